"""How numbers of privacy are written: never better than they are."""

import math
from fractions import Fraction


def rounded_up(epsilon: float) -> str:
    """`epsilon` with three decimals, never below its value: what every command and page prints of one.

    >>> rounded_up(7.9251), rounded_up(8.0)
    ('7.926', '8.000')
    """
    return (
        "inf"
        if math.isinf(epsilon)
        else f"{math.ceil(Fraction(repr(float(epsilon))) * 1000) / 1000:.3f}"
    )


def useless_delta(delta: float, num_examples: int) -> str | None:
    """The sentence that belongs to every epsilon at such a delta; None where the delta is below 1/n.

    >>> useless_delta(0.1, 400)
    'delta 0.1 is at or above 1/n = 0.0025: it protects nobody, since it allows publishing some examples outright'
    """
    if delta < 1 / num_examples:
        return None
    where = f"delta {delta:g} is at or above 1/n = {1 / num_examples:.3g}"
    return f"{where}: it protects nobody, since it allows publishing some examples outright"


def rounded_down(epsilon: float) -> str:
    return f"{math.floor(epsilon * 1000) / 1000:.3f}"


def percent(rate: float) -> str:
    """A rate in percent, never below its value."""
    return f"{math.ceil(min(Fraction(repr(float(rate))), Fraction(1)) * 10**4) / 100:.2f} %"
