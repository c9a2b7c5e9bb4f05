"""A study for a cluster: a script that trains one point by its number, and an array job of Slurm over it."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from trainer.files import write_durably
from trainer.scaling.executors import Trainer
from trainer.scaling.folder import StudyFolder

_SCRIPT = """\
#!/bin/bash
# Study {study}: trains the points with the given numbers (0 to {last}), all of them without a number. The same call resumes.
#   STUDY_LAUNCHER="deepspeed --num_gpus 8" {script} 3        (default: {python})
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
