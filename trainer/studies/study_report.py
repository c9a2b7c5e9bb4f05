"""The report of a study: CSV and Markdown from the public files of its runs, with plots.

Epsilon is from the ledgers, held-out losses from evaluation/. Plots always have the seeds' spread
and the blind line.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_durably
from privacy.accounting.rounding import rounded_up
from privacy.card.ledger_card import read_snapshot
from privacy.card.render import cell, table_of
from privacy.card.run_card import read_utility
from privacy.ledger.claim import claim_of
from privacy.plan.numbers import PrivacyPlan
from trainer.errors import ConfigError
from trainer.studies.grid import Label, Point, ReportSection, StudyConfig
from trainer.studies.study_folder import Progress, StudyFolder
from trainer.tasks.baselines import BLIND_LINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = (
    *("B", "steps", "sigma", "sigma / B", "epsilon"),
    *("held-out loss", "least", "largest", "blind line", "below the blind line by", "seeds"),
)


@dataclass(frozen=True)
class Result:
    """The public facts of a point that began.

    Attributes:
        plan: frozen in the run's ledger.
        epsilon, delta: of everything charged so far, private runs that the weights started from
            included; None without a formal guarantee, whatever the recipe says.
        losses: step -> held-out loss, where the held-out data are public.
        blind_loss: loss on the same held-out data without looking at them
            (`trainer.tasks.baselines`).
        shuffled_loss: the last held-out loss with another example's picture for every caption;
            captioners only.
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
        """Returns the held-out loss after the last step; None for a run that is not done."""
        return self.losses.get(self.plan.num_steps) if self.progress == "finished" else None

    @property
    def is_simulated(self) -> bool:
        """Returns whether the run is a simulation."""
        return self.point.config.privacy.simulation

    @property
    def columns(self) -> dict[str, Any]:
        """Returns the first columns of every table.

        The prefix tells an axis called epsilon from the epsilon that was spent.
        """
        axes = {f"axis/{name}": label for name, label in self.point.labels.items()}
        return {"point": self.point.name, **axes, "seed": self.point.seed}


def collect(folder: StudyFolder, planned: Sequence[Point]) -> tuple[list[Result], list[str]]:
    """Returns the results of all points that began, and the names of the others."""
    results: list[Result] = []
    missing: list[str] = []
    claims: dict[str, tuple[float, float] | None] = {}
    for point in planned:
        progress = folder.progress(point.name)
        if progress == "new":
            missing.append(point.name)
            continue
        run_dir = folder.run(point.name)
        state = read_snapshot(run_dir / "ledger.jsonl").state
        # The inputs of a claim: runs that differ by their seed alone have one claim, which takes
        # seconds.
        earlier_runs = (state.opened.get("behind"), state.opened.get("disjoint_from_start"))
        plan = state.plan
        claim_inputs = repr(
            (state.charged_groups(), plan.target_delta, plan.accounted_delta, earlier_runs)
        )
        if claim_inputs not in claims:
            claims[claim_inputs] = claim_of(run_dir, state)
        epsilon, delta = claims[claim_inputs] or (None, None)
        heldout = read_utility(run_dir).heldout_loss
        result = Result(
            point=point,
            progress=progress,
            plan=plan,
            charged=state.num_charged,
            epsilon=epsilon,
            delta=delta,
            losses={entry.step: entry.loss for entry in heldout if entry.loss is not None},
            blind_loss=heldout[-1].blind_loss if heldout else None,
            shuffled_loss=heldout[-1].shuffled_loss if heldout else None,
        )
        results.append(result)
    return results, missing


