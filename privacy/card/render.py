"""Pages of a privacy card: Markdown by a template, and HTML around that Markdown with a plot.

Epsilons are rounded up. A text is escaped unless a filter of this file made it Markdown, so that no
text from a file can forge the page. The plot is SVG in the page itself and follows the reader's
light or dark theme; it draws numbers of the card, and no text from a file.
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
INK = "#010203"
LINE = "#040506"
SOFT = "#07080a"
FIRST = "#0a0b0c"
SECOND = "#0d0e0f"
COLOURS = {INK: "--ink", LINE: "--line", SOFT: "--soft", FIRST: "--first", SECOND: "--warn"}
# Text stays text, so that it can be searched, and takes the page's own font. A fixed salt: the same
# card gives the same bytes.
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
"""Marks of Markdown: punctuation, an underscore except inside of a word, and marks at the start of
a line."""


def one_line(value: object) -> str:
    """Returns plain text without line breaks.

    A character that shows nothing, or turns the direction of the text, becomes a U+FFFD.
    """
    words = " ".join(str(value).split())
    letters = [letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words]
    return "".join(letters)


def escape(line: str) -> str:
    """Returns Markdown that shows just this line: nothing in it is a mark, or HTML."""
    text = _ACTIVE.sub(r"\\\g<0>", html.escape(line, quote=False))
    # A number at the start would begin a list.
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)


def cell(value: object) -> str:
    """Returns any value as plain text on one line, which cannot break out of its place."""
    return escape(one_line(value))


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def bullets(points: Iterable[str]) -> str:
    return "\n".join(f"* {point}" for point in points)


class Markdown(str):
    """A text that is Markdown already; the templates escape every other value."""


def code(value: object) -> Markdown:
    """Returns a code span, or plain text where a span in a table cannot hold the value."""
    text = one_line(value)
    return Markdown(f"`{text}`" if re.fullmatch(r"[^`|\\]+", text) else escaped(text))


def prose(text: str) -> Markdown:
    """Returns a statement of the card as Markdown: plain text with code spans."""
    parts = re.split(r"(`[^`|\\]+`)", one_line(text))
    # Every second part is a span.
    for number in range(0, len(parts), 2):
        parts[number] = escape(parts[number])
    return Markdown("".join(parts))


def escaped(value: object) -> str:
    """Returns plain text; `unknown` for None and the empty text."""
    if isinstance(value, Markdown):
        return value
    return "unknown" if value in (None, "") else cell(value)


def number(value: float | None, form: str = ",") -> str:
    return "unknown" if value is None else format(value, form)


def epsilon(value: float | None) -> str:
    return "none" if value is None else rounded_up(value)


def keys(value: object) -> Markdown:
    """Returns a JSON value on one line; an object as its names and values."""
    if not isinstance(value, Mapping):
        return code("none" if value is None else value)
    entries = []
    for name, content in value.items():
        text = json.dumps(content) if isinstance(content, dict | list) else content
        entries.append(f"{cell(name)} {code(text)}")
    return Markdown(", ".join(entries))


@functools.cache
def _template(name: str, *, is_html: bool) -> jinja2.Template:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        finalize=None if is_html else escaped,
        autoescape=is_html,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (code, prose, number, epsilon, percent, keys, one_line, rounded_down, rounded_up)
    environment.filters |= {function.__name__: function for function in filters}
    return environment.get_template(name)


def to_markdown(card: PrivacyCard, template: str = "card.md.j2") -> str:
    """Returns the card as one Markdown page.

    Args:
        template: "methods.md.j2" gives the paragraphs on privacy of a paper's methods section.
    """
    page = _template(template, is_html=False).render(card=card, say=STATEMENTS)
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def to_html(card: PrivacyCard) -> str:
    """Returns `to_markdown(card)` as one HTML file with a plot; no script, nothing to fetch."""
    from markdown_it import MarkdownIt

    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    page = renderer.render(to_markdown(card))
    template = _template("card.html.j2", is_html=True)
    return template.render(card=card, page=page, plot=trade_off(card))


def trade_off(card: PrivacyCard) -> str:
    """Returns an <svg> element with the bound on true-positive rates over false-positive rates.

    Empty without a bound.
    """
    import matplotlib

    # Without pyplot: no display and no global state.
    from matplotlib.figure import Figure

    attack = card.accounting.attack
    if attack is None or not attack.curve:
        return ""
    rates, bounds = zip(*attack.curve, strict=True)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.semilogx(rates, bounds, color=FIRST, label="no attack can be above")
        axes.semilogx(rates, rates, color=SOFT, linestyle="--", label="guessing")
        table_rates = [float(rate) for rate in attack.true_positive]
        axes.plot(table_rates, [*attack.true_positive.values()], "o", color=SECOND)
        axes.set(
            xlim=(rates[0], 1),
            ylim=(0, 1.05),
            xlabel="false-positive rate (log scale)",
            ylabel="true-positive rate",
        )
        axes.legend(loc="upper left")
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    # The element refers to nothing outside of it.
    text = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->", "", file.getvalue())
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    return re.sub("|".join(COLOURS), lambda match: f"var({COLOURS[match[0]]})", text).strip()
