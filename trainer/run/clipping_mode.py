"""Which clipping mode fits: bookkeeping is faster, two_pass takes less memory, and the sum is the same.

`privacy.clipping_mode = "auto"` takes bookkeeping unless it does not fit on some rank. Made-up examples are clipped on every rank
as the run's own will be, in its engine, precision and mode, by a clipper of their own, and what this takes is measured. One
example goes first, and then the whole micro-batch, if it surely fits: a process that takes more memory than there is gets killed.

Certified arithmetic asks for deterministic kernels, and for integers that depend on the example alone. The first part of the
hypothesis of docs/certified.md is a matter of settings, the second is looked for on made-up inputs, here also between ranks: an
example is dealt to any of them.
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
"""two_pass is taken if it needs less than this part of bookkeeping's memory; otherwise it would only be slower."""
UNCERTAIN = 2**24
"""Bytes by which the system's count of a process's memory may be off."""


@dataclass(frozen=True)
class ModeChoice:
    """What `auto` chose on all ranks, and the numbers of the rank with the least room; bytes.

    Attributes:
        needed: what one micro-batch in bookkeeping mode takes, and what training allocates later; None where the machine does
            not say how much memory it has.
        needed_in_two_passes: the same for two_pass; None where bookkeeping fits and it was not measured.
        available: bytes for one rank; None where the machine does not say.
    """

    mode: Mode
    micro_batch_size: int
    needed: int | None
    needed_in_two_passes: int | None
    available: int | None

    @property
    def sentence(self) -> str:
        """One line for the console."""
        text = f"clipping mode {self.mode} (auto)"
        if self.needed is None or self.available is None:
            return f"{text}: this machine does not say how much memory is free"
        needs = {"bookkeeping": self.needed, "two_pass": self.needed_in_two_passes or 0}
        need = needs.pop(self.mode)
        text += f": a micro-batch takes {_gib(need)} of {_gib(self.available)} a rank"
        if self.needed_in_two_passes is not None:
            text += "".join(f"; {mode} would need {_gib(size)}" for mode, size in needs.items())
        if need > USABLE * self.available:
            text += "; that may be too much: choose a smaller train.micro_batch_size"
        return text


def accumulator_of(config: RunConfig) -> MakeAccumulator:
    """Returns where the sums of a recipe gather."""
    return ShardedSums if config.train.accumulation == "sharded" else LocalSums


def require_repeats(config: RunConfig, task: TrainingTask, mechanism: Mechanism) -> None:
    """Requires that what is computed twice has the same bits: on this rank, and of certified sums on all. Collective.

    Raises:
        PrivacyConfigError: it has not.
    """
    clipped, engine = mechanism.clipped, mechanism.engine
    micro_batch_size = config.train.micro_batch_size
    if isinstance(clipped, CertifiedSum):
        require_same_integers(clipped, engine, task.synthetic_inputs, micro_batch_size)
        return
    if clipped.mode == "two_pass" and engine.device.type == "cuda":
        use_deterministic_kernels()  # else its attention adds up in no fixed order
    # Scores of the vocabulary that are computed in parts are computed again for norm and sum.
    hidden_BLD = torch.empty(micro_batch_size, config.data.num_tokens - 1, 1, device="meta")
    heads = [module for module in engine.module.modules() if isinstance(module, VocabularyHead)]
    if clipped.mode == "two_pass" or any(head.num_chunks(hidden_BLD) > 1 for head in heads):
        made_up = to_device(task.synthetic_inputs(micro_batch_size), engine)
        try:
            clipped.check_repeatable(engine.module, made_up)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise PrivacyConfigError(
                f"clipping in two passes is refused: {str(error).splitlines()[0]}"
            ) from error


def choose_by_trial(
    config: RunConfig,
    machine: MachineSettings,
    engine_name: EngineName,
    plan: PrivacyPlan,
    task: TrainingTask,
    engine: Engine,
    nodes: Sequence[int],
) -> ModeChoice:
    """Chooses the mode by what made-up examples take, before blocks are compiled, which saves memory. Collective.

    Args:
        nodes: the node of each rank, where each node reads its share of the examples.
    """

    def clip(clipped: ClippedSum, size: int) -> None:
        inputs = to_device(task.synthetic_inputs(size), engine)
        is_padding_B = torch.zeros(size, dtype=torch.bool, device=engine.device)
        clipped.add_micro_batch(engine.module, inputs, is_padding_B)

    def measure(mode: Mode, size: int) -> int | None:
        clipped = mechanism_of(
            plan,
            engine,
            engine.module,
            config.train.micro_batch_size,
            mode=mode,
            accumulator=accumulator_of(config),
            nodes=nodes,
        ).clipped
        try:
            return taken_memory(partial(clip, clipped, size), engine.device)
        finally:
            clipped.detach()

    states = state_memory(config, machine, engine_name, engine)
    return choose_mode(measure, states, engine.device, config.train.micro_batch_size)


