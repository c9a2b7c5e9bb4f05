"""A trace of torch's profiler, for chrome://tracing or Perfetto."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from privacy.files.durable import make_directory
from privacy.ranks import collectives


class Trace:
    """Follows a run through its steps. Times are private, and so is the trace.

    Args:
        steps: first and last step of the trace; None takes no trace.
        folder: gets one file of each rank.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._profile: profile | None = None
        self._traced: list[int] = []

    def begin(self, step: int) -> None:
        """Begins, goes on or ends, as `step` is inside or outside."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            self.end()
            return
        self._traced.append(step)
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def end(self) -> None:
        """Writes the trace, if there is one; also of fewer steps, where the run stops between."""
        if self._profile is None:
            return
        self._profile.stop()
        make_directory(self._folder, 0o700)
        name = f"steps-{self._traced[0]}-{self._traced[-1]}-rank-{collectives.rank()}.json"
        self._profile.export_chrome_trace(str(self._folder / name))
        self._profile = None
