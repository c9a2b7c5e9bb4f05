"""What the runs of a study show, from their public files: epsilon from the ledgers, held-out losses from evaluation/."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privacy.card.composition import claim_of
from privacy.card.folder import read_utility
from privacy.card.report import read_snapshot
from privacy.checkpoints.read import Checkpoint, newest_checkpoint
from privacy.ledger.records import LedgerState
from privacy.plan import PrivacyPlan
from trainer.studies.folder import Progress, StudyFolder
from trainer.studies.grid import Label
from trainer.studies.points import PlannedPoint


def axis_columns(labels: Mapping[str, Label]) -> dict[str, Label]:
    """Labels as columns of a table: an axis called epsilon is not the epsilon that was spent."""
    return {f"axis/{name}": label for name, label in labels.items()}


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
        parameters, trainable: how many the model has, and how many of them it trains; None before the first checkpoint.
        seconds: wall time over all attempts that this folder knows the end of; None for private data (contract 12).
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
    parameters: int | None
    trainable: int | None
    seconds: float | None

    @property
    def final_loss(self) -> float | None:
        """Held-out loss after the last step; None for a run that is not done."""
        return self.losses.get(self.plan.num_steps) if self.progress == "finished" else None

    @property
    def examples(self) -> int:
        """Examples through the model over the whole run as planned; every step is padded to the capped batch."""
        return self.plan.max_batch_size * self.plan.num_steps

    def row(self) -> dict[str, Any]:
        """A row of a table. Without a formal guarantee it holds neither epsilon nor delta."""
        formal = self.plan.formal_guarantee
        return {
            "point": self.name,
            **axis_columns(self.labels),
            "seed": self.seed,
            "status": self.progress,
            "formal_guarantee": formal,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "why_no_guarantee": "; ".join(self.plan.reasons),
            "num_examples": self.plan.num_examples,
            "expected_batch_size": self.plan.expected_batch_size,
            "noise_multiplier": self.plan.noise_multiplier,
            "max_grad_norm": self.plan.max_grad_norm,
            "noise_over_batch": self.plan.noise_multiplier / self.plan.expected_batch_size,
            "num_steps": self.plan.num_steps,
            "parameters": self.parameters,
            "trainable_parameters": self.trainable,
            "examples_computed": self.examples,
            "seconds": self.seconds,
            "first_heldout_loss": self.losses.get(0),
            "final_heldout_loss": self.final_loss,
            "blind_loss": self.blind_loss,
            "shuffled_loss": self.shuffled_loss,
        }


def collect(folder: StudyFolder, planned: Sequence[PlannedPoint]) -> tuple[list[Result], list[str]]:
    """The results of all points that began, and the names of those that did not."""
    seconds = folder.seconds()
    results, missing = [], []
    for one in planned:
        progress = folder.progress(one.name)
        if progress == "new":
            missing.append(one.name)
            continue
        state = read_snapshot(folder.run(one.name) / "ledger.jsonl").state
        plan = state.plan
        claim = _claim(folder.run(one.name), state)
        losses = read_utility(folder.run(one.name)).heldout_loss
        newest = newest_checkpoint(folder.run(one.name) / "checkpoints")
        checkpoint = None if newest is None else Checkpoint(newest)
        sizes = {} if checkpoint is None else {name: shape.numel() for name, shape in checkpoint.shapes.items()}
        frozen = 0 if checkpoint is None else sum(sizes[name] for name in checkpoint.frozen)
        results.append(
            Result(
                name=one.name,
                labels=dict(one.point.labels),
                seed=one.point.seed,
                kind=one.config.model.kind,
                progress=progress,
                simulation=one.is_simulation,
                plan=plan,
                charged=state.num_charged,
                epsilon=None if claim is None else claim[0],
                delta=None if claim is None else claim[1],
                losses={point.step: point.loss for point in losses if point.loss is not None},
                blind_loss=losses[-1].blind_loss if losses else None,
                shuffled_loss=losses[-1].shuffled_loss if losses else None,
                parameters=sum(sizes.values()) or None,
                trainable=sum(sizes.values()) - frozen or None,
                seconds=None if one.is_on_private_data else seconds.get(one.name),
            )
        )
    return results, missing


_known: dict[str, tuple[float, float] | None] = {}


def _claim(run_dir: Path, state: LedgerState) -> tuple[float, float] | None:
    """(epsilon, delta) of a run; those that differ by their seed alone have one, which takes seconds."""
    before = (state.opened.get("behind"), state.opened.get("disjoint_from_start"))
    name = repr((state.charged_groups(), state.plan.target_delta, state.plan.accounted_delta, before))
    if name not in _known:
        _known[name] = claim_of(run_dir, state)
    return _known[name]


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
        curve = []
        for step in sorted(shared):
            values = [result.losses[step] for result in self.results]
            curve.append((step, statistics.fmean(values), min(values), max(values)))
        return curve

    def row(self) -> dict[str, Any]:
        """A row of a table: mean and spread over the seeds; epsilon only where every seed has a guarantee."""
        first, losses = self.results[0], self.final_losses
        epsilons = [result.epsilon for result in self.results]
        return {
            **axis_columns(self.labels),
            "seeds_done": len(losses),
            "formal_guarantee": all(result.plan.formal_guarantee for result in self.results),
            "epsilon": None if None in epsilons else max(value for value in epsilons if value is not None),
            "simulation": self.is_simulated,
            "num_examples": first.plan.num_examples,
            "expected_batch_size": first.plan.expected_batch_size,
            "num_steps": first.plan.num_steps,
            "noise_multiplier": first.plan.noise_multiplier,
            "noise_over_batch": first.plan.noise_multiplier / first.plan.expected_batch_size,
            "parameters": first.parameters,
            "examples_computed": first.examples,
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
