"""What slurm.sbatch does when a node is lost, against stand-ins for Slurm's commands (test_slurm.py has a real one)."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT

BATCH = "launch_scripts/cluster/slurm.sbatch"
WAIT = 1
SLURM = {
    # Ranks end with $CODE; the node that is gone does not answer `srun --overlap`.
    "srun": 'case "$*" in *--overlap*) exit 1 ;; esac\nexit "$CODE"',
    # Slurm ends the script of a job that goes back to the queue.
    "scontrol": 'case "$*" in *show*) echo "JobId=7 Requeue=1 Restarts=$RESTARTS BatchFlag=1"; exit ;; esac\n'
    '[ "$REQUEUE" = works ] || exit 1\nkill -TERM "$PPID"',
    "squeue": "echo COMPLETING",
}


def batch(
    folder: Path, *script: str, **environment: str
) -> tuple[int, str, list[tuple[str, float]]]:
    """Exit code, what was said, and (command, time) of each call of a stand-in."""
    script = script or (
        BATCH,
        "--ds_config",
        "ds_configs/zero3.json",
        "--run_dir",
        str(folder / "run"),
    )
    calls = folder / "calls"
    for name, body in SLURM.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\necho "$(date +%s.%N) {name} $*" >> "{calls}"\n{body}\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", *script],
        cwd=ROOT,
        timeout=60,
        env={
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": "/bin/true",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "NODE_LOSS_SECONDS": str(WAIT),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    seen = [line.split(" ", 1) for line in calls.read_text().splitlines()]
    return (
        done.returncode,
        done.stdout + done.stderr,
        [(command, float(when)) for when, command in seen],
    )


@pytest.mark.parametrize("code", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_a_lost_node_that_slurm_does_not_notice(tmp_path: Path, code: str) -> None:
    """The script waits as long as it is told, then puts the job back by itself; also where a host did not come up (2)."""
    ended, said, calls = batch(tmp_path, CODE=code, REQUEUE="works")
    assert ended == -signal.SIGTERM, said
    assert "a node does not answer" in said and "a node was lost; back to the queue" in said
    train, *_, probe, requeue = calls
    assert "launch_scripts/train.py" in train[0] and "--overlap" in probe[0]
    assert requeue[0] == "scontrol requeue 7" and requeue[1] - probe[1] >= WAIT


@pytest.mark.parametrize("restarts", ["2", "3"])
def test_a_job_that_does_not_go_back(tmp_path: Path, restarts: str) -> None:
    """It cannot; or Slurm was faster and has requeued it, while the processes of this start are still ending."""
    more = {"SLURM_RESTART_COUNT": "2", "RESTARTS": restarts}
    ended, said, _ = batch(tmp_path, CODE="1", REQUEUE="fails", **more)
    assert ended == 1 and ("could not be requeued; submit the same command again" in said) == (
        restarts == "2"
    )


def test_a_task_of_an_array_takes_no_other_task_back_to_the_queue(tmp_path: Path) -> None:
    """The last task has the number of the array, and `scontrol requeue NUMBER` would end the runs of all the others."""
    more = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    _, said, calls = batch(tmp_path, CODE="7", REQUEUE="works", **more)
    assert calls[-1][0] == "scontrol requeue 7_3", said


def test_a_task_of_an_array_trains_its_line(tmp_path: Path) -> None:
    """Comments and empty lines do not count, and words are split as a shell would."""
    points, array = tmp_path / "points.txt", "launch_scripts/cluster/slurm_array.sbatch"
    points.write_text(
        "# two runs\noptimizer.peak_lr=1e-3\n\noptimizer.peak_lr=2e-3 'data.shards=a b/*.tar'\n"
    )
    words = (array, str(points), str(tmp_path / "sweep"), "--ds_config", "ds_configs/zero1.json")
    ended, said, calls = batch(
        tmp_path, *words, CODE="0", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2"
    )
    assert ended == 0, said
    train = f"--run_dir {tmp_path}/sweep/2 --ds_config ds_configs/zero1.json optimizer.peak_lr=2e-3 data.shards=a b/*.tar"
    assert calls[0][0].endswith(train)
    ended, said, _ = batch(
        tmp_path, *words, CODE="0", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3"
    )
    assert ended == 2 and "has no line 3" in said


def test_contract_12_the_console_of_a_job_is_for_its_owner_alone(tmp_path: Path) -> None:
    log = tmp_path / "auditable-dp-7.log"
    with log.open("w") as console:
        log.chmod(0o644)
        environment = {**os.environ, "SLURM_JOB_ID": "7"}
        subprocess.run(
            ["bash", BATCH], cwd=ROOT, env=environment, stdout=console, stderr=console, check=False
        )
    assert "give --run_dir" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
