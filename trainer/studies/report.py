"""The report of a study: what its runs show in their public files, as CSV, and as Markdown with plots of curves and of the
final loss over an axis. Epsilon is from the ledgers, held-out losses from evaluation/.

Plots always have the seeds' spread and the blind line.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_durably
from privacy.accounting.rounding import rounded_up
from privacy.card.folder import read_utility
from privacy.card.render import cell, table_of
from privacy.card.report import read_snapshot
from privacy.ledger.claim import claim_of
from privacy.plan.numbers import PrivacyPlan
from trainer.errors import ConfigError
from trainer.studies.folder import Progress, StudyFolder
from trainer.studies.grid import Label, Point, ReportSection, StudyConfig
from trainer.tasks.blind import BLIND_LINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = (
    *("B", "steps", "sigma", "sigma / B", "epsilon"),
    *("held-out loss", "least", "largest", "blind line", "below the blind line by", "seeds"),
)


@dataclass(frozen=True)
class Result:
    """What one point that began shows.

    Attributes:
        plan: frozen in the run's ledger.
        epsilon, delta: what the weights carry for everything charged so far, private runs that they started from included; None
            without a formal guarantee, whatever the recipe says.
        losses: step -> held-out loss, as far as the held-out data are public.
        blind_loss: what one gets on the same held-out data without looking at them (`trainer.tasks.blind`).
        shuffled_loss: the last held-out loss with another example's picture for every caption; captioners only.
    """

    point: Point
    progress: Progress
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

    @property
    def is_simulated(self) -> bool:
        return self.point.config.privacy.simulation

    @property
    def columns(self) -> dict[str, Any]:
        """What every row of a table begins with; an axis called epsilon is not the epsilon that was spent."""
        axes = {f"axis/{name}": label for name, label in self.point.labels.items()}
        return {"point": self.point.name, **axes, "seed": self.point.seed}


def collect(folder: StudyFolder, planned: Sequence[Point]) -> tuple[list[Result], list[str]]:
    """The results of all points that began, and the names of those that did not."""
    results, missing = [], []
    claims: dict[str, tuple[float, float] | None] = {}
    for one in planned:
        progress = folder.progress(one.name)
        if progress == "new":
            missing.append(one.name)
            continue
        state = read_snapshot(folder.run(one.name) / "ledger.jsonl").state
        # What a claim is a function of: runs that differ by their seed alone have one, which takes seconds.
        before = (state.opened.get("behind"), state.opened.get("disjoint_from_start"))
        known = repr(
            (state.charged_groups(), state.plan.target_delta, state.plan.accounted_delta, before)
        )
        if known not in claims:
            claims[known] = claim_of(folder.run(one.name), state)
        found = read_utility(folder.run(one.name)).heldout_loss
        losses = {point.step: point.loss for point in found if point.loss is not None}
        epsilon, delta = claims[known] or (None, None)
        blind, shuffled = (found[-1].blind_loss, found[-1].shuffled_loss) if found else (None, None)
        results.append(
            Result(
                one,
                progress,
                state.plan,
                state.num_charged,
                epsilon,
                delta,
                losses,
                blind,
                shuffled,
            )
        )
    return results, missing


@dataclass(frozen=True)
class Group:
    """All seeds of one combination of values."""

    results: list[Result]

    @property
    def labels(self) -> Mapping[str, Label]:
        return self.results[0].point.labels

    @property
    def final_losses(self) -> list[float]:
        return [loss for result in self.results if (loss := result.final_loss) is not None]

    @property
    def blind_loss(self) -> float | None:
        """The lowest of the seeds' blind losses, which are equal where all of them see the same held-out data."""
        return min(
            (result.blind_loss for result in self.results if result.blind_loss is not None),
            default=None,
        )

    @property
    def below_blind(self) -> float | None:
        """By how much the mean of the final losses is below the blind line; negative above it."""
        if self.blind_loss is None or not self.final_losses:
            return None
        return self.blind_loss - statistics.fmean(self.final_losses)

    def row(self) -> list[str]:
        """Cells of the page's table: mean and spread over the seeds; epsilon only where every seed has a guarantee."""
        losses, plan, below = self.final_losses, self.results[0].plan, ""
        epsilons = [result.epsilon for result in self.results if result.epsilon is not None]
        spent = (
            rounded_up(max(epsilons))
            if len(epsilons) == len(self.results)
            else "none (no guarantee)"
        )
        if any(
            result.is_simulated for result in self.results
        ):  # then nothing of the group is private
            spent = "none (simulation, not private)"
        if self.blind_loss is not None and self.below_blind is not None:
            above = sum(loss >= self.blind_loss for loss in losses)
            seeds = f" ({above} of {len(losses)} seeds above it)" if above else ""
            is_below = self.below_blind > 0
            below = (
                f"{self.below_blind:.4f}{seeds}"
                if is_below
                else f"**above it** by {-self.below_blind:.4f}"
            )
        spread = (
            (statistics.fmean(losses), min(losses), max(losses)) if losses else (None, None, None)
        )
        return [
            *(cell(label) for label in self.labels.values()),
            str(plan.expected_batch_size),
            str(plan.num_steps),
            f"{plan.noise_multiplier:.4g}",
            f"{plan.noise_multiplier / plan.expected_batch_size:.3g}",
            spent,
            *map(_loss, spread),
            _loss(self.blind_loss),
            below,
            str(len(losses)),
        ]

    def curve(self) -> list[tuple[int, float, float, float]]:
        """(step, mean, least, largest) of the held-out loss at the steps that every seed evaluated."""
        shared = set.intersection(*(set(result.losses) for result in self.results))
        seeds = {step: [result.losses[step] for result in self.results] for step in sorted(shared)}
        return [
            (step, statistics.fmean(values), min(values), max(values))
            for step, values in seeds.items()
        ]

    def words(self, color: str | None) -> str:
        """The values of the axes that have no colour, and whether the group is private."""
        rest = [f"{name} {label}" for name, label in self.labels.items() if name != color]
        is_simulated = any(result.is_simulated for result in self.results)
        return ", ".join([*rest, *(["simulated, not private"] if is_simulated else [])])


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def write_report(
    folder: StudyFolder, study: StudyConfig, results: Sequence[Result], missing: Sequence[str]
) -> Path:
    """Writes study_dir/report/; returns its page.

    Raises:
        ConfigError: nothing was trained yet, or the folder cannot be written.
    """
    if not results:
        raise ConfigError(
            f"study folder {folder.root}: no point has begun; start it with study.py run"
        )
    together: dict[tuple[Label, ...], list[Result]] = {}
    for result in results:
        together.setdefault(tuple(result.point.labels.values()), []).append(result)
    groups, target = [Group(of_seeds) for of_seeds in together.values()], folder.report
    of_plan = (
        "num_examples",
        "expected_batch_size",
        "num_steps",
        "noise_multiplier",
        "max_grad_norm",
    )
    points = [
        {
            **result.columns,
            "status": result.progress,
            "formal_guarantee": result.plan.formal_guarantee,
            "epsilon": result.epsilon,
            "delta": result.delta,
            "why_no_guarantee": "; ".join(result.plan.reasons),
            "attempts_charged": result.charged,
            **{name: getattr(result.plan, name) for name in of_plan},
            "noise_over_batch": result.plan.noise_multiplier / result.plan.expected_batch_size,
            "first_heldout_loss": result.losses.get(0),
            "final_heldout_loss": result.final_loss,
            "blind_loss": result.blind_loss,
            "shuffled_loss": result.shuffled_loss,
        }
        for result in results
    ]
    curves = [
        {**result.columns, "step": step, "heldout_loss": loss}
        for result in results
        for step, loss in sorted(result.losses.items())
    ]
    try:
        target.mkdir(exist_ok=True)
        for name, rows in (("points", points), ("curves", curves)):
            with (target / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        pictures = draw_all(groups, study.report, target)
        write_durably(target / "study.md", _page(study, results, groups, missing, pictures))
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot write the report: {error.strerror or error}"
        ) from error
    return target / "study.md"


