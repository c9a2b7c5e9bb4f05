"""The points of a study as an array job of Slurm: each of them is submitted once, and only what can begin.

What is queued is asked of Slurm itself, by a job name that belongs to the study's folder: a call that was cut off behind sbatch,
and one from another host, count too. A task's number is the line of its point in points.txt, and lines are only ever added, so
that a task that waits trains what it was submitted for.
"""

import hashlib
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from data.files import write_durably
from privacy.checkpoints.read import has_checkpoints
from privacy.step.folder import RunFolder
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.studies.executors import Trainer
from trainer.studies.folder import StudyFolder
from trainer.weights.start import find_checkpoint

_ARRAY_JOB = "launch_scripts/cluster/slurm_array.sbatch"


@dataclass(frozen=True)
class Allocation:
    """What each point gets, in sbatch's words; None is the default of sbatch and of the batch script.

    Attributes:
        cpus_per_task: by default the largest number of data workers of the points.
    """

    nodes: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None


def submit_array(
    folder: StudyFolder, trainer: Trainer, names: Sequence[str], at_once: int, allocation: Allocation
) -> list[str]:
    """Submits an array job over the points that are neither done nor queued; returns what to say.

    Partition and time limit come from sbatch's own environment variables (SBATCH_PARTITION, ...). A task that is preempted goes
    back to the queue by itself; the same call submits again what ended without being done.

    Raises:
        ConfigError: the checkpoint that a point starts from is missing, Slurm's commands are, or one of them refuses.
    """
    line_of = {
        name: shlex.join(["--recipe", str(folder.recipe(name)), "--run_dir", str(folder.run(name))]) for name in names
    }
    points = folder.root / "points.txt"
    lines = points.read_text().splitlines() if points.exists() else []
    lines += [line for line in line_of.values() if line not in lines]
    write_durably(points, "".join(f"{line}\n" for line in lines))
    task = {name: str(lines.index(line) + 1) for name, line in line_of.items()}

    digest = hashlib.sha256(str(folder.root).encode()).hexdigest()[:12]
    job_name = f"dp-study-{folder.root.name}-{digest}"
    queued = set(_slurm(trainer, "squeue", "--noheader", "--array", f"--name={job_name}", "--format=%K").split())
    progress = {name: folder.progress(name) for name in names}
    unfinished = [name for name in names if progress[name] in ("new", "begun")]
    waiting = [name for name in unfinished if task[name] in queued or folder.in_use(name)]
    left = [name for name in unfinished if name not in waiting]
    said = [f"queued or running already: {', '.join(waiting)}"] if waiting else []
    spent = [name for name in names if progress[name] == "budget spent"]
    if spent:
        said.append(f"the budget is spent and steps remain; not submitted again: {', '.join(spent)}")
    if not left:
        return [*said, "nothing to submit" if waiting or spent else "all points are done; nothing to submit"]
    configs = {name: load_config(folder.recipe(name)) for name in left}
    for name, config in configs.items():
        if config.init is not None and not has_checkpoints(RunFolder(folder.run(name)).checkpoints):
            try:
                find_checkpoint(config.init, trainer.root)
            except ConfigError as error:
                raise ConfigError(f"point {name}, so nothing is submitted: {error}") from error
    wanted = asdict(allocation)
    if allocation.cpus_per_task is None:
        wanted["cpus_per_task"] = max(1, *(config.data.num_workers for config in configs.values()))
    submitted = _slurm(
        trainer, "sbatch", f"--job-name={job_name}",
        *(f"--{key.replace('_', '-')}={value}" for key, value in wanted.items() if value is not None),
        f"--array={','.join(task[name] for name in left)}%{at_once}", f"--output={folder.logs}/slurm-%A_%a.log",
        _ARRAY_JOB, str(points), str(folder.runs), "--ds_config", trainer.ds_config, "--engine", trainer.engine,
    )  # fmt: skip
    return [*said, submitted.strip()]


def _slurm(trainer: Trainer, *command: str) -> str:
    """What one of Slurm's commands prints."""
    try:
        done = subprocess.run(command, cwd=trainer.root, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {command[0]} here: submit from a login node of the cluster, or use --executor script"
        ) from error
    if done.returncode != 0:
        raise ConfigError(f"{command[0]} refused, so nothing is submitted: {' '.join(done.stderr.split())}")
    return done.stdout
