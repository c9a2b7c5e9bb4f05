"""Recheck what a run claims.

    python launch_scripts/audit.py ledger    --run_dir runs/quickstart [--json]
    python launch_scripts/audit.py schedule  --run_dir runs/quickstart [--json]
    python launch_scripts/audit.py mechanism --run_dir runs/quickstart [--json] [--engine local] [--ranks 2]
    python launch_scripts/audit.py canaries  --output data/canaries --num_canaries 1000
    python launch_scripts/audit.py run       --run_dir runs/quickstart --canaries data/canaries [--json]

ledger     hash chain, legal order, charges, and every epsilon in the folder recomputed from the ledger alone
schedule   with the sampling key: the members of every batch drawn again and tested. Inside the trust boundary: what it prints
           tells batch sizes; with --json it keeps them to itself
mechanism  a short run on canaries in a folder of its own, through the code that trains: clipping, noise, coins
canaries   before training: tar shards with canaries that are in the data or not by secret coins
run        after training with these shards: do the losses of a checkpoint betray the coins?

An audit refutes a claim or fails to; it proves none. Exit codes: 0 consistent, 5 violated, 6 inconclusive; 2 bad input, 4 the
privacy state is refused.
"""

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from privacy.audit.report import AuditReport  # noqa: E402
from trainer.config.cli import Parser, run_command  # noqa: E402
from trainer.config.recipe import EngineName  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command-line arguments; a bad one is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="ledger/schedule/mechanism/canaries/run")
    audits = {kind: kinds.add_parser(kind) for kind in ("ledger", "schedule", "mechanism", "run")}
    for audit in audits.values():
        audit.add_argument("--run_dir", type=Path, required=True, help="run folder that holds ledger.jsonl")
        audit.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    mechanism, run = audits["mechanism"], audits["run"]
    mechanism.add_argument("--engine", choices=get_args(EngineName), default="deepspeed")
    mechanism.add_argument("--ds_config", type=Path, help="machine settings; default: those that the run used last")
    mechanism.add_argument("--ranks", type=int, default=2, help="processes on this machine's CPU (default 2)")
    run.add_argument("--canaries", type=Path, required=True, help="folder that `audit.py canaries` wrote")
    run.add_argument("--checkpoint", type=Path, help="default: the newest of the run")
    canaries = kinds.add_parser("canaries")
    canaries.add_argument("--output", type=Path, required=True, help="new folder for shards and secret coins")
    canaries.add_argument("--num_canaries", type=int, default=1000, help="in the data or not by one coin each")
    canaries.add_argument("--image_size", type=int, default=64, help="side of the random pictures in pixels")
    canaries.add_argument("--caption_field", help="the recipe's data.caption_field, if it has one")
    return parser.parse_args(arguments)


def main() -> int:
    """Audits, prints, and returns the verdict's exit code."""
    options = parse_args()
    if options.kind == "canaries":
        from trainer.audit.canaries import write_canaries

        print(write_canaries(options.output, options.num_canaries, options.image_size, options.caption_field))
        return 0
    report = _stamped(_audit(options), options.run_dir)
    print(json.dumps(report.to_json(), allow_nan=False) if options.json else report.to_text())
    return report.exit_code


def _stamped(report: AuditReport, run_dir: Path) -> AuditReport:
    """With the date and the ledger that was looked at: an audit of another ledger says nothing about this one."""
    digest = hashlib.sha256((run_dir / "ledger.jsonl").read_bytes()).hexdigest()
    today = datetime.now(UTC).date().isoformat()  # a finer clock would tell how long training took before
    return replace(report, facts={**report.facts, "date_utc": today, "ledger_sha256": digest})


def _audit(options: argparse.Namespace) -> AuditReport:
    if options.kind == "mechanism" and not 1 <= options.ranks <= 16:
        raise ConfigError(f"--ranks must be between 1 and 16, not {options.ranks}")
    if not options.run_dir.is_dir():
        raise ConfigError(f"run folder {options.run_dir} does not exist")
    if not (options.run_dir / "ledger.jsonl").is_file():
        raise ConfigError(f"run folder {options.run_dir} has no ledger.jsonl: nothing was trained here")
    if options.kind == "mechanism":
        from trainer.audit.mechanism import mechanism_audit

        return mechanism_audit(options.run_dir, engine=options.engine, ds_config=options.ds_config, ranks=options.ranks)
    if options.kind == "run":
        from trainer.audit.run import run_audit

        return run_audit(options.run_dir, options.canaries, options.checkpoint, ROOT)
    from trainer.audit.folder import ledger_audit, schedule_audit

    return (ledger_audit if options.kind == "ledger" else schedule_audit)(options.run_dir)


if __name__ == "__main__":
    run_command(main)
