"""launch_scripts/train.py on a GPU made of main memory (tests/fake_gpu.py), or on the CPU; two such runs can be compared.

Coins are fixed, and so is the noise: it is drawn as always, and then others' values are written over it.
"""

import hashlib
import itertools
import os
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from launch_scripts import train  # noqa: E402
from privacy.noise import SystemNoise  # noqa: E402
from tests import fake_gpu  # noqa: E402
from tests.e2e.repeatable_train import SeededNoise  # noqa: E402


class Repeatable(SystemNoise):
    """No noise for anything but a comparison of two runs."""

    def __init__(self) -> None:
        self._same = SeededNoise()

    def standard_normal(self, count: int, device: torch.device) -> torch.Tensor:
        drawn, same = super().standard_normal(count, device), self._same.standard_normal(count, torch.device("cpu"))
        return drawn.copy_(same.pin_memory() if drawn.is_cuda else same, non_blocking=True)


if __name__ == "__main__":
    numbers = itertools.count()
    secrets.token_bytes = lambda count=32: hashlib.sha256(str(next(numbers)).encode()).digest()[:count]
    if os.environ["DS_ACCELERATOR"] == "cuda":
        fake_gpu.install()
    train.main(sys.argv[1:], Repeatable())
