"""Formats of privacy numbers: a rounded number never looks better than the number itself."""

import math
from fractions import Fraction


def rounded_up(epsilon: float) -> str:
    """Returns `epsilon` with three decimals, never below its value, for all commands and pages.

    >>> rounded_up(7.9251), rounded_up(8.0)
    ('7.926', '8.000')
    """
    if math.isinf(epsilon):
        return "inf"
    # The shortest decimals of the double, so that 1.1 stays 1.100.
    decimal = Fraction(repr(float(epsilon)))
    return f"{math.ceil(decimal * 1000) / 1000:.3f}"


def useless_delta(delta: float, num_examples: int) -> str | None:
    """Returns the sentence that belongs to an epsilon at a large delta; None below 1/n.

    >>> print(useless_delta(0.1, 400).partition(":")[0])
    delta 0.1 is at or above 1/n = 0.0025
    """
    if delta < 1 / num_examples:
        return None
    fault = f"delta {delta:g} is at or above 1/n = {1 / num_examples:.3g}"
    return f"{fault}: it protects nobody, since it allows publishing some examples outright"


def rounded_down(epsilon: float) -> str:
    return f"{math.floor(epsilon * 1000) / 1000:.3f}"


def percent(rate: float) -> str:
    """Returns a rate in percent with two decimals, never below its value."""
    decimal = min(Fraction(repr(float(rate))), Fraction(1))
    return f"{math.ceil(decimal * 10**4) / 100:.2f} %"