def _page(
    study: StudyConfig,
    results: Sequence[Result],
    groups: Sequence[Group],
    missing: Sequence[str],
    pictures: Mapping[str, str],
) -> str:
    unfinished = [
        *(result.point.name for result in results if result.progress != "finished"),
        *missing,
    ]
    count = len(results) + len(missing)
    state = (
        f"{count - len(unfinished)} are done; not done: {', '.join(unfinished)}."
        if unfinished
        else "All are done."
    )
    parts = [
        f"# {cell(study.title or study.name)}",
        f"Study `{study.name}`: {count} points, {len(study.seeds)} seeds. {state}",
    ]
    if simulated := sum(result.is_simulated for result in results):
        parts.append(
            f"**{simulated} of these runs are TAN simulations: they are not private.** Their noise over batch size is that of "
            "the reference batch, which predicts its curve and protects nobody; no epsilon is claimed for them."
        )
    formal = sum(result.plan.formal_guarantee for result in results)
    if formal:
        parts.append(
            f"{formal} runs claim an epsilon each, composed with the private runs behind their initial weights, but not with "
            "each other. Runs on the same data compose: whoever sees several of them learns more than one epsilon says, and "
            "choosing the best one is not free either."
        )
    elif not simulated:
        parts.append("No run claims a guarantee.")
    parts += [
        "## Results",
        table_of([cell(name) for name in (*study.axis, *_COLUMNS)], [g.row() for g in groups]),
    ]
    # What the blind line is, and which groups say nothing about learning because they are not below it.
    if lines := sorted(
        {round(group.blind_loss, 4) for group in groups if group.blind_loss is not None}
    ):
        kinds = dict.fromkeys(
            BLIND_LINE[group.results[0].point.config.model.kind] for group in groups
        )
        known = [group for group in groups if group.below_blind is not None]
        above_it = [group for group in known if (group.below_blind or 0) <= 0]
        names = "; ".join(
            ", ".join(f"{axis} {label}" for axis, label in group.labels.items())
            for group in above_it
        )
        verdict = f"All {len(known)} groups that are done lie below it."
        if above_it:
            verdict = f"**{len(above_it)} of {len(known)} groups lie above it: {cell(names)}.**"
        parts.append(
            f"The blind line, {' or '.join(map(_loss, lines))}, is the loss that one gets on the same held-out data without "
            f"looking at them: {'; '.join(kinds)}. A model above it is no better than one that does not look. {verdict}"
        )
    else:
        parts.append(
            "No blind line is known: the held-out data are not public, or the runs evaluated none."
        )
    parts += [f"![{caption}]({file})\n\n{caption}" for file, caption in pictures.items()]
    parts.append(
        "Held-out losses are those of the runs' `evaluation/heldout.jsonl`, over public held-out data; epsilon is computed from "
        "each run's ledger. `points.csv` and `curves.csv` hold the numbers of every point."
    )
    return "\n\n".join(parts) + "\n"


