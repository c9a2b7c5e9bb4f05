"""The recipe's [train]; see trainer/config/recipe.py."""

from typing import Literal

from pydantic import Field, model_validator

from trainer.config.optimizer import Positive, Seconds, Section


class TrainSection(Section):
    num_steps: Positive
    micro_batch_size: int = Field(ge=1, le=2**20)
    """Examples per forward on one rank: speed and memory only, never the result."""
    accumulation: Literal["local", "sharded"] = "local"
    """Each rank sums in place and one reduction ends the logical batch; or every micro-batch is reduced to sharded sums, for
    models whose sum does not fit. Speed and memory only, never the result."""
    compile: bool = False
    """torch.compile of the model's blocks: minutes at the start, less time per step on a GPU. May change between starts."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, which are public. No secret and no noise comes from it."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints; a crash repeats, and is charged for, the steps since the last. Default: 1/20 of the reserve."""
    keep_checkpoints: Positive = 2
    """How many of the newest checkpoints are kept."""
    keep_every: Positive | None = None
    """Every checkpoint whose step is a multiple of this is kept, too."""
    async_checkpoints: bool = False
    """Write in the background, from a copy in CPU memory; a crash meanwhile goes back to the checkpoint before."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keeps an exponential moving average of the weights in checkpoints: post-processing, free of privacy cost."""
    max_minutes: float | None = Field(None, gt=0, le=10**7)
    """Stop as if asked to (exit 7) at the first step boundary after so long; the same command resumes."""
    grace_seconds: Seconds = Field(20.0, gt=0)
    """How long a step may take to end after a request to stop; then it is abandoned. Launchers kill 30 s after SIGTERM."""
    sanity_checks: bool = False
    """Compare replicas, noise and micro-batch counts between ranks at every step (trainer/loop/sanity.py); for tests."""
    log_every: Positive = 1
    profile: tuple[Positive, Positive] | None = Field(None, strict=False)  # TOML has lists only
    """The first and the last step of which torch's profiler writes a trace into `private/profile/`, one file per rank."""

    @model_validator(mode="after")
    def _profile_has_an_order(self) -> "TrainSection":
        if self.profile is not None and not self.profile[0] <= self.profile[1] <= self.num_steps:
            raise ValueError(
                f"train.profile = [first, last] needs first <= last <= train.num_steps {self.num_steps}, not {list(self.profile)}"
            )
        return self
