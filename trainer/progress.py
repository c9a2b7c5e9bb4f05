"""Prints on stderr how far a command is, from its second second on."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from privacy.errors import say

T = TypeVar("T")

QUIET_SECONDS = 1.5
"""A command takes up to half a second until `working` begins: two seconds together."""
LINE_SECONDS = 10.0
"""Seconds between lines where stderr is no terminal."""


_bars = 0
"""Number of bars of `track` in use: while there is one, `working` prints no lines."""


@contextmanager
def working(activity: str, *, shows: bool = True) -> Iterator[None]:
    """Prints an activity that takes longer than `QUIET_SECONDS`, and then its time so far.

    Args:
        activity: such as "computing the privacy card".
        shows: False on ranks that leave the console to rank 0.
    """
    ended = threading.Event()
    started = time.monotonic()

    def speak() -> None:
        if ended.wait(QUIET_SECONDS):
            return
        say(f"{activity} ...", file=sys.stderr)
        while not ended.wait(LINE_SECONDS):
            if _bars == 0:
                say(f"{activity}: {time.monotonic() - started:.0f} s so far", file=sys.stderr)

    if shows:
        threading.Thread(target=speak, name="progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def track(items: Iterable[T], name: str, total: int, *, shows: bool = True) -> Iterator[T]:
    """Yields the items, and shows how many of them are done.

    A terminal shows a bar, another stderr a line each `LINE_SECONDS`.

    Args:
        name: names the items, such as "batches of held-out pictures".
        total: number of items.
        shows: as in `working`.
    """
    global _bars
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
    )
    console = Console(stderr=True)
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    task = bar.add_task(name, total=total)
    started = time.monotonic()
    printed = started + QUIET_SECONDS - LINE_SECONDS
    is_bar = shows and console.is_terminal
    _bars += 1
    try:
        for done, item in enumerate(items):
            clock_time = time.monotonic()
            if is_bar and clock_time - started > QUIET_SECONDS:
                bar.start()
                bar.update(task, completed=done)
            elif shows and not is_bar and clock_time - printed >= LINE_SECONDS:
                printed = clock_time
                print(f"{name}: {done} of {total} done", file=sys.stderr, flush=True)
            yield item
    finally:
        _bars -= 1
        if bar.live.is_started:
            bar.stop()
