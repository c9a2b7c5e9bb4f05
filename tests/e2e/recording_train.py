"""launch_scripts/train.py with a noise source that also notes what it drew, in $NOISE_LOG: one line per draw."""

import hashlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from launch_scripts import train  # noqa: E402
from privacy.noise import SystemNoise  # noqa: E402


class RecordingNoise(SystemNoise):
    """The real source; the record is a hash of each draw, written before the draw is used."""

    def standard_normal(self, count: int, device: torch.device) -> torch.Tensor:
        return _noted(super().standard_normal(count, device))

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> torch.Tensor:
        return _noted(super().rounded_normal(deviation, count, device))


def _noted(draw: torch.Tensor) -> torch.Tensor:
    digest = hashlib.sha256(draw.cpu().numpy().tobytes()).hexdigest()
    with open(os.environ["NOISE_LOG"], "a") as file:
        file.write(digest + "\n")
    return draw


if __name__ == "__main__":
    train.main(sys.argv[1:], RecordingNoise())
