"""The way through a GPU on a machine without one: whole runs by every engine, PrivateLoop, and planted mistakes.

tests/fake_gpu.py says what the stand-in is, and what it cannot see: above all no kernel that torch.compile or Triton makes.
"""

import itertools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import Batch
from privacy.checkpoints.read import open_checkpoint
from privacy.clipping import ClippedSum
from privacy.noise.source import SystemNoise
from privacy.step.step import train_step
from tests import fake_gpu
from tests.distributed.ranks import free_port, quiet_environment, rank_environment
from tests.distributed.test_engines import (
    MICRO_BATCH,
    OPTIMIZER,
    a_mechanism,
    machine_settings,
    micro_batches,
    not_charged,
    pairs,
    tiny_captioner,
)
from tests.e2e.launch import PLANTED, train_arguments
from tests.privacy.loop import own
from tests.processes import Forked, kill_group, run_python
from trainer.engines import build_engine

AT_ITS_END = {
    (
        "step",
        "wait",
        "copy to the GPU",
        "privacy/noise/source.py:SystemNoise.rounded_normal",
    ),  # exact noise, drawn on the CPU
    ("step", "wait", "synchronize", "privacy/ranks/clock.py:Laps.end"),
    ("step", "wait", "_local_scalar_dense", "privacy/step/step.py:_norm"),
    ("step", "wait", "copy to the CPU", "privacy/step/step.py:_record.<locals>.<listcomp>"),
}
"""What a step waits for, a fixed number of times, when its micro-batches are over."""
ONCE = {("micro-batch", "wait", "copy to the GPU", "privacy/clipping/norms.py:_row")}
"""Numbers that the first micro-batch of a shape copies, and the others find; in a run the self-check has copied them."""
ENGINES = {
    # DeepSpeed's own norm and overflow check
    "deepspeed": {
        ("step", "wait", operation, "trainer/engines/deepspeed.py:DeepSpeedEngine.step")
        for operation in (
            "synchronize",
            "_local_scalar_dense",
            "copy to the GPU",
            "copy to the CPU",
        )
    },
    "fairscale": {
        ("step", "wait", "synchronize", "trainer/engines/fairscale.py:FairscaleEngine.step")
    },
    # the step is taken on the CPU where the weights are
    "fsdp": {("step", "wait", "copy to the CPU", "privacy/ranks/row_shards.py:RowShards.exchange")},
}
"""What the step of an engine waits for besides."""


MISTAKES = [
    ("nothing", None, None),
    ("a tensor of the CPU", "Expected all tensors to be on the same device", None),
    ("noise of the CPU", "Expected all tensors to be on the same device", None),
    ("a number is read", None, ("micro-batch", "wait", "_local_scalar_dense")),
    ("a mask selects", None, ("micro-batch", "wait", "index")),
    ("unpinned", None, ("micro-batch", "unpinned", "copy to the GPU")),
]
"""Planted in one step, with the error or the note that they end in."""


def read(notes: Path) -> set[tuple[str, ...]]:
    return (
        {tuple(line.split("\t")) for line in notes.read_text().splitlines()}
        if notes.exists()
        else set()
    )


def notes_file() -> Path:
    return Path(os.environ["FAKE_GPU_NOTES"])


# What runs in a process of its own, since the GPU is there for good.


def loop(device: torch.device) -> dict[str, Any]:
    """A run of four steps in two starts, with fixed coins and no noise: its weights, and notes of all but the first steps.

    In its first micro-batch a start may try a way through the model that it has not seen.
    """
    notes: set[tuple[str, ...]] = set()
    with tempfile.TemporaryDirectory() as folder, own.quick(silent=True) as patch:
        numbers = itertools.count()
        patch.setattr("secrets.token_bytes", lambda count=32: bytes([next(numbers)]) * count)
        for stop in (2, 4):
            model = own.net().to(device)
            with own.make(Path(folder) / "run", model, save_every=2) as run:
                run.step()
                notes_file().unlink(missing_ok=True)
                while run.steps_done < stop:
                    run.step()
                notes |= read(notes_file())
    return {"weights": own.weights(model).tolist(), "notes": sorted(notes)}


