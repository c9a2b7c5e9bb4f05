"""Keeps a data owner's ledger over several runs on the same data.

python launch_scripts/shared_ledger.py create PATH --target_epsilon 8 --delta 1e-9 \
    [--mirror FILE] [--informal_runs]
python launch_scripts/shared_ledger.py show PATH [--json]
A run joins with privacy.shared_ledger=PATH and reserves its complete budget before it touches data.
Exit 3: no room next to the other runs; exit 2: the run would not fit even alone; exit 4: the file
is refused.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import require_packages

require_packages()

from pydantic import Field

from privacy.errors import say
from trainer.config.cli import run_command
from trainer.config.options import Options, Shown, options_of
from trainer.errors import ConfigError


class CreateOptions(Options):
    """Writes the first line: the total budget."""

    path: Annotated[Path, Shown("PATH", is_positional=True)]
    """new file for the ledger"""
    target_epsilon: Annotated[float, Shown("E")]
    """the most that all runs together may spend"""
    delta: Annotated[float, Shown("D")]
    """delta of all runs together"""
    informal_runs: bool = False
    """permit runs without a guarantee, which nothing here covers"""
    mirror: Annotated[Path | None, Shown("FILE")] = None
    """second copy on another file system: finds lines that were cut off"""


class ShowOptions(Options):
    """Verifies the ledger and lists the runs."""

    path: Annotated[Path, Shown("PATH", is_positional=True)]
    """the ledger"""
    as_json: bool = Field(False, alias="json")
    """print one JSON object on stdout"""


def create(options: CreateOptions) -> None:
    """Writes the first line: the total budget."""
    from privacy.ledger.shared import SharedLedger

    SharedLedger.create(
        options.path,
        epsilon=options.target_epsilon,
        delta=options.delta,
        informal_runs=options.informal_runs,
        mirror=options.mirror,
    )
    budget = f"epsilon {options.target_epsilon:g} at delta {options.delta:g}"
    print(f"{options.path}: {budget} for all runs together")


def show(options: ShowOptions) -> None:
    """Verifies the ledger and lists the runs."""
    from privacy.accounting.rounding import rounded_up
    from privacy.ledger.shared import SharedLedger

    if not options.path.exists():
        raise ConfigError(
            f"{options.path}: there is no such file; "
            "`shared_ledger.py create` makes a shared ledger"
        )
    summary = SharedLedger(options.path).summary()
    if options.as_json:
        say(json.dumps(summary))
        return
    reserved_epsilon = rounded_up(summary["epsilon_reserved"])
    total_epsilon = summary["epsilon"]
    print(
        f"{options.path}: {reserved_epsilon} of epsilon {total_epsilon:g} reserved "
        f"({summary['accounting']})"
    )
    for run in summary["runs"]:
        schedule = "chosen after outputs" if run["chosen_after_outputs"] else "fixed in advance"
        label = f"{run['time_utc']}  {run['run'][:12]}  {run['name']}"
        say(f"  {label}: epsilon {rounded_up(run['epsilon'])} alone, {schedule}")
    for run in summary["informal_runs"]:
        say(f"  {run['name']}: no guarantee, covered by nothing here ({run['reason']})")


def parse_args(arguments: list[str] | None = None) -> CreateOptions | ShowOptions:
    """Returns the options of the chosen command; a bad argument is a ConfigError (exit 2)."""
    commands: dict[str, type[CreateOptions | ShowOptions]] = {
        "create": CreateOptions,
        "show": ShowOptions,
    }
    return options_of(__doc__, commands, arguments)


def main() -> None:
    """Creates or shows a shared ledger."""
    options = parse_args()
    if isinstance(options, CreateOptions):
        create(options)
    else:
        show(options)


if __name__ == "__main__":
    run_command(main)
