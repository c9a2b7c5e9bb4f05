"""The console command of the installed library: `auditable-dp plan`, `report`, `audit` and `verify`.

It needs no trainer. Exit codes: 0 done or consistent, 2 bad input, 4 the privacy state is refused, 5 violated, 6 inconclusive.
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
    from ..audit.report import AuditReport

OF_THE_TRAINER = ("mechanism", "run", "canaries")
SIZES, NOISE = (
    ("num_examples", "expected_batch_size", "num_steps"),
    ("target_epsilon", "noise_multiplier"),
)


class Parser(argparse.ArgumentParser):
    """A bad argument is one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def plan(options: argparse.Namespace) -> int:
    """What a private loop with these numbers would claim."""
    from ..accounting.rounding import rounded_up
    from ..plan.numbers import make_plan
    from ..plan.releases import SENSITIVITY_SLACK
    from ..plan.request import PlanRequest

    asked = {name: getattr(options, name) for name in (*SIZES, *NOISE)}
    made = make_plan(
        PlanRequest(**asked, target_delta=options.delta, sensitivity_slack=SENSITIVITY_SLACK)
    )
    epsilon, most = made.epsilon_planned, made.epsilon_with_reserve
    if epsilon is None or most is None:
        raise ConfigError(f"there is no formal guarantee: {made.reasons[0]}")
    found = {
        "epsilon": epsilon,
        "epsilon_with_reserve": most,
        "delta": made.target_delta,
        "noise_multiplier": made.noise_multiplier,
        "sample_rate": made.sample_rate,
        "cap": made.cap,
        "reserved_attempts": made.reserved_attempts,
    }
    text = (
        f"epsilon {rounded_up(epsilon)} at delta {made.target_delta:g} (at most {rounded_up(most)}, when crashes use up "
        f"the reserve of {made.reserved_attempts} attempts); noise multiplier {made.noise_multiplier:.6g}, sample rate "
        f"{made.sample_rate:.6g}, batches cut at {made.cap}"
    )
    print(json.dumps(found) if options.json else text)
    return 0


def report(options: argparse.Namespace) -> int:
    """Writes RUN_DIR/report/privacy_card.json, .md and .html."""
    from ..accounting.rounding import rounded_up
    from ..card.folder import build_card, write_card

    card = build_card(options.run_dir)
    paths = write_card(options.run_dir, card)
    claim = (
        "no epsilon is claimed"
        if card.epsilon is None
        else f"epsilon {rounded_up(card.epsilon)} at delta {card.delta:g}"
    )
    say(card.to_json() if options.json else f"{card.attempts_charged} attempts charged; {claim}")
    for path in paths:
        say(f"privacy card: {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def audit(options: argparse.Namespace) -> int:
    """Rechecks the ledger or, with the sampling key, who was in which batch."""
    if options.kind in OF_THE_TRAINER:
        raise ConfigError(
            f"audit {options.kind} is not in the library: take launch_scripts/audit.py {options.kind} of a clone of the project"
        )
    from ..audit.folder import ledger_audit, schedule_audit

    made = (schedule_audit if options.kind == "schedule" else ledger_audit)(options.run_dir)
    return conclude(made, options.run_dir, as_json=options.json)


def conclude(made: "AuditReport", run_dir: Path, *, as_json: bool) -> int:
    """Prints an audit with its date and the ledger that was looked at, of another of which it says nothing; its exit code."""
    ledger = sha256((run_dir / "ledger.jsonl").read_bytes()).hexdigest()
    today = (
        datetime.now(UTC).date().isoformat()
    )  # a finer clock would show how long training took before
    made = replace(made, facts={**made.facts, "date_utc": today, "ledger_sha256": ledger})
    print(printable(json.dumps(made.to_json(), allow_nan=False)) if as_json else made.to_text())
    return made.exit_code


def _parser() -> Parser:
    parser = Parser(prog="auditable-dp", description=(__doc__ or "").split("\n\n")[0])
    kinds = parser.add_subparsers(required=True, metavar="plan/report/audit/verify", dest="command")
    one = kinds.add_parser(
        "plan", help="epsilon or noise before any data are touched", description=plan.__doc__
    )
    for name in SIZES:
        one.add_argument(f"--{name}", type=int, required=True)
    noise = one.add_mutually_exclusive_group(required=True)
    for name in NOISE:
        noise.add_argument(f"--{name}", type=float)
    one.add_argument("--delta", type=float, help="default 1 / (2 num_examples)")
    one.set_defaults(act=plan)
    one = kinds.add_parser(
        "report", help="the privacy card of a run folder", description=report.__doc__
    )
    one.add_argument("run_dir", type=Path)
    one.set_defaults(act=report)
    one = kinds.add_parser("audit", help="recheck a run folder", description=audit.__doc__)
    one.add_argument("kind", choices=("ledger", "schedule", *OF_THE_TRAINER))
    one.add_argument("run_dir", type=Path)
    one.set_defaults(act=audit)
    for each in kinds.choices.values():
        each.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    kinds.add_parser(
        "verify",
        help="recheck a published folder; `verify --help` lists its options",
        add_help=False,
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; what a user can mend is one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == [
        "verify"
    ]:  # the library's own copy judges the folder, and reads its own options
        from .. import verify

        return verify.main(given[1:])
    try:
        options = _parser().parse_args(given)
        return int(options.act(options))
    except ModuleNotFoundError as error:
        print(
            f"error: {error.name} is not installed: pip install 'auditable-dp[card]'",
            file=sys.stderr,
        )
        return 2
    except Exception as error:
        said = in_one_line(error)
        if said is None:
            raise
        print(f"error: {said.line}", file=sys.stderr)
        return said.exit_code


if __name__ == "__main__":
    sys.exit(main())
