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
        step: the last one of the checkpoint that it goes on from; 0 where it goes on from none.
        attempts: how often the ledger had charged each step before; None where nothing is charged.
        starts: how many starts came before.
    """

    step: int
    attempts: Mapping[int, int] | None
    starts: int


class _Sinks(Generic[Number, Text, Picture]):
    """JSON lines and TensorBoard in one folder; takes boxes of one kind.

    Events are durable against a kill one by one. torch's SummaryWriter puts clock, host and process into the file's name and the
    clock into its first event; here the files of a folder are numbered. Nothing else here knows TensorBoard's format.

    A start repeats the steps that a crash has undone. Lines say which attempt at a step they are of, and a file of events begins
    with its session's start, at which viewers forget what earlier files have at its steps. Viewers never forget texts: what a
    later attempt writes has another name. What is measured before the first step is measured again by a start at step 0, whose
    attempt is the number of starts before.

    Args:
        session: the start of the run that writes; None for what is no run, such as an evaluation.
        times: whether lines and events say when they were written; only in a private folder. TensorBoard shows the step number
            where it would show the time.
    """

    def __init__(self, folder: Path, session: Session | None, *, times: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._times, self._session = times, session
        self._lines = (folder / "metrics.jsonl").open("a+")
        self._lines.write(torn_line_end(self._lines.fileno()).decode())
        board = folder / "tensorboard"
        board.mkdir(parents=True, exist_ok=True)
        numbers = [
            int(path.suffix[1:])
            for path in board.glob("events.out.tfevents.*")
            if path.suffix[1:].isdigit()
        ]
        self._events = (board / f"events.out.tfevents.{max(numbers, default=0) + 1:010d}").open(
            "xb"
        )
        self._summary: Any = summary
        self._event: Any = Event
        self._records: Any = RecordWriter(self._events)
        self._write_event(wall_time=0.0, file_version="brain.Event:2")
        if session is not None:
            first = session.step + 1 if session.step > 0 else 0
            self._write_event(
                wall_time=self._time(first),
                step=first,
                session_log=SessionLog(status=SessionLog.START),
            )

    def close(self) -> None:
        self._lines.close()
        self._events.close()

    def place(self, step: int) -> dict[str, int]:
        """What a line of this step begins with: the step, and the attempt at it, from 0, as the ledger counts them.

        No two starts have a line of the same step and attempt, but for the step that a start goes on from.
        """
        if self._session is None or self._session.attempts is None:
            return {"step": step}
        if step == 0:  # which is never charged
            return {"step": step, "attempt": self._session.starts}
        before = self._session.attempts.get(step, 0)
        return {
            "step": step,
            "attempt": before if step > self._session.step else max(before - 1, 0),
        }

    def scalars(self, step: int, values: Mapping[str, Number]) -> None:
        """One line, and one TensorBoard scalar per value; names are like `privacy/epsilon`."""
        opened = {name: self._open(name, value) for name, value in values.items()}
        when = {"time_unix": round(time.time(), 3)} if self._times else {}
        with placed(self._lines.name):
            self._lines.write(json.dumps({**self.place(step), **when, **opened}) + "\n")
            self._lines.flush()
        for name, number in opened.items():
            self._add(step, self._summary.scalar(name, number))

    def text(self, step: int, name: str, markdown: Text) -> None:
        starts = 0 if self._session is None else self._session.starts
        attempt = self.place(step).get("attempt", starts)
        tag = f"{name} (attempt {attempt})" if attempt > 0 else name
        self._add(step, self._summary.text(tag, self._open(name, markdown)))

    def picture(self, step: int, name: str, image_HWC: Picture) -> None:
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
        """What may be written of a box, before anything is."""
        raise NotImplementedError


class PublicMetrics(_Sinks[Public[float], Public[str], Public[np.ndarray]]):
    """Takes what is known to be public under its name in `PUBLISHED`, rounds it to fp32 and writes no time.

    What was spent is rounded upward.
    """

    def __init__(self, folder: Path, session: Session | None = None) -> None:
        super().__init__(folder, session, times=False)
        self._settings: dict[str, object] = {}

    def _open(self, name: str, box: Public[Any]) -> Any:
        """ValueError for what is not published for the reason that its name has."""
        if reason_of(name) is not box.because:
            raise ValueError(
                f"{name} is not published because {box.because.value}: see PUBLISHED in privacy/boundary.py"
            )
        if (
            box.because is Reason.SETTINGS
            and self._settings.setdefault(name, box.value) != box.value
        ):
            raise ValueError(f"{name} is called a setting, and changes from step to step")
        return (fp32_above if box.because is Reason.CHARGED else as_fp32)(box.value)


class PrivateMetrics(_Sinks[Private[float], Private[str], Private[np.ndarray]]):
    """Writes into a folder inside the trust boundary, in full precision; lines and events say when they were written."""

    def __init__(self, folder: Path, session: Session | None = None) -> None:
        super().__init__(folder, session, times=True)

    def _open(self, name: str, box: Private[Any]) -> Any:
        return box.inside()


def as_fp32(value: Any) -> Any:
    """A float as published: the shortest decimal that reads as its fp32 neighbour. Whole numbers stay as they are."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def fp32_above(value: Any) -> Any:
    """A float as published, like `as_fp32`, but never below `value`, whether the decimal is read as fp64 or as fp32.

    An epsilon is never published below what was spent.
    """
    if not isinstance(value, float):
        return value
    published = np.float32(value)
    # The shortest decimal may lie below its fp32 neighbour. Both are compared in fp64: numpy would round `value` to fp32 first.
    while min(as_fp32(float(published)), float(published)) < value:
        published = np.nextafter(published, np.float32(np.inf))
    return as_fp32(float(published))
