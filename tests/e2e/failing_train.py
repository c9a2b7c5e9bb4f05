"""launch_scripts/train.py that fails at one point on one rank: failing_train.py POINT RANK STEP SECONDS TRAIN_ARGUMENTS...

POINT: `raise` in the middle of a step; `disk` full in a checkpoint; `after_intent` sleeps SECONDS between intent and noise;
`stuck` sleeps SECONDS before every micro-batch, and for ever before the intent, or where STEP is 0 in the start. RANK -1: every
rank.
Ranks are less patient with one whose connection broke than they are elsewhere; STILL_AFTER in the environment is how long, in
seconds, nobody may move.
"""

import errno
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from launch_scripts import train  # noqa: E402
from privacy.checkpoints import write as checkpoint_writer  # noqa: E402
from privacy.clipping import ClippedSum  # noqa: E402
from privacy.noise import SystemNoise  # noqa: E402
from privacy.run import run as loop  # noqa: E402
from privacy.step import step as one_step  # noqa: E402
from trainer.ranks import distributed, heartbeat  # noqa: E402
from trainer.run import start as run_start  # noqa: E402

given = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]  # the launcher puts it first
point, rank, when, seconds = given[0], int(given[1]), int(given[2]), float(given[3])
here = rank in (-1, int(os.environ.get("RANK", "0")))
step_now = 0
FOR_EVER = 3600.0


def in_step(*_: Any) -> None:
    """Before every micro-batch."""
    if point == "stuck":
        time.sleep(seconds)
    if point == "raise" and step_now == when:
        raise ArithmeticError("made to fail")


class SlowNoise(SystemNoise):
    """Sleeps after the intent."""

    def standard_normal(self, count: int, device: torch.device) -> torch.Tensor:
        if here and point == "after_intent" and step_now == when:
            time.sleep(seconds)
        return super().standard_normal(count, device)


def install() -> None:
    timing = functools.partial(heartbeat.Timing, suspect_after=2.0)
    if "STILL_AFTER" in os.environ:
        timing = functools.partial(timing, still_after=float(os.environ["STILL_AFTER"]))
        heartbeat.STILL_TIMES = 2
    distributed.Timing = timing  # type: ignore[misc,assignment]
    heartbeat.LINGER = 1.0
    step, add, intend, save = loop.train_step, ClippedSum.add_micro_batch, one_step._intend, checkpoint_writer.save_file
    share = run_start.require_shared

    def counted(run: Any, number: int, micro_batches: Any) -> Any:
        global step_now
        step_now = number
        return step(run, number, micro_batches)

    def before_adding(self: ClippedSum, *arguments: Any) -> Any:
        if here:
            in_step()
        return add(self, *arguments)

    def before_intending(*arguments: Any) -> Any:
        if here and step_now == when and point == "stuck":
            time.sleep(FOR_EVER)
        return intend(*arguments)

    def on_a_full_disk(*arguments: Any) -> Any:
        if here and point == "disk" and step_now == when:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(*arguments)

    def in_the_start(*arguments: Any) -> Any:
        if here and point == "stuck" and when == 0:
            time.sleep(FOR_EVER)
        return share(*arguments)

    run_start.require_shared = in_the_start
    loop.train_step, one_step._intend = counted, before_intending
    ClippedSum.add_micro_batch = before_adding  # type: ignore[method-assign]
    checkpoint_writer.save_file = on_a_full_disk


if __name__ == "__main__":
    install()
    train.main(given[4:], SlowNoise())
