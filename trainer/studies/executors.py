"""How the points of a study come to run: here, several at a time, or as an array job of Slurm."""

import hashlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from data.files import write_durably
from privacy.errors import BUDGET_SPENT, DONE, STOPPED_EARLY
from trainer.config.environment import ROOT
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.studies.folder import StudyFolder
from trainer.studies.grid import StudyConfig

_POLL_SECONDS = 0.2
_ARRAY_JOB = "launch_scripts/cluster/slurm_array.sbatch"
_NOT_STARTED = {"finished": DONE, "budget spent": BUDGET_SPENT}
_ENDINGS = {
    DONE: "done",
    BUDGET_SPENT: "stopped, its budget is spent and steps remain",
    STOPPED_EARLY: "stopped on request; the same command resumes it",
}


def train_command(folder: StudyFolder, study: StudyConfig, name: str) -> list[str]:
    """The command that trains one point."""
    return [
        sys.executable,
        "launch_scripts/train.py",
        "--ds_config",
        study.ds_config,
        "--engine",
        study.engine,
        "--recipe",
        str(folder.recipe(name)),
        "--run_dir",
        str(folder.run(name)),
    ]


def run_local(
    folder: StudyFolder,
    study: StudyConfig,
    names: Sequence[str],
    workers: int,
    say: Callable[[str], None],
) -> dict[str, int]:
    """Trains the points here, `workers` at a time. SIGTERM and Ctrl-C stop the runs, which save; the same command resumes.

    Returns:
        The exit code of every point that was started, or had nothing to start for.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    stopped = False
    threads = str(max(1, (os.cpu_count() or 1) // workers))

    def request_stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        for process in list(running.values()):
            process.terminate()

    def train(name: str) -> int:
        if folder.in_use(name):  # by a trainer of a study that was killed
            say(f"{name}: another trainer has it; waiting for its end")
        while folder.in_use(name) and not stopped:
            time.sleep(_POLL_SECONDS)
        progress = folder.progress(name)
        if progress == "budget spent":
            say(f"{name}: the budget is spent and steps remain; not started again")
        if stopped or progress in _NOT_STARTED:
            return _NOT_STARTED.get(progress, STOPPED_EARLY)
        say(f"{name}: {'starts' if progress == 'new' else 'resumes'}")
        with folder.log(name).open("ab") as log:
            running[name] = process = subprocess.Popen(
                train_command(folder, study, name),
                cwd=ROOT,
                env={"OMP_NUM_THREADS": threads, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us alone; we pass it on as SIGTERM
            )
        if stopped:  # meanwhile
            process.terminate()
        code = process.wait()
        del running[name]
        if stopped and code == -signal.SIGTERM:
            code = STOPPED_EARLY  # before it could listen: nothing was begun
        ending = _ENDINGS.get(code)
        if ending is None:  # the trainer's last error says what and where, if a user can mend it
            lines = [
                line
                for line in folder.log(name).read_text(errors="replace").splitlines()
                if line.strip()
            ]
            errors = [line for line in lines if line.startswith("error")]
            last = (errors or lines or ["nothing was printed"])[-1]
            ending = f"failed with exit code {code}: {last} (log: {folder.log(name)})"
        say(f"{name}: {ending}")
        return code

    handlers = {
        number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(names, pool.map(train, names), strict=True))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def exit_code(codes: Mapping[str, int]) -> int:
    """A study's: a defect or bad input of any run before a stop, before a spent budget, before 0."""
    failed = [code for code in codes.values() if code not in _ENDINGS]
    if failed:
        return failed[0] if failed[0] > 0 else 1  # killed by a signal
    return next((code for code in (STOPPED_EARLY, BUDGET_SPENT) if code in codes.values()), DONE)


def submit_array(
    folder: StudyFolder,
    study: StudyConfig,
    names: Sequence[str],
    at_once: int,
    allocation: Mapping[str, int | None],
) -> list[str]:
    """Submits an array job over the points that are neither done nor queued; returns what to say.

    What is queued is asked of Slurm itself, by a job name that belongs to the study's folder: a call that was cut off behind
    sbatch, and one from another host, count too. A task's number is the line of its point in points.txt, and lines are only ever
    added, so that a task that waits trains what it was submitted for.

    Partition and time limit come from sbatch's own environment variables (SBATCH_PARTITION, ...). A task that is preempted goes
    back to the queue by itself; the same call submits again what ended without being done.

    Args:
        allocation: what each point gets, in sbatch's words; None is the default of sbatch and of the batch script, and for
            cpus_per_task the largest number of data workers of the points.

    Raises:
        ConfigError: Slurm's commands are missing, or one of them refuses.
    """

    def slurm(*command: str) -> str:
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no {command[0]} here: submit from a login node of the cluster"
            ) from error
        if done.returncode != 0:
            raise ConfigError(
                f"{command[0]} refused, so nothing is submitted: {' '.join(done.stderr.split())}"
            )
        return done.stdout

    line_of = {
        name: shlex.join(["--recipe", str(folder.recipe(name)), "--run_dir", str(folder.run(name))])
        for name in names
    }
    points = folder.root / "points.txt"
    lines = points.read_text().splitlines() if points.exists() else []
    lines += [line for line in line_of.values() if line not in lines]
    write_durably(points, "".join(f"{line}\n" for line in lines))
    task = {name: str(lines.index(line) + 1) for name, line in line_of.items()}

    digest = hashlib.sha256(str(folder.root).encode()).hexdigest()[:12]
    job_name = f"dp-study-{folder.root.name}-{digest}"
    queued = set(
        slurm("squeue", "--noheader", "--array", f"--name={job_name}", "--format=%K").split()
    )
    progress = {name: folder.progress(name) for name in names}
    unfinished = [name for name in names if progress[name] in ("new", "begun")]
    waiting = [name for name in unfinished if task[name] in queued or folder.in_use(name)]
    left = [name for name in unfinished if name not in waiting]
    said = [f"queued or running already: {', '.join(waiting)}"] if waiting else []
    spent = [name for name in names if progress[name] == "budget spent"]
    if spent:
        said.append(
            f"the budget is spent and steps remain; not submitted again: {', '.join(spent)}"
        )
    if not left:
        return [
            *said,
            "nothing to submit" if waiting or spent else "all points are done; nothing to submit",
        ]
    wanted = dict(allocation)
    if wanted.get("cpus_per_task") is None:
        wanted["cpus_per_task"] = max(
            1, *(load_config(folder.recipe(name)).data.num_workers for name in left)
        )
    submitted = slurm(
        "sbatch",
        f"--job-name={job_name}",
        *(
            f"--{key.replace('_', '-')}={value}"
            for key, value in wanted.items()
            if value is not None
        ),
        f"--array={','.join(task[name] for name in left)}%{at_once}",
        f"--output={folder.logs}/slurm-%A_%a.log",
        _ARRAY_JOB,
        str(points),
        str(folder.runs),
        "--ds_config",
        study.ds_config,
        "--engine",
        study.engine,
    )
    return [*said, submitted.strip()]
