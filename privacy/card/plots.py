"""Plots of the privacy card as inline SVG: text stays text, and colours follow the reader's light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from privacy.card.text import rounded_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Card = dict[str, Any]

# matplotlib draws in these stand-ins, which become variables of the page's style sheet.
INK, GRID, FIRST, SECOND, THIRD, FAINT = "#010203", "#040506", "#07080a", "#0a0b0c", "#0d0e0f", "#101112"
_THEME = {
    INK: "currentColor",
    GRID: "var(--grid)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    THIRD: "var(--third)",
    FAINT: "var(--faint)",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.minor.size": 0.0,
    "xtick.major.pad": 7.0,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "legend.fontsize": 10.0,
}
_SIZE = (8.8, 3.9)


class Plot(NamedTuple):
    """One figure of the page; `name` is its id."""

    name: str
    title: str
    caption: str
    svg: str


def plots(card: Card) -> dict[str, list[Plot]]:
    """(name, title, caption, SVG) by the heading of the section that a plot belongs to; what has no data is left out."""
    known: tuple[tuple[str, str, str, Callable[[Axes, Card], str | None]], ...] = (
        ("Accounting", "epsilon-by-attempts", "Epsilon over charged attempts", draw_attempts),
        ("Accounting", "epsilon-by-delta", "Epsilon by delta", draw_delta),
        ("Accounting", "trade-off", "What an attack can reach", draw_trade_off),
        ("Utility (not attested)", "heldout-loss", "Held-out loss", draw_heldout),
    )
    found: dict[str, list[Plot]] = {}
    for heading, name, title, draw in known:
        drawn = _drawn(name, title, draw, card)
        if drawn is not None:
            found.setdefault(heading, []).append(drawn)
    return found


def _drawn(name: str, title: str, draw: Callable[[Axes, Card], str | None], card: Card) -> Plot | None:
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=_SIZE, layout="constrained")
        caption = draw(figure.subplots(), card)
        return None if caption is None else Plot(name, title, caption, _svg(figure, name, f"{title}. {caption}"))


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def _svg(figure: Any, name: str, title: str) -> str:
    """The figure as one <svg> element that refers to nothing outside of it and clashes with no other."""
    import matplotlib

    file = io.StringIO()
    # A fixed salt: the same card gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: (\S+) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    for drawn, wanted in _THEME.items():
        text = text.replace(drawn, wanted)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


# The plots. Each draws only numbers of the card, and returns its caption, or None where there is nothing to draw.


def draw_attempts(axes: Axes, card: Card) -> str | None:
    """Epsilon over charged attempts, below what was planned and what the budget allows."""
    numbers = card["accounting"]
    points = numbers["epsilon_by_attempts"]
    if not points:
        return None
    # Between two points the next one's value holds: a bound never understates.
    axes.step(*_columns(points), where="pre", color=FIRST, label="charged so far (upper bound)")
    axes.plot(*_columns(points[-1:]), "o", color=FIRST, markersize=6)
    _level(axes, numbers["epsilon_with_reserve"], SECOND, "--", "budget with the reserve")
    _level(axes, numbers["epsilon_planned"], THIRD, ":", "planned")
    axes.set_xlim(0, max(numbers["attempts"]["allowed"], points[-1][0]) * 1.02)
    levels = [level for level in (numbers["epsilon_with_reserve"], numbers["epsilon_planned"], points[-1][1]) if level]
    axes.set_ylim(0, 1.12 * max(levels, default=1.0))
    _labels(axes, "charged attempts", f"epsilon at delta = {numbers['delta']:.6g}", "lower right")
    return (
        f"{numbers['attempts']['charged']:,} of {numbers['attempts']['allowed']:,} allowed attempts are charged. "
        "From the ledger."
    )


def _level(axes: Axes, value: float | None, color: str, style: str, label: str) -> None:
    if value is not None:
        axes.axhline(value, color=color, linestyle=style, label=f"{label}: {rounded_up(value)}")


def draw_delta(axes: Axes, card: Card) -> str | None:
    """Epsilon by delta for everything charged, with the claim and 1/n."""
    numbers = card["accounting"]
    points = [(delta, eps) for eps, delta in numbers["delta_by_epsilon"] if 1e-11 <= delta <= 0.1]
    if len(points) < 2:
        return None
    axes.semilogx(*_columns(points), color=FIRST)
    axes.plot([numbers["delta"]], [numbers["epsilon"]], "o", color=SECOND, markersize=8, label="the claim")
    n = card["unit_of_privacy"]["num_examples"]
    axes.axvline(1 / n, color=THIRD, linestyle=":", label=f"1/n, n = {n:,}")
    axes.set_xlim(min(numbers["delta"], points[-1][0]) / 2, max(points[0][0], 1 / n) * 2)
    axes.set_ylim(bottom=0)
    _labels(axes, "delta (log scale)", "epsilon", "upper right")
    return "Every point of the curve holds at once, for everything charged. From the ledger."


def draw_trade_off(axes: Axes, card: Card) -> str | None:
    """The largest true-positive rate of any attack against its false-positive rate."""
    attack = card["accounting"]["attack"]
    if attack is None:
        return None
    rates, bounds = _columns(attack["curve"])
    axes.semilogx(rates, bounds, color=FIRST, label="no attack can be above")
    axes.fill_between(rates, rates, bounds, color=FIRST, alpha=0.12, linewidth=0)
    axes.semilogx(rates, rates, color=FAINT, linestyle="--", linewidth=1.4, label="guessing")
    for rate, bound in attack["true_positive"].items():
        axes.plot([float(rate)], [bound], "o", color=SECOND, markersize=7)
        text = f"{rounded_up(min(100 * bound, 100.0), 2)} %"
        # Left of and above the curve is free, except at its very top.
        axes.annotate(text, (float(rate), bound), (-9, 5), textcoords="offset points", ha="right", color=INK)
    axes.set_xlim(rates[0], 1)
    axes.set_ylim(0, 1.05)
    _labels(axes, "false-positive rate (log scale)", "true-positive rate, upper bound", "upper left")
    return (
        "Membership inference on one example, whatever the attacker knows; dots at the false-positive rates "
        f"{' and '.join(attack['true_positive'])}. From the ledger."
    )


def draw_heldout(axes: Axes, card: Card) -> str | None:
    """Held-out loss, as a public file has it."""
    utility = card.get("utility") or {}
    points = [(point["step"], point["loss"]) for point in utility.get("heldout_loss", []) if point["loss"] is not None]
    if not points:
        return None
    axes.plot(*_columns(points), "o-", color=FIRST, markersize=5)
    _not_attested(axes)
    _labels(axes, "step", "held-out loss", None)
    return f"From {utility['heldout_file']}, which nothing protects against changes."


def _not_attested(axes: Axes) -> None:
    # Above the axes, where no curve can run through it.
    axes.set_title("not attested", loc="right", color=SECOND, weight="bold", fontsize=11)


def _labels(axes: Axes, x: str, y: str, legend: Any) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend is not None:
        axes.legend().set_loc(legend)


def _columns(points: Any) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]
