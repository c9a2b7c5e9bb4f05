"""Watches a sandbox process from outside of the code under audit: what it made durable, drew, and let go, in order.

While it watches, `os.fsync`, `os.urandom` and the reduction over ranks are called through it. Times are of the machine's
monotonic clock, so that those of all ranks, which run on one machine, can be compared.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainer.ranks import distributed


class Watch:
    """What happened since the process began to be watched.

    Attributes:
        entropy_bytes: how much was read from the operating system's entropy.
    """

    def __init__(self) -> None:
        self.entropy_bytes = 0
        self._released_at = 0
        self._fsyncs: list[tuple[int, int, int, int]] = []

    def release(self) -> None:
        """Noise is about to be drawn, or a value that depends on a gradient is about to leave the process."""
        self._released_at = self._released_at or time.monotonic_ns()

    def first_release(self) -> int:
        """When the attempt that ends here released something first; 0 for never. The next call is about the next attempt."""
        released_at, self._released_at = self._released_at, 0
        return released_at

    def durable(self, path: Path) -> np.ndarray:
        """(F, 2): time at which an fsync of this file or folder had returned, and the size that it made durable."""
        status = os.stat(path)
        found = [event[2:] for event in self._fsyncs if event[:2] == (status.st_dev, status.st_ino)]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def _fsync(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fsync(file: Any) -> None:
            status = os.fstat(file)
            original(file)
            self._fsyncs.append((status.st_dev, status.st_ino, time.monotonic_ns(), status.st_size))

        return fsync

    def _urandom(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def urandom(size: int, /) -> Any:
            self.entropy_bytes += size
            return original(size)

        return urandom

    def _reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(*arguments: Any) -> Any:
            self.release()
            return original(*arguments)

        return reduce


@contextmanager
def watching() -> Iterator[Watch]:
    """Watches inside of the block."""
    watch = Watch()
    with ExitStack() as stack:
        stack.enter_context(replaced(os, "fsync", watch._fsync))
        stack.enter_context(replaced(os, "urandom", watch._urandom))
        stack.enter_context(replaced(distributed, "reduce_scatter_sum", watch._reduce))
        yield watch


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside of the block `owner.name` is what `make` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
