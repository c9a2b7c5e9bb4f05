"""Types for the options of commands: what is out of range is one line that says the range."""

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)

MOST = 10**12
MOST_SEED = 2**63 - 1
MOST_PIXELS = 8192
MOST_AT_ONCE = 2**20
MOST_PROCESSES = 1024
MOST_REPEATS = 100_000
"""Of what is done again and again: more is a slip of the pen, and would run for years."""


LEAST_RATE, MOST_RATE = 1e-12, 1e4


def between(least: int, most: int) -> Callable[[str], int]:
    """A type for `add_argument`: whole numbers from `least` to `most`."""

    def whole_number(text: str) -> int:
        return _checked(int, text, least, most, "a whole number")

    return whole_number


def number_between(least: float, most: float) -> Callable[[str], float]:
    """A type for `add_argument`: numbers from `least` to `most`."""

    def number(text: str) -> float:
        return _checked(float, text, least, most, "a number")

    return number


def _checked(kind: type[Number], text: str, least: Number, most: Number, what: str) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise argparse.ArgumentTypeError(f"must be {what}, at least {least:,} and at most {most:,}, not {text[:40]!r}")
    return value