# Okabe and Ito: distinct with any colour vision, and in print.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_LINES = ("-", "--", ":", "-.")
_WIDE_RANGE = 8.0
"""From this ratio of its numbers on, an axis is logarithmic."""


def draw_all(groups: Sequence[Group], report: ReportSection, folder: Path) -> dict[str, str]:
    """Writes what the results allow; returns file -> caption."""
    from matplotlib.figure import Figure  # without pyplot: no display and no global state

    color = report.color or next(iter(groups[0].labels), None)
    words = "steps" if report.x == "steps" else "examples seen"
    done = [group for group in groups if group.final_losses]
    written = {}
    for file, caption, draw, members in (
        (
            "curves.png",
            f"Held-out loss against {words}: mean over the seeds, band from least to largest.",
            _curves,
            [group for group in groups if len(group.curve()) > 1],
        ),
        (
            "final.png",
            "Held-out loss after the last step over the coloured axis: seeds, mean, least and largest.",
            _final,
            done if color and len({group.labels[color] for group in done}) > 1 else [],
        ),
    ):
        if not members:
            continue
        figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
        ax = figure.subplots()
        draw(ax, members, color, report)
        for loss in sorted(
            {round(group.blind_loss, 4) for group in members if group.blind_loss is not None}
        ):
            # To be below of; groups with other held-out data have another.
            ax.axhline(
                loss,
                color="black",
                linestyle=(0, (6, 3)),
                linewidth=1.1,
                label=f"blind line {loss:.3f}",
            )
        ax.set(xlabel=words if draw is _curves else color, ylabel="held-out loss")
        ax.grid(color="#dddddd")
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=9)
        figure.savefig(folder / file, metadata={"Software": None})
        written[file] = caption
    return written


def _curves(ax: Axes, groups: Sequence[Group], color: str | None, report: ReportSection) -> None:
    """Colour by the value of the colour axis, line by the remaining ones."""
    colors = list(dict.fromkeys(group.labels[color] if color else "all" for group in groups))
    rests = list(dict.fromkeys(group.words(color) for group in groups))
    for group in groups:
        value, rest = group.labels[color] if color else "all", group.words(color)
        scale = 1 if report.x == "steps" else group.results[0].plan.expected_batch_size
        steps, means, low, high = zip(*group.curve(), strict=True)
        x, look = [step * scale for step in steps], _COLORS[colors.index(value) % len(_COLORS)]
        line, label = (
            _LINES[rests.index(rest) % len(_LINES)],
            " ".join(filter(None, (color, str(value), rest))),
        )
        ax.plot(x, means, color=look, linestyle=line, label=label)
        ax.fill_between(x, low, high, color=look, alpha=0.18, linewidth=0)


def _final(ax: Axes, groups: Sequence[Group], color: str | None, report: ReportSection) -> None:
    """Mean, least and largest, and the seeds; only numbers are joined by a line, names have nothing between them."""
    assert color is not None
    values = list(dict.fromkeys(group.labels[color] for group in groups))
    numbers = [
        float(value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    is_numeric = len(numbers) == len(values)
    lines: dict[str, list[Group]] = {}
    for group in groups:
        lines.setdefault(group.words(color), []).append(group)
    for index, (name, members) in enumerate(lines.items()):
        look = _COLORS[index % len(_COLORS)]
        at = [
            float(group.labels[color]) if is_numeric else values.index(group.labels[color])
            for group in members
        ]
        losses = [group.final_losses for group in members]
        means = [statistics.fmean(of_seeds) for of_seeds in losses]
        around = [
            [mean - min(of_seeds) for mean, of_seeds in zip(means, losses, strict=True)],
            [max(of_seeds) - mean for mean, of_seeds in zip(means, losses, strict=True)],
        ]
        style = "-" if is_numeric else "none"
        ax.errorbar(
            at,
            means,
            around,
            color=look,
            linestyle=style,
            marker="_",
            capsize=4,
            label=name or None,
        )
        for x, of_seeds in zip(at, losses, strict=True):
            ax.scatter([x] * len(of_seeds), of_seeds, color=look, s=14, alpha=0.6)
    if not is_numeric:
        ax.set_xticks(range(len(values)), [str(value) for value in values], rotation=30, ha="right")
    elif min(numbers) > 0 and max(numbers) / min(numbers) >= _WIDE_RANGE:
        ax.set_xscale("log")
