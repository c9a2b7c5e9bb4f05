"""How every command ends: an error that a user can mend is one line on stderr and an exit code, never a traceback."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from trainer.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Of every command and of its subcommands: a bad argument is a ConfigError, not a block of usage.

    Raises:
        ConfigError: by `parse_args`, in argparse's words.
    """

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise ConfigError(message)


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command and exits with its code.

    An exception with an `exit_code` prints `error: ...` in one line and exits with that code; Ctrl-C exits with 130; a
    reader that closed our stdout (`| head`) ends the command quietly with 1. Anything else is a defect and keeps its
    traceback.

    Args:
        main: returns the exit code; None means 0.
    """
    try:
        code = main() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        exit_code = getattr(error, "exit_code", None)
        if not isinstance(exit_code, int):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = exit_code
    sys.exit(code)
