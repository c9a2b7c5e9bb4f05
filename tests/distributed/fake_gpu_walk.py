"""PrivateLoop and planted mistakes on a GPU made of main memory (tests/fake_gpu.py); prints what came of each as JSON."""

import itertools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import Batch
from privacy.clipping import ClippedSum
from privacy.noise import SystemNoise
from privacy.step.step import train_step
from tests import fake_gpu
from tests.distributed.test_engines import (  # fmt: skip
    MICRO_BATCH,
    OPTIMIZER,
    a_mechanism,
    machine_settings,
    micro_batches,
    pairs,
    tiny_captioner,
)
from tests.privacy.loop import own
from trainer.engines import build_engine

NOTES = Path(os.environ["FAKE_GPU_NOTES"])
Task = Callable[..., Tensor]


def read_notes() -> list[str]:
    """Each once."""
    return sorted(set(NOTES.read_text().splitlines())) if NOTES.exists() else []


def loop(device: torch.device) -> dict[str, Any]:
    """A run of four steps in two starts, with fixed coins and no noise: its weights, and notes of all but the first steps.

    In its first micro-batch a start may try a way through the model that it has not seen.
    """
    notes: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, own.quick(silent=True) as patch:
        numbers = itertools.count()
        patch.setattr("secrets.token_bytes", lambda count=32: bytes([next(numbers)]) * count)
        for stop in (2, 4):
            model = own.net().to(device)
            with own.make(Path(folder) / "run", model, save_every=2) as run:
                run.step()
                NOTES.unlink(missing_ok=True)
                while run.steps_done < stop:
                    run.step()
                notes |= set(read_notes())
    return {"weights": own.weights(model).tolist(), "notes": sorted(notes)}


class FromTheCpu(SystemNoise):
    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return super().standard_normal(count, torch.device("cpu"))


def walk(wrong: str) -> str | None:
    """One step of two micro-batches or more, with a mistake or none; returns what stopped it."""
    engine = build_engine("local", tiny_captioner(), OPTIMIZER, machine_settings(1), fake_gpu.CUDA, MICRO_BATCH)
    clipped = ClippedSum(engine.module, 1.0, shapes=engine.shapes, self_check=False)
    run = a_mechanism(engine, clipped, FromTheCpu() if "noise" in wrong else SystemNoise(), 4.0, 7)
    tasks: dict[str, Task] = {
        "a number is read": lambda **inputs: engine.module(**inputs) * (engine.module(**inputs).sum().item() * 0 + 1),
        "a mask selects": lambda **inputs: (
            inputs["images_BCHW"][inputs["images_BCHW"] > 0].sum() * 0 + engine.module(**inputs)
        ),
        "a tensor of the CPU": lambda **inputs: engine.module(**inputs) + torch.zeros(MICRO_BATCH),
    }
    run.task = tasks.get(wrong, run.task)
    batches = micro_batches(pairs(), (7,))
    if wrong != "unpinned":
        batches = [
            Batch({name: x.pin_memory() for name, x in b.inputs.items()}, b.is_padding_B.pin_memory()) for b in batches
        ]
    try:
        train_step(run, 1, iter(batches))
    except RuntimeError as error:
        return str(error)
    return None


def main() -> None:
    fake_gpu.install()
    found: dict[str, Any] = {"loop on the CPU": loop(torch.device("cpu")), "loop": loop(fake_gpu.CUDA)}
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    for wrong in (
        "nothing",
        "a number is read",
        "a mask selects",
        "a tensor of the CPU",
        "unpinned",
        "noise of the CPU",
    ):
        NOTES.unlink(missing_ok=True)
        fake_gpu.in_micro_batches = False  # where the step before ended in an error
        found[wrong] = {"error": walk(wrong), "notes": read_notes()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
