"""The plots of a study as PNG files: curves, final loss over an axis, epsilon and cost, always with the seeds' spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.studies.collect import Group
from trainer.studies.grid import Label, ReportSection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_LOSS = "held-out loss"
_OTHER_EPSILON = 1.2  # below it epsilons differ by how much of the reserve was used, not by what was studied
_WIDE_RANGE = 8.0  # from this ratio on an axis is logarithmic,
_WIDE_FALL = 3.0  # and from this one that of the losses, whose differences lie at its lower end
_WORDS_ABREAST = 50  # letters of the words below an axis that fit next to each other


class Picture(NamedTuple):
    """A file in the report's folder."""

    file: str
    caption: str


class Axis(NamedTuple):
    """What distinguishes the groups: the values of `color`, those of `panels`, and what remains."""

    color: str | None
    panels: str | None

    @classmethod
    def of(cls, names: Sequence[str], report: ReportSection) -> Axis:
        free = [name for name in names if name not in (report.color, report.panels)]
        color = report.color or (free.pop(0) if free else None)
        return cls(color, report.panels or (free.pop(0) if free else None))


def draw_all(groups: Sequence[Group], report: ReportSection, folder: Path) -> list[Picture]:
    """Writes what the results allow; returns what was written."""
    import matplotlib

    names = list(groups[0].labels) if groups else []
    axis = Axis.of(names, report)
    with matplotlib.rc_context(_STYLE):
        done = [group for group in groups if group.final_losses]
        formal = [group for group in done if group.row()["epsilon"] is not None]
        spent = [group.row()["epsilon"] for group in formal]
        known = [group for group in done if group.results[0].parameters]
        epsilon_figure = cost_figure = None
        if spent and max(spent) >= _OTHER_EPSILON * min(spent):
            epsilon_figure = _against(formal, axis, lambda group: group.row()["epsilon"], "epsilon")
        if len({_compute(group) for group in known}) > 1:
            cost_figure = _against(known, axis, _compute, "parameters times examples computed")
        drawn = (
            ("curves.png", f"Held-out loss against {_x_words(report)}: mean over the seeds, band from least to largest.",
             _curves(groups, axis, report)),
            ("final.png", "Held-out loss after the last step over the coloured axis: seeds, mean, least and largest.",
             _final(done, axis)),
            ("epsilon.png", "Held-out loss after the last step against epsilon as spent, for runs with a guarantee.",
             epsilon_figure),
            ("cost.png", "Cost against quality: one multiply-add per parameter and example counts as one.", cost_figure),
        )  # fmt: skip
        written = []
        for file, caption, figure in drawn:
            if figure is not None:
                figure.savefig(folder / file, bbox_inches="tight", metadata={"Software": None})
                written.append(Picture(file, caption))
    return written


