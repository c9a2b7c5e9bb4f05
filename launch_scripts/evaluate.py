"""Evaluates a trained model.

    python launch_scripts/evaluate.py COMMAND --checkpoint DIR ... [--json] [--data_is_public]
    # for commands that share their work over ranks:
    deepspeed launch_scripts/evaluate.py linear-probe ...

Results are printed and written to RUN_DIR/private/evaluation, or to RUN_DIR/evaluation if the data
are declared public. Exit codes: 0 done, 2 bad input, 3 a private head's budget is spent, 4 its
privacy state is refused, 1 anything else.
"""

import argparse
import inspect
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import require_packages

require_packages()

# torch reads this when it is imported. It hides C++ frames where a store is lost, since the trainer
# prints a line of its own.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from evaluation.command_options import COMMANDS, Command, CommandOptions
from trainer.config.cli import Parser, explain, run_command
from trainer.config.options import add_options, parse_options, require_folders
from trainer.errors import ConfigError
from trainer.progress import working
from trainer.ranks.discovery import Ranks, discover_ranks


def parse_args(arguments: list[str]) -> CommandOptions:
    """Returns the options of the chosen command; a bad argument is a ConfigError (exit 2)."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="evaluate.py", description=__doc__, formatter_class=formatter)
    # The deepspeed launcher puts it before all other arguments; the environment states it, too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for command in COMMANDS:
        description = inspect.getdoc(command.options)
        sub = commands.add_parser(
            command.name, help=command.help, description=description, formatter_class=formatter
        )
        add_options(sub, command.options)
    options = parse_options(parser, arguments)
    assert isinstance(options, CommandOptions)
    return options


def main() -> int:
    """Runs the command, on all ranks of a launcher or alone."""
    arguments = sys.argv[1:]
    options = parse_args(arguments)
    require_folders(options)
    command = next(command for command in COMMANDS if command.options is type(options))
    ranks = discover_ranks(os.environ)
    # The message covers the import of torch, too.
    with working(f"{command.name}: {command.help}", shows=ranks.is_main):
        return evaluate(command, options, ranks, arguments)


def evaluate(command: Command, options: CommandOptions, ranks: Ranks, arguments: list[str]) -> int:
    """Runs the command; with other ranks it never returns (`trainer.ranks.distributed.finish`)."""
    from evaluation.results import publish
    from trainer.ranks.distributed import fail, finish, quit_now, start

    def run() -> None:
        results = command.run(options)
        if results is not None:
            publish(
                results,
                output=options.output_folder,
                data_is_public=options.results_are_public,
                as_json=options.as_json,
                arguments=arguments,
            )

    if ranks.world_size == 1:
        run()
        return 0
    try:
        if not command.uses_ranks:
            raise ConfigError(f"{command.name} works in one process; start it without a launcher")
        start(ranks)
        run()
    except KeyboardInterrupt:
        quit_now(130)
    except Exception as caught:
        error = caught
        fail(error, lambda: explain(error, ranks.rank))
    finish(0)


if __name__ == "__main__":
    run_command(main)
