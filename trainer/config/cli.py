"""How every command begins and ends: an error that a user can mend is one line on stderr and an exit code, never a traceback."""

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
"""No option of any command has a use for a larger one; NaN is below nothing."""

OPEN_FILES, FILES_OF_A_RANK = 128, 4
"""Files that any process needs, and more for each rank of a job: rank 0 holds two sockets of gloo and two of the rendezvous."""


class Parser(argparse.ArgumentParser):
    """The parser of every command and subcommand: a bad argument is a ConfigError, not a block of usage.

    Raises:
        ConfigError: `parse_args` refuses something, in argparse's words, or text that is no UTF-8, NaN, or a number beyond
            `MAX_NUMBER`.
    """

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise ConfigError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `argparse.ArgumentParser.parse_known_args`, which all other ways to parse go through."""
        for word in sys.argv[1:] if args is None else args:
            if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
                raise ConfigError(
                    f"argument {word!a} is not valid UTF-8; rename the file, or mend the argument"
                )
        options, others = super().parse_known_args(args, namespace)
        for name, value in vars(options).items():
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not abs(number) < MAX_NUMBER:
                    raise ConfigError(
                        f"argument --{name}: must be a number below {MAX_NUMBER:.3g} in size, not {number:g}"
                    )
        return options, others


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command and exits with its code.

    What `in_one_line` knows is printed as `error: ...` and exits with its code; Ctrl-C exits with 130; a reader that closed
    our stdout (`| head`) ends the command quietly with 1. Anything else is a defect and keeps its traceback.

    Args:
        main: returns the exit code; None means 0.
    """
    print_anything()
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
        known = in_one_line(error)
        if known is None:
            raise
        print(f"error: {known.line}", file=sys.stderr)
        code = known.exit_code
    sys.exit(code)


def explain(error: Exception, rank: int) -> bool:
    """Prints why a rank ends: once, in one line, what a user can mend; a traceback for a defect. Whether it is printed."""
    if isinstance(error, RemoteError):
        return True  # by the other rank
    known = in_one_line(error)
    if known is None:
        print(f"error on rank {rank}:", file=sys.stderr)
        traceback.print_exception(error)
    elif rank == 0 or not isinstance(
        error, ConfigError
    ):  # those come from the command line: every rank has them
        where = "" if rank == 0 and known.exit_code != 1 else f" on rank {rank}"
        print(f"error{where}: {known.line}", file=sys.stderr, flush=True)
    else:
        return False
    return True


class _Console(io.FileIO):
    """A stream of the process; an error of the disk behind it says which stream it is."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._stream = name

    def write(self, data: Any, /) -> int:
        with placed(f"the console ({self._stream})"):
            return super().write(data)


def print_anything() -> None:
    """A console that cannot show a character shows its number, and a stream that was closed swallows what is printed.

    A console on a full disk is an error that names it.
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
    """How many files and sockets a process of a job of so many ranks may have to open."""
    return OPEN_FILES + (FILES_OF_A_RANK * world_size if world_size > 1 else 0)


def require_open_files(world_size: int = 1) -> None:
    """Refuses too few open files, which fail somewhere in the middle, in as many ways as there are libraries.

    A limit that this process may raise by itself is raised.

    Raises:
        ConfigError: this process may not open as many as it needs.
    """
    needed = open_files_of(world_size)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < needed:
        ranks = f" for {world_size:,} ranks" if world_size > 1 else ""
        raise ConfigError(
            f"this process may have {most} open files, and at least {needed} are needed{ranks}: ulimit -n {needed}"
        )
    if 0 <= allowed < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
