"""The one clock whose readings are kept: private by type, since any example may take long.

Deadlines and waits read clocks of their own, and none of those readings is written
(tests/test_structure.py lists where).
"""

import time

import torch

from ..boundary import Private


def now() -> Private[float]:
    """Returns the seconds of a clock that only goes forward."""
    return Private(time.monotonic())


def since(start: Private[float]) -> Private[float]:
    """Returns the seconds since `start`, a reading of `now`."""
    return Private(time.monotonic() - start.inside())


class Laps:
    """Measures the phases of a step, one after the other.

    Args:
        device: a CUDA device is waited for at the end of every phase, since its work is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = now()
        self.seconds: dict[str, Private[float]] = {}

    def end(self, phase: str) -> None:
        """Ends the phase that began with the last call, or with this object."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[phase] = since(self._began)
        self._began = now()
