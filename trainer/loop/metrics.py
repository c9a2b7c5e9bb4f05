"""Two sinks with a wall between them (contract 12).

Public: `run_dir/metrics.jsonl` and `run_dir/tensorboard`: what is post-processing of noised quantities, or computed from
public held-out data. Private: the same under `run_dir/private` (mode 0700): everything computed from training data without
noise (losses, clipped fraction, batch sizes, decode errors), and timings where the batch shape depends on the data.
Only rank 0 writes.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np


class MetricsWriter:
    """JSON lines and TensorBoard in one folder.

    With `times` off nothing says when a step happened: durations follow the realised batch size, which is private where the
    capped batch is not padded to. TensorBoard then shows the step number where it would show the time.
    """

    def __init__(self, folder: Path, *, times: bool = True) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._times = times
        self._lines = _open_for_appending(folder / "metrics.jsonl")
        self._board: Any = SummaryWriter(str(folder / "tensorboard"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One line, and one TensorBoard scalar per value; names are like `privacy/epsilon`."""
        when = {"time_unix": round(time.time(), 3)} if self._times else {}
        self._lines.write(json.dumps({"step": step, **when, **values}) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step, walltime=self._walltime(step))

    def text(self, step: int, name: str, markdown: str) -> None:
        self._board.add_text(name, markdown, step, walltime=self._walltime(step))

    def picture(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        self._board.add_image(name, image_HWC, step, dataformats="HWC", walltime=self._walltime(step))
        self._board.flush()

    def _walltime(self, step: int) -> float:
        return time.time() if self._times else float(step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()


def _open_for_appending(path: Path) -> TextIO:
    """Ends the torn line that a killed process may have left, so that it does not swallow the next one."""
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    file = path.open("a")
    if torn:
        file.write("\n")
    return file


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of `metrics.jsonl`; those torn by a kill are left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line.startswith("{") and line.endswith("}")]


def write_hparams(folder: Path, runs: Sequence[tuple[str, Mapping[str, Any], Mapping[str, float]]]) -> None:
    """TensorBoard's table of (name, hyper-parameters, metrics), in place of an older one."""
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as board:
        for name, hparams, metrics in runs:
            board.add_hparams(dict(hparams), dict(metrics), run_name=name)
