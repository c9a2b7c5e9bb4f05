"""Traces of torch's profiler: where the time of single steps goes, kernel by kernel, for chrome://tracing or Perfetto."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from privacy.ledger.durable import make_directory
from trainer.ranks import distributed


class StepProfiler:
    """Profiles the steps `first` to `last` of this process. A trace holds times, so it is private.

    Args:
        folder: inside the trust boundary; takes `steps-FIRST-LAST-rank-RANK.json`.
        steps: None profiles nothing.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self._folder, self._steps = folder, steps
        self._began_at = self._step = 0
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """`step` begins."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            self.close()
            return
        self._step = step
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities)
            self._profile.start()
            self._began_at = step

    def close(self) -> None:
        """Writes the trace, if one is being taken; also of fewer steps, where the run stops between."""
        if self._profile is None:
            return
        self._profile.stop()
        make_directory(self._folder, 0o700)
        name = f"steps-{self._began_at}-{self._step}-rank-{distributed.rank()}.json"
        self._profile.export_chrome_trace(str(self._folder / name))
        self._profile = None
