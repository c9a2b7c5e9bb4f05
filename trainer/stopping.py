"""Requests to stop at the next step boundary: a file named STOP in the run folder, SIGTERM, or SIGUSR1 to a rank."""

import signal
from pathlib import Path
from types import FrameType


class StopRequests:
    """Install once per process. The file is removed at the next start, not here: all ranks must see it."""

    def __init__(self, stop_file: Path) -> None:
        self._file = stop_file
        self._signalled = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def pending(self) -> bool:
        return self._signalled or self._file.exists()
