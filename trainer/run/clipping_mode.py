"""Chooses the clipping mode that fits: bookkeeping is faster, two_pass takes less memory.

The sum is the same in both modes. Certified arithmetic asks for deterministic kernels, and for
integers that depend on the example alone: the settings here give the first, and made-up inputs
test the second, also between ranks, since an example is dealt to any of them (docs/certified.md).
"""

import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from models.vocabulary_head import VocabularyHead
from privacy.certified.certified_sum import CertifiedSum
from privacy.clipping import ClippedSum
from privacy.clipping.clipped_sum import Mode
from privacy.errors import PrivacyConfigError
from privacy.guards.certified_rows import check_rows
from privacy.guards.neighbours import nothing_is_small
from privacy.plan.numbers import PrivacyPlan
from privacy.ranks import collectives
from privacy.ranks.engine import Engine, holds_whole_weights, to_device
from privacy.run.mechanism import mechanism_of
from privacy.step.step import Mechanism
from privacy.sums.local import LocalSums, MakeAccumulator
from privacy.sums.sharded import ShardedSums
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.memory import USABLE, available_memory, taken_memory
from trainer.optimizers import moments
from trainer.tasks import TrainingTask

CUBLAS_REPEATS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
WORTHWHILE = 0.9
"""two_pass is taken if it needs less than this part of bookkeeping's memory, as it is slower."""
UNCERTAIN = 2**24
"""Bytes by which the system's count of a process's memory may be off."""


@dataclass(frozen=True)
class ModeChoice:
    """Holds the mode that `auto` chose on all ranks, and bytes of the rank with the least memory.

    Attributes:
        needed: bytes of one micro-batch in bookkeeping mode, with all that training allocates
            later; None where the machine does not say how much memory it has.
        needed_in_two_passes: the same for two_pass; None where bookkeeping fits and two_pass was
            not measured.
        available: bytes for one rank; None where the machine does not say.
    """

    mode: Mode
    micro_batch_size: int
    needed: int | None
    needed_in_two_passes: int | None
    available: int | None

    @property
    def sentence(self) -> str:
        """Returns one line for the console."""
        text = f"clipping mode {self.mode} (auto)"
        if self.needed is None or self.available is None:
            return f"{text}: this machine does not say how much memory is free"
        bytes_needed = {"bookkeeping": self.needed, "two_pass": self.needed_in_two_passes or 0}
        chosen_bytes = bytes_needed.pop(self.mode)
        text += f": a micro-batch takes {_gib(chosen_bytes)} of {_gib(self.available)} a rank"
        if self.needed_in_two_passes is not None:
            for mode, size in bytes_needed.items():
                text += f"; {mode} would need {_gib(size)}"
        if chosen_bytes > USABLE * self.available:
            text += "; that may be too much: choose a smaller train.micro_batch_size"
        return text


def accumulator_of(config: RunConfig) -> MakeAccumulator:
    """Returns the class of accumulator that gathers the sums of a recipe."""
    return ShardedSums if config.train.accumulation == "sharded" else LocalSums


def require_repeats(config: RunConfig, task: TrainingTask, mechanism: Mechanism) -> None:
    """Refuses a mechanism whose repeated computations differ in a bit. Collective.

    Certified sums are compared between all ranks, other sums on each rank alone.

    Raises:
        PrivacyConfigError: two computations of the same gradient differ.
    """
    clipped = mechanism.clipped
    engine = mechanism.engine
    micro_batch_size = config.train.micro_batch_size
    if isinstance(clipped, CertifiedSum):
        require_same_integers(clipped, engine, task.synthetic_inputs, micro_batch_size)
        return
    if clipped.mode == "two_pass" and engine.device.type == "cuda":
        # Else the backward of attention adds up in no fixed order.
        use_deterministic_kernels()
    # A vocabulary head that computes its scores in parts computes them again for norm and sum.
    hidden_BLD = torch.empty(micro_batch_size, config.data.num_tokens - 1, 1, device="meta")
    heads = [module for module in engine.module.modules() if isinstance(module, VocabularyHead)]
    if clipped.mode == "two_pass" or any(head.num_chunks(hidden_BLD) > 1 for head in heads):
        inputs = to_device(task.synthetic_inputs(micro_batch_size), engine)
        try:
            clipped.check_repeatable(engine.module, inputs)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            reason = str(error).splitlines()[0]
            raise PrivacyConfigError(f"clipping in two passes is refused: {reason}") from error


