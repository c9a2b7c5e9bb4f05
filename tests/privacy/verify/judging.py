"""What the tests of verify.py judge by."""

from collections.abc import Callable
from typing import Any

Judge = Callable[..., tuple[int, dict[str, Any]]]


def sentences(found: dict[str, Any], outcome: str = "violated") -> str:
    return "\n".join(f"{one['name']}: {one['sentence']}" for one in found["checks"] if one["outcome"] == outcome)
