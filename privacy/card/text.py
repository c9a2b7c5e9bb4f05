"""Small pieces of Markdown: text that cannot break out, tables, epsilons rounded up."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

_ACTIVE = re.compile(r"[\\`*\[\]|~#]|(?<![^\W_])_|_(?![^\W_])|^[+=-]")
"""What Markdown reads as a mark: punctuation, an underscore except inside of a word, and marks at the start of a line."""


def rounded_up(epsilon: float, digits: int = 3) -> str:
    """`epsilon` with `digits` decimals, never below its value: what every command prints of one.

    >>> rounded_up(7.9251), rounded_up(8.0, 2)
    ('7.926', '8.00')
    """
    if math.isinf(epsilon):
        return "inf"
    scale = 10**digits
    return f"{math.ceil(Fraction(repr(float(epsilon))) * scale) / scale:.{digits}f}"


def useless_delta(delta: float, num_examples: int) -> str | None:
    """The sentence that belongs to every epsilon at such a delta; None where the delta is below 1/n.

    >>> useless_delta(0.1, 400)
    'delta 0.1 is at or above 1/n = 0.0025: it protects nobody, since it allows publishing some examples outright'
    """
    if delta < 1 / num_examples:
        return None
    where = f"delta {delta:g} is at or above 1/n = {1 / num_examples:.3g}"
    return f"{where}: it protects nobody, since it allows publishing some examples outright"


def rounded_down(epsilon: float, digits: int = 3) -> str:
    return f"{math.floor(epsilon * 10**digits) / 10**digits:.{digits}f}"


def percent(rate: float) -> str:
    """A rate in percent, never below its value."""
    return f"{math.ceil(min(Fraction(repr(float(rate))), Fraction(1)) * 10**4) / 100:.2f} %"


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
