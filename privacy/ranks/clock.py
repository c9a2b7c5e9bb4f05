"""The one clock whose readings are kept: the time that a single example takes is in it, so it is private by type.

Deadlines and waits read clocks of their own, and nothing of those is written (tests/test_structure.py lists where).
"""

import time

import torch

from ..boundary import Private


def now() -> Private[float]:
    """Seconds of a clock that only goes forward."""
    return Private(time.monotonic())


def since(start: Private[float]) -> Private[float]:
    """Seconds since `start`, a reading of `now`."""
    return Private(time.monotonic() - start.inside())


class Laps:
    """How long the phases of a step take, one after the other.

    Args:
        device: a CUDA device is waited for at the end of every phase, since its work is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._began = device, now()
        self.seconds: dict[str, Private[float]] = {}

    def end(self, phase: str) -> None:
        """The phase that goes on since the last end, or since the first line, is over."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[phase] = since(self._began)
        self._began = now()
