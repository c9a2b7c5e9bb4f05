"""launch_scripts/train.py that kills itself at a named point: crashing_train.py POINT COUNT TRAIN_ARGUMENTS...

It dies by SIGKILL at the COUNT-th passage of POINT (on the rank that passes it; rank 0 for all but `before_noise`). At the
POINT `full_disk` it lives on: its COUNT-th write to the ledger finds no space.
"""

import errno
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from launch_scripts import train  # noqa: E402
from privacy.checkpoints import write as checkpoint_writer  # noqa: E402
from privacy.ledger import chain, durable  # noqa: E402
from privacy.ledger.chain import AppendOnly  # noqa: E402
from privacy.ledger.ledger import Ledger  # noqa: E402
from privacy.run.ledger import MembersLog  # noqa: E402
from tests.e2e.recording_train import RecordingNoise  # noqa: E402

POINTS = (
    *("before_intent", "before_mark", "before_noise", "before_done"),
    *("in_record", "in_ledger_write", "in_checkpoint"),
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Dies at the count-th call."""

    def __init__(self, count: int) -> None:
        self.left = count

    def passed(self) -> bool:
        self.left -= 1
        return self.left == 0


class DyingNoise(RecordingNoise):
    """Dies between the intent and the noise."""

    def __init__(self, countdown: Countdown) -> None:
        self._countdown = countdown

    def standard_normal(self, count: int, device: torch.device) -> torch.Tensor:
        if self._countdown.passed():
            die()
        return super().standard_normal(count, device)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> torch.Tensor:
        if self._countdown.passed():
            die()
        return super().rounded_normal(deviation, count, device)


class FullDisk:
    """The file layer as the ledger sees it."""

    def __init__(self, countdown: Countdown) -> None:
        self._countdown = countdown

    def __getattr__(self, name: str) -> object:
        return getattr(durable, name)

    def write(self, descriptor: int, data: bytes) -> None:
        if self._countdown.passed():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        durable.write(descriptor, data)


def arm(point: str, count: int) -> RecordingNoise:
    """Puts the crash in place; returns the noise source."""
    countdown = Countdown(count)
    if point == "before_noise":
        return DyingNoise(countdown)
    if point == "full_disk":
        chain.durable = FullDisk(countdown)  # type: ignore[assignment]
        return RecordingNoise()
    owner, name = {
        "before_intent": (Ledger, "intent"),
        "before_mark": (MembersLog, "mark"),
        "in_record": (MembersLog, "attempt"),
        "before_done": (Ledger, "done"),
        "in_ledger_write": (AppendOnly, "append"),
        "in_checkpoint": (checkpoint_writer, "_publish"),
    }[point]
    whole = getattr(owner, name)

    def dying(*arguments, **more):
        if countdown.passed():
            if point == "in_ledger_write":
                file, data = arguments
                os.write(file._descriptor, data[: count * 7919 % len(data)])  # torn anywhere, the newline missing
                os.fsync(file._descriptor)
            if point == "in_record":
                with arguments[0]._path.open("ab") as file:
                    file.write(b'{"seq":9,"hash":"')
            die()
        return whole(*arguments, **more)

    setattr(owner, name, dying)
    return RecordingNoise()


if __name__ == "__main__":
    train.main(sys.argv[3:], arm(sys.argv[1], int(sys.argv[2])))
