"""A run, put together: everything that `trainer/loop.py` needs for a step, built once per start."""

from dataclasses import dataclass
from typing import Any

from data.loader import Loader
from data.streaming import StreamingLoader
from privacy.clipping import ClippedSum
from privacy.noise import NoiseSource
from privacy.plan import PrivacyPlan
from trainer import distributed
from trainer.adaptive_bound import MANIFEST_KEY
from trainer.audit_members import MembersLog
from trainer.averaging import WeightAverage
from trainer.batches import LogicalBatches
from trainer.checkpoint_writer import CheckpointWriter
from trainer.config import RunConfig
from trainer.engines.base import Engine
from trainer.frozen import FrozenWeights
from trainer.heldout import Heldout
from trainer.optimizers.adam_bc import NoiseVariance
from trainer.run_folder import RunFolder
from trainer.run_ledger import RunLedger
from trainer.sanity import SanityChecks


@dataclass(frozen=True)
class Run:
    """Built by `trainer.train.train`.

    Attributes:
        first_step: 1, or the step after the checkpoint that was resumed from.
        model_facts: what a checkpoint's manifest says about the model, its tokenizer and its initialisation.
    """

    config: RunConfig
    folder: RunFolder
    plan: PrivacyPlan
    ledger: RunLedger
    engine: Engine
    frozen: FrozenWeights
    clipped: ClippedSum
    noise: NoiseSource
    batches: LogicalBatches
    members: MembersLog
    loader: Loader | StreamingLoader
    heldout: Heldout | None
    first_step: int
    checkpoints: CheckpointWriter
    average: WeightAverage | None
    sanity: SanityChecks | None
    noise_variance: NoiseVariance
    model_facts: dict[str, Any]

    @property
    def is_main(self) -> bool:
        return distributed.rank() == 0

    @property
    def checkpoint_interval(self) -> int:
        """Steps between checkpoints; by default a twentieth of the reserve, so that it lasts for twenty crashes."""
        return self.config.train.checkpoint_every or max(1, self.plan.reserved_attempts // 20)

    def checkpoint_facts(self) -> dict[str, Any]:
        """What a manifest says beside the weights; a checkpoint without it would be a model without a guarantee."""
        return {
            "run": self.config.name,
            "formal_guarantee": self.plan.formal_guarantee,
            "reasons": list(self.plan.reasons),
            "ledger": self.ledger.position(),
            "charged_attempts": self.ledger.num_charged,
            **({MANIFEST_KEY: self.clipped.max_grad_norm} if self.clipped.adaptive is not None else {}),
            "noise_variance": self.noise_variance.average,
            **self.frozen.facts(),
            **self.model_facts,
        }
