"""A run, put together: everything that `trainer/loop/fit.py` needs for a step, built once per start."""

from dataclasses import dataclass
from typing import Any

from data.reading.loader import Loader
from data.reading.streaming import StreamingLoader
from privacy.checkpoints.write import CheckpointWriter
from privacy.step.adaptive_bound import MANIFEST_KEY
from privacy.step.batches import LogicalBatches
from privacy.step.folder import RunFolder
from privacy.step.run_ledger import RunLedger
from privacy.step.step import Mechanism
from trainer.config.recipe import RunConfig
from trainer.loop.averaging import WeightAverage
from trainer.loop.sanity import SanityChecks
from trainer.run.frozen import FrozenWeights
from trainer.run.heldout import Heldout


@dataclass(frozen=True)
class Run:
    """Built by `trainer.run.start.train`.

    Attributes:
        flops_per_example: floating-point operations of one example's forward and backward without privacy.
        first_step: 1, or the step after the checkpoint that was resumed from.
        model_facts: what a checkpoint's manifest says about the model, its tokenizer and its initialisation.
    """

    config: RunConfig
    folder: RunFolder
    mechanism: Mechanism
    ledger: RunLedger
    frozen: FrozenWeights
    batches: LogicalBatches
    loader: Loader | StreamingLoader
    heldout: Heldout | None
    first_step: int
    checkpoints: CheckpointWriter
    average: WeightAverage | None
    sanity: SanityChecks | None
    flops_per_example: int
    model_facts: dict[str, Any]

    def checkpoint_facts(self) -> dict[str, Any]:
        """What a manifest says of the weights; a checkpoint without it would be a model without a guarantee."""
        plan, clipped = self.mechanism.plan, self.mechanism.clipped
        return {
            "run": self.config.name,
            "formal_guarantee": plan.formal_guarantee,
            "reasons": list(plan.reasons),
            "ledger": self.ledger.position(),
            "charged_attempts": self.ledger.num_charged,
            **({MANIFEST_KEY: clipped.max_grad_norm} if clipped.adaptive is not None else {}),
            "noise_variance": self.mechanism.noise_variance.average,
            **self.frozen.facts(),
            **self.model_facts,
        }
