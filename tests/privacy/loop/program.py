"""A program of somebody who has a loop of their own: python -m tests.privacy.loop.program RUN_DIR [--accelerate] [--kill_at N]

Runs in one process, or in many that torchrun (or a test) starts. Prints one JSON object at its end.
"""

import argparse
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from privacy.ledger import durable
from privacy.loop import PrivateLoop, floats, integers
from tests.privacy.loop.own import D, K, cross_entropy, net, rows, weights


def kill_at(number: int) -> None:
    """SIGKILL at the number-th write, flush, rename or removal of the file layer, before it happens."""
    counter = itertools.count(1)
    for name in ("write", "fsync", "rename", "link", "unlink", "fsync_directory"):
        real = getattr(durable, name)

        def counted(*arguments: Any, real: Any = real) -> Any:
            if next(counter) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        setattr(durable, name, counted)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--accelerate", action="store_true")
    parser.add_argument("--kill_at", type=int)
    parser.add_argument("--uneven", action="store_true", help="rank 1 has another number of items")
    options = parser.parse_args()
    if options.kill_at is not None:
        kill_at(options.kill_at)
    if options.accelerate:
        from accelerate import Accelerator

        device = Accelerator(cpu=True).device
    else:
        device = torch.device("cpu")
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = net(seed=rank).to(device)  # ranks begin with different weights: those of rank 0 count
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = rows(60 + rank * options.uneven)
    with PrivateLoop(
        model, optimizer, data, loss=cross_entropy(model), example=(floats(D), integers(K)), run_dir=options.run_dir,
        expected_batch_size=15, num_steps=12, noise_multiplier=4.0, micro_batch_size=4, save_every=2,
    ) as loop:  # fmt: skip
        for step in loop:
            print(f"step {step.number}", flush=True)
    mine = {"rank": rank, "epsilon": loop.epsilon, "delta": loop.delta, "weights": weights(model).tolist()}
    print(json.dumps(mine), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # interpreter shutdown after gloo traffic aborts now and then


if __name__ == "__main__":
    main()
