"""Writes public and private metrics to separate sinks (contract 12). Only rank 0 writes.

`run_dir/metrics.jsonl` and `run_dir/tensorboard` take post-processing of noised quantities, and
results on public held-out data. The same files under `run_dir/private` (mode 0700) take results on
training data without noise (losses, clipped fraction, batch sizes, decode errors), and every
reading of a clock or a memory meter, since it includes the decoding of single examples.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from privacy.boundary import Private, Public, Reason, reason_of
from privacy.errors import placed
from privacy.files.durable import torn_line_end

Number = TypeVar("Number", Public[float], Private[float])
Text = TypeVar("Text", Public[str], Private[str])
Picture = TypeVar("Picture", Public[np.ndarray], Private[np.ndarray])


class Session(NamedTuple):
    """One start of a run.

    Attributes:
        step: the last step of the checkpoint that it resumes; 0 where it resumes none.
        attempts: how often the ledger had charged each step before; None where nothing is charged.
        starts: how many starts came before.
    """

    step: int
    attempts: Mapping[int, int] | None
    starts: int


class _Sinks(Generic[Number, Text, Picture]):
    """Writes JSON lines and TensorBoard events in one folder; takes boxes of one kind.

    A kill loses no event that was written. torch's SummaryWriter puts clock, host and process into
    the file's name and the clock into its first event; here the files of a folder are numbered.

    A start repeats the steps that a crash has undone. So each line names its attempt at a step, and
    a file of events begins with its session's start: viewers then forget the events of earlier
    files at these steps. Viewers never forget texts, so a later attempt writes under another name.
    A start at step 0 repeats the measurements before the first step; the number of earlier starts
    is its attempt.

    Args:
        session: the start of the run that writes; None for a writer without a run, such as an
            evaluation.
        times: whether lines and events have a time; only in a private folder. TensorBoard shows
            the step number in place of the time.
    """

    def __init__(self, folder: Path, session: Session | None, *, times: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._times = times
        self._session = session
        self._lines = (folder / "metrics.jsonl").open("a+")
        self._lines.write(torn_line_end(self._lines.fileno()).decode())
        board = folder / "tensorboard"
        board.mkdir(parents=True, exist_ok=True)
        suffixes = [path.suffix[1:] for path in board.glob("events.out.tfevents.*")]
        last_number = max((int(suffix) for suffix in suffixes if suffix.isdigit()), default=0)
        self._events = (board / f"events.out.tfevents.{last_number + 1:010d}").open("xb")
        self._summary: Any = summary
        self._event: Any = Event
        self._records: Any = RecordWriter(self._events)
        self._write_event(wall_time=0.0, file_version="brain.Event:2")
        if session is not None:
            first_step = session.step + 1 if session.step > 0 else 0
            self._write_event(
                wall_time=self._time(first_step),
                step=first_step,
                session_log=SessionLog(status=SessionLog.START),
            )

    def close(self) -> None:
        """Closes the files."""
        self._lines.close()
        self._events.close()

    def place(self, step: int) -> dict[str, int]:
        """Returns the first fields of a line: the step, and its attempt as the ledger counts it.

        The first attempt is 0. No two starts have a line of the same step and attempt, but for
        the step that a start resumes.
        """
        if self._session is None or self._session.attempts is None:
            return {"step": step}
        if step == 0:  # it is never charged
            return {"step": step, "attempt": self._session.starts}
        charged = self._session.attempts.get(step, 0)
        # A step up to the checkpoint is not charged again: its last attempt counts.
        attempt = charged if step > self._session.step else max(charged - 1, 0)
        return {"step": step, "attempt": attempt}

    def scalars(self, step: int, values: Mapping[str, Number]) -> None:
        """Writes a line, and a TensorBoard scalar per value; names are like `privacy/epsilon`."""
        numbers = {name: self._open(name, box) for name, box in values.items()}
        fields: dict[str, Any] = dict(self.place(step))
        if self._times:
            fields["time_unix"] = round(time.time(), 3)
        with placed(self._lines.name):
            self._lines.write(json.dumps(fields | numbers) + "\n")
            self._lines.flush()
        for name, number in numbers.items():
            self._add(step, self._summary.scalar(name, number))

    def text(self, step: int, name: str, markdown: Text) -> None:
        """Writes a text to TensorBoard, whose name has the attempt at the step."""
        starts = 0 if self._session is None else self._session.starts
        attempt = self.place(step).get("attempt", starts)
        tag = f"{name} (attempt {attempt})" if attempt > 0 else name
        self._add(step, self._summary.text(tag, self._open(name, markdown)))

    def picture(self, step: int, name: str, image_HWC: Picture) -> None:
        """Writes a picture to TensorBoard."""
        self._add(step, self._summary.image(name, self._open(name, image_HWC), dataformats="HWC"))

    def _add(self, step: int, summary: Any) -> None:
        self._write_event(wall_time=self._time(step), step=step, summary=summary)

    def _time(self, step: int) -> float:
        return time.time() if self._times else float(step)

    def _write_event(self, **fields: Any) -> None:
        with placed(self._events.name):
            self._records.write(self._event(**fields).SerializeToString())
            self._events.flush()

    def _open(self, name: str, box: Any) -> Any:
        """Returns the value of a box as it may be written, or refuses it before anything is."""
        raise NotImplementedError


class PublicMetrics(_Sinks[Public[float], Public[str], Public[np.ndarray]]):
    """Writes values that `PUBLISHED` names, rounded to fp32, without times.

    What was spent is rounded upward.
    """

    def __init__(self, folder: Path, session: Session | None = None) -> None:
        super().__init__(folder, session, times=False)
        self._settings: dict[str, object] = {}

    def _open(self, name: str, box: Public[Any]) -> Any:
        """Returns the rounded value.

        Raises:
            ValueError: the box is public for another reason than its name, or a setting changes.
        """
        if reason_of(name) is not box.because:
            raise ValueError(
                f"{name} is not published because {box.because.value}: see PUBLISHED in "
                "privacy/boundary.py"
            )
        if box.because is Reason.SETTINGS:
            setting = self._settings.setdefault(name, box.value)
            if setting != box.value:
                raise ValueError(f"{name} is called a setting, and changes from step to step")
        if box.because is Reason.CHARGED:
            return fp32_above(box.value)
        return as_fp32(box.value)


class PrivateMetrics(_Sinks[Private[float], Private[str], Private[np.ndarray]]):
    """Writes values inside the trust boundary, in full precision; lines and events have a time."""

    def __init__(self, folder: Path, session: Session | None = None) -> None:
        super().__init__(folder, session, times=True)

    def _open(self, name: str, box: Private[Any]) -> Any:
        return box.inside()


def as_fp32(value: Any) -> Any:
    """Returns a float as published: the shortest decimal that reads as its fp32 neighbour.

    Whole numbers stay as they are.
    """
    return float(str(np.float32(value))) if isinstance(value, float) else value


def fp32_above(value: Any) -> Any:
    """Returns a float as published, like `as_fp32`, but never below `value`.

    That holds whether the decimal is read as fp64 or as fp32: an epsilon is never published below
    the epsilon that was spent.
    """
    if not isinstance(value, float):
        return value
    published = np.float32(value)
    # The shortest decimal may be below its fp32 neighbour. Both are compared in fp64: numpy would
    # round `value` to fp32 first.
    while min(as_fp32(float(published)), float(published)) < value:
        published = np.nextafter(published, np.float32(np.inf))
    return as_fp32(float(published))
