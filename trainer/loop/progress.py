"""The one live line of a run: a progress bar on a terminal, plain lines otherwise (logs of batch jobs)."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

PLAIN_INTERVAL_SECONDS = 10.0


class ProgressLine:
    """Shows step, percent, the given facts and the time left. Only rank 0 makes one."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self._first, self._total = first_step, num_steps
        self._started = time.monotonic()
        self._printed = 0.0
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.percentage:.1f}%  {task.description}"),
                console=Console(),
            )
            self._task = self._bar.add_task("", total=num_steps, completed=first_step)
            self._bar.start()

    def update(self, step: int, facts: Mapping[str, str]) -> None:
        """After each step; plain lines appear at most every ten seconds, and for the last step."""
        # rich's own estimate forgets what is older than half a minute, and a step may take longer.
        now, done = time.monotonic(), step - self._first
        eta = timedelta(seconds=int((now - self._started) / done * (self._total - step))) if done > 0 else "?"
        text = "  ".join(f"{name} {value}" for name, value in {**facts, "eta": str(eta)}.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        if now - self._printed >= PLAIN_INTERVAL_SECONDS or step == self._total:
            self._printed = now
            print(f"step {step}/{self._total}  {100 * step / self._total:.1f}%  {text}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