@dataclass(frozen=True)
class Group:
    """All seeds of one combination of values."""

    results: list[Result]

    @property
    def labels(self) -> Mapping[str, Label]:
        """Returns the values of the axes, which all seeds share."""
        return self.results[0].point.labels

    @property
    def final_losses(self) -> list[float]:
        """Returns the final losses of the seeds that are done."""
        losses = [result.final_loss for result in self.results]
        return [loss for loss in losses if loss is not None]

    @property
    def blind_loss(self) -> float | None:
        """Returns the lowest of the seeds' blind losses, which are equal on equal held-out data."""
        losses = [result.blind_loss for result in self.results]
        return min((loss for loss in losses if loss is not None), default=None)

    @property
    def below_blind(self) -> float | None:
        """Returns the blind loss minus the mean of the final losses; negative above the line."""
        if self.blind_loss is None or not self.final_losses:
            return None
        return self.blind_loss - statistics.fmean(self.final_losses)

    def row(self) -> list[str]:
        """Returns the cells of the page's table: mean and spread over the seeds.

        Epsilon appears only where every seed has a guarantee.
        """
        plan = self.results[0].plan
        epsilons = [result.epsilon for result in self.results if result.epsilon is not None]
        # One simulated seed makes the whole group not private.
        if any(result.is_simulated for result in self.results):
            spent = "none (simulation, not private)"
        elif len(epsilons) == len(self.results):
            spent = rounded_up(max(epsilons))
        else:
            spent = "none (no guarantee)"
        losses = self.final_losses
        distance = ""
        if self.blind_loss is not None and self.below_blind is not None:
            num_above = sum(loss >= self.blind_loss for loss in losses)
            if self.below_blind <= 0:
                distance = f"**above it** by {-self.below_blind:.4f}"
            else:
                distance = f"{self.below_blind:.4f}"
                if num_above:
                    distance += f" ({num_above} of {len(losses)} seeds above it)"
        spread: tuple[float | None, ...] = (None, None, None)
        if losses:
            spread = (statistics.fmean(losses), min(losses), max(losses))
        noise_over_batch = plan.noise_multiplier / plan.expected_batch_size
        cells = [cell(label) for label in self.labels.values()]
        cells += [str(plan.expected_batch_size), str(plan.num_steps)]
        cells += [f"{plan.noise_multiplier:.4g}", f"{noise_over_batch:.3g}", spent]
        cells += map(_loss, spread)
        cells += [_loss(self.blind_loss), distance, str(len(losses))]
        return cells

    def curve(self) -> list[tuple[int, float, float, float]]:
        """Returns (step, mean, least, largest) of the held-out loss, at steps of every seed."""
        steps = set.intersection(*(set(result.losses) for result in self.results))
        points = []
        for step in sorted(steps):
            losses = [result.losses[step] for result in self.results]
            points.append((step, statistics.fmean(losses), min(losses), max(losses)))
        return points

    def words(self, color: str | None) -> str:
        """Returns the values of the axes without colour, and whether the group is simulated."""
        words = [f"{name} {label}" for name, label in self.labels.items() if name != color]
        if any(result.is_simulated for result in self.results):
            words.append("simulated, not private")
        return ", ".join(words)