def choose_by_trial(
    config: RunConfig,
    machine: MachineSettings,
    engine_name: EngineName,
    plan: PrivacyPlan,
    task: TrainingTask,
    engine: Engine,
    nodes: Sequence[int],
) -> ModeChoice:
    """Chooses the mode by the memory that made-up examples take on each rank. Collective.

    The trial comes before blocks are compiled: compiled blocks take less memory.

    Args:
        nodes: the node of each rank, where each node reads its share of the examples.
    """

    def clip(clipped: ClippedSum, size: int) -> None:
        inputs = to_device(task.synthetic_inputs(size), engine)
        is_padding_B = torch.zeros(size, dtype=torch.bool, device=engine.device)
        clipped.add_micro_batch(engine.module, inputs, is_padding_B)

    def measure(mode: Mode, size: int) -> int | None:
        mechanism = mechanism_of(
            plan,
            engine,
            engine.module,
            config.train.micro_batch_size,
            mode=mode,
            accumulator=accumulator_of(config),
            nodes=nodes,
        )
        try:
            return taken_memory(partial(clip, mechanism.clipped, size), engine.device)
        finally:
            mechanism.clipped.detach()

    states = state_memory(config, machine, engine_name, engine)
    return choose_mode(measure, states, engine.device, config.train.micro_batch_size)


