"""Recheck what a run claims.

    python launch_scripts/audit.py ledger    --run_dir RUN_DIR [--json]
    python launch_scripts/audit.py schedule  --run_dir RUN_DIR [--json]
    python launch_scripts/audit.py mechanism --run_dir RUN_DIR [--json] [--engine local] [--ranks 2]
    python launch_scripts/audit.py canaries  --output data/canaries --num_canaries 1000
    python launch_scripts/audit.py run       --run_dir RUN_DIR --canaries data/canaries [--json]

ledger     Makes the checks of verify.py and, if the folder has private/, checks sampling key, data,
           mirror and the record of attempts.
schedule   Draws the members of every batch again with the sampling key, by independent code too,
and
           tests them. Its output stays inside the trust boundary, since it shows batch sizes; with
           --json it shows none.
mechanism  Trains shortly on canaries in a folder of its own, with the run's settings and the code
that
           trains, also for a loop of one's own: checks clipping, noise, coins and order of charges.
canaries   Writes, before training, tar shards with canaries that are in the data or not by secret
           coins.
run        Tests, after training with these shards, whether the losses of a checkpoint betray the
coins.

An audit refutes a claim or fails to; it proves none. Exit codes: 0 consistent, 5 violated,
6 inconclusive; 2 bad input, 4 the privacy state is refused.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import ROOT, require_packages

require_packages()

from pydantic import Field

from privacy.command.main import conclude
from trainer.config.cli import run_command
from trainer.config.options import Options, options_of, require_folders
from trainer.config.recipe import EngineName
from trainer.progress import working


class LedgerOptions(Options):
    """Recomputes every epsilon from the ledger alone."""

    run_dir: Path
    """run folder that holds ledger.jsonl"""
    as_json: bool = Field(False, alias="json")
    """print one JSON object on stdout"""


class ScheduleOptions(LedgerOptions):
    """Draws the members of every batch again."""


class MechanismOptions(LedgerOptions):
    """Trains shortly on canaries, with the settings of the run."""

    engine: EngineName = "deepspeed"
    ds_config: Path | None = None
    """machine settings; default: those that the run used last"""
    ranks: int | None = Field(None, ge=1, le=16)
    """processes on this machine's CPU; default: those of the run, up to four"""


class RunOptions(LedgerOptions):
    """Asks the losses of a checkpoint whether they betray the coins."""

    canaries: Path
    """folder that `audit.py canaries` wrote"""
    checkpoint: Path | None = None
    """default: the newest of the run"""


class CanariesOptions(Options):
    """Writes shards with canaries that are in the data or not."""

    output: Path
    """new folder for shards and secret coins"""
    num_canaries: int = 1000
    """in the data or not by one coin each"""
    image_size: int = 64
    """side of the random pictures in pixels"""
    caption_field: str | None = None
    """the recipe's data.caption_field, if it has one"""


def parse_args(arguments: list[str] | None = None) -> LedgerOptions | CanariesOptions:
    """Returns the options of the chosen audit; a bad argument is a ConfigError (exit 2)."""
    kinds: dict[str, type[LedgerOptions | CanariesOptions]] = {
        "ledger": LedgerOptions,
        "schedule": ScheduleOptions,
        "mechanism": MechanismOptions,
        "canaries": CanariesOptions,
        "run": RunOptions,
    }
    return options_of(__doc__, kinds, arguments)


def main() -> int:
    """Audits, prints, and returns the verdict's exit code."""
    options = parse_args()
    if isinstance(options, CanariesOptions):
        from trainer.audit.canaries import write_canaries

        summary = write_canaries(
            options.output, options.num_canaries, options.image_size, options.caption_field
        )
        print(summary)
        return 0
    require_folders(options)
    run_dir = options.run_dir
    with working(f"auditing {run_dir}"):
        if isinstance(options, MechanismOptions):
            from trainer.audit.mechanism import mechanism_audit

            report = mechanism_audit(
                run_dir, engine=options.engine, ds_config=options.ds_config, ranks=options.ranks
            )
        elif isinstance(options, RunOptions):
            from trainer.audit.canaries import run_audit

            report = run_audit(run_dir, options.canaries, options.checkpoint, ROOT)
        else:
            from data.index.tar_index import ExampleTable
            from privacy.audit.run_audit import ledger_audit, schedule_audit

            index = run_dir / "private" / "index"
            if isinstance(options, ScheduleOptions):
                report = schedule_audit(run_dir)
            elif (index / "manifest.json").is_file():
                table = ExampleTable.open(index, run_dir, check_shards=False)
                report = ledger_audit(run_dir, table.manifest_digest())
            else:
                report = ledger_audit(run_dir)
    return conclude(report, run_dir, as_json=options.as_json)


if __name__ == "__main__":
    run_command(main)
