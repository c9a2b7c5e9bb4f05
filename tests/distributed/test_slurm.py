"""Batch jobs on a real Slurm: preempted, out of time, a node lost; the ledger stays whole and charges every attempt."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from privacy.ledger.records import read_ledger
from tests.e2e.launch import TRAIN, count, ledger_lines, train_arguments
from tests.hosts.hosts import network, wait_until, why_not
from tests.hosts.slurm import PROGRAMS, Slurm
from tests.privacy.ledger_epsilon import recompute

BATCH = "launch_scripts/cluster/slurm.sbatch"
WITHIN = 240
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = why_not(*PROGRAMS)
    if reason:
        pytest.skip(reason)
    with network(tmp_path_factory.mktemp("slurm"), "head", "node1", "node2", "node3") as hosts:
        made = Slurm(hosts, "head")
        made.start()
        yield made


def arguments(run_dir: Path, steps: int, *more: str) -> list[str]:
    return train_arguments(run_dir, f"train.num_steps={steps}", "heldout.num_captions=0", *more)


def submit(slurm: Slurm, log: Path, *command: str) -> str:
    return slurm.submit("--nodes=2", f"--output={log}", *command)


def done_beyond(slurm: Slurm, number: str, run_dir: Path, wanted: int, log: Path) -> None:
    """Waits until this number of steps is done."""
    wait_until(
        lambda: count(run_dir, "done") >= wanted or slurm.has_ended(number),
        f"{wanted} steps: {slurm.job(number)}\n{text(log)[-3000:]}",
        within=WITHIN,
    )
    assert not slurm.has_ended(number), text(log)


def ends(slurm: Slurm, number: str, log: Path, within: float = WITHIN) -> str:
    """The state that the job ends in."""
    wait_until(
        lambda: slurm.has_ended(number),
        f"the end: {slurm.job(number)}\n{text(log)[-3000:]}",
        within=within,
        every=0.3,
    )
    return slurm.state(number)


def text(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def is_whole(run_dir: Path, steps: int) -> None:
    """Every planned step is done exactly once; the ledger is one chain, and its epsilon charges every intent."""
    done = [line["step"] for line in ledger_lines(run_dir) if line["type"] == "done"]
    assert sorted(set(done)) == list(range(1, steps + 1))
    state = read_ledger(run_dir / "ledger.jsonl")
    charged, epsilon = recompute(run_dir / "ledger.jsonl")
    assert (
        state.closed == "finished"
        and state.num_charged == charged == count(run_dir, "intent") >= steps
    )
    manifest = json.loads(
        (run_dir / "checkpoints" / f"step-{steps:08d}" / "manifest.json").read_text()
    )
    assert manifest["formal_guarantee"] is True
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    printed = max(line["privacy/epsilon"] for line in metrics if "privacy/epsilon" in line)
    assert epsilon * 0.9999 <= printed <= epsilon * 1.01, (
        "what is printed while training is rounded up"
    )


def nodes_of(slurm: Slurm, number: str) -> list[str]:
    return slurm.run("scontrol", "show", "hostnames", slurm.job(number)["NodeList"]).split()


def test_preempted_twice_and_a_node_lost_once(slurm: Slurm, tmp_path: Path) -> None:
    steps, log, run_dir = 80, tmp_path / "job.log", tmp_path / "run"
    number = submit(slurm, log, BATCH, *arguments(run_dir, steps))
    for preemption in (1, 2):
        done_beyond(slurm, number, run_dir, count(run_dir, "done") + 3, log)
        urgent = slurm.submit(
            "--partition=urgent", "--nodes=3", "--output=/dev/null", "--wrap", "sleep 0.2"
        )
        wait_until(
            lambda urgent=urgent: slurm.has_ended(urgent),
            f"preemption\n{text(log)[-3000:]}",
            within=60,
        )
        assert text(log).count("stopped on request") >= preemption, text(log)
        assert count(run_dir, "intent") == count(run_dir, "done"), (
            "a preempted run saves: nothing is repeated"
        )

    done_beyond(slurm, number, run_dir, count(run_dir, "done") + 3, log)
    lost = next(
        h
        for h in slurm.nodes
        if h.name in nodes_of(slurm, number) and h.name != slurm.job(number)["BatchHost"]
    )
    lost.kill()
    wait_until(
        lambda: slurm.job(number)["Restarts"] == "3",
        f"the node to be missed\n{text(log)[-3000:]}",
        within=90,
    )
    done_beyond(slurm, number, run_dir, count(run_dir, "done") + 1, log)
    assert lost.name not in nodes_of(slurm, number), "the third node took its place"

    assert ends(slurm, number, log) == "COMPLETED", text(log)
    is_whole(run_dir, steps)
    assert count(run_dir, "session") == 4
    lost.start()
    slurm.start_node(lost)
    slurm.wait_for_nodes()


def test_the_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm looks every half minute: the signal comes early."""
    steps, log, run_dir = 4000, tmp_path / "job.log", tmp_path / "run"
    number = submit(
        slurm,
        log,
        "--time=2",
        "--signal=B:USR1@50",
        BATCH,
        *arguments(run_dir, steps, "train.checkpoint_every=1000"),
    )
    wait_until(
        lambda: slurm.job(number)["Restarts"] == "1",
        f"the time limit\n{text(log)[-3000:]}",
        within=120,
        every=0.3,
    )
    said = text(log)
    assert "asked to stop by USR1" in said and "stopped on request; back to the queue" in said, said
    assert count(run_dir, "intent") == count(run_dir, "done") > 0
    latest = (run_dir / "checkpoints" / "LATEST").read_text().strip()
    assert latest == f"step-{count(run_dir, 'done'):08d}", (
        "it was saved, though no checkpoint was due"
    )
    slurm.run("scancel", number)


