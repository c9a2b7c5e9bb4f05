"""Which clipping mode fits: bookkeeping is faster, two_pass takes less memory, and the sum is the same.

`privacy.clipping_mode = "auto"` takes bookkeeping unless the memory that it is predicted to need is not there on some rank.
With activation checkpointing bookkeeping keeps what checkpointing would free, and the prediction sees that: it is the planner's,
of a whole micro-batch of this model on the meta device (trainer/planner/probe.py).

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

import torch
from torch import Tensor

from models.vocabulary_head import VocabularyHead
from privacy.certified.certified_sum import CertifiedSum
from privacy.clipping import ClippedSum
from privacy.clipping.clipped_sum import Mode
from privacy.errors import PrivacyConfigError
from privacy.guards.neighbours import nothing_is_small
from privacy.plan.numbers import PrivacyPlan
from privacy.run.mechanism import clipper_of
from privacy.step import collectives
from privacy.step.batches import most_rows
from privacy.step.engine import Engine, holds_whole_weights, to_device
from privacy.sums.local import LocalSums
from privacy.sums.sharded import ShardedSums
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.planner.memory import USABLE, RankMemory, better_mode
from trainer.planner.resources import probed
from trainer.run.memory_estimate import available_memory
from trainer.tasks import TrainingTask

CUBLAS_REPEATS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class ModeChoice:
    """What `auto` chose on all ranks, and the numbers of the rank with the least room; bytes.

    Attributes:
        needed: what one micro-batch in bookkeeping mode takes, and what training allocates later.
        needed_in_two_passes: the same for two_pass; None where bookkeeping fits and it was not measured.
        available: bytes for one rank; None where the machine does not say.
    """

    mode: Mode
    micro_batch_size: int
    needed: int
    needed_in_two_passes: int | None
    available: int | None

    @property
    def sentence(self) -> str:
        """One line for the console."""
        chosen, other = self.needed, self.needed_in_two_passes
        if self.mode == "two_pass":
            assert other is not None
            chosen, other = other, chosen
        room = "" if self.available is None else f" of {_gib(self.available)}"
        text = f"clipping mode {self.mode} (auto): a micro-batch takes {_gib(chosen)}{room} a rank"
        if other is not None:
            text += f"; {'bookkeeping' if self.mode == 'two_pass' else 'two_pass'} would need {_gib(other)}"
        fits = self.available is None or chosen <= USABLE * self.available
        return (
            text
            if fits
            else f"{text}; that may be too much: choose a smaller train.micro_batch_size"
        )


def made_clipper(
    config: RunConfig,
    machine: MachineSettings,
    engine_name: EngineName,
    plan: PrivacyPlan,
    task: TrainingTask,
    engine: Engine,
    nodes: Sequence[int],
) -> tuple[ClippedSum, ModeChoice | None]:
    """The clipper, and how its mode was chosen where the recipe says "auto". Collective.

    Args:
        nodes: the node of each rank, where each node reads its share of the examples.
    """
    privacy, micro_batch_size = config.privacy, config.train.micro_batch_size
    rows = most_rows(plan, micro_batch_size, nodes)
    clipped = clipper_of(
        plan,
        engine.module,
        shapes=engine.shapes,
        mode="bookkeeping" if privacy.clipping_mode == "auto" else privacy.clipping_mode,
        accumulator=ShardedSums if config.train.accumulation == "sharded" else LocalSums,
        rows=rows,
        device=engine.device,
        self_check=False,  # an unsharded copy has passed before (`TrainerStart`)
    )
    if isinstance(clipped, CertifiedSum):
        require_same_integers(clipped, engine, task.synthetic_inputs, micro_batch_size)
        return clipped, None
    choice = None
    if privacy.clipping_mode == "auto":
        world_size, on_cpu = collectives.world_size(), engine.device.type == "cpu"
        probe, memory = probed(
            config,
            machine,
            engine_name,
            task,
            plan,
            rows=rows,
            world_size=world_size,
            on_cpu=on_cpu,
        )
        choice = choose_mode(
            memory, lambda mode: probe.peak(mode, micro_batch_size), engine.device, micro_batch_size
        )
        clipped.mode = choice.mode
    if (
        clipped.mode == "two_pass" and engine.device.type == "cuda"
    ):  # else its attention adds up in no fixed order
        use_deterministic_kernels()
    # Scores of the vocabulary that are computed in parts are computed again for norm and sum: that must repeat to the last bit.
    hidden_BLD = torch.empty(micro_batch_size, config.data.num_tokens - 1, 1, device="meta")
    heads = [module for module in engine.module.modules() if isinstance(module, VocabularyHead)]
    if clipped.mode == "two_pass" or any(head.num_chunks(hidden_BLD) > 1 for head in heads):
        try:
            clipped.check_repeatable(
                engine.module, to_device(task.synthetic_inputs(micro_batch_size), engine)
            )
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise PrivacyConfigError(
                f"clipping in two passes is refused: {str(error).splitlines()[0]}"
            ) from error
    return clipped, choice


def choose_mode(
    memory: RankMemory,
    peak: Callable[[Mode], int],
    device: torch.device,
    micro_batch_size: int,
    available: Callable[[torch.device], int | None] = available_memory,
) -> ModeChoice:
    """The mode, equal on all ranks. Collective.

    Args:
        memory: of the busiest rank.
        peak: bytes of a micro-batch in a mode.
    """
    on_device: dict[tuple[str, str], list[int]] = {}  # ranks may share one, such as a host's CPU
    for host, name, free in collectives.gather_objects(
        (socket.gethostname(), str(device), available(device))
    ):
        on_device.setdefault((host, name), []).extend([] if free is None else [free])
    room = min((min(known) // len(known) for known in on_device.values() if known), default=None)
    later = memory.sums + memory.on_top + memory.average
    needed = later + peak("bookkeeping")
    mode, less = better_mode(
        needed, None if room is None else USABLE * room, lambda: later + peak("two_pass")
    )
    return ModeChoice(mode, micro_batch_size, needed, less, room)


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
            found = clipped.check_rows(engine.module, inputs)
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
