"""The console command of the installed library: `auditable-dp plan`, `report`, `audit`, `verify`.

It needs no trainer. Exit codes: 0 done or consistent, 2 bad input, 4 the privacy state is refused,
5 violated, 6 inconclusive.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..errors import ConfigError, in_one_line, printable, say

if TYPE_CHECKING:
    from ..audit.audit_report import AuditReport

OF_THE_TRAINER = ("mechanism", "run", "canaries")
SIZES = ("num_examples", "expected_batch_size", "num_steps")
NOISE = ("target_epsilon", "noise_multiplier")


class Parser(argparse.ArgumentParser):
    """A parser of arguments that reports a bad one as a ConfigError: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def plan(options: argparse.Namespace) -> int:
    """Prints the claim of a private loop with these numbers."""
    # Imported here, as in the other commands: a missing package is one line, `--help` needs none.
    from ..accounting.rounding import rounded_up
    from ..plan.numbers import make_plan
    from ..plan.releases import SENSITIVITY_SLACK
    from ..plan.request import PlanRequest

    numbers = {name: getattr(options, name) for name in (*SIZES, *NOISE)}
    request = PlanRequest(
        **numbers, target_delta=options.delta, sensitivity_slack=SENSITIVITY_SLACK
    )
    privacy_plan = make_plan(request)
    epsilon = privacy_plan.epsilon_planned
    epsilon_with_reserve = privacy_plan.epsilon_with_reserve
    if epsilon is None or epsilon_with_reserve is None:
        raise ConfigError(f"there is no formal guarantee: {privacy_plan.reasons[0]}")
    delta = privacy_plan.target_delta
    sigma = privacy_plan.noise_multiplier
    rate = privacy_plan.sample_rate
    reserve = privacy_plan.reserved_attempts
    if options.json:
        claim = {
            "epsilon": epsilon,
            "epsilon_with_reserve": epsilon_with_reserve,
            "delta": delta,
            "noise_multiplier": sigma,
            "sample_rate": rate,
            "cap": privacy_plan.cap,
            "reserved_attempts": reserve,
        }
        print(json.dumps(claim))
        return 0
    print(
        f"epsilon {rounded_up(epsilon)} at delta {delta:g} (at most "
        f"{rounded_up(epsilon_with_reserve)}, when crashes use up the reserve of {reserve} "
        f"attempts); noise multiplier {sigma:.6g}, sample rate {rate:.6g}, batches cut at "
        f"{privacy_plan.cap}"
    )
    return 0


def report(options: argparse.Namespace) -> int:
    """Writes RUN_DIR/report/privacy_card.json, .md and .html."""
    from ..accounting.rounding import rounded_up
    from ..card.run_card import build_card, write_card

    card = build_card(options.run_dir)
    paths = write_card(options.run_dir, card)
    claim = "no epsilon is claimed"
    if card.epsilon is not None:
        claim = f"epsilon {rounded_up(card.epsilon)} at delta {card.delta:g}"
    say(card.to_json() if options.json else f"{card.attempts_charged} attempts charged; {claim}")
    for path in paths:
        say(f"privacy card: {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def audit(options: argparse.Namespace) -> int:
    """Rechecks the ledger or, with the sampling key, who was in which batch."""
    if options.kind in OF_THE_TRAINER:
        raise ConfigError(
            f"audit {options.kind} is not in the library: take launch_scripts/audit.py "
            f"{options.kind} of a clone of the project"
        )
    from ..audit.run_audit import ledger_audit, schedule_audit

    run_audit = schedule_audit if options.kind == "schedule" else ledger_audit
    return conclude(run_audit(options.run_dir), options.run_dir, as_json=options.json)


def conclude(audit_report: "AuditReport", run_dir: Path, *, as_json: bool) -> int:
    """Prints an audit with its date and the hash of its ledger, and returns its exit code.

    The hash ties the audit to that ledger: it says nothing about another one.
    """
    ledger_hash = sha256((run_dir / "ledger.jsonl").read_bytes()).hexdigest()
    # A finer clock would show how long the training before it took.
    date = datetime.now(UTC).date().isoformat()
    facts = {**audit_report.facts, "date_utc": date, "ledger_sha256": ledger_hash}
    audit_report = replace(audit_report, facts=facts)
    if as_json:
        print(printable(json.dumps(audit_report.to_json(), allow_nan=False)))
    else:
        print(audit_report.to_text())
    return audit_report.exit_code


def _parser() -> Parser:
    parser = Parser(prog="auditable-dp", description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(
        required=True, metavar="plan/report/audit/verify", dest="command"
    )
    plan_parser = commands.add_parser(
        "plan", help="epsilon or noise before any data are touched", description=plan.__doc__
    )
    for name in SIZES:
        plan_parser.add_argument(f"--{name}", type=int, required=True)
    noise = plan_parser.add_mutually_exclusive_group(required=True)
    for name in NOISE:
        noise.add_argument(f"--{name}", type=float)
    plan_parser.add_argument("--delta", type=float, help="default 1 / (2 num_examples)")
    plan_parser.set_defaults(act=plan)
    report_parser = commands.add_parser(
        "report", help="the privacy card of a run folder", description=report.__doc__
    )
    report_parser.add_argument("run_dir", type=Path)
    report_parser.set_defaults(act=report)
    audit_parser = commands.add_parser(
        "audit", help="recheck a run folder", description=audit.__doc__
    )
    audit_parser.add_argument("kind", choices=("ledger", "schedule", *OF_THE_TRAINER))
    audit_parser.add_argument("run_dir", type=Path)
    audit_parser.set_defaults(act=audit)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    # After the loop: `verify` reads its own options.
    commands.add_parser(
        "verify",
        help="recheck a published folder; `verify --help` lists its options",
        add_help=False,
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a fault that a user can mend is one line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The library's own copy judges the folder, and reads its own options.
    if words[:1] == ["verify"]:
        from .. import verify

        return verify.main(words[1:])
    try:
        options = _parser().parse_args(words)
        return int(options.act(options))
    except ModuleNotFoundError as error:
        print(
            f"error: {error.name} is not installed: pip install 'auditable-dp[card]'",
            file=sys.stderr,
        )
        return 2
    except Exception as error:
        fault = in_one_line(error)
        if fault is None:
            raise
        print(f"error: {fault.line}", file=sys.stderr)
        return fault.exit_code


if __name__ == "__main__":
    sys.exit(main())
