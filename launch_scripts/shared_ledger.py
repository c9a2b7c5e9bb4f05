"""A data owner's ledger over several runs on the same data.

python launch_scripts/shared_ledger.py create PATH --target_epsilon 8 --delta 1e-9
python launch_scripts/shared_ledger.py show PATH [--json]
A run joins with privacy.shared_ledger=PATH and reserves its whole budget before it touches data. Exit 3: no room beside the
other runs; exit 2: the run would not fit even alone, or unit or adjacency differ; exit 4: the file is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from privacy.ledger.shared import DEFAULT_UNIT, SharedLedger
from trainer.config.cli import Parser, run_command


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command-line arguments; a bad one is a ConfigError (exit 2)."""
    parser = Parser(description="Create or show the ledger that several runs on the same data share.")
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="write the first line: the total budget")
    create.add_argument("path", type=Path, metavar="PATH", help="new file for the ledger")
    create.add_argument("--target_epsilon", type=float, required=True, metavar="E", help="of all runs together")
    create.add_argument("--delta", type=float, required=True, metavar="D", help="of all runs together")
    create.add_argument("--unit", default=DEFAULT_UNIT, help=f"unit of privacy (default {DEFAULT_UNIT!r})")
    create.add_argument(
        "--rdp_order",
        type=float,
        metavar="A",
        help="order of the RDP filter; default: the best for runs like the first",
    )
    create.add_argument(
        "--informal_runs", action="store_true", help="permit runs without a guarantee, which nothing here covers"
    )
    create.add_argument(
        "--mirror", type=Path, metavar="FILE", help="second copy on another file system: finds lines that were cut off"
    )
    show = commands.add_parser("show", help="verify it and list the runs")
    show.add_argument("path", type=Path, metavar="PATH", help="the ledger")
    show.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser.parse_args(arguments)


def main() -> int:
    """Creates or shows."""
    args = parse_args()
    if args.command == "create":
        SharedLedger.create(
            args.path,
            epsilon=args.target_epsilon,
            delta=args.delta,
            unit=args.unit,
            rdp_order=args.rdp_order,
            informal_runs=args.informal_runs,
            mirror=args.mirror,
        )
        print(f"{args.path}: epsilon {args.target_epsilon:g} at delta {args.delta:g} for all runs together")
        return 0
    summary = SharedLedger(args.path).summary()
    if args.json:
        print(json.dumps(summary))
        return 0
    print(
        f"{args.path}: {summary['epsilon_reserved']:.4f} of epsilon {summary['epsilon']:g} reserved ({summary['accounting']})"
    )
    for run in summary["runs"]:
        chosen = "chosen after outputs" if run["chosen_after_outputs"] else "fixed in advance"
        print(f"  {run['time_utc']}  {run['run'][:12]}  {run['name']}: epsilon {run['epsilon']:.4f} alone, {chosen}")
    for run in summary["informal_runs"]:
        print(f"  {run['name']}: no guarantee, covered by nothing here ({run['reason']})")
    return 0


if __name__ == "__main__":
    run_command(main)
