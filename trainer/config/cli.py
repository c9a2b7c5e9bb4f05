"""Begins and ends every command.

An error that a user can mend is one line on stderr and an exit code, never a traceback.
"""

import argparse
import contextlib
import io
import os
import resource
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from privacy.errors import placed
from trainer.errors import ConfigError, RemoteError, in_one_line

MAX_NUMBER = 2**63
"""No option of any command has a use for a larger number; NaN is not below it."""

OPEN_FILES = 128
"""Files that any process needs."""
FILES_OF_A_RANK = 4
"""Further files for each rank of a job: rank 0 has two sockets of gloo, two of the rendezvous."""


class Parser(argparse.ArgumentParser):
    """A parser of commands and subcommands that raises ConfigError in place of printing usage.

    Raises:
        ConfigError: `parse_args` refuses an argument, in argparse's words, or text that is no
            UTF-8, NaN, or a number beyond `MAX_NUMBER`.
    """

    def error(self, message: str) -> NoReturn:
        """Raises argparse's message as ConfigError."""
        raise ConfigError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses the arguments; all other ways to parse call it.

        See `argparse.ArgumentParser.parse_known_args`.
        """
        for word in sys.argv[1:] if args is None else args:
            # Python reads bytes that are no UTF-8 as such surrogates.
            if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
                raise ConfigError(
                    f"argument {word!a} is not valid UTF-8; rename the file, or mend the argument"
                )
        options, unknown_words = super().parse_known_args(args, namespace)
        for name, setting in vars(options).items():
            for number in setting if isinstance(setting, list) else [setting]:
                # `not <` refuses NaN too.
                if isinstance(number, int | float) and not abs(number) < MAX_NUMBER:
                    raise ConfigError(
                        f"argument --{name}: must be a number below {MAX_NUMBER:.3g} in size, "
                        f"not {number:g}"
                    )
        return options, unknown_words


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command and exits with its code.

    An error that `in_one_line` knows is printed as `error: ...` and exits with its code; Ctrl-C
    exits with 130; a reader that closed our stdout (`| head`) ends the command quietly with 1. Any
    other error is a defect and keeps its traceback.

    Args:
        main: returns the exit code; None means 0.
    """
    prepare_console()
    try:
        require_open_files()
        code = main() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        message = in_one_line(error)
        if message is None:
            raise
        print(f"error: {message.line}", file=sys.stderr)
        code = message.exit_code
    sys.exit(code)


def explain(error: Exception, rank: int) -> bool:
    """Prints why a rank ends, and returns whether the reason is printed.

    An error that a user can mend is printed once, in one line; a defect has its traceback.
    """
    if isinstance(error, RemoteError):
        return True  # by the other rank
    message = in_one_line(error)
    if message is None:
        print(f"error on rank {rank}:", file=sys.stderr)
        traceback.print_exception(error)
        return True
    # A ConfigError comes from the command line, which every rank has; rank 0 prints it.
    if rank > 0 and isinstance(error, ConfigError):
        return False
    place = "" if rank == 0 and message.exit_code != 1 else f" on rank {rank}"
    print(f"error{place}: {message.line}", file=sys.stderr, flush=True)
    return True


class _Console(io.FileIO):
    """A stream of the process; an error of the disk behind it names the stream."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._stream = name

    def write(self, data: Any, /) -> int:
        with placed(f"the console ({self._stream})"):
            return super().write(data)


def prepare_console() -> None:
    """Lets the console take any text.

    A console that cannot show a character shows its number. A closed stream drops its text.
    A console on a full disk raises an error that names the console.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            with contextlib.suppress(OSError):  # a stand-in that has no file
                raw = _Console(stream.fileno(), name)
                buffer = raw if stream.write_through else io.BufferedWriter(raw)
                console = io.TextIOWrapper(
                    buffer,
                    stream.encoding,
                    "backslashreplace",
                    None,
                    stream.line_buffering,
                    stream.write_through,
                )
                setattr(sys, name, console)


def open_files_of(world_size: int) -> int:
    """Returns how many files and sockets a process of a job with `world_size` ranks may open."""
    return OPEN_FILES + (FILES_OF_A_RANK * world_size if world_size > 1 else 0)


def require_open_files(world_size: int = 1) -> None:
    """Raises this process's limit of open files where it is too low.

    Without that a run fails somewhere in the middle, and each library fails in another way.

    Raises:
        ConfigError: the hard limit is below the files that this process needs.
    """
    needed = open_files_of(world_size)
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A negative limit is no limit.
    if 0 <= hard_limit < needed:
        ranks = f" for {world_size:,} ranks" if world_size > 1 else ""
        raise ConfigError(
            f"this process may have {hard_limit} open files, and at least {needed} are "
            f"needed{ranks}: ulimit -n {needed}"
        )
    if 0 <= soft_limit < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard_limit))
