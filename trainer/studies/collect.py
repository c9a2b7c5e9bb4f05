"""What the runs of a study show, from their public files: epsilon from the ledgers, held-out losses from evaluation/."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from privacy.card.folder import read_utility
from privacy.card.report import read_snapshot
from privacy.ledger.claim import claim_of
from privacy.ledger.records import LedgerState
from privacy.plan import PrivacyPlan
from trainer.studies.folder import Progress, StudyFolder
from trainer.studies.grid import Label
from trainer.studies.points import PlannedPoint


def axis_columns(labels: Mapping[str, Label]) -> dict[str, Label]:
    """Labels as columns of a table: an axis called epsilon is not the epsilon that was spent."""
    return {f"axis/{name}": label for name, label in labels.items()}


def plan_columns(plan: PrivacyPlan) -> dict[str, Any]:
    """What a plan says, as columns of a table."""
    names = ("num_examples", "expected_batch_size", "num_steps", "noise_multiplier", "max_grad_norm")
    columns = {name: getattr(plan, name) for name in names}
    return columns | {"noise_over_batch": plan.noise_multiplier / plan.expected_batch_size}


@dataclass(frozen=True)
class Result:
    """One point.

    Attributes:
        labels: axis -> value.
        kind: what the model does, by its name in recipes.
        plan: frozen in the run's ledger.
        epsilon, delta: what the weights carry for everything charged so far, private runs that they started from included; None
            without a formal guarantee, whatever the recipe says.
        losses: step -> held-out loss, as far as the held-out data are public.
        blind_loss: what one gets on the same held-out data without looking at them (`trainer.tasks.blind`).
        shuffled_loss: the last held-out loss with another example's picture for every caption; captioners only.
    """

    name: str
    labels: dict[str, Label]
    seed: int
    kind: str
    progress: Progress
    simulation: bool
    plan: PrivacyPlan
    charged: int
    epsilon: float | None
    delta: float | None
    losses: dict[int, float]
    blind_loss: float | None
    shuffled_loss: float | None

    @property
    def final_loss(self) -> float | None:
        """Held-out loss after the last step; None for a run that is not done."""
        return self.losses.get(self.plan.num_steps) if self.progress == "finished" else None

    def row(self) -> dict[str, Any]:
        """A row of a table. Without a formal guarantee it holds neither epsilon nor delta."""
        return {
            "point": self.name,
            **axis_columns(self.labels),
            "seed": self.seed,
            "status": self.progress,
            "formal_guarantee": self.plan.formal_guarantee,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "why_no_guarantee": "; ".join(self.plan.reasons),
            "attempts_charged": self.charged,
            **plan_columns(self.plan),
            "first_heldout_loss": self.losses.get(0),
            "final_heldout_loss": self.final_loss,
            "blind_loss": self.blind_loss,
            "shuffled_loss": self.shuffled_loss,
        }


def collect(folder: StudyFolder, planned: Sequence[PlannedPoint]) -> tuple[list[Result], list[str]]:
    """The results of all points that began, and the names of those that did not."""
    results, missing = [], []
    claims: dict[str, tuple[float, float] | None] = {}
    for one in planned:
        progress = folder.progress(one.name)
        if progress == "new":
            missing.append(one.name)
            continue
        state = read_snapshot(folder.run(one.name) / "ledger.jsonl").state
        if (known := told_apart_by(state)) not in claims:
            claims[known] = claim_of(folder.run(one.name), state)
        losses = read_utility(folder.run(one.name)).heldout_loss
        epsilon, delta = claims[known] or (None, None)
        results.append(
            Result(
                name=one.name,
                labels=dict(one.point.labels),
                seed=one.point.seed,
                kind=one.config.model.kind,
                progress=progress,
                simulation=one.is_simulation,
                plan=state.plan,
                charged=state.num_charged,
                epsilon=epsilon,
                delta=delta,
                losses={point.step: point.loss for point in losses if point.loss is not None},
                blind_loss=losses[-1].blind_loss if losses else None,
                shuffled_loss=losses[-1].shuffled_loss if losses else None,
            )
        )
    return results, missing


def told_apart_by(state: LedgerState) -> str:
    """What a run's claim is a function of: runs that differ by their seed alone have one, which takes seconds."""
    before = (state.opened.get("behind"), state.opened.get("disjoint_from_start"))
    return repr((state.charged_groups(), state.plan.target_delta, state.plan.accounted_delta, before))


@dataclass(frozen=True)
class Group:
    """All seeds of one combination of values."""

    labels: dict[str, Label]
    results: list[Result]

    @property
    def final_losses(self) -> list[float]:
        return [loss for result in self.results if (loss := result.final_loss) is not None]

    @property
    def blind_loss(self) -> float | None:
        """The lowest of the seeds' blind losses, which are equal where all of them see the same held-out data."""
        return min((result.blind_loss for result in self.results if result.blind_loss is not None), default=None)

    @property
    def below_blind(self) -> float | None:
        """By how much the mean of the final losses is below the blind line; negative above it."""
        if self.blind_loss is None or not self.final_losses:
            return None
        return self.blind_loss - statistics.fmean(self.final_losses)

    @property
    def is_simulated(self) -> bool:
        """Whether any of them is a TAN simulation: then nothing of the group is private."""
        return any(result.simulation for result in self.results)

    def curve(self) -> list[tuple[int, float, float, float]]:
        """(step, mean, least, largest) of the held-out loss at the steps that every seed evaluated."""
        shared = set.intersection(*(set(result.losses) for result in self.results))
        seeds = {step: [result.losses[step] for result in self.results] for step in sorted(shared)}
        return [(step, statistics.fmean(values), min(values), max(values)) for step, values in seeds.items()]

    def row(self) -> dict[str, Any]:
        """A row of a table: mean and spread over the seeds; epsilon only where every seed has a guarantee."""
        losses, epsilons = self.final_losses, [result.epsilon for result in self.results]
        return {
            **axis_columns(self.labels),
            "seeds_done": len(losses),
            "formal_guarantee": all(result.plan.formal_guarantee for result in self.results),
            "epsilon": None if None in epsilons else max(value for value in epsilons if value is not None),
            "simulation": self.is_simulated,
            **plan_columns(self.results[0].plan),
            "final_heldout_loss_mean": statistics.fmean(losses) if losses else None,
            "final_heldout_loss_min": min(losses, default=None),
            "final_heldout_loss_max": max(losses, default=None),
            "final_heldout_loss_sd": statistics.stdev(losses) if len(losses) > 1 else None,
            "blind_loss": self.blind_loss,
            "below_blind": self.below_blind,
        }


def grouped(results: Sequence[Result]) -> list[Group]:
    """Results that differ by their seed alone together, in the order of the grid."""
    groups: dict[tuple[Label, ...], Group] = {}
    for result in results:
        key = tuple(result.labels.values())
        groups.setdefault(key, Group(result.labels, [])).results.append(result)
    return list(groups.values())