def test_what_is_not_started_again(slurm: Slurm, tmp_path: Path) -> None:
    """Wrong input, a spent budget, a file STOP, and a crash without progress."""
    log, run_dir = tmp_path / "wrong.log", tmp_path / "wrong"
    wrong = submit(slurm, log, BATCH, *arguments(run_dir, 4, "privacy.no_such_key=1"))
    assert ends(slurm, wrong, log) == "FAILED" and slurm.job(wrong)["ExitCode"] == "2:0"

    log, run_dir = tmp_path / "no-folder.log", tmp_path / "none"
    lacking = submit(slurm, log, BATCH, "--ds_config", "ds_configs/zero3.json")
    assert ends(slurm, lacking, log) == "FAILED" and "give --run_dir" in text(log)

    log, run_dir = tmp_path / "stop.log", tmp_path / "stop"
    number = submit(slurm, log, BATCH, *arguments(run_dir, 4000))
    done_beyond(slurm, number, run_dir, 2, log)
    (run_dir / "STOP").touch()
    assert ends(slurm, number, log) == "FAILED" and slurm.job(number)["ExitCode"] == "7:0"
    assert "stopped by the file STOP" in text(log)

    # The key is gone: exit 4.
    (run_dir / "private" / "sampling.key").unlink()
    log = tmp_path / "refused.log"
    refused = submit(slurm, log, BATCH, *arguments(run_dir, 4000))
    assert ends(slurm, refused, log) == "FAILED" and slurm.job(refused)["ExitCode"] == "4:0"
    assert {slurm.job(n)["Restarts"] for n in (wrong, lacking, number, refused)} == {"0"}


def test_a_crash_is_started_again_as_long_as_there_is_progress(
    slurm: Slurm, tmp_path: Path
) -> None:
    log, run_dir = tmp_path / "crash.log", tmp_path / "run"
    number = submit(slurm, log, BATCH, *arguments(run_dir, 4000))
    done_beyond(slurm, number, run_dir, 2, log)
    os.kill(min(ranks_of(run_dir)), 9)
    wait_until(
        lambda: slurm.job(number)["Restarts"] == "1",
        f"a restart\n{text(log)[-3000:]}",
        within=WITHIN,
    )
    assert re.search(r"exit code \d+ after \d+ steps; back to the queue", text(log)), text(log)
    wait_until(
        lambda: count(run_dir, "session") == 1 and ranks_of(run_dir) != [],
        "the second start",
        within=WITHIN,
    )
    os.kill(min(ranks_of(run_dir)), 9)  # while it sets up
    assert ends(slurm, number, log) == "FAILED", text(log)
    assert "without a single step: not started again" in text(log)


def ranks_of(run_dir: Path) -> list[int]:
    """Processes of the run's rank 1, of no other run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (
                (folder / "cmdline").read_bytes(),
                (folder / "environ").read_bytes(),
            )
        except OSError:
            continue
        is_rank = command.split(b"\0")[1:3] == [b"-u", TRAIN.encode()]
        if is_rank and b"\0SLURM_PROCID=1\0" in environment and str(run_dir).encode() in command:
            found.append(int(folder.name))
    return found


def test_a_study_as_an_array(slurm: Slurm, tmp_path: Path) -> None:
    """Points on two nodes each. What is queued is not submitted again, and neither is what is done."""
    study, folder = tmp_path / "two.toml", tmp_path / "study"
    study.write_text(
        'name = "two"\nrecipe = "recipes/tiny.toml"\nengine = "deepspeed"\nseeds = [0]\n'
        '[base]\ndata.provenance = "public"\nheldout.num_captions = 0\n'
        "[axis.rate]\noptimizer.peak_lr = [1e-3, 2e-3]\n"
    )
    command = [sys.executable, "launch_scripts/study.py"]
    run = [
        *command,
        "run",
        str(study),
        "--study_dir",
        str(folder),
        "--executor",
        "slurm-array",
        "--workers",
        "2",
    ]
    run += ["--nodes", "2"]
    said = slurm.run(*run)
    found = re.search(r"Submitted batch job (\d+)", said)
    assert found is not None, said
    points = ("rate-0.001_seed-0", "rate-0.002_seed-0")
    again = slurm.run(*run)
    assert "Submitted" not in again and f"queued or running already: {', '.join(points)}" in again
    for task, point in enumerate(points, 1):
        log = folder / "private" / "logs" / f"slurm-{found[1]}_{task}.log"
        assert ends(slurm, f"{found[1]}_{task}", log) == "COMPLETED", text(log)
        assert "2 ranks on 2 hosts" in text(log)
        is_whole(folder / "runs" / point, 4)
    assert "2 of 2 points are done" in slurm.run(*command, "report", "--study_dir", str(folder))
    assert "all points are done; nothing to submit" in slurm.run(*run)
