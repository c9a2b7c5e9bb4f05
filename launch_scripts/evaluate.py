"""Evaluates what a model has learnt.

    python launch_scripts/evaluate.py COMMAND --checkpoint RUN_OR_CHECKPOINT ... [--json] [--data_is_public]
    deepspeed launch_scripts/evaluate.py features ...        # commands that share their work over ranks

Results are printed, and written to RUN_DIR/private/evaluation, or to RUN_DIR/evaluation where the data are declared public.
Exit codes: 0 done, 2 bad input, 3 a private head's budget is spent, 4 its privacy state is refused, 1 anything else.
"""

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Before torch is imported: a store that is gone is one line of ours, not a stack of C++ frames.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from evaluation.commands import COMMANDS, Command  # noqa: E402
from evaluation.commands.common import add_output, output_of  # noqa: E402
from trainer.config.cli import Parser, explain, run_command  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402


def parse_args(arguments: list[str]) -> argparse.Namespace:
    """Command-line arguments; a bad one is a ConfigError (exit 2)."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="evaluate.py", description=__doc__, formatter_class=formatter)
    # The deepspeed launcher puts it before everything else; the environment says it too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.NAME, help=command.HELP, description=command.__doc__, formatter_class=formatter
        )
        command.add_arguments(sub)
        add_output(sub)
        sub.set_defaults(command=command)
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the command, on all ranks of a launcher or alone."""
    from trainer.ranks.discovery import discover_ranks

    arguments = sys.argv[1:]
    options = parse_args(arguments)
    if discover_ranks(os.environ).world_size == 1:
        _run(options, arguments)
        return 0
    _on_ranks(options, arguments)


def _run(options: argparse.Namespace, arguments: list[str]) -> None:
    from evaluation.results import publish

    command: Command = options.command
    results = command.run(options)
    if results is not None:
        public = options.data_is_public
        publish(results, output=output_of(options), data_is_public=public, as_json=options.json, arguments=arguments)


def _on_ranks(options: argparse.Namespace, arguments: list[str]) -> NoReturn:
    from trainer.ranks.discovery import discover_ranks
    from trainer.ranks.distributed import fail, finish, quit_now, start

    ranks = discover_ranks(os.environ)

    try:
        if not getattr(options.command, "RANKS", False):
            raise ConfigError(f"{options.name} works in one process; start it without a launcher")
        start(ranks)
        _run(options, arguments)
    except KeyboardInterrupt:
        quit_now(130)
    except Exception as error:
        fail(error, functools.partial(explain, error, ranks.rank))
    finish(0)


if __name__ == "__main__":
    run_command(main)
