"""launch_scripts/train.py with a fixed key, nonce and noise, for tests alone: equal data then give equal runs.

Writes to $RECORD one line per micro-batch (a hash of its tensors) and per reduced clipped sum, before noise.
"""

import hashlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from data.batch import Batch  # noqa: E402
from launch_scripts import train  # noqa: E402
from privacy.run import run as loop  # noqa: E402
from privacy.step import step as one_step  # noqa: E402


def note(what: str, *tensors: torch.Tensor) -> None:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tensor.shape).encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    with open(os.environ["RECORD"], "a") as file:
        file.write(f"{what} {digest.hexdigest()}\n")


class SeededNoise:
    """No noise for anything but a comparison of two runs."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def standard_normal(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.randn(count, dtype=torch.float64, generator=self._generator).to(device)


def recording(batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        note("batch", batch.is_padding_B, *(batch.inputs[name] for name in sorted(batch.inputs)))
        yield batch


if __name__ == "__main__":
    secrets.token_bytes = lambda count=32: bytes(range(count))  # type: ignore[assignment,misc]
    step, reduce = loop.train_step, one_step.reduce_to_owners

    def recording_step(run: Any, number: int, batches: Iterator[Batch]) -> one_step.StepRecord:
        return step(run, number, recording(batches))

    def recording_reduce(*arguments: Any) -> Any:
        shards = list(reduce(*arguments))
        for shard in shards:
            note(f"sum {shard.name}", shard.values)
        return shards

    loop.train_step, one_step.reduce_to_owners = recording_step, recording_reduce
    train.main(sys.argv[1:], SeededNoise())
