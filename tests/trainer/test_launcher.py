"""Which processes above a rank are its launcher, and when one is gone. Whole runs are in tests/e2e/test_launches.py."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.ranks.launcher import Process, launcher_name, process_identity, watch

PYTHON = "/env/bin/python3.11"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/env/bin/python /env/bin/deepspeed --num_gpus 2 train.py", "deepspeed"),
        (f"{PYTHON} -u -m deepspeed.launcher.launch --world_info=x -- train.py", "deepspeed.launcher.launch"),
        (f"{PYTHON} -W ignore -X dev -Im deepspeed.launcher.runner train.py", "deepspeed.launcher.runner"),
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
    assert launcher_name(command.split()) == name


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_the_loss_of_any_of_them_is_noticed_once(child: subprocess.Popen[bytes]) -> None:
    """Before anybody waits for the process that has ended."""
    stops: list[float] = []
    watched = [Process(process_identity(pid), "one") for pid in (os.getpid(), child.pid)]
    watch(watched, speaks=False, stop=lambda: stops.append(time.monotonic()))
    time.sleep(1.2)
    assert not stops
    child.kill()
    deadline = time.monotonic() + 10
    while not stops:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1.2)
    assert len(stops) == 1


# Stands for a launcher: it runs the command that follows it and waits.
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))\n"
RANK = "from trainer.ranks.launcher import launcher_processes; print([p.name for p in launcher_processes()])"


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (["torchrun", "deepspeed"], ["deepspeed", "torchrun"]),
        (["deepspeed", "shell", "torchrun"], ["torchrun"]),
        (["deepspeed", "shell"], []),
        ([], []),
    ],
)
def test_only_an_unbroken_line_counts(tmp_path: Path, between: list[str], expected: list[str]) -> None:
    """Outermost first; `shell` is no launcher. What stands above the test is none either."""
    command = [sys.executable, "-c", RANK]
    for name in reversed(between):
        (tmp_path / name).write_text(LAUNCHER)
        command = [sys.executable, str(tmp_path / name), *command]
    said = subprocess.run([sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout.strip() == str(expected)


def test_a_reader_that_ends_is_noticed_and_printing_goes_on() -> None:
    script = (
        "import os, threading, time\n"
        "from trainer.ranks.launcher import watch\n"
        "watch((), speaks=True, stop=threading.Timer(0.3, os._exit, (7,)).start)\n"
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
    time.sleep(1.2)
    assert process.poll() is None, "somebody could read it"
    process.stdout.close()
    assert process.wait(20) == 7
    assert process.stderr.read() == "the launcher is gone (console): the run stops\n"
    process.stderr.close()


def test_without_a_stop_of_its_own_it_is_the_signal_of_schedulers() -> None:
    """In a process whose main thread runs no Python."""
    script = (
        "import os, signal, socket, time\n"
        "from trainer.ranks.launcher import Process, watch\n"
        "from trainer.loop.stopping import end_on_signals\n"
        "end_on_signals(lambda: os._exit(7))\n"
        "watch((Process('elsewhere pid:[1] 1 1', 'nobody'),), speaks=True)\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7 and signal.SIGUSR1.name not in done.stderr, done.stderr
