"""Makes pages of a privacy card: Markdown by a template, and HTML around that Markdown. Epsilons are rounded up.

A value is escaped unless a filter of this file made it Markdown, so that no text from a file can forge the page.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..accounting.rounding import percent, rounded_down, rounded_up
from .model import STATEMENTS, PrivacyCard
from .text import cell, escape, one_line

if TYPE_CHECKING:
    import jinja2


class Markdown(str):
    """Text that is Markdown already; the templates escape every other value."""


def code(value: object) -> Markdown:
    """A code span, or plain text where a span in a table cannot hold the value."""
    text = one_line(value)
    return Markdown(f"`{text}`" if re.fullmatch(r"[^`|\\]+", text) else escaped(text))


def prose(text: str) -> Markdown:
    """A statement of the card: plain text with code spans."""
    parts = re.split(r"(`[^`|\\]+`)", one_line(text))
    return Markdown("".join(part if number % 2 else escape(part) for number, part in enumerate(parts)))


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
    items = {name: json.dumps(item) if isinstance(item, dict | list) else item for name, item in value.items()}
    return Markdown(", ".join(f"{cell(name)} {code(item)}" for name, item in items.items()))


@functools.cache
def _template(name: str, *, is_html: bool) -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=is_html,
        finalize=None if is_html else escaped,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (code, prose, number, epsilon, percent, keys, one_line, rounded_down, rounded_up)
    environment.filters |= {function.__name__: function for function in filters}
    return environment.get_template(name)


def to_markdown(card: PrivacyCard) -> str:
    """The card as one Markdown page."""
    page = _template("card.md.j2", is_html=False).render(card=card, say=STATEMENTS)
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def to_html(card: PrivacyCard, samples: bytes | None = None) -> str:
    """The card as one HTML file: what `to_markdown(card)` says; no script, nothing to fetch.

    Args:
        samples: the PNG that `utility.samples` names; it ends the section on utility.
    """
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    picture = None if samples is None else base64.b64encode(samples).decode()
    page = markdown.render(to_markdown(card))
    return _template("card.html.j2", is_html=True).render(card=card, page=page, picture=picture)