def _blind_lines(groups: Sequence[Group]) -> list[float]:
    """Returns the different blind losses of groups, rounded as they are shown."""
    losses = {round(group.blind_loss, 4) for group in groups if group.blind_loss is not None}
    return sorted(losses)


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def write_report(
    folder: StudyFolder, study: StudyConfig, results: Sequence[Result], missing: Sequence[str]
) -> Path:
    """Writes study_dir/report/; returns the path of its page.

    Raises:
        ConfigError: no point has begun, or the folder cannot be written.
    """
    if not results:
        raise ConfigError(
            f"study folder {folder.root}: no point has begun; start it with study.py run"
        )
    by_labels: dict[tuple[Label, ...], list[Result]] = {}
    for result in results:
        by_labels.setdefault(tuple(result.point.labels.values()), []).append(result)
    groups = [Group(group_results) for group_results in by_labels.values()]
    target = folder.report
    points: list[dict[str, Any]] = []
    for result in results:
        plan = result.plan
        row = {
            **result.columns,
            "status": result.progress,
            "formal_guarantee": plan.formal_guarantee,
            "epsilon": result.epsilon,
            "delta": result.delta,
            "why_no_guarantee": "; ".join(plan.reasons),
            "attempts_charged": result.charged,
            "num_examples": plan.num_examples,
            "expected_batch_size": plan.expected_batch_size,
            "num_steps": plan.num_steps,
            "noise_multiplier": plan.noise_multiplier,
            "max_grad_norm": plan.max_grad_norm,
            "noise_over_batch": plan.noise_multiplier / plan.expected_batch_size,
            "first_heldout_loss": result.losses.get(0),
            "final_heldout_loss": result.final_loss,
            "blind_loss": result.blind_loss,
            "shuffled_loss": result.shuffled_loss,
        }
        points.append(row)
    curves: list[dict[str, Any]] = []
    for result in results:
        for step, loss in sorted(result.losses.items()):
            curves.append({**result.columns, "step": step, "heldout_loss": loss})
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
    """Returns the text of study.md."""
    unfinished = [result.point.name for result in results if result.progress != "finished"]
    unfinished += missing
    count = len(results) + len(missing)
    state = "All are done."
    if unfinished:
        num_done = count - len(unfinished)
        state = f"{num_done} are done; not done: {', '.join(unfinished)}."
    parts = [
        f"# {cell(study.title or study.name)}",
        f"Study `{study.name}`: {count} points, {len(study.seeds)} seeds. {state}",
    ]
    num_simulated = sum(result.is_simulated for result in results)
    if num_simulated:
        parts.append(
            f"**{num_simulated} of these runs are TAN simulations: they are not private.** Their "
            "noise over batch size is that of the reference batch, which predicts its curve and "
            "protects no example; no epsilon is claimed for them."
        )
    formal = sum(result.plan.formal_guarantee for result in results)
    if formal:
        parts.append(
            f"{formal} runs claim an epsilon each, composed with the private runs behind their "
            "initial weights, but not with each other. Runs on the same data compose: a reader of "
            "several of them learns more than one epsilon says, and choosing the best one is not "
            "free either."
        )
    elif not num_simulated:
        parts.append("No run claims a guarantee.")
    header = [cell(name) for name in (*study.axis, *_COLUMNS)]
    parts += ["## Results", table_of(header, [group.row() for group in groups])]
    # Groups that are not below the blind line say nothing about learning.
    lines = _blind_lines(groups)
    if lines:
        kinds = [group.results[0].point.config.model.kind for group in groups]
        explanations = dict.fromkeys(BLIND_LINE[kind] for kind in kinds)
        done = [group for group in groups if group.below_blind is not None]
        above = [group for group in done if (group.below_blind or 0) <= 0]
        verdict = f"All {len(done)} groups that are done lie below it."
        if above:
            names = []
            for group in above:
                names.append(", ".join(f"{axis} {label}" for axis, label in group.labels.items()))
            verdict = (
                f"**{len(above)} of {len(done)} groups lie above it: {cell('; '.join(names))}.**"
            )
        parts.append(
            f"The blind line, {' or '.join(map(_loss, lines))}, is the loss on the same held-out "
            f"data without looking at them: {'; '.join(explanations)}. A model above it is no "
            f"better than one that does not look. {verdict}"
        )
    else:
        parts.append(
            "No blind line is known: the held-out data are not public, or the runs evaluated none."
        )
    parts += [f"![{caption}]({file})\n\n{caption}" for file, caption in pictures.items()]
    parts.append(
        "Held-out losses are those of the runs' `evaluation/heldout.jsonl`, over public held-out "
        "data; epsilon is computed from each run's ledger. `points.csv` and `curves.csv` hold the "
        "numbers of every point."
    )
    return "\n\n".join(parts) + "\n"


# Okabe and Ito: distinct with any colour vision, and in print.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_LINES = ("-", "--", ":", "-.")
_WIDE_RANGE = 8.0
"""From this ratio of its numbers on, an axis is logarithmic."""


