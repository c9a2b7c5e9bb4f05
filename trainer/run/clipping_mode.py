"""Which clipping mode fits: bookkeeping is faster, two_pass takes less memory, and the sum is the same.

`privacy.clipping_mode = "auto"` takes bookkeeping unless the memory that it is predicted to need is not there on some rank.
With activation checkpointing bookkeeping keeps what checkpointing would free, and the prediction sees that, because it comes
from real micro-batches of the real model under the real engine (trainer/run/memory_estimate.py).
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.vocabulary_head import VocabularyHead, cut_as_for
from privacy.checkpoints.read import Checkpoint
from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import EXAMPLES_PER_PART, LocalSums
from privacy.clipping.certified_sum import CertifiedSum
from privacy.clipping.clipped_sum import Mode
from privacy.errors import PrivacyConfigError
from privacy.plan import PrivacyPlan
from privacy.step.adaptive_bound import resumed_bound
from privacy.step.batches import most_rows
from privacy.step.engine import Engine, to_device
from privacy.step.sharded_sums import ShardedSums
from trainer.config.recipe import RunConfig
from trainer.ranks import distributed
from trainer.run.certified import require_same_integers, use_deterministic_kernels
from trainer.run.memory_estimate import available_memory, predict_peak
from trainer.tasks import TrainingTask

WORTHWHILE = 0.9
"""two_pass is taken if it needs less than this part of bookkeeping's memory; otherwise it would only be slower."""
USABLE = 0.8
"""This part of the available memory is used; the rest is for scratch memory inside of operations and for fragmentation."""
MOMENT_BYTES = 8
"""Optimizers make two fp32 moments at their first step, for every coordinate that a rank owns."""


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
        room = "unknown memory" if self.available is None else f"{_gib(self.available)} available"
        chosen = self.needed if self.mode == "bookkeeping" else self.needed_in_two_passes
        assert chosen is not None
        text = (
            f"clipping mode {self.mode} (auto): a micro-batch of {self.micro_batch_size} needs about {_gib(chosen)}, "
            f"{room} a rank"
        )
        if self.mode == "two_pass":
            text += f"; bookkeeping would need {_gib(self.needed)}"
        elif self.needed_in_two_passes is not None:
            text += f"; two_pass would need as much ({_gib(self.needed_in_two_passes)})"
        fits = self.available is None or chosen <= USABLE * self.available
        return text if fits else f"{text}; that may be too much: choose a smaller train.micro_batch_size"


def made_clipper(
    config: RunConfig,
    plan: PrivacyPlan,
    task: TrainingTask,
    engine: Engine,
    resumed: Checkpoint | None,
    nodes: Sequence[int],
) -> tuple[ClippedSum, ModeChoice | None]:
    """The clipper, and how its mode was chosen where the recipe says "auto". Collective.

    Args:
        nodes: the node of each rank, where each node reads its share of the examples.
    """
    privacy, micro_batch_size = config.privacy, config.train.micro_batch_size
    clipped = plan.clipped_sum(
        engine.module,
        shapes=engine.shapes,
        mode="bookkeeping" if privacy.clipping_mode == "auto" else privacy.clipping_mode,
        accumulator=ShardedSums if config.train.accumulation == "sharded" else LocalSums,
        rows=most_rows(plan, micro_batch_size, nodes),
        device=engine.device,
        self_check=False,  # an unsharded copy has passed before (`TrainerStart`)
    )
    if plan.adaptive_clipping is not None and resumed is not None:
        clipped.max_grad_norm = resumed_bound(resumed.manifest, plan.max_grad_norm)
    if isinstance(clipped, CertifiedSum):
        require_same_integers(clipped, engine, task.synthetic_inputs, micro_batch_size)
        return clipped, None
    choice = None
    if privacy.clipping_mode == "auto":
        choice = choose_mode(clipped, engine, task.synthetic_inputs, micro_batch_size)
    if clipped.mode == "two_pass" and engine.device.type == "cuda":  # else its attention adds up in no fixed order
        use_deterministic_kernels()
    # Scores of the vocabulary that are computed in parts are computed again for norm and sum: that must repeat to the last bit.
    hidden_BLD = torch.empty(micro_batch_size, config.data.num_tokens - 1, 1, device="meta")
    heads = [module for module in engine.module.modules() if isinstance(module, VocabularyHead)]
    if clipped.mode == "two_pass" or any(head.num_chunks(hidden_BLD) > 1 for head in heads):
        try:
            clipped.check_repeatable(engine.module, to_device(task.synthetic_inputs(micro_batch_size), engine))
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise PrivacyConfigError(f"clipping in two passes is refused: {str(error).splitlines()[0]}") from error
    return clipped, choice


