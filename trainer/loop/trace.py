"""Writes a trace of torch's profiler, for chrome://tracing or Perfetto."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from privacy.files.durable import make_directory
from privacy.ranks import collectives


class Trace:
    """Traces some steps of a run. Its times are private, and so is the trace.

    Args:
        steps: first and last step of the trace; None takes no trace.
        folder: takes one file of each rank.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        self._steps = steps
        self._folder = folder
        self._profile: profile | None = None
        self._traced_steps: list[int] = []

    def begin(self, step: int) -> None:
        """Begins or continues the trace if `step` is one of its steps, and ends it otherwise."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            self.end()
            return
        self._traced_steps.append(step)
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def end(self) -> None:
        """Writes the trace, if one has begun; a run that stops early writes fewer steps."""
        if self._profile is None:
            return
        self._profile.stop()
        make_directory(self._folder, 0o700)
        first_step = self._traced_steps[0]
        last_step = self._traced_steps[-1]
        name = f"steps-{first_step}-{last_step}-rank-{collectives.rank()}.json"
        self._profile.export_chrome_trace(str(self._folder / name))
        self._profile = None