def state_memory(
    config: RunConfig, machine: MachineSettings, engine_name: EngineName, engine: Engine
) -> int:
    """Returns the bytes of the optimizer's states, which the first step makes on this rank's device."""
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
        measure: clips so many made-up examples in a mode, and returns the bytes that this takes on this rank.
        states: bytes that this rank's optimizer allocates in its first step.
    """
    on_device: dict[tuple[str, str], list[int]] = {}  # ranks may share one, such as a host's CPU
    for host, name, free in collectives.gather_objects(
        (socket.gethostname(), str(device), available(device))
    ):
        on_device.setdefault((host, name), []).extend([] if free is None else [free])
    room = min((min(parts) // len(parts) for parts in on_device.values() if parts), default=None)
    if room is None:
        return ModeChoice("bookkeeping", micro_batch_size, None, None, None)
    usable = int(USABLE * room)

    def need(mode: Mode) -> int:
        return needed_memory(
            lambda size: max(collectives.gather_objects(states + (measure(mode, size) or 0))),
            micro_batch_size,
            usable,
        )

    one_pass = need("bookkeeping")
    mode, two_passes = better_mode(one_pass, usable, lambda: need("two_pass"))
    return ModeChoice(mode, micro_batch_size, one_pass, two_passes, room)


def needed_memory(measure: Callable[[int], int], size: int, usable: int) -> int:
    """Returns the bytes that `size` examples need: measured where they fit, and else estimated from fewer that do.

    Memory grows at most in proportion to the number of examples, so two measurements bound all larger ones.

    Args:
        measure: runs that many examples and returns the bytes that they need.
        usable: no micro-batch is run that may need more, but for one or two examples.
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
    """Returns the mode, and what two passes need where that was asked for; for a start as for a plan.

    Args:
        needed: bytes by bookkeeping, with all that training allocates later.
        usable: bytes that all of this may take; None where nobody knows.
        needed_in_two_passes: the same as `needed`; it is called only where bookkeeping does not fit.
    """
    if usable is None or needed <= usable:
        return "bookkeeping", None
    less = needed_in_two_passes()
    return ("two_pass" if less < WORTHWHILE * needed else "bookkeeping"), less


def _gib(count: float) -> str:
    return f"{count / 2**30:.2g} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"


def use_deterministic_kernels() -> None:
    """Forbids atomics and kernels chosen by trial, in the whole process; before its first kernel, or after `prepare_process`.

    Attention on CUDA has a deterministic backward, and takes it for no less: `warn_only` would leave it as it is.
    """
    os.environ.setdefault(*CUBLAS_REPEATS)  # read once, at the first product
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # new tensors are written once
    torch.backends.cudnn.benchmark = False


def require_same_integers(
    clipped: CertifiedSum,
    engine: Engine,
    synthetic_inputs: Callable[[int], dict[str, Tensor]],
    micro_batch_size: int,
) -> None:
    """Made-up examples give the same integers in every row, among any neighbours and on every rank. Collective.

    Args:
        synthetic_inputs: makes up the number of examples that it is called with, the same on every rank.

    Raises:
        PrivacyConfigError: on all ranks, if they do not somewhere; the parameter is named.
    """
    inputs = to_device(synthetic_inputs(micro_batch_size), engine)
    problem, digests = None, dict[str, str]()
    try:
        # Weights near zero would hide the gradients before them. Shards are left as they are.
        with nothing_is_small(engine.module) if holds_whole_weights(engine) else nullcontext():
            found = check_rows(clipped, engine.module, inputs)
        digests = {
            name: hashlib.sha256(z.cpu().numpy().tobytes()).hexdigest() for name, z in found.items()
        }
    except PrivacyConfigError as error:
        problem = str(error)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        problem = f"privacy.arithmetic = 'certified' is refused: {str(error).splitlines()[0]}"
    answers = collectives.gather_objects((socket.gethostname(), problem, digests))
    for rank, (host, said, theirs) in enumerate(answers):
        if said is not None:
            raise PrivacyConfigError(said)
        differing = [name for name in engine.shapes if theirs.get(name) != answers[0][2].get(name)]
        if differing:
            raise PrivacyConfigError(
                f"privacy.arithmetic = 'certified' is refused: the gradient of {differing[0]} of one and the same example is "
                f"another on rank {rank} ({host}) than on rank 0 ({answers[0][0]}); use machines of one kind with the same "
                "libraries and numbers of threads, or privacy.arithmetic = 'floating'"
            )
