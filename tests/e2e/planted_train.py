"""launch_scripts/train.py with something planted: planted_train.py PLANT TRAIN_ARGUMENTS..., where PLANT is one of

* `POINT:COUNT`: it dies by SIGKILL at the COUNT-th passage of a point of `POINTS`, on the rank that passes it. At the point
  `full_disk` it lives on: its COUNT-th write to the ledger finds no space.
* `raise:RANK:STEP` in the middle of a step; `disk:RANK:STEP` is full in a checkpoint; `after_intent:RANK:STEP:SECONDS` sleeps
  between intent and noise; `stuck:RANK:STEP:SECONDS` sleeps before every micro-batch, and for ever before the intent, or where
  STEP is 0 in the start; `patience` fails nowhere. With all of them ranks are less patient with one whose connection broke than
  they are elsewhere; STILL_AFTER in the environment is how long, in seconds, nobody may move.
* `repeatable`: coins and noise are fixed, so that two runs can be compared; with DS_ACCELERATOR=cuda it runs on a GPU made of
  main memory (tests/fake_gpu.py).
* `alike`: clock, number of the process and seeds are those of every other such start.
* `nothing`.

The noise that is drawn is noted in $NOISE_LOG, where there is one: a line per draw.
"""

import errno
import functools
import hashlib
import itertools
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from launch_scripts import train  # noqa: E402
from privacy.checkpoints import write as checkpoint_writer  # noqa: E402
from privacy.clipping import ClippedSum  # noqa: E402
from privacy.files import durable  # noqa: E402
from privacy.ledger import chain  # noqa: E402
from privacy.ledger.attempts import MarkedLedger  # noqa: E402
from privacy.ledger.chain import AppendOnly  # noqa: E402
from privacy.ledger.ledger import Ledger  # noqa: E402
from privacy.noise.source import SystemNoise  # noqa: E402
from privacy.run import run as loop  # noqa: E402
from privacy.step import step as one_step  # noqa: E402
from trainer.ranks import distributed, heartbeat  # noqa: E402
from trainer.run import start as run_start  # noqa: E402

FOR_EVER = 3600.0


class RecordingNoise(SystemNoise):
    """The real source; the record is a hash of each draw, written before the draw is used."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> torch.Tensor:
        draw = super().rounded_normal(deviation, count, device)
        if "NOISE_LOG" in os.environ:
            with open(os.environ["NOISE_LOG"], "a") as file:
                file.write(hashlib.sha256(draw.cpu().numpy().tobytes()).hexdigest() + "\n")
        return draw


class SeededNoise:
    """No noise for anything but a comparison of two runs with a fixed key and nonce: equal data then give equal runs."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> torch.Tensor:
        normals = torch.randn(count, dtype=torch.float64, generator=self._generator)
        return normals.mul_(deviation).round_().long().to(device)


class DrawnAndReplaced(SystemNoise):
    """Noise that is drawn as always; then the values of `SeededNoise` are written over it."""

    def __init__(self) -> None:
        self._same = SeededNoise()

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> torch.Tensor:
        drawn = super().rounded_normal(deviation, count, device)
        same = self._same.rounded_normal(deviation, count, torch.device("cpu"))
        return drawn.copy_(same.pin_memory() if drawn.is_cuda else same, non_blocking=True)


def fixed_coins() -> Callable[..., bytes]:
    """`secrets.token_bytes` of a run that can be compared with another: the same keys and nonces in the same order."""
    numbers = itertools.count()
    return lambda count=32: hashlib.sha256(str(next(numbers)).encode()).digest()[:count]


def as_in_other_starts() -> None:
    """From now on nothing but the operating system's entropy tells this start from another one on the same files."""
    began, now = time.monotonic(), time.monotonic
    time.time = lambda: 2e9 + now() - began
    os.getpid = lambda: 4711
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (what an old library draws from)
    torch.manual_seed(0)


POINTS: dict[str, tuple[Any, str]] = {
    "before_intent": (Ledger, "intent"),
    "before_mark": (MarkedLedger, "mark"),
    "before_noise": (RecordingNoise, "rounded_normal"),
    "before_done": (Ledger, "done"),
    "in_record": (MarkedLedger, "note"),
    "in_ledger_write": (AppendOnly, "append"),
    "in_checkpoint": (checkpoint_writer, "_publish"),
}


def before(owner: Any, name: str, happens: Callable[..., object]) -> None:
    """From now on `happens` is called, with the same arguments, before the function of this name."""
    whole = getattr(owner, name)

    def planted(*arguments: Any, **more: Any) -> Any:
        happens(*arguments)
        return whole(*arguments, **more)

    setattr(owner, name, planted)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def crash(point: str, count: int) -> None:
    passages = itertools.count(1)

    def die(*arguments: Any) -> None:
        if next(passages) != count:
            return
        if point == "full_disk":
            no_space()
        if point == "in_ledger_write":
            file, data = arguments
            os.write(
                file._descriptor, data[: count * 7919 % len(data)]
            )  # torn anywhere, the newline missing
            os.fsync(file._descriptor)
        if point == "in_record":
            with arguments[0]._members.open("ab") as file:
                file.write(b'{"seq":9,"hash":"')
        os.kill(os.getpid(), signal.SIGKILL)

    if point == "full_disk":
        chain.durable = SimpleNamespace(**vars(durable))  # type: ignore[assignment]  # of the ledger alone
    before(*({"full_disk": (chain.durable, "write")} | POINTS)[point], die)


def fail(point: str, rank: int = 0, when: int = 0, seconds: float = 0) -> None:
    timing = functools.partial(heartbeat.Timing, suspect_after=2.0)
    if "STILL_AFTER" in os.environ:
        timing = functools.partial(timing, still_after=float(os.environ["STILL_AFTER"]))
        heartbeat.STILL_TIMES = 2
    distributed.Timing = timing  # type: ignore[misc,assignment]
    heartbeat.LINGER = 1.0
    steps = [0]
    before(loop, "train_step", lambda mechanism, charge, step, batches: steps.append(step))

    def then(happens: Callable[[], object]) -> Callable[..., None]:
        def in_its_step(*_: Any) -> None:
            if steps[-1] == when:
                happens()

        return in_its_step

    def raises() -> None:
        raise ArithmeticError("made to fail")

    plants: dict[str, list[tuple[Any, str, Callable[..., object]]]] = {
        "patience": [],
        "raise": [(ClippedSum, "add_micro_batch", then(raises))],
        "disk": [(checkpoint_writer, "save_file", then(no_space))],
        "after_intent": [(RecordingNoise, "rounded_normal", then(lambda: time.sleep(seconds)))],
        "stuck": [
            (ClippedSum, "add_micro_batch", lambda *_: time.sleep(seconds)),
            (one_step, "_intend", then(lambda: time.sleep(FOR_EVER))),
            (run_start, "require_shared", then(lambda: time.sleep(FOR_EVER))),
        ],
    }
    if rank == int(os.environ.get("RANK", "0")):
        for plant in plants[point]:
            before(*plant)


if __name__ == "__main__":
    point, *numbers = sys.argv[1].split(":")
    if point == "repeatable":
        secrets.token_bytes = fixed_coins()
        if os.environ["DS_ACCELERATOR"] == "cuda":
            from tests import fake_gpu

            fake_gpu.install()
    elif point == "full_disk" or point in POINTS:
        crash(point, int(numbers[0]))
    elif point == "alike":
        as_in_other_starts()
    elif point != "nothing":
        fail(point, *map(float, numbers))  # type: ignore[arg-type]
    train.main(sys.argv[2:], DrawnAndReplaced() if point == "repeatable" else RecordingNoise())
