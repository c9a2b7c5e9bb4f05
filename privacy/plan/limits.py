"""The largest numbers that make sense; a larger one is a typing error, refused in one line."""

import math
from typing import Any

MAX_COUNT = 10**12
"""More examples, steps and attempts than any data set or run has."""
SMALLEST_BOUND, LARGEST_BOUND = 1e-12, 1e12
"""The limits of C. Between them squares of norms about C, and of the many small entries that add up
to them, are ordinary numbers in single precision. (Below 1e-20 they underflow, and contributions of
several C pass unclipped.)"""
MOST_DEVIATION = 2.0**50
"""Standard deviation of noise in steps of the sum: beyond it 64 bits would often not determine the
whole number (privacy/noise/rounded_normal.py)."""
MAX_EPSILON = 1000.0
"""Above it nothing is guaranteed, and the distributions of the privacy loss no longer fit into
memory."""


def json_value(value: Any) -> Any:
    """Returns `value` with None for every number in it that JSON cannot hold.

    Keys become strings, tuples lists, and scalars of NumPy numbers of Python.
    """
    if isinstance(value, dict):
        return {str(key): json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    # A scalar of NumPy.
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
