"""A study for a cluster: a script that trains one point by its number, and an array job of Slurm over it."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.run.files import write_durably
from trainer.studies.executors import Trainer
from trainer.studies.folder import StudyFolder

_ARRAY_JOB = "launch_scripts/cluster/slurm_array.sbatch"
_SCRIPT = """\
#!/bin/bash
# Study {study}: trains the points with the given numbers (0 to {last}), all of them without a number. The same call resumes.
#   STUDY_LAUNCHER="deepspeed --num_gpus 8" {script} 3        (default: {python})
# What it prints shows training loss: keep it to yourself, in a file under {private} for instance.
# Exit code: the first that is not 0 of launch_scripts/train.py (3 budget spent, 7 stopped and resumable).
set -u
points=(
{points}
)
cd {root} || exit 2
[ $# -gt 0 ] || set -- "${{!points[@]}}"
code=0
for number in "$@"; do
    point=${{points[$number]:?there is no point $number}}
    ${{STUDY_LAUNCHER:-{python}}} launch_scripts/train.py --ds_config {ds_config} --engine {engine} \\
        --recipe {recipes}/"$point".toml --run_dir {runs}/"$point"
    ended=$?
    [ $code -ne 0 ] || code=$ended
done
exit $code
"""


def write_script(folder: StudyFolder, trainer: Trainer, study: str, names: Sequence[str]) -> Path:
    """study_dir/submit.sh, executable; it needs nothing else of the study."""
    path = folder.root / "submit.sh"
    quote = shlex.quote
    text = _SCRIPT.format(
        study=study,
        last=len(names) - 1,
        script=quote(str(path)),
        private=quote(str(folder.private)),
        python=quote(trainer.command(folder, names[0])[0]),
        points="\n".join(f"    {quote(name)}" for name in names),
        root=quote(str(trainer.root)),
        ds_config=quote(trainer.ds_config),
        engine=quote(trainer.engine),
        recipes=quote(str(folder.recipes)),
        runs=quote(str(folder.runs)),
    )
    write_durably(path, text)
    path.chmod(0o755)
    return path


def submit_array(folder: StudyFolder, trainer: Trainer, names: Sequence[str], at_once: int) -> str:
    """Submits a Slurm array job over the points that are not done; returns what sbatch said.

    A task gets as many CPUs as its recipe has data workers. Partition, devices and time limit come from sbatch's own
    environment variables (SBATCH_PARTITION, ...). A task that is preempted goes back to the queue by itself; the same call
    submits again what is left.

    Raises:
        ConfigError: there is no sbatch, or it refuses.
    """
    points = folder.root / "points.txt"
    # Words of train.py's command line; --run_dir comes again after the array job's own, and the last one counts.
    words = [["--recipe", str(folder.recipe(name)), "--run_dir", str(folder.run(name))] for name in names]
    write_durably(points, "".join(shlex.join(line) + "\n" for line in words))
    left = [str(number) for number, name in enumerate(names, start=1) if folder.progress(name) in ("new", "begun")]
    if not left:
        return "all points are done; nothing to submit"
    workers = max(load_config(folder.recipe(name)).data.num_workers for name in names)
    command = [
        "sbatch", f"--cpus-per-task={max(workers, 1)}", f"--array={','.join(left)}%{at_once}",
        f"--output={folder.logs}/slurm-%A_%a.log",
        _ARRAY_JOB, str(points), str(folder.runs), "--ds_config", trainer.ds_config, "--engine", trainer.engine,
    ]  # fmt: skip
    try:
        said = subprocess.run(command, cwd=trainer.root, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no sbatch here: submit from a login node of the cluster, or use --executor script"
        ) from error
    if said.returncode != 0:
        raise ConfigError(f"sbatch refused the array job: {' '.join(said.stderr.split())}")
    return said.stdout.strip()
