"""Runs a function on real ranks: one process each, gloo, a free port, an outer timeout."""

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def quiet_environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def run_ranks(target: str, world_size: int, timeout: float = 180, **arguments: Any) -> list[Any]:
    """Calls `target` ("package.module:function") as function(device, **arguments) on every rank; returns their results."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "arguments").write_bytes(pickle.dumps(arguments))
        port = str(free_port())
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.ranks", target, folder],
                cwd=ROOT,
                env=quiet_environment(
                    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{outputs[rank][-4000:]}"
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _main(target: str, folder: str) -> None:
    import torch

    from trainer.ranks import distributed
    from trainer.ranks.discovery import discover_ranks

    torch.set_num_threads(1)
    module, function = target.split(":")
    arguments = pickle.loads((Path(folder) / "arguments").read_bytes())
    ranks = discover_ranks(os.environ)
    device = distributed.start(ranks)
    result = getattr(importlib.import_module(module), function)(device, **arguments)
    (Path(folder) / f"result-{ranks.rank}").write_bytes(pickle.dumps(result))
    distributed.finish(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
