"""Writes the privacy card of a run: its guarantee, recomputed from its ledger.

    python launch_scripts/report.py --run_dir RUN_DIR [--json] [--methods] [--publish published]

Writes RUN_DIR/report/privacy_card.json, .md and .html (one file, nothing external). Works while the
run goes on: it takes no lock and changes nothing else. --publish copies the public files and the
newest checkpoint into a new folder, without the times of files, names the files that it leaves out,
and prints two values to keep elsewhere; --time_stamp has an RFC 3161 authority sign them. Exit
codes: 0 done, 2 no such run, 4 the ledger is broken.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import require_packages

require_packages()

from pydantic import Field

from trainer.config.cli import run_command
from trainer.config.options import Options, options_of, require_folders
from trainer.progress import working

if TYPE_CHECKING:
    from privacy.card.model import PrivacyCard


class ReportOptions(Options):
    """Options of the command."""

    run_dir: Path
    """run folder that holds ledger.jsonl"""
    publish: Path | None = None
    """copy the public files of the run into this new folder"""
    time_stamp: str | None = None
    """with --publish: address of an RFC 3161 authority, which gets a hash of the two values to keep
    elsewhere"""
    no_checkpoints: bool = False
    """publish no checkpoint; otherwise the newest whole one goes with the other files"""
    methods: bool = False
    """print the paragraphs on privacy for a paper's methods section, from the run's own numbers"""
    as_json: bool = Field(False, alias="json")
    """print the card as one JSON object on stdout"""


def report(options: ReportOptions) -> "PrivacyCard":
    """Computes the card, writes its files into the run folder, and prints a summary or the card.

    Raises:
        ConfigError: no such run, its folder cannot be written, or the folder to publish to is not
            new (exit 2).
        PrivacyStateRefused: the ledger is broken, or contradicts config.toml (exit 4).
    """
    from privacy.accounting.rounding import rounded_up
    from privacy.card.run_card import write_card
    from privacy.errors import say
    from trainer.card_of_run import build_card
    from trainer.errors import ConfigError
    from trainer.publish import fingerprint, publish
    from trainer.weights import require_new

    if options.time_stamp is not None and options.publish is None:
        raise ConfigError("--time_stamp is for what is published: give --publish FOLDER too")
    if options.publish is not None:
        # The card takes a while, so this refusal comes first.
        require_new(options.publish)
    card = build_card(options.run_dir)
    paths = write_card(options.run_dir, card)
    steps = "an unknown number" if card.steps_done is None else card.steps_done
    progress = (
        f"{steps} of {card.steps_planned} steps done, {card.attempts_charged} attempts charged"
    )
    claim = "no finite epsilon" if card.epsilon is None else f"epsilon {rounded_up(card.epsilon)}"
    claim += f" at delta {card.delta:g}"
    if not card.formal_guarantee:
        claim = f"formal_guarantee: false ({'; '.join(card.reasons)}); no epsilon is claimed"
    summary = [f"{progress}; {claim}", *(f"note: {line}" for line in card.warnings)]
    lines = [f"privacy card: {path}" for path in paths]
    if options.publish is not None:
        # Nothing is printed yet, so a refusal is one line.
        fingerprint_lines = fingerprint(options.run_dir, card.ledger, options.time_stamp)
        lines += publish(
            options.run_dir,
            options.publish,
            card.ledger,
            checkpoints=not options.no_checkpoints,
        )
        lines += fingerprint_lines
    if options.methods:
        from privacy.card.render import to_markdown

        summary = to_markdown(card, "methods.md.j2").splitlines()

    say(*[card.to_json()] if options.as_json else summary, folds=not options.as_json)
    say(*lines, file=sys.stderr if options.as_json or options.methods else sys.stdout)
    return card


def parse_args(arguments: list[str] | None = None) -> ReportOptions:
    """Returns the arguments of the command line; a bad argument is a ConfigError (exit 2)."""
    return options_of(__doc__, ReportOptions, arguments)


def main() -> int:
    """Runs the command of the process."""
    options = parse_args()
    require_folders(options)
    with working(f"computing the privacy card of {options.run_dir}"):
        report(options)
    return 0


if __name__ == "__main__":
    run_command(main)
