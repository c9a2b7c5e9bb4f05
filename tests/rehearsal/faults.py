"""A host loses its power in the middle of a step, and Slurm and torchrun start the job again by their own means.

Two hosts (tests/hosts) train with checkpoints that are written in the background, so that one is in flight when a
host dies. Under Slurm the host of rank 1 dies in a step that is charged. Under torchrun the host of rank 0, which
writes the ledger, dies in a step that is dealt and not yet charged. The host comes back, the run ends, and its ledger
is compared with what lay on the disk when the host died.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from privacy.ledger.attempts import MembersRecord, read_lines
from tests.e2e.launch import TRAIN, kill_group, ledger_lines, train_arguments
from tests.e2e.test_kill import members_of
from tests.hosts.hosts import SSH_PROGRAMS, Host, Network, network, wait_until, why_not
from tests.hosts.slurm import ENDED, PROGRAMS, Slurm
from tests.privacy.ledger_epsilon import recompute
from tests.rehearsal.part import Part, command, say

STEPS = 8
CHECKPOINT_EVERY = 2
LOST_STEP = 5
"""The checkpoint of step 4 is in flight in it, so the run goes back to that of step 2."""
WITHIN = 3600
RANKS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def rehearse(part: Part) -> None:
    """Loses a host under each of the two launchers."""
    reason = why_not(*SSH_PROGRAMS, *PROGRAMS)
    if reason:
        say(f"faults: skipped, and its record stays: two hosts cannot be made here: {reason}")
        sys.exit(0)
    part.stage("slurm_requeues", lambda: under_slurm(part.folder / "slurm"))
    part.stage("torchrun_restarts", lambda: under_torchrun(part.folder / "torchrun"))
    part.ran(hosts=2)


def arguments(run_dir: Path, accumulation: str) -> list[str]:
    """Arguments of a run whose steps take a second or more, most of which is spent on gradients."""
    return train_arguments(
        run_dir,
        f"train.num_steps={STEPS}",
        f"train.checkpoint_every={CHECKPOINT_EVERY}",
        "train.async_checkpoints=true",
        f"train.accumulation={accumulation}",
        "train.micro_batch_size=8",
        "privacy.expected_batch_size=256",
        "heldout.num_captions=0",
        *("--rendezvous_seconds", "600"),  # on a machine with much to do
    )


@contextmanager
def hosts(folder: Path) -> Iterator[Network]:
    """Makes a login host and two that train, and an empty folder for the run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as files,
        network(Path(files), "head", "node1", "node2") as made,
    ):
        yield made


def under_slurm(folder: Path) -> dict[str, Any]:
    """Runs the batch script of the project on two nodes; Slurm misses one and puts the job back into the queue."""
    run_dir, log = folder / "run", folder / "job.log"
    with hosts(folder) as made:
        slurm = Slurm(made, "head")
        slurm.start()
        batch = ["--nodes=2", f"--output={log}", "launch_scripts/cluster/slurm.sbatch"]
        number = slurm.submit(*batch, *arguments(run_dir, "sharded"))
        wait_for(lambda: charges(run_dir, 1) == 1, log, "the first charge")
        batch_host = told_of(slurm, number, log)["BatchHost"]
        lost = next(host for host in slurm.nodes if host.name != batch_host)
        wait_for(lambda: charges(run_dir, LOST_STEP) == 1, log, "the charge of the step")
        loss = lose(lost, run_dir)
        wait_for(
            lambda: told_of(slurm, number, log)["Restarts"] == "1",
            log,
            "Slurm to miss the node",
            every=1,
        )
        missed_after = time.monotonic() - loss.at
        lost.start()
        slurm.start_node(lost)
        wait_for(
            lambda: told_of(slurm, number, log)["JobState"] in ENDED,
            log,
            "the end of the job",
            every=1,
        )
        job = told_of(slurm, number, log)
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), job
    said = log.read_text()
    assert "is dead (" in said and "the same command resumes" in said, said[-5000:]
    assert "task 0: Exited with exit code 1" in said and "could not be requeued" not in said, said[
        -5000:
    ]
    assert loss.was_charged
    return judged(run_dir, loss) | {"seconds_until_requeued": round(missed_after, 1)}


def under_torchrun(folder: Path) -> dict[str, Any]:
    """Runs an agent on each host; the one that is left waits for a new agent on the host that comes back."""
    run_dir = folder / "run"
    with hosts(folder) as made:
        first, second = made.hosts["node1"], made.hosts["node2"]
        first_agent, agent = start_agent(first, run_dir), start_agent(second, run_dir)
        log = folder / "node2.log"
        wait_for(lambda: LOST_STEP in dealt_steps(run_dir), log, "the deal of the step")
        loss = lose(first, run_dir)
        kill_group(first_agent)
        wait_for(lambda: "exitcode" in log.read_text(), log, "the end of the rank that is left")
        ended_after = time.monotonic() - loss.at
        first.start()
        first_agent = start_agent(first, run_dir)
        codes = [first_agent.wait(WITHIN), agent.wait(WITHIN)]
    said = log.read_text()
    assert codes == [0, 0], said[-5000:]
    assert "is dead (" in said and "the same command resumes" in said, said[-5000:]
    assert "(exitcode: 1)" in said, said[-5000:]
    assert not loss.was_charged
    return judged(run_dir, loss) | {"seconds_until_rank_ended": round(ended_after, 1)}


