"""Makes pages of a privacy card: Markdown by a template, and HTML around that Markdown with a plot. Epsilons are rounded up.

A value is escaped unless a filter of this file made it Markdown, so that no text from a file can forge the page. The plot is SVG
in the page itself and follows the reader's light or dark theme; it draws numbers of the card, and no text from a file.
"""

from __future__ import annotations

import functools
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..accounting.rounding import percent, rounded_down, rounded_up
from .model import STATEMENTS, PrivacyCard

if TYPE_CHECKING:
    import jinja2


# matplotlib draws in these stand-ins, which become colours of the page's style sheet.
INK, LINE, SOFT, FIRST, SECOND = "#010203", "#040506", "#07080a", "#0a0b0c", "#0d0e0f"
COLOURS = {INK: "--ink", LINE: "--line", SOFT: "--soft", FIRST: "--first", SECOND: "--warn"}
# Text stays text, so that it can be searched, and takes the page's own font. A fixed salt: the same card gives the same bytes.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.0,
    "legend.fontsize": 9.0,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": LINE,
    "xtick.minor.size": 0.0,
    "svg.hashsalt": "trade-off",
}
_ACTIVE = re.compile(r"[\\`*\[\]|~#]|(?<![^\W_])_|_(?![^\W_])|^[+=-]")
"""What Markdown reads as a mark: punctuation, an underscore except inside of a word, and marks at the start of a line."""


def one_line(value: object) -> str:
    """Plain text without line breaks; a character that shows nothing, or turns the direction of the text, is a U+FFFD."""
    words = " ".join(str(value).split())
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words
    )


def escape(line: str) -> str:
    """One line as Markdown that shows just this line: nothing in it is a mark, or HTML."""
    text = _ACTIVE.sub(r"\\\g<0>", html.escape(line, quote=False))
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)


def cell(value: object) -> str:
    """Any value as plain text on one line: nothing from a file may break out of its place."""
    return escape(one_line(value))


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def bullets(points: Iterable[str]) -> str:
    return "\n".join(f"* {point}" for point in points)


class Markdown(str):
    """Text that is Markdown already; the templates escape every other value."""


def code(value: object) -> Markdown:
    """A code span, or plain text where a span in a table cannot hold the value."""
    text = one_line(value)
    return Markdown(f"`{text}`" if re.fullmatch(r"[^`|\\]+", text) else escaped(text))


def prose(text: str) -> Markdown:
    """A statement of the card: plain text with code spans."""
    parts = re.split(r"(`[^`|\\]+`)", one_line(text))
    return Markdown(
        "".join(part if number % 2 else escape(part) for number, part in enumerate(parts))
    )


def escaped(value: object) -> str:
    """Plain text; `unknown` where there is none."""
    if isinstance(value, Markdown):
        return value
    return "unknown" if value in (None, "") else cell(value)


def number(value: float | None, form: str = ",") -> str:
    return "unknown" if value is None else format(value, form)


def epsilon(value: float | None) -> str:
    return "none" if value is None else rounded_up(value)


def keys(value: object) -> Markdown:
    """A value of JSON on one line; an object as its names and values."""
    if not isinstance(value, Mapping):
        return code("none" if value is None else value)
    items = {
        name: json.dumps(item) if isinstance(item, dict | list) else item
        for name, item in value.items()
    }
    return Markdown(", ".join(f"{cell(name)} {code(item)}" for name, item in items.items()))


@functools.cache
def _template(name: str, *, is_html: bool) -> jinja2.Template:
    import jinja2

    loader, shown = (
        jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        None if is_html else escaped,
    )
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, finalize=shown
    )
    environment.autoescape, environment.trim_blocks, environment.lstrip_blocks = is_html, True, True
    filters = (code, prose, number, epsilon, percent, keys, one_line, rounded_down, rounded_up)
    environment.filters |= {function.__name__: function for function in filters}
    return environment.get_template(name)


def to_markdown(card: PrivacyCard, template: str = "card.md.j2") -> str:
    """The card as one Markdown page; with "methods.md.j2" the paragraphs on privacy of a paper's methods section."""
    page = _template(template, is_html=False).render(card=card, say=STATEMENTS)
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def to_html(card: PrivacyCard) -> str:
    """The card as one HTML file: what `to_markdown(card)` says, with a plot; no script, nothing to fetch."""
    from markdown_it import MarkdownIt

    page = MarkdownIt("commonmark", {"html": False}).enable("table").render(to_markdown(card))
    return _template("card.html.j2", is_html=True).render(
        card=card, page=page, plot=trade_off(card)
    )


def trade_off(card: PrivacyCard) -> str:
    """An <svg> element with the largest true-positive rate of any attack over its false-positive rate; empty without a bound."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no display and no global state

    attack, file = card.accounting.attack, io.StringIO()
    if attack is None or not attack.curve:
        return ""
    rates, bounds = zip(*attack.curve, strict=True)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.semilogx(rates, bounds, color=FIRST, label="no attack can be above")
        axes.semilogx(rates, rates, color=SOFT, linestyle="--", label="guessing")
        axes.plot(
            [float(rate) for rate in attack.true_positive],
            [*attack.true_positive.values()],
            "o",
            color=SECOND,
        )
        axes.set(
            xlim=(rates[0], 1),
            ylim=(0, 1.05),
            xlabel="false-positive rate (log scale)",
            ylabel="true-positive rate",
        )
        axes.legend(loc="upper left")
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    # It refers to nothing outside of it.
    text = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->", "", file.getvalue())
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    return re.sub("|".join(COLOURS), lambda found: f"var({COLOURS[found[0]]})", text).strip()
