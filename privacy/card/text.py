"""Small pieces of the card's Markdown: text that cannot break out, tables, epsilons rounded up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Card = dict[str, Any]
_ROUNDING_GUARD = 1e-9


def rounded_up(epsilon: float, digits: int = 3) -> str:
    """`epsilon` with `digits` decimals, never below its value."""
    scale = 10**digits
    return f"{math.ceil(epsilon * scale - _ROUNDING_GUARD) / scale:.{digits}f}"


def rounded_down(epsilon: float, digits: int = 3) -> str:
    return f"{math.floor(epsilon * 10**digits) / 10**digits:.{digits}f}"


def epsilon_text(value: float | None) -> str:
    return "none" if value is None else rounded_up(value)


def cell(value: object) -> str:
    """One line of plain text: nothing from a file may break out of its table cell."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def code(value: object) -> str:
    return "unknown" if value in (None, "") else f"`{cell(value)}`"


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def facts(rows: Iterable[Sequence[str]]) -> str:
    return table_of(("what", "value"), rows)


def bullets(points: Iterable[str]) -> str:
    return "\n".join(f"* {point}" for point in points)


def stated_text(found: Card, otherwise: str) -> str:
    if not found["text"]:
        return otherwise
    return f"{cell(found['text'])} (`{found['file']}`{'' if found['attested'] else ', **not attested**'})"
