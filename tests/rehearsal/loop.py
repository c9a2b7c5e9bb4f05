"""`PrivateLoop` over 5 million items with logical batches of 1,310,720: two steps, the second after a new start.

The loop runs in a process of its own for each step, as a program that is started again does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from privacy.loop import PrivateLoop, floats, integers
from tests.rehearsal.part import GIB, ROOT, Part, command, lap, peak_bytes

NUM_ITEMS, BATCH, MICRO_BATCH = 5_000_000, 1_310_720, 4096
WIDTH, NUM_STEPS = 8, 2


class MadeItems(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Items that are computed from their number: nothing is kept in memory or read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.bits = torch.arange(WIDTH)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = ((number * 2654435761 >> self.bits) & 1).float() - 0.5
        return x, torch.tensor(number & 1)


def rehearse(part: Part, num_items: int = NUM_ITEMS, batch: int = BATCH) -> None:
    """Takes one step, starts again for the second, and has the run verified."""
    run_dir = part.folder / "run"
    for step in range(1, NUM_STEPS + 1):
        part.stage(
            f"start and step {step}",
            lambda step=step: in_own_process(run_dir, num_items, batch, step),
        )
    verify = (sys.executable, "-I", run_dir / "verify.py", run_dir)
    part.stage("verify.py", lambda: {"verdict": command(*verify).strip().splitlines()[-1]})
    part.ran(expected_batch_size=batch)


def in_own_process(run_dir: Path, num_items: int, batch: int, step: int) -> dict[str, Any]:
    """Starts or resumes the loop in a new process, which ends after `step`."""
    code = (
        "import json, sys; from pathlib import Path; from tests.rehearsal import loop; "
        "print(json.dumps(loop.take_step(Path(sys.argv[1]), *map(int, sys.argv[2:]))))"
    )
    words = [sys.executable, "-c", code, *map(str, (run_dir, num_items, batch, step))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    measured: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return measured


def take_step(run_dir: Path, num_items: int, batch: int, step: int) -> dict[str, Any]:
    """Opens the loop and takes one step."""
    measured: dict[str, Any] = {}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2))
    with lap(measured, "start"):
        loop = PrivateLoop(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            MadeItems(num_items),
            run_dir=run_dir,
            example=(floats(WIDTH), integers(2)),
            loss=lambda x, y: F.cross_entropy(model(x), y, reduction="none"),
            expected_batch_size=batch,
            num_steps=NUM_STEPS,
            noise_multiplier=1.0,
            micro_batch_size=MICRO_BATCH,
            data_version="items computed from their number",
            starts_from="public",
        )
    with loop:
        with lap(measured, "step"):
            taken = next(iter(loop))
        assert taken.number == step
        drawn = int(taken.private["num_examples"].inside())
        assert abs(drawn - batch) < 8 * batch**0.5
        if step == NUM_STEPS:
            assert [more.number for more in loop] == []
    return {"examples": drawn, **measured, "peak_gib_of_the_process": round(peak_bytes() / GIB, 3)}
