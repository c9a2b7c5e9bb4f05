"""Privacy card of a run: what it guarantees, recomputed from its ledger.

    python launch_scripts/report.py --run_dir runs/quickstart [--json]

Writes RUN_DIR/report/privacy_card.json, .md and .html (one file with plots, nothing external). Works while the run goes
on: it takes no lock and changes nothing else. Exit codes: 0 done, 2 no such run, 4 the ledger is broken.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from privacy.card.text import rounded_up  # noqa: E402
from trainer.config.cli import Parser, run_command  # noqa: E402
from trainer.report import build_card, write_card  # noqa: E402


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command-line arguments; a bad one is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, required=True, help="run folder that holds ledger.jsonl")
    parser.add_argument("--json", action="store_true", help="print the card as one JSON object on stdout")
    return parser.parse_args(arguments)


def main() -> int:
    """Computes, writes and prints."""
    options = parse_args()
    card = build_card(options.run_dir)
    paths = write_card(options.run_dir, card)
    if options.json:
        print(json.dumps(card, allow_nan=False))
    else:
        print(_summary(card))
    for path in paths:
        print(f"privacy card: {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _summary(card: dict[str, Any]) -> str:
    steps = "an unknown number" if card["steps_done"] is None else card["steps_done"]
    progress = f"{steps} of {card['steps_planned']} steps done, {card['attempts_charged']} attempts charged"
    warnings = "".join(f"\nnote: {line}" for line in card["warnings"])
    if not card["formal_guarantee"]:
        return f"{progress}; formal_guarantee: false ({'; '.join(card['reasons'])}); no epsilon is claimed{warnings}"
    epsilon = "no finite epsilon" if card["epsilon"] is None else f"epsilon {rounded_up(card['epsilon'], 4)}"
    return f"{progress}; {epsilon} at delta {card['delta']:g}{warnings}"


if __name__ == "__main__":
    run_command(main)
