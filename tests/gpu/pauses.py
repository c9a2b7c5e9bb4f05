"""`python -m tests.gpu.pauses DEVICE`: how long other threads stand still while a device starts and blocks compile; prints JSON.

A heartbeat is such a thread: one that stands still for 30 seconds would have its rank declared dead.
"""

import json
import sys
import threading
import time

import torch

from tests.gpu.sums import captioner, error_of, expected_sum, moved
from trainer.engines.blocks import compile_blocks, require_compiler
from trainer.errors import ConfigError


class Ticks:
    """Notes the longest time between two ticks of a thread that wants to tick every hundredth of a second."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(0.01):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    def __enter__(self) -> "Ticks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def main(device: torch.device) -> None:
    pauses: dict[str, float | str] = {}
    expected, bound = expected_sum(captioner(), torch.float32)
    with Ticks() as ticks:
        model, inputs = moved(captioner(), device, torch.float32)
        error_of((model, inputs), bound, "bookkeeping", expected)
    pauses["first micro-batch"] = ticks.longest
    try:
        require_compiler(device)
    except ConfigError as error:
        pauses["compilation"] = str(error)
    else:
        with Ticks() as ticks:
            compile_blocks(model)
            error_of((model, inputs), bound, "bookkeeping", expected)
        pauses["compilation"] = ticks.longest
    print(json.dumps(pauses))


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
