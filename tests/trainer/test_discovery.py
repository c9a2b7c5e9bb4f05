"""Who am I, by each launcher's environment; which processes above a rank are its launcher, and when one is gone.

Talking to other ranks is in tests/distributed, whole runs that lose their launcher in tests/e2e/test_launches.py.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from privacy.ranks import collectives
from trainer.errors import ConfigError
from trainer.ranks import discovery
from trainer.ranks.discovery import (
    Process,
    Ranks,
    discover_ranks,
    launcher_name,
    process_identity,
    watch,
)

ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
LAUNCHERS = {
    "torchrun": {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "8",
    },
    "mvapich": {
        "MV2_COMM_WORLD_RANK": "5",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "8",
    },
    "mpich": {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"},
    "slurm": {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"},
}
CLAIMS = {
    "torchrun": "RANK=5 and WORLD_SIZE=8",
    "openmpi": "OMPI_COMM_WORLD_RANK=5 and OMPI_COMM_WORLD_SIZE=8",
    "mvapich": "MV2_COMM_WORLD_RANK=5 and MV2_COMM_WORLD_SIZE=8",
    "mpich": "PMI_RANK=5 and PMI_SIZE=8",
    "slurm": "SLURM_PROCID=5 and SLURM_NTASKS=8",
}
SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
"""Slurm sets its variables in an allocation's shell too, but only srun starts ranks."""
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
STEP = {
    **LAUNCHERS["slurm"],
    "SLURM_STEP_NODELIST": "node[07-08,11],other",
    "SLURM_JOB_ID": "123456",
}
FIFTH = Ranks(rank=5, local_rank=1, world_size=8, address="node0", port=1234)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        *(({"HOME": "/root", **variables, **ADDRESS}, FIFTH) for variables in LAUNCHERS.values()),
        *(
            ({**v, "MASTER_ADDR": "node0"}, Ranks(5, 1, 8, "node0", 29500))
            for v in LAUNCHERS.values()
        ),
        ({}, Ranks(0, 0, 1, "127.0.0.1", 29500)),
        ({"WORLD_SIZE": "8"}, Ranks()),  # half of a launcher is none
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, Ranks()),  # one rank needs no address
        (
            {"RANK": "3", "WORLD_SIZE": "4", **ADDRESS},
            Ranks(3, 3, 4, "node0", 1234),
        ),  # as if all were on one machine
        ({**SHELL, "SLURM_NTASKS": "8"}, Ranks()),
        # The inner launcher wins. In an interactive step every rank inherits the variables of the shell.
        ({**SHELL, **LAUNCHERS["torchrun"], **ADDRESS}, FIFTH),
        ({**SHELL, **LAUNCHERS["openmpi"], **ADDRESS}, FIFTH),
        ({**SHELL, "SLURM_STEP_ID": "0", **PMI, **ADDRESS}, Ranks(5, 5, 8, "node0", 1234)),
        ({**LAUNCHERS["slurm"], **PMI, **ADDRESS}, FIFTH),  # srun with PMI knows the local rank
        # Slurm says where to meet; two jobs on one node take different ports.
        (STEP, Ranks(5, 1, 8, "node07", 23456)),
        ({**STEP, **ADDRESS}, FIFTH),
        *(
            ({**STEP, "SLURM_STEP_NODELIST": nodes}, Ranks(5, 1, 8, first, 23456))
            for nodes, first in (
                ("node0,node1", "node0"),
                ("node[03,05-07].site", "node03.site"),
                ("a-[9-11],b", "a-9"),
                ("rack[1-2]node[04-07,9],login", "rack1node04"),
            )
        ),
    ],
)
def test_ranks_are_those_that_the_launcher_says(environment: dict[str, str], found: Ranks) -> None:
    assert discover_ranks(environment) == found
    assert found.is_main == (found.rank == 0)