class FromTheCpu(SystemNoise):
    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return super().rounded_normal(deviation, count, torch.device("cpu"))


def step_with(wrong: str) -> str | None:
    """One step of two micro-batches or more, with a mistake or none; returns what stopped it."""
    engine = build_engine(
        "local", tiny_captioner(), OPTIMIZER, machine_settings(1), fake_gpu.CUDA, MICRO_BATCH
    )
    clipped = ClippedSum(engine.module, 1.0, shapes=engine.shapes)
    run = a_mechanism(engine, clipped, FromTheCpu() if "noise" in wrong else SystemNoise(), 4.0, 7)
    tasks: dict[str, Callable[..., Tensor]] = {
        "a number is read": lambda **inputs: (
            engine.module(**inputs) * (engine.module(**inputs).sum().item() * 0 + 1)
        ),
        "a mask selects": lambda **inputs: (
            inputs["images_BCHW"][inputs["images_BCHW"] > 0].sum() * 0 + engine.module(**inputs)
        ),
        "a tensor of the CPU": lambda **inputs: engine.module(**inputs) + torch.zeros(MICRO_BATCH),
    }
    run = replace(run, task=tasks.get(wrong, run.task))
    batches = micro_batches(pairs(), (7,))
    if wrong != "unpinned":
        batches = [
            Batch(
                {name: x.pin_memory() for name, x in b.inputs.items()}, b.is_padding_B.pin_memory()
            )
            for b in batches
        ]
    try:
        train_step(run, not_charged(), 1, iter(batches))
    except RuntimeError as error:
        return str(error)
    return None


