"""Scaling studies: a grid of training runs from one TOML file, resumable, and their comparison.

python launch_scripts/study.py run studies/batch_size_dpcap.toml --workers 2      the same command again resumes
python launch_scripts/study.py report --study_dir runs/studies/batch_size_dpcap   tables and plots

Every point is an ordinary run folder that launch_scripts/train.py trains. Exit codes of `run`: 0 all points are done;
2 bad study, or bad recipe of a point; 3 the budget of some point is spent and steps remain; 4 the shared ledger is refused;
7 stopped on request, resumable; otherwise the code of the first run that failed.
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
    """Writes study_dir/report/ from what the runs left behind, finished or not."""

    study_dir: Annotated[Path, Shown("DIR")]
    """folder of the study"""


def run(options: RunOptions) -> int:
    """Trains all points that are not done."""
    from trainer.studies.executors import exit_code, run_local, submit_array
    from trainer.studies.folder import StudyFolder
    from trainer.studies.grid import load_study, plan_points, require_useful_starts

    study = load_study(options.study)
    folder = StudyFolder(options.study_dir or ROOT / "runs" / "studies" / study.name)
    planned = plan_points(study, f"study {options.study}", ROOT)
    require_useful_starts(planned, ROOT)
    with folder.locked():
        late = folder.prepare(study, options.study.read_text(), planned)
        count = sum(one.config.privacy.simulation for one in planned)
        simulated = f", {count} of them TAN simulations, which are not private" if count else ""
        say(f"study {study.name}: {len(planned)} points{simulated}; folder {folder.root}")
        if late:
            say(
                f"chosen after outputs, so charged by an RDP filter (docs/planning.md): {', '.join(late)}"
            )
        names = [one.name for one in planned]
        if options.executor == "slurm-array":
            allocation = {name: getattr(options, name) for name in ALLOCATION}
            for line in submit_array(folder, study, names, options.workers, allocation):
                say(line)
            return 0
        before = sum(folder.progress(name) == "finished" for name in names)
        codes = run_local(folder, study, names, options.workers, say)
    done = sum(code == 0 for code in codes.values())
    earlier = f" ({before} were done before)" if before else ""
    rest = "" if done == len(names) else "; the same command goes on with the rest"
    say(f"{done} of {len(names)} points are done{earlier}{rest}")
    return exit_code(codes)


def report(options: ReportOptions) -> int:
    """Writes study_dir/report/ from what the runs left behind, finished or not."""
    from trainer.studies.folder import StudyFolder
    from trainer.studies.grid import load_study, plan_points
    from trainer.studies.report import collect, write_report

    folder = StudyFolder(options.study_dir)
    study = load_study(folder.definition)
    planned = plan_points(study, f"study {folder.definition}", ROOT)
    results, missing = collect(folder, planned)
    page = write_report(folder, study, results, missing)
    say(
        f"{sum(result.progress == 'finished' for result in results)} of {len(planned)} points are done; {page}"
    )
    return 0


def parse_args(arguments: list[str] | None = None) -> RunOptions | ReportOptions:
    """The command line; a bad argument is a ConfigError (exit 2)."""
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
