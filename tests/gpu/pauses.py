"""`python -m tests.gpu.pauses DEVICE`: how long other threads stand still while a device starts and blocks compile; prints JSON.

A heartbeat is such a thread: one that stands still for 30 seconds would have its rank declared dead.
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable

import torch

from tests.gpu.sums import captioner, error_of, expected_sum, moved
from trainer.engines.blocks import compile_blocks, require_compiler
from trainer.errors import ConfigError


def longest_pause(work: Callable[[], object]) -> float:
    """The longest time between two ticks of a thread that wants to tick every hundredth of a second while this works."""
    ended, ticks = threading.Event(), [time.monotonic()]

    def tick() -> None:
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return max((b - a for a, b in itertools.pairwise(ticks)), default=0.0)


def main(device: torch.device) -> None:
    pauses: dict[str, float | str] = {}
    expected, bound = expected_sum(captioner(), torch.float32)
    made = captioner()

    def first() -> None:
        error_of(moved(made, device, torch.float32), bound, "bookkeeping", expected)

    def compiled() -> None:
        compile_blocks(made[0])
        first()

    pauses["first micro-batch"] = longest_pause(first)
    try:
        require_compiler(device)
    except ConfigError as error:
        pauses["compilation"] = str(error)
    else:
        pauses["compilation"] = longest_pause(compiled)
    print(json.dumps(pauses))


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