def _figure(num_panels: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # without pyplot: no display and no global state

    figure = Figure(figsize=(5.2 * num_panels, 3.8), layout="constrained")
    axes = figure.subplots(1, num_panels, squeeze=False, sharey=True)
    return figure, list(axes[0])


def _rest(group: Group, axis: Axis) -> str:
    """The values of the axes that have neither colour nor panel."""
    return ", ".join(f"{name} {label}" for name, label in group.labels.items() if name not in (axis.color, axis.panels))


def _color_value(group: Group, axis: Axis) -> Label:
    return group.labels[axis.color] if axis.color else "all"


def _style(groups: Sequence[Group], axis: Axis) -> Callable[[Group], dict[str, Any]]:
    """Colour by the value of the colour axis, line by the remaining ones; equal in every panel."""
    colors = list(dict.fromkeys(_color_value(group, axis) for group in groups))
    rests = list(dict.fromkeys(_rest(group, axis) for group in groups))

    def style(group: Group) -> dict[str, Any]:
        value = _color_value(group, axis)
        words = [axis.color or "", str(value), _rest(group, axis)]
        if group.is_simulated:
            words.append("(simulated, not private)")
        return {
            "color": _COLORS[colors.index(value) % len(_COLORS)],
            "linestyle": _LINES[rests.index(_rest(group, axis)) % len(_LINES)],
            "label": " ".join(filter(None, words)),
        }

    return style


def _x_words(report: ReportSection) -> str:
    return "steps" if report.x == "steps" else "examples seen"


def _curves(groups: Sequence[Group], axis: Axis, report: ReportSection) -> Figure | None:
    if not any(len(group.curve()) > 1 for group in groups):
        return None
    panels: dict[str, list[Group]] = {}
    for group in groups:
        title = "" if axis.panels is None else f"{axis.panels}: {group.labels[axis.panels]}"
        panels.setdefault(title, []).append(group)
    style = _style(groups, axis)
    figure, axes = _figure(len(panels))
    for ax, (title, members) in zip(axes, panels.items(), strict=True):
        for group in members:
            curve, look = group.curve(), style(group)
            scale = 1 if report.x == "steps" else group.results[0].plan.expected_batch_size
            x = [step * scale for step, *_ in curve]
            ax.plot(x, [mean for _, mean, *_ in curve], linewidth=1.6, **look)
            low, high = [row[2] for row in curve], [row[3] for row in curve]
            ax.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
        _blind_lines(ax, members)
        if max(ax.dataLim.intervaly) >= _WIDE_FALL * min(ax.dataLim.intervaly) > 0:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("{x:g}")
        ax.set(title=title, xlabel=_x_words(report), ylabel=_LOSS if ax is axes[0] else "")
        ax.legend()
    return figure


def _final(done: Sequence[Group], axis: Axis) -> Figure | None:
    if axis.color is None or len({group.labels[axis.color] for group in done}) < 2:
        return None
    values = list(dict.fromkeys(group.labels[axis.color] for group in done))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    lines: dict[str, list[Group]] = {}
    for group in done:
        panel = f"{axis.panels} {group.labels[axis.panels]}" if axis.panels else ""
        lines.setdefault(", ".join(filter(None, [panel, _rest(group, axis)])) or "all", []).append(group)
    figure, (ax,) = _figure(1)
    for index, (name, members) in enumerate(lines.items()):
        color = _COLORS[index % len(_COLORS)]
        x = [
            float(group.labels[axis.color]) if numeric else values.index(group.labels[axis.color]) for group in members
        ]
        _line_with_seeds(ax, x, members, color, name if len(lines) > 1 else None, joined=numeric)
    if numeric:
        _scale(ax, [float(value) for value in values])
    else:
        ax.set_xticks(range(len(values)), words := [str(value) for value in values])
        if sum(map(len, words)) > _WORDS_ABREAST:
            ax.tick_params(axis="x", rotation=90)
    _blind_lines(ax, done)
    ax.set(xlabel=axis.color, ylabel=_LOSS)
    if ax.get_legend_handles_labels()[0]:
        ax.legend()
    return figure


def _compute(group: Group) -> float:
    return float((group.results[0].parameters or 0) * group.results[0].examples)


def _against(groups: Sequence[Group], axis: Axis, x: Callable[[Group], float], xlabel: str) -> Figure:
    """Final loss of every group over `x`: mean and seeds, coloured as in the curves."""
    style = _style(groups, axis)
    figure, (ax,) = _figure(1)
    lines: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        lines.setdefault((style(group)["label"], style(group)["color"]), []).append(group)
    for (label, color), members in lines.items():
        ordered = sorted(members, key=x)
        _line_with_seeds(ax, [x(group) for group in ordered], ordered, color, label)
    _blind_lines(ax, groups)
    _scale(ax, [x(group) for group in groups])
    ax.set(xlabel=xlabel, ylabel=_LOSS)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))  # the bars take the room inside
    return figure


def _blind_lines(ax: Axes, groups: Sequence[Group]) -> None:
    """The loss without looking, as a line to be below of; groups with other held-out data have another."""
    lines = sorted({round(group.blind_loss, 4) for group in groups if group.blind_loss is not None})
    for loss in lines:
        ax.axhline(loss, color="black", linestyle=(0, (6, 3)), linewidth=1.1, label=f"blind line {loss:.3f}")


def _line_with_seeds(
    ax: Axes, x: Sequence[float], groups: Sequence[Group], color: str, label: str | None, *, joined: bool = True
) -> None:
    """Mean, least and largest, and the seeds; only numbers are joined by a line, names have nothing between them."""
    means = [sum(group.final_losses) / len(group.final_losses) for group in groups]
    line = "-" if joined else "none"
    around = [
        [mean - min(group.final_losses) for mean, group in zip(means, groups, strict=True)],
        [max(group.final_losses) - mean for mean, group in zip(means, groups, strict=True)],
    ]
    bars: dict[str, Any] = {"marker": "_", "markersize": 12, "capsize": 4, "linewidth": 1.2}
    ax.errorbar(x, means, around, color=color, linestyle=line, label=label, **bars)
    for at, group in zip(x, groups, strict=True):
        look: dict[str, Any] = {"marker": "x", "linewidths": 1.2} if group.is_simulated else {"linewidths": 0}
        ax.scatter([at] * len(group.final_losses), group.final_losses, color=color, s=14, alpha=0.6, **look)
    if any(group.is_simulated for group in groups):
        ax.set_title("x: simulated, not private", fontsize=9, loc="left")


def _scale(ax: Axes, values: Sequence[float]) -> None:
    """Logarithmic where the values span much; ticks at the values where they are few, one for those that hardly differ."""
    if min(values) > 0 and max(values) / min(values) >= _WIDE_RANGE:
        ax.set_xscale("log")
    distinct: list[float] = []
    for value in sorted(set(values)):
        if not distinct or value - distinct[-1] > 0.02 * abs(value):
            distinct.append(value)
    if len(distinct) <= 6:
        formats = (".2g" if value >= 1e6 else ",.0f" if value == round(value) else ".3g" for value in distinct)
        ax.set_xticks(distinct, [format(value, how) for value, how in zip(distinct, formats, strict=True)])
        ax.minorticks_off()
