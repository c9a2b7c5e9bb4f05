"""The largest numbers that mean anything here: what is above is a slip of the pen, and is refused in one line."""

import math
from typing import Any

MAX_COUNT = 10**12
"""More examples, steps and attempts than any data set or run has."""
SMALLEST_BOUND, LARGEST_BOUND = 1e-12, 1e12
"""C lies between these: squares of norms about C, and of the many small entries that they are made of, are ordinary numbers in
single precision. (Below 1e-20 they underflow, and contributions of several C pass unclipped.)"""
MOST_DEVIATION = 2.0**50
"""Standard deviation of noise in steps of the sum: beyond it 64 bits would often not tell the whole number
(privacy/noise/rounded_normal.py)."""
MAX_EPSILON = 1000.0
"""Above it nothing is guaranteed, and the distributions of the privacy loss no longer fit into memory."""


def finite(value: Any) -> Any:
    """The value with None for every number in it that JSON cannot hold; keys become strings, tuples lists."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
