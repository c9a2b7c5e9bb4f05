"""Which clipping mode fits: bookkeeping is faster, two_pass takes less memory, and the sum is the same.

`privacy.clipping_mode = "auto"` takes bookkeeping unless the memory that it is predicted to need is not there on some rank.
With activation checkpointing bookkeeping keeps what checkpointing would free, and the prediction sees that: it is the planner's,
of a whole micro-batch of this model on the meta device (trainer/planner/probe.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from models.vocabulary_head import VocabularyHead
from privacy.checkpoints.read import Checkpoint
from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import LocalSums
from privacy.clipping.certified_sum import CertifiedSum
from privacy.clipping.clipped_sum import Mode
from privacy.errors import PrivacyConfigError
from privacy.plan import PrivacyPlan
from privacy.step.adaptive_bound import resumed_bound
from privacy.step.batches import most_rows
from privacy.step.engine import Engine, to_device
from privacy.step.sharded_sums import ShardedSums
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig
from trainer.planner.memory import USABLE, RankMemory, better_mode
from trainer.planner.resources import probed
from trainer.ranks import distributed
from trainer.run.certified import require_same_integers, use_deterministic_kernels
from trainer.run.memory_estimate import available_memory
from trainer.tasks import TrainingTask


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
    machine: MachineSettings,
    engine_name: EngineName,
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
    rows = most_rows(plan, micro_batch_size, nodes)
    clipped = plan.clipped_sum(
        engine.module,
        shapes=engine.shapes,
        mode="bookkeeping" if privacy.clipping_mode == "auto" else privacy.clipping_mode,
        accumulator=ShardedSums if config.train.accumulation == "sharded" else LocalSums,
        rows=rows,
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
        world_size, on_cpu = distributed.world_size(), engine.device.type == "cpu"
        probe, memory = probed(
            config, machine, engine_name, task, plan, rows=rows, world_size=world_size, on_cpu=on_cpu
        )
        choice = choose_mode(
            memory, lambda mode: probe.micro_batch(mode, micro_batch_size).peak, engine.device, micro_batch_size
        )
        clipped.mode = choice.mode
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
    for host, name, free in distributed.gather_objects((distributed.host_name(), str(device), available(device))):
        on_device.setdefault((host, name), []).extend([] if free is None else [free])
    room = min((min(known) // len(known) for known in on_device.values() if known), default=None)
    later = memory.sums + memory.on_top + memory.average
    needed = later + peak("bookkeeping")
    mode, less = better_mode(needed, None if room is None else USABLE * room, lambda: later + peak("two_pass"))
    return ModeChoice(mode, micro_batch_size, needed, less, room)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2g} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"
