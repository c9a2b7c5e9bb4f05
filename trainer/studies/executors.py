"""Executors of a study's points: on this machine, several at a time, or an array job of Slurm."""

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
from trainer.studies.grid import StudyConfig
from trainer.studies.study_folder import StudyFolder

_POLL_SECONDS = 0.2
_ARRAY_JOB = "launch_scripts/cluster/slurm_array.sbatch"
_NOT_STARTED = {"finished": DONE, "budget spent": BUDGET_SPENT}
_ENDINGS = {
    DONE: "done",
    BUDGET_SPENT: "stopped, its budget is spent and steps remain",
    STOPPED_EARLY: "stopped on request; the same command resumes it",
}


def train_command(folder: StudyFolder, study: StudyConfig, name: str) -> list[str]:
    """Returns the command that trains one point."""
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
    """Trains the points on this machine, `workers` at a time.

    SIGTERM and Ctrl-C stop the runs, which save; the same command resumes them.

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
        if folder.in_use(name):
            # The study that started this trainer was killed.
            say(f"{name}: another trainer has it; waiting for its end")
        while folder.in_use(name) and not stopped:
            time.sleep(_POLL_SECONDS)
        progress = folder.progress(name)
        if progress == "budget spent":
            say(f"{name}: the budget is spent and steps remain; not started again")
        if stopped or progress in _NOT_STARTED:
            return _NOT_STARTED.get(progress, STOPPED_EARLY)
        say(f"{name}: {'starts' if progress == 'new' else 'resumes'}")
        command = train_command(folder, study, name)
        with folder.log(name).open("ab") as log:
            # A session of its own: Ctrl-C reaches this process alone, which passes it on as
            # SIGTERM.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={"OMP_NUM_THREADS": threads, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running[name] = process
        # A stop while the process started did not find it in `running`.
        if stopped:
            process.terminate()
        code = process.wait()
        del running[name]
        if stopped and code == -signal.SIGTERM:
            # The signal came before the trainer listened, so it has done nothing yet.
            code = STOPPED_EARLY
        ending = _ENDINGS.get(code)
        if ending is None:
            # The trainer's last error states problem and place, if a user can mend it.
            log_lines = folder.log(name).read_text(errors="replace").splitlines()
            lines = [line for line in log_lines if line.strip()]
            errors = [line for line in lines if line.startswith("error")]
            last_line = (errors or lines or ["nothing was printed"])[-1]
            ending = f"failed with exit code {code}: {last_line} (log: {folder.log(name)})"
        say(f"{name}: {ending}")
        return code

    handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        handlers[number] = signal.signal(number, request_stop)
    try:
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(names, pool.map(train, names), strict=True))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def exit_code(codes: Mapping[str, int]) -> int:
    """Returns a study's exit code: of a failure before a stop before a spent budget before 0."""
    failed = [code for code in codes.values() if code not in _ENDINGS]
    if failed:
        # A negative code is the signal that killed the run.
        return failed[0] if failed[0] > 0 else 1
    for code in (STOPPED_EARLY, BUDGET_SPENT):
        if code in codes.values():
            return code
    return DONE


def submit_array(
    folder: StudyFolder,
    study: StudyConfig,
    names: Sequence[str],
    at_once: int,
    allocation: Mapping[str, int | None],
) -> list[str]:
    """Submits an array job of the points that are neither done nor queued; returns lines to print.

    Slurm itself lists the queued tasks, by a job name that belongs to the study's folder: so a call
    that was cut off behind sbatch, and one from another host, count too. A task's number is the
    line of its point in points.txt, and lines are only added, so that a task that waits trains the
    point that it was submitted for.

    Partition and time limit come from sbatch's own environment variables (SBATCH_PARTITION, ...). A
    task that is preempted goes back to the queue by itself; the same call submits again the tasks
    that ended without being done.

    Args:
        allocation: resources of each point, in sbatch's words; None is the default of sbatch and of
            the batch script, and for cpus_per_task the largest number of data workers of the
            points.

    Raises:
        ConfigError: Slurm's commands are missing, or one of them refuses.
    """

    def slurm(*command: str) -> str:
        try:
            process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no {command[0]} here: submit from a login node of the cluster"
            ) from error
        if process.returncode != 0:
            reason = " ".join(process.stderr.split())
            raise ConfigError(f"{command[0]} refused, so nothing is submitted: {reason}")
        return process.stdout

    line_of = {}
    for name in names:
        arguments = ["--recipe", str(folder.recipe(name)), "--run_dir", str(folder.run(name))]
        line_of[name] = shlex.join(arguments)
    points = folder.root / "points.txt"
    lines = points.read_text().splitlines() if points.exists() else []
    lines += [line for line in line_of.values() if line not in lines]
    write_durably(points, "".join(f"{line}\n" for line in lines))
    task = {name: str(lines.index(line) + 1) for name, line in line_of.items()}

    digest = hashlib.sha256(str(folder.root).encode()).hexdigest()[:12]
    job_name = f"dp-study-{folder.root.name}-{digest}"
    queue = slurm("squeue", "--noheader", "--array", f"--name={job_name}", "--format=%K")
    queued_tasks = set(queue.split())
    progress = {name: folder.progress(name) for name in names}
    unfinished = [name for name in names if progress[name] in ("new", "begun")]
    waiting = [name for name in unfinished if task[name] in queued_tasks or folder.in_use(name)]
    to_submit = [name for name in unfinished if name not in waiting]
    spent = [name for name in names if progress[name] == "budget spent"]
    notes = []
    if waiting:
        notes.append(f"queued or running already: {', '.join(waiting)}")
    if spent:
        notes.append(
            f"the budget is spent and steps remain; not submitted again: {', '.join(spent)}"
        )
    if not to_submit:
        verdict = "nothing to submit" if notes else "all points are done; nothing to submit"
        return [*notes, verdict]
    resources = dict(allocation)
    if resources.get("cpus_per_task") is None:
        recipes = [load_config(folder.recipe(name)) for name in to_submit]
        resources["cpus_per_task"] = max(1, *(recipe.data.num_workers for recipe in recipes))
    options = []
    for key, amount in resources.items():
        if amount is not None:
            options.append(f"--{key.replace('_', '-')}={amount}")
    tasks = ",".join(task[name] for name in to_submit)
    submission = slurm(
        "sbatch",
        f"--job-name={job_name}",
        *options,
        f"--array={tasks}%{at_once}",
        f"--output={folder.logs}/slurm-%A_%a.log",
        _ARRAY_JOB,
        str(points),
        str(folder.runs),
        "--ds_config",
        study.ds_config,
        "--engine",
        study.engine,
    )
    return [*notes, submission.strip()]