def main() -> None:
    """Prints what came of each as JSON."""
    fake_gpu.install()
    found: dict[str, Any] = {
        "loop on the CPU": loop(torch.device("cpu")),
        "loop": loop(fake_gpu.CUDA),
    }
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    for wrong, *_ in MISTAKES:
        notes_file().unlink(missing_ok=True)
        fake_gpu.in_micro_batches = False  # where the step before ended in an error
        found[wrong] = {"error": step_with(wrong), "notes": sorted(read(notes_file()))}
    print(json.dumps(found))


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = quiet_environment(FAKE_GPU_NOTES=str(tmp_path_factory.mktemp("walk") / "notes"))
    done = run_python(["-m", __name__], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_loop_of_ones_own_on_a_gpu(walk: dict[str, Any]) -> None:
    """Two starts with a checkpoint between them: the CPU's weights, and no micro-batch waits."""
    assert walk["loop"]["weights"] == pytest.approx(walk["loop on the CPU"]["weights"], rel=1e-5)
    of_weights = (
        "step",
        "wait",
        "copy to the CPU",
        "privacy/guards/fingerprints.py:fingerprint.<locals>.<listcomp>",
    )
    assert {tuple(note) for note in walk["loop"]["notes"]} - AT_ITS_END <= {of_weights}


@pytest.mark.parametrize(("mistake", "error", "noted"), MISTAKES)
def test_a_mistake_is_found(
    walk: dict[str, Any], mistake: str, error: str | None, noted: tuple[str, ...] | None
) -> None:
    found = walk[mistake]
    assert (found["error"] is None) if error is None else (error in found["error"])
    notes = {tuple(note) for note in found["notes"]} - AT_ITS_END - ONCE
    assert {note[:3] for note in notes} == ({noted} if noted is not None else set()), notes


def run(
    folder: Path, engine: str, ds_config: str, world_size: int, device: str
) -> tuple[dict[str, Tensor], Path]:
    """Two steps of the tiny recipe with held-out losses and checkpoints; returns the weights at the end, and the notes."""
    run_dir, log, notes, port = folder / "run", folder / "log", folder / "notes", str(free_port())
    folder.mkdir()
    notes.touch()
    settings = ["train.num_steps=2", "heldout.num_captions=1", "heldout.num_examples=4"]
    arguments = train_arguments(
        run_dir, "--engine", engine, *settings, ds_config=f"ds_configs/{ds_config}.json"
    )
    more = {
        "FAKE_GPU_NOTES": str(notes),
        "DS_ACCELERATOR": device,
        "LOCAL_RANK": "0",
    }  # each rank sees one GPU alone
    ranks = [
        Forked(
            [PLANTED, "repeatable", *arguments],
            stdout=log,
            env=rank_environment(rank, world_size, port) | more,
        )
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(280) for rank in ranks] == [0] * world_size, log.read_text()[-4000:]
    finally:
        for rank in ranks:
            kill_group(rank)
    assert ("cuda (NVIDIA H100 80GB HBM3" in log.read_text()) == (device == "cuda")
    assert "held-out caption loss after step 2" in log.read_text()
    checkpoint = open_checkpoint(run_dir)
    assert checkpoint.step == 2
    return {name: checkpoint.full("param", name) for name in checkpoint.shapes}, notes


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return run(tmp_path_factory.mktemp("cpu") / "local", "local", "zero1", 1, "cpu")[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "ds_config", "world_size"),
    [
        ("local", "zero1", 1),
        ("local", "zero1_bf16", 1),
        *(("deepspeed", f"zero{stage}", 2) for stage in (1, 2, 3)),
        ("deepspeed", "zero3_offload", 2),
        *(("fsdp", ds_config, 2) for ds_config in ("zero2", "zero3", "zero3_offload")),
        ("fairscale", "zero1", 2),
    ],
)
def test_a_run_on_a_gpu(
    tmp_path: Path, engine: str, ds_config: str, world_size: int, on_the_cpu: dict[str, Tensor]
) -> None:
    """A start, two steps, held-out losses and checkpoints: no micro-batch waits, and one rank gets the CPU's weights."""
    weights, notes = run(tmp_path / "gpu", engine, ds_config, world_size, "cuda")
    noted = read(notes) - AT_ITS_END - ENGINES.get(engine, set())
    if (engine, ds_config) == (
        "deepspeed",
        "zero3_offload",
    ):  # it fetches each layer's weights by a copy that waits
        noted = {note for note in noted if note[:3] != ("micro-batch", "wait", "copy to the GPU")}
    assert noted == set()
    if world_size == 1:
        tolerance = 1e-5 if ds_config == "zero1" else 1e-2
        for name, expected in on_the_cpu.items():
            torch.testing.assert_close(
                weights[name], expected, rtol=0, atol=tolerance * float(expected.abs().max() + 1)
            )


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["dpcap_base", "dpcap_large"])
def test_the_start_of_a_published_recipe_on_a_gpu(tmp_path: Path, recipe: str) -> None:
    """Everything that a start can be refused for, at the recipe's own model and precision; only data and plan are small."""
    smaller = [
        "data.shards=data/demo/train-*.tar",
        "data.num_examples=3000",
        "init.parts=none",
        "privacy.expected_batch_size=16",
        "privacy.target_delta=1e-4",
        "train.num_steps=2",
        "train.micro_batch_size=4",
        "schedule.warmup_steps=1",
    ]
    command = [
        PLANTED,
        "repeatable",
        "--dry_run",
        "--engine",
        "local",
        "--ds_config",
        "ds_configs/zero1_bf16.json",
        "--recipe",
        f"recipes/{recipe}.toml",
        "--run_dir",
        str(tmp_path / "run"),
        *smaller,
    ]
    device = {
        "FAKE_GPU_NOTES": str(tmp_path / "notes"),
        "DS_ACCELERATOR": "cuda",
        "LOCAL_RANK": "0",
    }
    done = run_python(command, timeout=3000, env=rank_environment(0, 1, str(free_port())) | device)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (
        "cuda (NVIDIA H100 80GB HBM3), bfloat16" in done.stdout
        and "clipping mode bookkeeping" in done.stdout
    )


if __name__ == "__main__":
    main()
