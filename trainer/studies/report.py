"""The report of a study: CSV, and Markdown with plots of curves and of the final loss over an axis.

Plots always have the seeds' spread and the blind line.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files import write_durably
from privacy.accounting.rounding import rounded_up
from privacy.card.text import cell, table_of
from trainer.errors import ConfigError
from trainer.studies.collect import Group, Result, axis_columns, grouped
from trainer.studies.folder import StudyFolder
from trainer.studies.grid import ReportSection, StudyConfig
from trainer.tasks.blind import BLIND_LINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = (
    *("B", "steps", "sigma", "sigma / B", "epsilon"),
    *("held-out loss", "least", "largest", "blind line", "below the blind line by", "seeds"),
)


def write_report(folder: StudyFolder, study: StudyConfig, results: Sequence[Result], missing: Sequence[str]) -> Path:
    """Writes study_dir/report/; returns its page.

    Raises:
        ConfigError: nothing was trained yet, or the folder cannot be written.
    """
    if not results:
        raise ConfigError(f"study folder {folder.root}: no point has begun; start it with study.py run")
    groups, target = grouped(results), folder.report
    curves = [
        {"point": result.name, **axis_columns(result.labels), "seed": result.seed, "step": step, "heldout_loss": loss}
        for result in results
        for step, loss in sorted(result.losses.items())
    ]
    try:
        target.mkdir(exist_ok=True)
        tables: dict[str, list[dict[str, Any]]] = {
            "points": [result.row() for result in results],
            "groups": [group.row() for group in groups],
            "curves": curves,
        }
        for name, rows in tables.items():
            with (target / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        pictures = draw_all(groups, study.report, target)
        write_durably(target / "study.md", _page(study, results, groups, missing, pictures))
    except OSError as error:
        raise ConfigError(f"{target}: cannot write the report: {error.strerror or error}") from error
    return target / "study.md"


def _page(
    study: StudyConfig,
    results: Sequence[Result],
    groups: Sequence[Group],
    missing: Sequence[str],
    pictures: Mapping[str, str],
) -> str:
    unfinished = [*(result.name for result in results if result.progress != "finished"), *missing]
    count = len(results) + len(missing)
    state = f"{count - len(unfinished)} are done; not done: {', '.join(unfinished)}." if unfinished else "All are done."
    parts = [
        f"# {cell(study.title or study.name)}",
        f"Study `{study.name}`: {count} points, {len(study.seeds)} seeds. {state}",
    ]
    if simulated := sum(result.simulation for result in results):
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
    rows = []
    for group in groups:
        row, below = group.row(), ""
        epsilon = "none (simulation, not private)" if group.is_simulated else "none (no guarantee)"
        if group.blind_loss is not None and group.below_blind is not None:
            above = sum(loss >= group.blind_loss for loss in group.final_losses)
            seeds = f" ({above} of {len(group.final_losses)} seeds above it)" if above else ""
            is_below = group.below_blind > 0
            below = f"{group.below_blind:.4f}{seeds}" if is_below else f"**above it** by {-group.below_blind:.4f}"
        rows.append(
            [
                *(cell(label) for label in group.labels.values()),
                str(row["expected_batch_size"]),
                str(row["num_steps"]),
                f"{row['noise_multiplier']:.4g}",
                f"{row['noise_over_batch']:.3g}",
                epsilon if row["epsilon"] is None else rounded_up(row["epsilon"], 2),
                *(_loss(row[f"final_heldout_loss_{which}"]) for which in ("mean", "min", "max")),
                _loss(group.blind_loss),
                below,
                str(row["seeds_done"]),
            ]
        )
    parts += ["## Results", table_of([cell(name) for name in (*study.axis, *_COLUMNS)], rows)]
    # What the blind line is, and which groups say nothing about learning because they are not below it.
    if lines := sorted({round(group.blind_loss, 4) for group in groups if group.blind_loss is not None}):
        kinds = dict.fromkeys(BLIND_LINE[group.results[0].kind] for group in groups)
        known = [group for group in groups if group.below_blind is not None]
        above_it = [group for group in known if group.below_blind is not None and group.below_blind <= 0]
        names = "; ".join(", ".join(f"{axis} {label}" for axis, label in group.labels.items()) for group in above_it)
        verdict = f"All {len(known)} groups that are done lie below it."
        if above_it:
            verdict = f"**{len(above_it)} of {len(known)} groups lie above it: {cell(names)}.**"
        parts.append(
            f"The blind line, {' or '.join(map(_loss, lines))}, is the loss that one gets on the same held-out data without "
            f"looking at them: {'; '.join(kinds)}. A model above it is no better than one that does not look. {verdict}"
        )
    else:
        parts.append("No blind line is known: the held-out data are not public, or the runs evaluated none.")
    parts += [f"![{caption}]({file})\n\n{caption}" for file, caption in pictures.items()]
    parts.append(
        "Held-out losses are those of the runs' `evaluation/heldout.jsonl`, over public held-out data; epsilon is computed from "
        "each run's ledger. `points.csv`, `groups.csv` and `curves.csv` hold the numbers of every point."
    )
    return "\n\n".join(parts) + "\n"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


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
        ("curves.png", f"Held-out loss against {words}: mean over the seeds, band from least to largest.",
         _curves, [group for group in groups if len(group.curve()) > 1]),
        ("final.png", "Held-out loss after the last step over the coloured axis: seeds, mean, least and largest.",
         _final, done if color and len({group.labels[color] for group in done}) > 1 else []),
    ):  # fmt: skip
        if not members:
            continue
        figure = Figure(figsize=(6.4, 4.0), dpi=120, layout="constrained")
        ax = figure.subplots()
        draw(ax, members, color, report)
        for loss in sorted({round(group.blind_loss, 4) for group in members if group.blind_loss is not None}):
            # To be below of; groups with other held-out data have another.
            ax.axhline(loss, color="black", linestyle=(0, (6, 3)), linewidth=1.1, label=f"blind line {loss:.3f}")
        ax.set(xlabel=words if draw is _curves else color, ylabel="held-out loss")
        ax.grid(color="#dddddd")
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=9)
        figure.savefig(folder / file, metadata={"Software": None})
        written[file] = caption
    return written


def _words(group: Group, color: str | None) -> str:
    """The values of the axes that have no colour, and whether the group is private."""
    rest = [f"{name} {label}" for name, label in group.labels.items() if name != color]
    return ", ".join([*rest, *(["simulated, not private"] if group.is_simulated else [])])


def _curves(ax: Axes, groups: Sequence[Group], color: str | None, report: ReportSection) -> None:
    """Colour by the value of the colour axis, line by the remaining ones."""
    colors = list(dict.fromkeys(group.labels[color] if color else "all" for group in groups))
    rests = list(dict.fromkeys(_words(group, color) for group in groups))
    for group in groups:
        value, rest = group.labels[color] if color else "all", _words(group, color)
        scale = 1 if report.x == "steps" else group.results[0].plan.expected_batch_size
        steps, means, low, high = zip(*group.curve(), strict=True)
        x, look = [step * scale for step in steps], _COLORS[colors.index(value) % len(_COLORS)]
        line, label = _LINES[rests.index(rest) % len(_LINES)], " ".join(filter(None, (color, str(value), rest)))
        ax.plot(x, means, color=look, linestyle=line, label=label)
        ax.fill_between(x, low, high, color=look, alpha=0.18, linewidth=0)


def _final(ax: Axes, groups: Sequence[Group], color: str | None, report: ReportSection) -> None:
    """Mean, least and largest, and the seeds; only numbers are joined by a line, names have nothing between them."""
    assert color is not None
    values = list(dict.fromkeys(group.labels[color] for group in groups))
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    is_numeric = len(numbers) == len(values)
    lines: dict[str, list[Group]] = {}
    for group in groups:
        lines.setdefault(_words(group, color), []).append(group)
    for index, (name, members) in enumerate(lines.items()):
        look = _COLORS[index % len(_COLORS)]
        at = [float(group.labels[color]) if is_numeric else values.index(group.labels[color]) for group in members]
        losses = [group.final_losses for group in members]
        means = [statistics.fmean(of_seeds) for of_seeds in losses]
        around = [
            [mean - min(of_seeds) for mean, of_seeds in zip(means, losses, strict=True)],
            [max(of_seeds) - mean for mean, of_seeds in zip(means, losses, strict=True)],
        ]
        style = "-" if is_numeric else "none"
        ax.errorbar(at, means, around, color=look, linestyle=style, marker="_", capsize=4, label=name or None)
        for x, of_seeds in zip(at, losses, strict=True):
            ax.scatter([x] * len(of_seeds), of_seeds, color=look, s=14, alpha=0.6)
    if not is_numeric:
        ax.set_xticks(range(len(values)), [str(value) for value in values], rotation=30, ha="right")
    elif min(numbers) > 0 and max(numbers) / min(numbers) >= _WIDE_RANGE:
        ax.set_xscale("log")
