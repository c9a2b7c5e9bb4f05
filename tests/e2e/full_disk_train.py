"""launch_scripts/train.py whose COUNT-th write to the ledger finds the disk full: full_disk_train.py COUNT ARGUMENTS..."""

import errno
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch_scripts import train  # noqa: E402
from privacy.ledger import chain, durable  # noqa: E402
from tests.e2e.recording_train import RecordingNoise  # noqa: E402

left = int(sys.argv[1])


class FullDisk:
    """The file layer as the ledger sees it."""

    def __getattr__(self, name: str) -> object:
        return getattr(durable, name)

    def write(self, descriptor: int, data: bytes) -> None:
        global left
        left -= 1
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        durable.write(descriptor, data)


if __name__ == "__main__":
    chain.durable = FullDisk()  # type: ignore[assignment]
    train.main(sys.argv[2:], RecordingNoise())
