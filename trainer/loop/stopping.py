"""Stops a run on a file STOP, on SIGTERM, SIGINT or SIGUSR1 to a rank, or `train.max_minutes`.

The run saves at its next step boundary and ends with exit 7. Launchers and schedulers kill half a
minute after SIGTERM and SIGINT, so a step that outlasts the grace time is given up: before its
intent it is dropped, since nothing of it has left its process; after it, it stays charged and the
newest checkpoint resumes. A signal before training ends all ranks at once, with exit 7 too.
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
"""A step that was not dropped between two micro-batches is abandoned this long after the grace."""


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask this process to stop.

    A shell has its background jobs ignore SIGINT; such a process goes on ignoring it.
    """
    signals = list(SIGNALS)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signals.remove(signal.SIGINT)
    return signals


def end_on_signals(
    end: Callable[[], None] = lambda: distributed.abandon(
        "stopped on request; no step was running, and the same command resumes", STOPPED_EARLY
    ),
) -> None:
    """Ends all ranks on each of SIGNALS, also in a blocking call, until `StopRequests` takes over.

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

    for number in stop_signals():
        # A signal with a handler arrives, and its number goes to the socket at once.
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="stop before training", daemon=True).start()


class StopRequests:
    """Collects the requests to stop; make one per process, in its main thread.

    The file STOP stays until the next start removes it, since all ranks must see it. A rank whose
    launcher is gone sends SIGUSR1 to itself (trainer/ranks/discovery.py).

    Args:
        abandon: ends all ranks although a step is running; called from a thread of its own, because
            the main thread may be blocked in a collective, where Python runs no signal handler.
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
        # The handlers make the signals arrive; their numbers go to the socket at once, even while
        # the main thread is blocked.
        self._former_handlers = {
            number: signal.signal(number, lambda number, frame: self._signalled.set())
            for number in stop_signals()
        }
        writer = self._writer.fileno()
        self._former_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop requests", daemon=True).start()

    def close(self) -> None:
        """Restores the former handlers of the signals."""
        signal.set_wakeup_fd(self._former_wakeup)
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)
        self._writer.close()

    def pending(self) -> bool:
        """Returns whether the run should stop at this step boundary."""
        is_late = self._ends_at is not None and time.monotonic() >= self._ends_at
        return self._signalled.is_set() or is_late or self._file.exists()

    def grace_is_over(self) -> bool:
        """Returns whether a step that is not charged yet should be dropped."""
        return self._hurried_at is not None and time.monotonic() - self._hurried_at > self._grace

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds a step: only a running step can be abandoned."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def droppable(self, micro_batches: Iterator[T]) -> Iterator[T]:
        """Yields the micro-batches, or drops the step between two of them after the grace time.

        Use it only before the step's intent.

        Raises:
            StepDropped: on all ranks, here or at the agreement before the intent.
        """
        for micro_batch in micro_batches:
            if self.grace_is_over():
                collectives.agree(ready=False)
            yield micro_batch

    def _watch(self) -> None:
        """Notes signals as they arrive, and starts the grace time."""
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
                threading.Thread(target=self._end_grace, name="grace", daemon=True).start()

    def _end_grace(self) -> None:
        """Abandons a step that outlasts the grace time."""
        time.sleep(self._grace + MARGIN_SECONDS)
        if self._in_step:
            self._abandon()
