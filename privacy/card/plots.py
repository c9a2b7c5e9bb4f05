"""The three plots of the privacy card, as SVG that stands in the page itself and follows the reader's light or dark theme.

They draw numbers of the card alone, and no text from a file: nothing in a drawing has to be escaped.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ..accounting.rounding import rounded_up
from .model import PrivacyCard

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib draws in these stand-ins, which become colours of the page's style sheet.
INK, LINE, SOFT, FIRST, SECOND, THIRD = "#010203", "#040506", "#07080a", "#0a0b0c", "#0d0e0f", "#101112"
COLOURS = {INK: "--ink", LINE: "--line", SOFT: "--soft", FIRST: "--first", SECOND: "--warn", THIRD: "--third"}
# Text stays text, so that it can be searched, and takes the page's own font.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 10.0, "legend.fontsize": 9.0, "legend.frameon": False, "axes.grid": True,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK,
    "axes.labelcolor": INK, "axes.edgecolor": SOFT, "xtick.color": INK, "ytick.color": INK, "grid.color": LINE,
    "xtick.minor.size": 0.0,
}  # fmt: skip


def plots(card: PrivacyCard) -> dict[str, str]:
    """One <svg> element by the name of its figure; a figure without data, or without the claim that it needs, is left out."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no display and no global state

    numbers, drawn = card.accounting, {}
    for name, draw, data in (
        ("epsilon-by-attempts", draw_attempts, numbers.epsilon_by_attempts),
        ("trade-off", draw_trade_off, numbers.attack and numbers.attack.curve),
        ("heldout-loss", draw_heldout, _losses(card)),
    ):
        if not data:
            continue
        # A fixed salt: the same card gives the same bytes.
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
            figure, file = Figure(figsize=(5.6, 3.2), layout="constrained"), io.StringIO()
            draw(figure.subplots(), card)
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        # It refers to nothing outside of it, and shares no id with another one.
        text = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->", "", file.getvalue())
        text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
        text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
        drawn[name] = re.sub("|".join(COLOURS), lambda found: f"var({COLOURS[found[0]]})", text).strip()
    return drawn


def draw_attempts(axes: Axes, card: PrivacyCard) -> None:
    """Epsilon over charged attempts, below what was planned and what the budget allows."""
    numbers = card.accounting
    counts, bounds = zip(*numbers.epsilon_by_attempts, strict=True)
    # Each bound holds for all counts since the one before: stairs never understate, straight lines would.
    axes.step(counts, bounds, where="pre", color=FIRST, label="charged so far (upper bound)")
    axes.plot(counts[-1:], bounds[-1:], "o", color=FIRST)
    for value, color, style, label in (
        (numbers.epsilon_with_reserve, SECOND, "--", "budget with the reserve"),
        (numbers.epsilon_planned, THIRD, ":", "planned"),
    ):
        if value is not None:
            axes.axhline(value, color=color, linestyle=style, label=f"{label}: {rounded_up(value)}")
    axes.margins(y=0.12)
    axes.set(xlim=(0, 1.02 * max(numbers.attempts.allowed, counts[-1])), ylim=(0, None))
    axes.set(xlabel="charged attempts", ylabel=f"epsilon at delta = {numbers.delta:.6g}")
    axes.legend(loc="lower right")


def draw_trade_off(axes: Axes, card: PrivacyCard) -> None:
    """The largest true-positive rate of any attack against its false-positive rate."""
    attack = card.accounting.attack
    assert attack is not None
    rates, bounds = zip(*attack.curve, strict=True)
    axes.semilogx(rates, bounds, color=FIRST, label="no attack can be above")
    axes.semilogx(rates, rates, color=SOFT, linestyle="--", label="guessing")
    axes.plot([float(rate) for rate in attack.true_positive], [*attack.true_positive.values()], "o", color=SECOND)
    axes.set(xlim=(rates[0], 1), ylim=(0, 1.05), xlabel="false-positive rate (log scale)", ylabel="true-positive rate")
    axes.legend(loc="upper left")


def draw_heldout(axes: Axes, card: PrivacyCard) -> None:
    """Held-out loss, and what it is compared with, as a public file has them."""
    for field, style, color, label in (
        ("loss", "o-", FIRST, "the model"),
        ("blind_loss", "--", SECOND, "without looking"),
        ("shuffled_loss", ":", THIRD, "with another picture"),
    ):
        if found := _losses(card, field):
            axes.plot(*np.transpose(found), style, markersize=4, color=color, label=label)
    # Above the axes, where no curve can run through it.
    axes.set_title("not attested", loc="right", color=SECOND, weight="bold", fontsize=10)
    axes.set(xlabel="step", ylabel="held-out loss")
    axes.legend(loc="upper right")


def _losses(card: PrivacyCard, field: str = "loss") -> list[tuple[int, float]]:
    """(step, loss) where there is one that matplotlib can scale an axis for: it raises an error near the largest float."""
    points = card.utility.heldout_loss if card.utility else ()
    found = [(point.step, getattr(point, field)) for point in points]
    return [(step, loss) for step, loss in found if loss is not None and abs(loss) < 1e100]
