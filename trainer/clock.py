"""The one clock whose readings are kept: the time that a single example takes is in it, so it is private by type.

Deadlines and waits read clocks of their own, and nothing of those is written (tests/test_structure.py lists where).
"""

import time

from privacy.boundary import Private


def now() -> Private[float]:
    """Seconds of a clock that only goes forward."""
    return Private(time.monotonic())


def since(start: Private[float]) -> Private[float]:
    """Seconds since `start`, a reading of `now`."""
    return Private(time.monotonic() - start.inside())
