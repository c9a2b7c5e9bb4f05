"""Who may take a step: one thread of the process that made the loop."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import PrivacyConfigError


class Turns:
    """One step at a time. Two at once would sum two batches into one release; a forked copy would draw the same batch again.

    Attributes:
        over: why no further step is taken; None while the loop goes on.
    """

    def __init__(self) -> None:
        self.over: str | None = None
        self._process, self._taken = os.getpid(), threading.Lock()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made the loop."""
        return os.getpid() == self._process

    @contextmanager
    def take(self) -> Iterator[None]:
        """One thing that the loop does, alone.

        Raises:
            PrivacyConfigError: in a forked process, while another thread is in the loop, or when the loop is over.
        """
        if not self.is_ours:
            raise PrivacyConfigError(
                "this process was forked from the one that made the loop and holds the same secret coins: step and save there"
            )
        if not self._taken.acquire(blocking=False):
            raise PrivacyConfigError(
                "a step is being taken already, by another thread or around this call: take one step after the other"
            )
        try:
            if self.over is not None:
                raise PrivacyConfigError(
                    f"this loop is over ({self.over}): make it again, and it goes on where it was saved"
                )
            yield
        finally:
            self._taken.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is inside ends, or the loop is over."""
        self.over = "a step was not taken to its end"
        yield
        self.over = None