def choose_mode(
    clipped: ClippedSum,
    engine: Engine,
    synthetic_inputs: Callable[[int], dict[str, Tensor]],
    micro_batch_size: int,
    available: Callable[[torch.device], int | None] = available_memory,
) -> ModeChoice:
    """Sets and returns the mode; equal on all ranks. Collective. Leaves empty sums.

    Args:
        synthetic_inputs: makes up the number of examples that it is called with.
    """
    count = min(micro_batch_size, EXAMPLES_PER_PART)
    later = MOMENT_BYTES * engine.layout.count(distributed.rank())  # made at the first step, to stay
    needed = later + _peak(clipped, engine, synthetic_inputs, "bookkeeping", count)
    mine = (socket.gethostname(), str(engine.device), available(engine.device))
    sharing = [free for host, device, free in distributed.gather_objects(mine) if (host, device) == mine[:2]]
    known = [free for free in sharing if free is not None]
    room = min(known) // len(sharing) if len(known) == len(sharing) else None  # equal for all ranks on a device
    every = distributed.gather_objects((needed, room))
    most_needed = max(rank_needs for rank_needs, _ in every)
    least_room: int | None = None
    limited = [(rank_needs, rank_room) for rank_needs, rank_room in every if rank_room is not None]
    if limited:  # the rank that has the least left over decides
        most_needed, least_room = min(limited, key=lambda pair: USABLE * pair[1] - pair[0])
    clipped.mode, less = better_mode(
        most_needed,
        None if least_room is None else USABLE * least_room,
        lambda: max(distributed.gather_objects(later + _peak(clipped, engine, synthetic_inputs, "two_pass", count))),
    )
    return ModeChoice(clipped.mode, micro_batch_size, most_needed, less, least_room)


def better_mode(needed: int, usable: float | None, needed_in_two_passes: Callable[[], int]) -> tuple[Mode, int | None]:
    """The mode, and what two passes need where that was asked for; the planner decides by this function too.

    Args:
        needed: bytes by bookkeeping, with all that training allocates later.
        usable: bytes that all of this may take; None where nobody knows.
        needed_in_two_passes: the same as `needed`; it is called only where bookkeeping does not fit.
    """
    if usable is None or needed <= usable:
        return "bookkeeping", None
    less = needed_in_two_passes()
    return ("two_pass" if less < WORTHWHILE * needed else "bookkeeping"), less


def _peak(
    clipped: ClippedSum, engine: Engine, synthetic_inputs: Callable[[int], dict[str, Tensor]], mode: Mode, count: int
) -> int:
    """Predicts the bytes of a micro-batch of `count` examples from small ones whose vocabulary is cut as its own is.

    The sums are among them where they are local: the first micro-batch of a step makes them.
    """
    clipped.mode = mode

    def work(size: int) -> None:
        inputs = to_device(synthetic_inputs(size), engine)
        is_padding_B = torch.zeros(size, dtype=torch.bool, device=engine.device)
        clipped.zero_()
        with cut_as_for(engine.module, count, size):
            clipped.add_micro_batch(engine.module, inputs, is_padding_B)

    peak = predict_peak(work, count)
    clipped.zero_()
    return peak


def _gib(count: float) -> str:
    return f"{count / 2**30:.2g} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"
