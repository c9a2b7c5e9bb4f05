"""Two sinks with a wall between them (contract 12).

Public: `run_dir/metrics.jsonl` and `run_dir/tensorboard`: what is post-processing of noised quantities, or computed from
public held-out data. Private: the same under `run_dir/private` (mode 0700): everything computed from training data without
noise (losses, clipped fraction, batch sizes, decode errors), and everything that a clock or a memory meter says, since the time
and memory that one example takes to decode are in it.
Only rank 0 writes.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from privacy.boundary import Private, Public, Reason, reason_of
from privacy.ledger.durable import torn_line_end

T = TypeVar("T")


class _Sinks:
    """JSON lines and TensorBoard in one folder.

    Args:
        times: whether lines and events say when they were written; only in a private folder. TensorBoard shows the step number
            where it would show the time.
    """

    def __init__(self, folder: Path, *, times: bool) -> None:
        from torch.utils.tensorboard import summary

        self._times = times
        self._summary: Any = summary
        self._lines = (folder / "metrics.jsonl").open("a+")
        self._lines.write(torn_line_end(self._lines.fileno()).decode())
        self._board = _EventFile(folder / "tensorboard")

    def close(self) -> None:
        self._lines.close()
        self._board.close()

    def _write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        when = {"time_unix": round(time.time(), 3)} if self._times else {}
        self._lines.write(json.dumps({"step": step, **when, **values}) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._board.add(self._summary.scalar(name, value), step, self._walltime(step))

    def _write_text(self, step: int, name: str, markdown: str) -> None:
        self._board.add(self._summary.text(name, markdown), step, self._walltime(step))

    def _write_picture(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        self._board.add(self._summary.image(name, image_HWC, dataformats="HWC"), step, self._walltime(step))

    def _walltime(self, step: int) -> float:
        return time.time() if self._times else float(step)


class PublicMetrics(_Sinks):
    """Takes what is known to be public under its name in `PUBLISHED`, rounds it to fp32 and writes no time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, times=False)
        self._settings: dict[str, object] = {}

    def scalars(self, step: int, values: Mapping[str, Public[float]]) -> None:
        """One line, and one TensorBoard scalar per value; names are like `privacy/epsilon`."""
        self._write_scalars(step, {name: as_fp32(self._listed(name, value)) for name, value in values.items()})

    def text(self, step: int, name: str, markdown: Public[str]) -> None:
        self._write_text(step, name, self._listed(name, markdown))

    def picture(self, step: int, name: str, image_HWC: Public[np.ndarray]) -> None:
        self._write_picture(step, name, self._listed(name, image_HWC))

    def _listed(self, name: str, value: Public[T]) -> T:
        """The value, if it is published for the reason that its name has; ValueError otherwise, before anything is written."""
        if reason_of(name) is not value.because:
            raise ValueError(
                f"{name} is not published because {value.because.value}: see PUBLISHED in privacy/boundary.py"
            )
        if value.because is Reason.SETTINGS and self._settings.setdefault(name, value.value) != value.value:
            raise ValueError(f"{name} is called a setting, and changes from step to step")
        return value.value


class PrivateMetrics(_Sinks):
    """Writes into a folder inside the trust boundary; lines and events say when they were written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, times=True)

    def scalars(self, step: int, values: Mapping[str, Private[float]]) -> None:
        """As `PublicMetrics.scalars`, in full precision."""
        self._write_scalars(step, {name: value.inside() for name, value in values.items()})

    def text(self, step: int, name: str, markdown: Private[str]) -> None:
        self._write_text(step, name, markdown.inside())

    def picture(self, step: int, name: str, image_HWC: Private[np.ndarray]) -> None:
        self._write_picture(step, name, image_HWC.inside())


def as_fp32(value: float) -> float:
    """A float as published: the shortest decimal that reads as its fp32 neighbour. Whole numbers stay as they are."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def fp32_above(value: float) -> float:
    """The smallest fp32 number that is not below `value`: an epsilon is never published below what was spent."""
    nearest = np.float32(value)
    return float(nearest if nearest >= value else np.nextafter(nearest, np.float32(np.inf)))


class _EventFile:
    """A new file of TensorBoard events, durable against a kill event by event.

    torch's SummaryWriter puts clock, host and process into the file's name and the clock into its first event; here the files of
    a folder are numbered, and nothing has a time that the caller did not give. Nothing else here knows TensorBoard's format.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(path.suffix[1:]) for path in folder.glob("events.out.tfevents.*") if path.suffix[1:].isdigit()]
        self._file = (folder / f"events.out.tfevents.{max(numbers, default=0) + 1:010d}").open("xb")
        self._event: Any = Event
        self._records: Any = RecordWriter(self._file)
        self._write(wall_time=0.0, file_version="brain.Event:2")

    def add(self, summary: Any, step: int, walltime: float) -> None:
        """Writes a summary that `torch.utils.tensorboard.summary` made."""
        self._write(wall_time=walltime, step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(**fields).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()
