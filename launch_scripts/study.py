"""Trains a scaling study, a resumable grid of runs from one TOML file, and compares the runs.

python launch_scripts/study.py run studies/batch_size_dpcap.toml --workers 2
python launch_scripts/study.py report --study_dir runs/studies/batch_size_dpcap

`run` trains all points; the same command again resumes. `report` writes tables and plots. Every
point is an ordinary run folder that launch_scripts/train.py trains. Exit codes of `run`: 0 all
points are done; 2 bad study, or bad recipe of a point; 3 the budget of some point is spent and
steps remain; 4 the shared ledger is refused; 7 stopped on request, resumable; otherwise the code of
the first run that failed.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import ROOT, require_packages

require_packages()

from pydantic import Field, model_validator

from privacy.errors import say
from trainer.config.cli import run_command
from trainer.config.options import Options, Shown, options_of

ALLOCATION = ("nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node")
"""Options of sbatch for each point of an array job."""


class RunOptions(Options):
    """Trains all points that are not done."""

    study: Annotated[Path, Shown("STUDY.toml", is_positional=True)]
    """recipe, axes, seeds; see docs/studies.md"""
    study_dir: Annotated[Path | None, Shown("DIR")] = None
    """default: runs/studies/NAME"""
    workers: Annotated[int, Shown("N"), Field(ge=1)] = 1
    """runs at the same time (default: 1)"""
    executor: Literal["local", "slurm-array"] = "local"
    """here, or as a Slurm array job"""
    nodes: Annotated[int | None, Shown("N"), Field(ge=1)] = None
    """nodes for each point of a Slurm array job (default: 1)"""
    ntasks_per_node: Annotated[int | None, Shown("N"), Field(ge=1)] = None
    """ranks on each of these nodes (default: 1)"""
    cpus_per_task: Annotated[int | None, Shown("N"), Field(ge=1)] = None
    """CPUs for each rank (default: the recipe's data workers)"""
    gpus_per_node: Annotated[int | None, Shown("N"), Field(ge=1)] = None
    """GPUs on each of these nodes (default: what the partition gives)"""

    @model_validator(mode="after")
    def _allocates_for_slurm(self) -> "RunOptions":
        for name in ALLOCATION:
            if getattr(self, name) is not None and self.executor != "slurm-array":
                raise ValueError(f"--{name} is for --executor slurm-array")
        return self


class ReportOptions(Options):
    """Writes study_dir/report/ from the folders of the runs, finished or not."""

    study_dir: Annotated[Path, Shown("DIR")]
    """folder of the study"""


def run(options: RunOptions) -> int:
    """Trains all points that are not done."""
    from trainer.studies.executors import exit_code, run_local, submit_array
    from trainer.studies.grid import load_study, plan_points, require_useful_starts
    from trainer.studies.study_folder import StudyFolder

    study = load_study(options.study)
    folder = StudyFolder(options.study_dir or ROOT / "runs" / "studies" / study.name)
    points = plan_points(study, f"study {options.study}", ROOT)
    require_useful_starts(points, ROOT)
    with folder.locked():
        late_points = folder.prepare(study, options.study.read_text(), points)
        num_simulations = sum(point.config.privacy.simulation for point in points)
        sizes = f"{len(points)} points"
        if num_simulations:
            sizes += f", {num_simulations} of them TAN simulations, which are not private"
        say(f"study {study.name}: {sizes}; folder {folder.root}")
        if late_points:
            say(
                "chosen after outputs, so charged by an RDP filter (docs/planning.md): "
                f"{', '.join(late_points)}"
            )
        names = [point.name for point in points]
        if options.executor == "slurm-array":
            allocation = {name: getattr(options, name) for name in ALLOCATION}
            for line in submit_array(folder, study, names, options.workers, allocation):
                say(line)
            return 0
        num_finished = sum(folder.progress(name) == "finished" for name in names)
        codes = run_local(folder, study, names, options.workers, say)
    num_done = sum(code == 0 for code in codes.values())
    sentence = f"{num_done} of {len(names)} points are done"
    if num_finished:
        sentence += f" ({num_finished} were done before)"
    if num_done < len(names):
        sentence += "; the same command goes on with the rest"
    say(sentence)
    return exit_code(codes)


def report(options: ReportOptions) -> int:
    """Writes study_dir/report/ from the folders of the runs, finished or not."""
    from trainer.studies.grid import load_study, plan_points
    from trainer.studies.study_folder import StudyFolder
    from trainer.studies.study_report import collect, write_report

    folder = StudyFolder(options.study_dir)
    study = load_study(folder.definition)
    points = plan_points(study, f"study {folder.definition}", ROOT)
    results, missing = collect(folder, points)
    page = write_report(folder, study, results, missing)
    num_finished = sum(point.progress == "finished" for point in results)
    say(f"{num_finished} of {len(points)} points are done; {page}")
    return 0


def parse_args(arguments: list[str] | None = None) -> RunOptions | ReportOptions:
    """Returns the arguments of the command line; a bad argument is a ConfigError (exit 2)."""
    commands: dict[str, type[RunOptions | ReportOptions]] = {
        "run": RunOptions,
        "report": ReportOptions,
    }
    return options_of(__doc__, commands, arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen command; by default that of the process."""
    options = parse_args(arguments)
    return run(options) if isinstance(options, RunOptions) else report(options)


if __name__ == "__main__":
    run_command(main)