def start_agent(host: Host, run_dir: Path) -> subprocess.Popen[str]:
    """Starts torchrun's agent on a host. The rendezvous is on node2; node1 has rank 0, as agents are sorted by name."""
    words = [
        *(
            sys.executable,
            "launch_scripts/cluster/torchrun.py",
            "--nnodes",
            "2",
            "--nproc_per_node",
            "1",
        ),
        *(
            "--max_restarts",
            "2",
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            "node2:29400",
            "--rdzv_id",
            "drill",
        ),
        *(TRAIN, *arguments(run_dir, "local")),
    ]
    return host.popen(words, output=run_dir.parent / f"{host.name}.log", **RANKS)


@dataclass(frozen=True)
class Loss:
    """What lay on the disk when a host had lost its power, and when that was.

    Attributes:
        checkpoint: the step of the newest checkpoint that has its name.
        was_charged: whether the ledger has the intent of the step that was lost.
    """

    at: float
    ledger: bytes
    checkpoint: int
    was_charged: bool


def lose(host: Host, run_dir: Path) -> Loss:
    """Takes a host's power in the middle of the step that has begun, and reads what it has left."""
    time.sleep(0.1)
    host.kill()
    at, ledger = time.monotonic(), (run_dir / "ledger.jsonl").read_bytes()
    steps = [
        int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*")
    ]
    assert not done(run_dir, LOST_STEP), "the host was to be lost in the middle of the step"
    return Loss(at, ledger, max(steps), charges(run_dir, LOST_STEP) == 1)


def judged(run_dir: Path, loss: Loss) -> dict[str, Any]:
    """Asserts that a run that lost a host forgot no charge, used no coin twice and says what it repeated; returns numbers."""
    ledger, records = (run_dir / "ledger.jsonl").read_bytes(), ledger_lines(run_dir)
    assert ledger.startswith(loss.ledger), "no line is lost or rewritten"
    assert (records[-1]["type"], records[-1]["reason"]) == ("close", "finished")

    assert loss.checkpoint == LOST_STEP - 1 - CHECKPOINT_EVERY, (
        "the checkpoint in flight is lost with the host"
    )
    intents = Counter(record["step"] for record in records if record["type"] == "intent")
    repeated = [step for step in range(loss.checkpoint + 1, LOST_STEP) if intents[step] == 2]
    assert repeated == list(range(loss.checkpoint + 1, LOST_STEP))
    expected = {step: 2 if step in repeated else 1 for step in range(1, STEPS + 1)}
    expected[LOST_STEP] = 2 if loss.was_charged else 1
    assert intents == expected, intents
    attempts = [
        (record["step"], record["attempt"]) for record in records if record["type"] == "intent"
    ]
    assert len(set(attempts)) == len(attempts), "each repetition has a number of its own"

    nonces = [record["nonce"] for record in records if record["type"] == "session"]
    assert len(nonces) == len(set(nonces)) == 2
    members = members_of(
        run_dir
    )  # what was trained on is compared with them by the audit of the schedule
    assert len({batch.tobytes() for batch in members}) == len(members), (
        "no attempt has the coins of another"
    )

    charged, epsilon = recompute(run_dir / "ledger.jsonl")
    assert charged == sum(intents.values())
    log = run_dir.parent / "audits.log"
    found = json.loads(
        command(sys.executable, "-I", run_dir / "verify.py", run_dir, "--json", log=log)
    )
    assert found["verdict"] == "consistent" and found["formal_guarantee"], found
    assert any(
        f"{charged} attempts are charged" in check["sentence"] for check in found["checks"]
    ), found
    assert found["epsilon"] == pytest.approx(epsilon, rel=1e-6)
    for audit in ("ledger", "schedule"):
        command(sys.executable, "launch_scripts/audit.py", audit, "--run_dir", run_dir, log=log)
    again = command(sys.executable, TRAIN, *arguments(run_dir, "local"), log=log)
    assert "finished" in again and (run_dir / "ledger.jsonl").read_bytes() == ledger, again
    return {
        "steps": STEPS,
        "lost_in_step": LOST_STEP,
        "lost_step_was_charged": loss.was_charged,
        "newest_checkpoint": loss.checkpoint,
        "repeated_steps": len(repeated),
        "charges": charged,
        "epsilon": epsilon,
    }


def charges(run_dir: Path, step: int) -> int:
    """Returns how many attempts at a step the ledger has charged."""
    return sum(
        record["type"] == "intent" and record["step"] == step for record in ledger_lines(run_dir)
    )


def done(run_dir: Path, step: int) -> bool:
    """Returns whether a step was taken to its end."""
    return any(
        record["type"] == "done" and record["step"] == step for record in ledger_lines(run_dir)
    )


def dealt_steps(run_dir: Path) -> set[int]:
    """Returns the steps whose members are recorded; ranks then work on their gradients."""
    path = run_dir / "private" / "members.jsonl"
    lines = read_lines(path) if path.exists() else ()
    return {line.step for line in lines if isinstance(line, MembersRecord)}


def told_of(slurm: Slurm, number: str, log: Path) -> dict[str, str]:
    """Returns what Slurm says of a job, as soon as its controller has time to answer."""
    job: dict[str, str] = {}

    def answers() -> bool:
        said = slurm.run("scontrol", "--oneliner", "show", "job", number, check=False)
        job.update(word.split("=", 1) for word in said.split() if "=" in word)
        return "JobState" in job

    wait_for(answers, log, "an answer of Slurm", every=1)
    return job


def wait_for(condition: Callable[[], object], log: Path, what: str, every: float = 0.05) -> None:
    """Waits until a run has come so far; says what it printed if it has not."""
    try:
        wait_until(condition, what, within=WITHIN, every=every)
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n{log.read_text()[-5000:] if log.exists() else ''}"
        ) from None