def draw_all(groups: Sequence[Group], report: ReportSection, folder: Path) -> dict[str, str]:
    """Writes the plots that the results allow; returns file -> caption."""
    from matplotlib.figure import Figure  # without pyplot: no display and no global state

    color = report.color or next(iter(groups[0].labels), None)
    x_name = "steps" if report.x == "steps" else "examples seen"
    with_curves = [group for group in groups if len(group.curve()) > 1]
    done = [group for group in groups if group.final_losses]
    colors_differ = color is not None and len({group.labels[color] for group in done}) > 1
    plots: list[tuple[str, str, Callable[..., None], list[Group]]] = [
        (
            "curves.png",
            f"Held-out loss against {x_name}: mean over the seeds, band from least to largest.",
            _curves,
            with_curves,
        ),
        (
            "final.png",
            "Held-out loss after the last step over the coloured axis: seeds, mean, least and "
            "largest.",
            _final,
            done if colors_differ else [],
        ),
    ]
    written = {}
    for file, caption, draw, members in plots:
        if not members:
            continue
        figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
        ax = figure.subplots()
        draw(ax, members, color, report)
        for loss in _blind_lines(members):
            ax.axhline(
                loss,
                color="black",
                linestyle=(0, (6, 3)),
                linewidth=1.1,
                label=f"blind line {loss:.3f}",
            )
        ax.set(xlabel=x_name if draw is _curves else color, ylabel="held-out loss")
        ax.grid(color="#dddddd")
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=9)
        figure.savefig(folder / file, metadata={"Software": None})
        written[file] = caption
    return written


def _curves(ax: Axes, groups: Sequence[Group], color: str | None, report: ReportSection) -> None:
    """Draws a curve for each group: colour by the value of the colour axis, line by the others."""
    colors = list(dict.fromkeys(group.labels[color] if color else "all" for group in groups))
    words = list(dict.fromkeys(group.words(color) for group in groups))
    for group in groups:
        label = group.labels[color] if color else "all"
        group_words = group.words(color)
        scale = 1 if report.x == "steps" else group.results[0].plan.expected_batch_size
        steps, means, low, high = zip(*group.curve(), strict=True)
        x = [step * scale for step in steps]
        line_color = _COLORS[colors.index(label) % len(_COLORS)]
        line = _LINES[words.index(group_words) % len(_LINES)]
        legend = " ".join(filter(None, (color, str(label), group_words)))
        ax.plot(x, means, color=line_color, linestyle=line, label=legend)
        ax.fill_between(x, low, high, color=line_color, alpha=0.18, linewidth=0)


def _final(ax: Axes, groups: Sequence[Group], color: str | None, report: ReportSection) -> None:
    """Draws mean, least, largest and each seed over the colour axis.

    A line joins numbers only, because names have nothing between them.
    """
    assert color is not None
    labels = list(dict.fromkeys(group.labels[color] for group in groups))
    # A bool counts as a number in Python.
    numbers = [
        float(label)
        for label in labels
        if isinstance(label, int | float) and not isinstance(label, bool)
    ]
    is_numeric = len(numbers) == len(labels)
    lines: dict[str, list[Group]] = {}
    for group in groups:
        lines.setdefault(group.words(color), []).append(group)
    for index, (name, members) in enumerate(lines.items()):
        line_color = _COLORS[index % len(_COLORS)]
        x: list[float] = []
        means: list[float] = []
        below: list[float] = []
        above: list[float] = []
        for group in members:
            label = group.labels[color]
            losses = group.final_losses
            mean = statistics.fmean(losses)
            x.append(float(label) if is_numeric else labels.index(label))
            means.append(mean)
            below.append(mean - min(losses))
            above.append(max(losses) - mean)
        ax.errorbar(
            x,
            means,
            [below, above],
            color=line_color,
            linestyle="-" if is_numeric else "none",
            marker="_",
            capsize=4,
            label=name or None,
        )
        for place, group in zip(x, members, strict=True):
            losses = group.final_losses
            ax.scatter([place] * len(losses), losses, color=line_color, s=14, alpha=0.6)
    if not is_numeric:
        ax.set_xticks(range(len(labels)), [str(label) for label in labels], rotation=30, ha="right")
    elif min(numbers) > 0 and max(numbers) / min(numbers) >= _WIDE_RANGE:
        ax.set_xscale("log")
