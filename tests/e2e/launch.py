"""Starts the real command as a user would, and reads what it left behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from tests.distributed.ranks import free_port, rank_environment
from tests.processes import ROOT, Forked, kill_group, quiet_environment, run_python

RECIPE = "recipes/tiny.toml"
TRAIN = "launch_scripts/train.py"
PLANTED = "tests/e2e/planted_train.py"
"""Its first argument is what is planted."""


def train_arguments(
    run_dir: Path, *more: str, ds_config: str = "ds_configs/zero3.json", recipe: str = RECIPE
) -> list[str]:
    """The clipping mode is given, since the trial that chooses one takes a part of a small start."""
    if not any(option.startswith("privacy.clipping_mode") for option in more):
        more = ("privacy.clipping_mode=bookkeeping", *more)
    return ["--ds_config", ds_config, "--recipe", recipe, "--run_dir", str(run_dir), *more]


def launch(
    arguments: list[str],
    *,
    script: str = TRAIN,
    timeout: float = 240,
    launcher: Literal["deepspeed", "torchrun", "mpirun"] = "deepspeed",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """`deepspeed --num_gpus 2 SCRIPT ARGUMENTS`, or the same with another launcher."""
    port, programs = str(free_port()), Path(sys.executable).parent
    options = {
        "deepspeed": ["--num_gpus", "2", "--master_port", port],
        "torchrun": ["--nproc_per_node", "2", "--master_port", port],
        "mpirun": ["-n", "2", sys.executable],
    }
    if launcher == "mpirun":
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [str(programs / launcher), *options[launcher], script, *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=quiet_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        kill_group(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def alone(
    arguments: list[str], *, script: str = TRAIN, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same in one process, without a launcher."""
    return run_python([script, *arguments], timeout=timeout, env=quiet_environment(**environment))


def start_ranks(
    arguments: list[str], world_size: int, log: Path, *, script: str = TRAIN, **environment: str
) -> list[Forked]:
    """Two ranks without a launcher that would react to their death; output goes to `log`."""
    port = str(free_port())
    return [
        Forked(
            [script, *arguments],
            stdout=log,
            env=rank_environment(rank, world_size, port, **environment),
        )
        for rank in range(world_size)
    ]


def train_together(arguments: list[str], log: Path, world_size: int = 2) -> str:
    """Ranks without a launcher, to a good end; returns what they said."""
    ranks = start_ranks(arguments, world_size, log)
    try:
        codes = [rank.wait(240) for rank in ranks]
    finally:
        for rank in ranks:
            kill_group(rank)
    assert codes == [0] * world_size, log.read_text()[-4000:]
    return log.read_text()


def refused(arguments: list[str], code: int, *words: str) -> None:
    """One process ends with this code, and one line that holds these words."""
    result = alone(arguments)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == code, result.stderr + result.stdout
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], lines[0]


def ledger_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Parsed lines of the ledger; a torn one is {"type": "torn"}."""
    path, out = run_dir / "ledger.jsonl", []
    for line in filter(None, path.read_bytes().split(b"\n") if path.exists() else []):
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            out.append({"type": "torn"})
    return out


def count(run_dir: Path, kind: str) -> int:
    return sum(line["type"] == kind for line in ledger_lines(run_dir))
