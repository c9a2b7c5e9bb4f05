"""Plots of the privacy card as inline SVG: text stays text, and colours follow the reader's light or dark theme."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..accounting.rounding import percent, rounded_up
from .model import PrivacyCard

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib draws in these stand-ins, which become variables of the page's style sheet.
INK, GRID, FIRST, SECOND, THIRD, FAINT = "#010203", "#040506", "#07080a", "#0a0b0c", "#0d0e0f", "#101112"
_THEME = {
    INK: "currentColor", GRID: "var(--grid)", FAINT: "var(--faint)",
    FIRST: "var(--first)", SECOND: "var(--second)", THIRD: "var(--third)",
}  # fmt: skip
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11.0, "text.color": INK, "lines.linewidth": 2.0,
    "axes.labelcolor": INK, "axes.edgecolor": FAINT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8, "xtick.color": INK,
    "ytick.color": INK, "xtick.minor.size": 0.0, "xtick.major.pad": 7.0, "legend.frameon": False, "legend.fontsize": 10.0,
}  # fmt: skip


class Plot(NamedTuple):
    """One figure of the page; `name` is its id."""

    name: str
    title: str
    caption: str
    svg: str


def plots(card: PrivacyCard) -> dict[str, list[Plot]]:
    """Plots by the heading of the section that they belong to; what has no data is left out."""
    import matplotlib
    from matplotlib.figure import Figure

    found: dict[str, list[Plot]] = {}
    for heading, name, title, draw in (
        ("Accounting", "epsilon-by-attempts", "Epsilon over charged attempts", draw_attempts),
        ("Accounting", "trade-off", "What an attack can reach", draw_trade_off),
        ("Utility (not attested)", "heldout-loss", "Held-out loss", draw_heldout),
    ):
        # A fixed salt: the same card gives the same bytes.
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
            figure = Figure(figsize=(8.8, 3.9), layout="constrained")
            caption = draw(figure.subplots(), card)
            if caption is None:
                continue
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        # One <svg> element that refers to nothing outside of it and clashes with no other.
        text = file.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
        text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
        text = re.sub(r"font: (\S+) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
        for stand_in, variable in _THEME.items():
            text = text.replace(stand_in, variable)
        label = html.escape(f"{title}. {caption}")
        svg = text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()
        found.setdefault(heading, []).append(Plot(name, title, caption, svg))
    return found


# The plots. Each draws only numbers of the card, and returns its caption, or None where there is nothing to draw.


def draw_attempts(axes: Axes, card: PrivacyCard) -> str | None:
    """Epsilon over charged attempts, below what was planned and what the budget allows."""
    numbers = card.accounting
    points = numbers.epsilon_by_attempts
    if not points:
        return None
    # A bound holds from the attempt after the point before on; drawn there, straight lines between bounds never understate.
    counts, bounds = _columns(points)
    axes.plot(
        [0, *(count + 1 for count in counts[:-1]), counts[-1]],
        [*bounds, bounds[-1]],
        color=FIRST,
        label="charged so far (upper bound)",
    )
    axes.plot(*_columns(points[-1:]), "o", color=FIRST, markersize=6)
    levels = [points[-1][1] or 0.0]
    for value, color, style, label in (
        (numbers.epsilon_with_reserve, SECOND, "--", "budget with the reserve"),
        (numbers.epsilon_planned, THIRD, ":", "planned"),
    ):
        if value is not None:
            axes.axhline(value, color=color, linestyle=style, label=f"{label}: {rounded_up(value)}")
            levels.append(value)
    axes.set_xlim(0, max(numbers.attempts.allowed, points[-1][0]) * 1.02)
    axes.set_ylim(0, 1.12 * max(levels) or 1.0)
    axes.set(xlabel="charged attempts", ylabel=f"epsilon at delta = {numbers.delta:.6g}")
    axes.legend(loc="lower right")
    attempts = numbers.attempts
    return f"{attempts.charged:,} of {attempts.allowed:,} allowed attempts are charged, as the ledger says."


def draw_trade_off(axes: Axes, card: PrivacyCard) -> str | None:
    """The largest true-positive rate of any attack against its false-positive rate."""
    attack = card.accounting.attack
    if attack is None:
        return None
    rates, bounds = _columns(attack.curve)
    axes.semilogx(rates, bounds, color=FIRST, label="no attack can be above")
    axes.fill_between(rates, rates, bounds, color=FIRST, alpha=0.12, linewidth=0)
    axes.semilogx(rates, rates, color=FAINT, linestyle="--", linewidth=1.4, label="guessing")
    for rate, bound in attack.true_positive.items():
        axes.plot([float(rate)], [bound], "o", color=SECOND, markersize=7)
        # Left of and above the curve is free, except at its very top.
        axes.annotate(percent(bound), (float(rate), bound), (-9, 5), textcoords="offset points", ha="right", color=INK)
    axes.set_xlim(rates[0], 1)
    axes.set_ylim(0, 1.05)
    axes.set(xlabel="false-positive rate (log scale)", ylabel="true-positive rate, upper bound")
    axes.legend(loc="upper left")
    return (
        "The curve bounds membership inference on one example, whatever the attacker knows, from the ledger alone; the "
        f"dots are at the false-positive rates {' and '.join(attack.true_positive)}."
    )


def draw_heldout(axes: Axes, card: PrivacyCard) -> str | None:
    """Held-out loss, as a public file has it."""
    points = [(p.step, p.loss) for p in card.utility.heldout_loss if p.loss is not None] if card.utility else []
    if card.utility is None or not points:
        return None
    axes.plot(*_columns(points), "o-", color=FIRST, markersize=5, label="the model")
    blind = [(p.step, p.blind_loss) for p in card.utility.heldout_loss if p.blind_loss is not None]
    shuffled = [(p.step, p.shuffled_loss) for p in card.utility.heldout_loss if p.shuffled_loss is not None]
    for others, style, label in ((blind, "--", "without looking"), (shuffled, ":", "with another picture")):
        if others:
            axes.plot(*_columns(others), style, color=SECOND, label=label)
            axes.legend()
    # Above the axes, where no curve can run through it.
    axes.set_title("not attested", loc="right", color=SECOND, weight="bold", fontsize=11)
    axes.set(xlabel="step", ylabel="held-out loss")
    return f"The losses come from {card.utility.heldout_file}, which nothing protects against changes."


def _columns(points: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[Any]]:
    return [point[0] for point in points], [point[1] for point in points]