def state_memory(
    config: RunConfig, machine: MachineSettings, engine_name: EngineName, engine: Engine
) -> int:
    """Returns the bytes of optimizer states that the first step makes on this rank's device."""
    if machine.offload_optimizer or (engine_name == "fsdp" and machine.offload_param):
        return 0
    # The replicas of a shard own it together, and each steps all of it.
    num_shards = 1 if engine.replicated else machine.shard_group_size or collectives.world_size()
    total = sum(shape.numel() for shape in engine.shapes.values())
    stepped = max(engine.layout.count(collectives.rank()), -(-total // num_shards))
    return torch.float32.itemsize * len(moments(config.optimizer)) * stepped


def choose_mode(
    measure: Callable[[Mode, int], int | None],
    states: int,
    device: torch.device,
    micro_batch_size: int,
    available: Callable[[torch.device], int | None] = available_memory,
) -> ModeChoice:
    """Chooses the mode, equal on all ranks. Collective.

    Args:
        measure: clips so many made-up examples in a mode, and returns the bytes that this takes on
            this rank.
        states: bytes that this rank's optimizer allocates in its first step.
    """
    # Several ranks may share a device, such as the CPU of a host, and its memory.
    free_by_device: dict[tuple[str, str], list[int]] = {}
    reports = collectives.gather_objects((socket.gethostname(), str(device), available(device)))
    for host, name, free in reports:
        free_of_ranks = free_by_device.setdefault((host, name), [])
        if free is not None:
            free_of_ranks.append(free)
    shares = [min(frees) // len(frees) for frees in free_by_device.values() if frees]
    if not shares:
        return ModeChoice("bookkeeping", micro_batch_size, None, None, None)
    memory = min(shares)
    usable = int(USABLE * memory)

    def measure_on_ranks(mode: Mode, size: int) -> int:
        measured = measure(mode, size) or 0
        return max(collectives.gather_objects(states + measured))

    measure_one_pass = partial(measure_on_ranks, "bookkeeping")
    measure_two_passes = partial(measure_on_ranks, "two_pass")
    one_pass = needed_memory(measure_one_pass, micro_batch_size, usable)
    mode, two_passes = better_mode(
        one_pass, usable, lambda: needed_memory(measure_two_passes, micro_batch_size, usable)
    )
    return ModeChoice(mode, micro_batch_size, one_pass, two_passes, memory)


def needed_memory(measure: Callable[[int], int], size: int, usable: int) -> int:
    """Returns the bytes that `size` examples need: measured where they fit, else estimated.

    An estimate extends the measurements of fewer examples. Memory grows at most in proportion to
    the number of examples, so two measurements bound all larger ones.

    Args:
        measure: runs that many examples and returns the bytes that they need.
        usable: no micro-batch is run that may need more, but for one or two examples: the system
            kills a process that takes more memory than there is.
    """
    count = memory = 0
    growth = 0.0  # bytes of one more example, at most
    next_count = 1
    while count < next_count:
        next_memory = measure(next_count)
        growth = (max(0, next_memory - memory) + UNCERTAIN) / (next_count - count)
        count = next_count
        memory = next_memory
        if memory <= usable:
            next_count = min(size, max(count + int((usable - memory) / growth), 2))
    return memory if count == size else int(memory + growth * (size - count))


def better_mode(
    needed: int, usable: float | None, needed_in_two_passes: Callable[[], int]
) -> tuple[Mode, int | None]:
    """Returns the mode, and the bytes of two passes where they were asked for.

    A start and a plan both choose by it.

    Args:
        needed: bytes by bookkeeping, with all that training allocates later.
        usable: bytes that all of this may take; None where the machine does not say.
        needed_in_two_passes: returns the same as `needed`; it is called only where bookkeeping
            does not fit.
    """
    if usable is None or needed <= usable:
        return "bookkeeping", None
    two_passes = needed_in_two_passes()
    return ("two_pass" if two_passes < WORTHWHILE * needed else "bookkeeping"), two_passes


def _gib(count: float) -> str:
    return f"{count / 2**30:.2g} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"


def use_deterministic_kernels() -> None:
    """Forbids atomics and kernels chosen by trial, in the whole process.

    Call it before the process's first kernel, or after `prepare_process`. Attention on CUDA takes
    its deterministic backward only for an error: `warn_only` would leave the other one.
    """
    os.environ.setdefault(*CUBLAS_REPEATS)  # read once, at the first product
    torch.use_deterministic_algorithms(True)
    # Filling new tensors would only write each of them twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def require_same_integers(
    clipped: CertifiedSum,
    engine: Engine,
    synthetic_inputs: Callable[[int], dict[str, Tensor]],
    micro_batch_size: int,
) -> None:
    """Refuses made-up examples whose integers depend on row, neighbours or rank. Collective.

    Args:
        synthetic_inputs: makes up the number of examples that it is called with, the same on every
            rank.

    Raises:
        PrivacyConfigError: on all ranks, if integers differ on one of them; names the parameter.
    """
    inputs = to_device(synthetic_inputs(micro_batch_size), engine)
    # Weights near zero would hide the gradients before them. Shards are left as they are.
    weights = nothing_is_small(engine.module) if holds_whole_weights(engine) else nullcontext()
    problem = None
    digests = dict[str, str]()
    try:
        with weights:
            integers = check_rows(clipped, engine.module, inputs)
        for name, z in integers.items():
            digests[name] = hashlib.sha256(z.cpu().numpy().tobytes()).hexdigest()
    except PrivacyConfigError as error:
        problem = str(error)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        problem = f"privacy.arithmetic = 'certified' is refused: {str(error).splitlines()[0]}"
    reports = collectives.gather_objects((socket.gethostname(), problem, digests))
    first_host, _, first_digests = reports[0]
    for rank, (host, problem_there, digests_there) in enumerate(reports):
        if problem_there is not None:
            raise PrivacyConfigError(problem_there)
        for name in engine.shapes:
            if digests_there.get(name) != first_digests.get(name):
                raise PrivacyConfigError(
                    "privacy.arithmetic = 'certified' is refused: the gradient of "
                    f"{name} of one and the same example is another on rank {rank} ({host}) than "
                    f"on rank 0 ({first_host}); use machines of one kind with the same libraries "
                    "and numbers of threads, or privacy.arithmetic = 'floating'"
                )
