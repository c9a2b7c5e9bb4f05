"""Small pieces of Markdown: text that cannot break out, and tables."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_ACTIVE = re.compile(r"[\\`*\[\]|~#]|(?<![^\W_])_|_(?![^\W_])|^[+=-]")
"""What Markdown reads as a mark: punctuation, an underscore except inside of a word, and marks at the start of a line."""


def one_line(value: object) -> str:
    """Plain text without line breaks; a character that shows nothing, or turns the direction of the text, is a U+FFFD."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(str(value).split())
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
