"""What a command says while it works: from its second second on, on stderr, what it does and how far it is."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from privacy.errors import say

T = TypeVar("T")

QUIET_SECONDS = 1.5
"""A command takes up to half a second to come here."""
LINE_SECONDS = 10.0
"""Where stderr is no terminal, a line appears this often."""


_bars = 0
"""How many bars of `track` are in use: they say more than `working` can."""


@contextmanager
def working(what: str, *, shows: bool = True) -> Iterator[None]:
    """Says `what` ("computing the privacy card") once it takes longer than `QUIET_SECONDS`, and then how long it has taken.

    Args:
        shows: False on ranks that leave the console to rank 0.
    """
    ended, started = threading.Event(), time.monotonic()

    def speak() -> None:
        if ended.wait(QUIET_SECONDS):
            return
        say(f"{what} ...", file=sys.stderr)
        while not ended.wait(LINE_SECONDS):
            if _bars == 0:
                say(f"{what}: {time.monotonic() - started:.0f} s so far", file=sys.stderr)

    if shows:
        threading.Thread(target=speak, name="progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def track(items: Iterable[T], what: str, total: int, *, shows: bool = True) -> Iterator[T]:
    """Yields the items, and shows how many of them are done: a bar on a terminal, elsewhere a line each `LINE_SECONDS`.

    Args:
        what: what they are ("batches of held-out pictures").
        total: how many there are.
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
    task = bar.add_task(what, total=total)
    started = time.monotonic()
    printed = started + QUIET_SECONDS - LINE_SECONDS
    is_bar = shows and console.is_terminal
    _bars += 1
    try:
        for done, item in enumerate(items):
            now = time.monotonic()
            if is_bar and now - started > QUIET_SECONDS:
                bar.start()
                bar.update(task, completed=done)
            elif shows and not is_bar and now - printed >= LINE_SECONDS:
                printed = now
                print(f"{what}: {done} of {total} done", file=sys.stderr, flush=True)
            yield item
    finally:
        _bars -= 1
        if bar.live.is_started:
            bar.stop()
