"""The plots of a study as PNG files: curves, and final loss over an axis, always with the seeds' spread and the blind line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.studies.collect import Group
from trainer.studies.grid import ReportSection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito: distinct with any colour vision, and in print.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_LINES = ("-", "--", ":", "-.")
_STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "figure.dpi": 120,
}
_WIDE_RANGE = 8.0  # from this ratio on an axis is logarithmic,
_WIDE_FALL = 3.0  # and from this one that of the losses, whose differences lie at its lower end
_WORDS_ABREAST = 50  # letters of the words below an axis that fit next to each other


def draw_all(groups: Sequence[Group], report: ReportSection, folder: Path) -> dict[str, str]:
    """Writes what the results allow; returns file -> caption."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no display and no global state

    color = report.color or next(iter(groups[0].labels), None) if groups else None
    done = [group for group in groups if group.final_losses]
    words = "steps" if report.x == "steps" else "examples seen"
    written = {}
    with matplotlib.rc_context(_STYLE):
        for file, caption, draw, members in (
            ("curves.png", f"Held-out loss against {words}: mean over the seeds, band from least to largest.",
             _curves, [group for group in groups if len(group.curve()) > 1]),
            ("final.png", "Held-out loss after the last step over the coloured axis: seeds, mean, least and largest.",
             _final, done if color and len({group.labels[color] for group in done}) > 1 else []),
        ):  # fmt: skip
            if not members:
                continue
            figure = Figure(figsize=(6.4, 4.0), layout="constrained")
            ax = figure.subplots()
            draw(ax, members, color, report)
            lines = sorted({round(group.blind_loss, 4) for group in members if group.blind_loss is not None})
            for loss in lines:  # to be below of; groups with other held-out data have another
                ax.axhline(loss, color="black", linestyle=(0, (6, 3)), linewidth=1.1, label=f"blind line {loss:.3f}")
            if draw is _curves:
                ax.set(xlabel=words)
                if max(ax.dataLim.intervaly) >= _WIDE_FALL * min(ax.dataLim.intervaly) > 0:
                    ax.set_yscale("log")
                    ax.yaxis.set_major_formatter("{x:g}")
                    ax.yaxis.set_minor_formatter("{x:g}")
            ax.set(ylabel="held-out loss")
            if ax.get_legend_handles_labels()[0]:
                ax.legend()
            figure.savefig(folder / file, bbox_inches="tight", metadata={"Software": None})
            written[file] = caption
    return written


def _rest(group: Group, color: str | None) -> str:
    """The values of the axes that have no colour."""
    return ", ".join(f"{name} {label}" for name, label in group.labels.items() if name != color)


def _curves(ax: Axes, groups: Sequence[Group], color: str | None, report: ReportSection) -> None:
    """Colour by the value of the colour axis, line by the remaining ones."""
    colors = list(dict.fromkeys(group.labels[color] if color else "all" for group in groups))
    rests = list(dict.fromkeys(_rest(group, color) for group in groups))
    for group in groups:
        value, rest = group.labels[color] if color else "all", _rest(group, color)
        words = [color or "", str(value), rest, "(simulated, not private)" if group.is_simulated else ""]
        look = _COLORS[colors.index(value) % len(_COLORS)]
        scale = 1 if report.x == "steps" else group.results[0].plan.expected_batch_size
        steps, means, low, high = zip(*group.curve(), strict=True)
        x, line = [step * scale for step in steps], _LINES[rests.index(rest) % len(_LINES)]
        ax.plot(x, means, color=look, linestyle=line, linewidth=1.6, label=" ".join(filter(None, words)))
        ax.fill_between(x, low, high, color=look, alpha=0.18, linewidth=0)


def _final(ax: Axes, groups: Sequence[Group], color: str | None, report: ReportSection) -> None:
    """Mean, least and largest, and the seeds; only numbers are joined by a line, names have nothing between them."""
    assert color is not None
    values = list(dict.fromkeys(group.labels[color] for group in groups))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    lines: dict[str, list[Group]] = {}
    for group in groups:
        lines.setdefault(_rest(group, color), []).append(group)
    for index, (name, members) in enumerate(lines.items()):
        look = _COLORS[index % len(_COLORS)]
        x = [float(group.labels[color]) if numeric else values.index(group.labels[color]) for group in members]
        losses = [group.final_losses for group in members]
        means = [sum(of_seeds) / len(of_seeds) for of_seeds in losses]
        around = [
            [mean - min(of_seeds) for mean, of_seeds in zip(means, losses, strict=True)],
            [max(of_seeds) - mean for mean, of_seeds in zip(means, losses, strict=True)],
        ]
        bars: dict[str, Any] = {"marker": "_", "markersize": 12, "capsize": 4, "linewidth": 1.2}
        ax.errorbar(
            x, means, around, color=look, linestyle="-" if numeric else "none", label=name if name else None, **bars
        )
        for at, group in zip(x, members, strict=True):
            cross: dict[str, Any] = {"marker": "x", "linewidths": 1.2} if group.is_simulated else {"linewidths": 0}
            ax.scatter([at] * len(group.final_losses), group.final_losses, color=look, s=14, alpha=0.6, **cross)
    if any(group.is_simulated for group in groups):
        ax.set_title("x: simulated, not private", fontsize=9, loc="left")
    ax.set(xlabel=color)
    if numeric:
        numbers = sorted(float(value) for value in values)
        if numbers[0] > 0 and numbers[-1] / numbers[0] >= _WIDE_RANGE:
            ax.set_xscale("log")
        if len(numbers) <= 6:
            ax.set_xticks(numbers, [f"{value:,.0f}" if value == round(value) else f"{value:.3g}" for value in numbers])
            ax.minorticks_off()
    else:
        ax.set_xticks(range(len(values)), words := [str(value) for value in values])
        if sum(map(len, words)) > _WORDS_ABREAST:
            ax.tick_params(axis="x", rotation=90)
