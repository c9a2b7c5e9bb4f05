"""Requests to stop: a file named STOP in the run folder, SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 to a rank, or `train.max_minutes`.

All of them save at the next step boundary and end with exit 7. After SIGTERM and SIGINT that boundary must come soon, because
launchers and schedulers kill half a minute later: a step that has not ended within the grace time is given up. Up to its intent
nothing of it has left its process, so it is dropped, costs nothing, and the state of the step before is saved. After its intent
the step is abandoned: it stays charged, and the newest checkpoint is what resumes. Before training there is nothing to save: a
signal ends all ranks at once, with exit 7 too.

A rank whose launcher is gone sends SIGUSR1 to itself (trainer/ranks/discovery.py).
"""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from privacy.errors import STOPPED_EARLY
from privacy.ranks import collectives
from trainer.ranks import distributed

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
HURRIED = frozenset((signal.SIGTERM, signal.SIGINT))
MARGIN_SECONDS = 4.0
"""A step that was not dropped between two micro-batches is abandoned so long after the grace time."""


def heard() -> list[signal.Signals]:
    """The signals that ask this process to stop; a shell has its background jobs ignore SIGINT, and so it stays."""
    return [
        number
        for number in SIGNALS
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
    ]


def end_on_signals(
    end: Callable[[], None] = lambda: distributed.abandon(
        "stopped on request; no step was running, and the same command resumes", STOPPED_EARLY
    ),
) -> None:
    """From here until training, when `StopRequests` takes over, each of SIGNALS ends all ranks, whatever they wait for.

    The run folder is then as after a crash, and the same command resumes.

    Args:
        end: called from a thread of its own.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while reader.recv(1)[0] not in SIGNALS:
            pass
        end()

    for number in heard():
        signal.signal(number, lambda number, frame: None)  # the number goes to the socket at once
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="stop before training", daemon=True).start()


class StopRequests:
    """Install once per process, in the main thread. The next start removes a file that was obeyed: all ranks must see it.

    Args:
        abandon: ends all ranks although a step is running; called from a thread of its own, because the main one may be
            blocked in a collective, where Python runs no signal handler.
    """

    def __init__(
        self,
        stop_file: Path,
        *,
        grace_seconds: float,
        max_minutes: float | None = None,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = stop_file
        self._grace = grace_seconds
        self._ends_at = time.monotonic() + 60 * max_minutes if max_minutes else None
        self._abandon = abandon
        self._signalled = threading.Event()
        self._hurried_at: float | None = None
        self._in_step = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # The handlers make the signals arrive; their numbers go to the socket at once, whatever the main thread does.
        self._before = {
            number: signal.signal(number, lambda number, frame: self._signalled.set())
            for number in heard()
        }
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop requests", daemon=True).start()

    def close(self) -> None:
        """Gives the signals back."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()

    def pending(self) -> bool:
        """Whether to stop at this step boundary."""
        late = self._ends_at is not None and time.monotonic() >= self._ends_at
        return self._signalled.is_set() or late or self._file.exists()

    def grace_is_over(self) -> bool:
        """Whether a step that is not charged yet should be dropped."""
        return self._hurried_at is not None and time.monotonic() - self._hurried_at > self._grace

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Stands around a step: only then is there something to abandon."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def droppable(self, micro_batches: Iterator[T]) -> Iterator[T]:
        """Yields them, but drops the step between two of them when the grace time is over. Only before the step's intent.

        Raises:
            StepDropped: on all ranks, here or at the agreement before the intent.
        """
        for micro_batch in micro_batches:
            if self.grace_is_over():
                collectives.agree(ready=False)
            yield micro_batch

    def _watch(self) -> None:
        """Notes signals as they arrive and keeps the time."""

        def end_of_grace() -> None:
            time.sleep(self._grace + MARGIN_SECONDS)
            if self._in_step:
                self._abandon()

        while True:
            try:
                numbers = self._reader.recv(64)
            except OSError:
                return
            if not numbers:
                return
            if any(number in numbers for number in SIGNALS):
                self._signalled.set()
            if HURRIED.intersection(numbers) and self._hurried_at is None:
                self._hurried_at = time.monotonic()
                threading.Thread(target=end_of_grace, name="grace", daemon=True).start()
