"""Runs a function on real ranks: one process each, gloo, a free port, an outer timeout."""

import contextlib
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from privacy.clipping import clipped_sum
from tests.processes import ROOT, Forked, kill_group, quiet_environment

__all__ = ["ROOT", "free_port", "quiet_environment", "run_ranks"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: str, **more: str) -> dict[str, str]:
    """Tells a process which rank it is, as a launcher does."""
    return quiet_environment(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        **more,
    )


def run_ranks(target: str, world_size: int, timeout: float = 180, **arguments: Any) -> list[Any]:
    """Calls `target` ("package.module:function") as function(device, **arguments) on every rank; returns their results."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), str(free_port())
        (folder / "arguments").write_bytes(pickle.dumps((arguments, clipped_sum.WRITTEN_ENTRIES)))
        logs = [folder / f"log-{rank}" for rank in range(world_size)]
        command = ["-m", "tests.distributed.ranks", target, name]
        deadline = time.monotonic() + timeout
        processes = [
            Forked(command, stdout=logs[rank], env=rank_environment(rank, world_size, port))
            for rank in range(world_size)
        ]
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in processes:
                    process.wait(max(deadline - time.monotonic(), 0))
        finally:
            for process in processes:
                kill_group(process)
        said = [
            f"rank {rank} ended with {process.returncode} (-9: killed after {timeout} s):\n{logs[rank].read_text()[-4000:]}"
            for rank, process in enumerate(processes)
            if process.returncode != 0
        ]
        assert not said, "\n".join(said)  # of all: the first one may have failed because of another
        return [
            pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]


def _main(target: str, folder: str) -> None:
    import torch

    from trainer.ranks import distributed
    from trainer.ranks.discovery import discover_ranks

    torch.set_num_threads(1)
    module, function = target.split(":")
    arguments, clipped_sum.WRITTEN_ENTRIES = pickle.loads((Path(folder) / "arguments").read_bytes())
    ranks = discover_ranks(os.environ)
    device = distributed.start(ranks)
    result = getattr(importlib.import_module(module), function)(device, **arguments)
    (Path(folder) / f"result-{ranks.rank}").write_bytes(pickle.dumps(result))
    distributed.finish(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