TORCHRUN = {**LAUNCHERS["torchrun"], **ADDRESS}


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        *(
            (LAUNCHERS[name], f"{claim}, but MASTER_ADDR is not set: to train alone, unset them")
            for name, claim in CLAIMS.items()
        ),
        *(
            ({**variables, **ADDRESS, name: value}, name)
            for variables in LAUNCHERS.values()
            for name in list(variables)[:3]
            for value in ("", "x", "1.5")
        ),
        *(({**TORCHRUN, "RANK": rank}, "no such rank") for rank in ("8", "-1")),
        *(
            ({**TORCHRUN, "MASTER_ADDR": a}, "MASTER_ADDR is")
            for a in ("a b", "=1!\f\f<j", "http://host", "x\ny")
        ),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "http"),
    ],
)
def test_garbage_is_refused_by_name(environment: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        discover_ranks(environment)
    assert caught.value.exit_code == 2


def test_nothing_is_used_after_an_error_of_nccl(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by a private name of torch. Gloo raises by itself and is not asked."""
    group, gpu = dist.group.WORLD, torch.device("cuda")
    assert group is not None and group._get_backend(one_rank) is not None
    collectives.require_sound(gpu)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    for error in (ErrorType.SUCCESS, ErrorType.COMM_ERROR, ErrorType.TIMEOUT):
        answer = SimpleNamespace(get_error=lambda error=error: error)
        monkeypatch.setattr(type(group), "_get_backend", lambda self, device, answer=answer: answer)
        expected = pytest.raises(RuntimeError, match=f"NCCL reports {error.name}: .*are not used")
        with contextlib.nullcontext() if error == ErrorType.SUCCESS else expected:
            collectives.require_sound(gpu)


PYTHON = "/env/bin/python3.11"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/env/bin/python /env/bin/deepspeed --num_gpus 2 train.py", "deepspeed"),
        (
            f"{PYTHON} -u -m deepspeed.launcher.launch --world_info=x -- train.py",
            "deepspeed.launcher.launch",
        ),
        (
            f"{PYTHON} -W ignore -X dev -Im deepspeed.launcher.runner train.py",
            "deepspeed.launcher.runner",
        ),
        (f"{PYTHON} /env/bin/torchrun --nproc_per_node 2 train.py", "torchrun"),
        (f"{PYTHON} -m torch.distributed.run train.py", "torch.distributed.run"),
        ("mpirun -n 2 python train.py", "mpirun"),
        ("/usr/bin/mpirun.openmpi -n 2 python train.py", "mpirun"),
        ("/env/bin/mpiexec.hydra -n 2 python train.py", "mpiexec"),
        ("/env/bin/hydra_pmi_proxy --control-port node1:1", "hydra_pmi_proxy"),
        ("slurmstepd: [7.0]", "slurmstepd"),
        ("/bin/bash -c deepspeed train.py", None),
        ("nohup deepspeed train.py", None),
        (f"{PYTHON} launch_scripts/train.py --launcher deepspeed", None),
        (f"{PYTHON} -u -m pytest torchrun", None),
        (f"{PYTHON} -m other deepspeed", None),
        ("sshd: me@notty", None),
        (PYTHON, None),
        ("", None),
    ],
)
def test_what_is_a_launcher(command: str, name: str | None) -> None:
    assert launcher_name(command.replace(" ", "\0")) == name


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_the_loss_of_any_of_them_is_noticed_once(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anybody waits for the process that has ended."""
    monkeypatch.setattr(discovery, "INTERVAL", 0.1)
    stops: list[float] = []
    watched = [Process(process_identity(pid), "one") for pid in (os.getpid(), child.pid)]
    watch(watched, speaks=False, stop=lambda: stops.append(time.monotonic()))
    time.sleep(0.3)
    assert not stops
    child.kill()
    deadline = time.monotonic() + 10
    while not stops:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(stops) == 1


# Stands for a launcher: it runs the command that follows it and waits.
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))\n"
RANK = "from trainer.ranks.discovery import launcher_processes; print([p.name for p in launcher_processes()])"


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (["torchrun", "deepspeed"], ["deepspeed", "torchrun"]),
        (["deepspeed", "shell", "torchrun"], ["torchrun"]),
        (["deepspeed", "shell"], []),
        ([], []),
    ],
)
def test_only_an_unbroken_line_counts(
    tmp_path: Path, between: list[str], expected: list[str]
) -> None:
    """Outermost first; `shell` is no launcher. What stands above the test is none either."""
    command = [sys.executable, "-c", RANK]
    for name in reversed(between):
        (tmp_path / name).write_text(LAUNCHER)
        command = [sys.executable, str(tmp_path / name), *command]
    said = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    assert said.stdout.strip() == str(expected)


def test_a_reader_that_ends_is_noticed_and_printing_goes_on() -> None:
    script = (
        "import os, threading, time\n"
        "from trainer.ranks import discovery\n"
        "discovery.INTERVAL = 0.1\n"
        "discovery.watch((), speaks=True, stop=threading.Timer(0.3, os._exit, (7,)).start)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    print('step', flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.4)
    assert process.poll() is None, "somebody could read it"
    process.stdout.close()
    assert process.wait(20) == 7
    assert process.stderr.read() == "the launcher is gone (console): the run stops\n"
    process.stderr.close()
