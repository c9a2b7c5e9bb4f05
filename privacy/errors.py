"""Errors that a user can mend, and what a command says of them: `in_one_line` is the only place that decides.

An exception with `exit_code` ends a command with one line and that code.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple, TextIO

DONE, BUDGET_SPENT, STOPPED_EARLY = 0, 3, 7
"""How the steps of a run end, as exit codes: all are done; the budget is spent and steps remain; stopped on request."""


class PrivacyConfigError(ValueError):
    """The privacy parameters, or the model they shall protect, are refused."""

    exit_code = 2


class BudgetSpent(RuntimeError):
    """The next intent would pass the budget; steps remain."""

    exit_code = 3


class PrivacyStateRefused(RuntimeError):
    """Ledger, key, mirror or manifest do not fit together: starting could spend budget unseen."""

    exit_code = 4


class MixedExamples(PrivacyStateRefused):
    """The loss of an example depended on others, so the run's guarantee does not hold."""


class NotRecorded(PrivacyStateRefused):
    """A checkpoint is not the one that the ledger around it recorded."""


class ConfigError(ValueError):
    """A recipe, an override, a ds_config or a run folder is wrong; the message says what, where and how to mend it.

    It has several lines where a file has several faults, so that one start shows them all.
    """

    exit_code = 2

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class WeightsNotFinite(RuntimeError):
    """The weights hold NaN or infinity: nothing that is trained from here on is of use, and every step would be charged."""

    exit_code = 1


class StepDropped(RuntimeError):
    """All ranks agreed to drop a step before its intent: nothing of it left its process, and it costs nothing."""


class RemoteError(RuntimeError):
    """Another rank failed; carries its exit code so that all ranks end alike."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def refusing(what: str, kind: Callable[[str], Exception] = PrivacyStateRefused) -> Iterator[None]:
    """Inside, what the operating system refuses becomes an error of one line: `what` cannot be done, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


@contextlib.contextmanager
def placed(path: str | Path) -> Iterator[None]:
    """Inside, an error of the operating system that names no file, such as that of a write to a full disk, names this one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


class Said(NamedTuple):
    """What a command says at its end, and the exit code that goes with it."""

    line: str
    exit_code: int


_WRONG_PATH = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EROFS,
    errno.ENOTEMPTY,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENODEV,
    errno.ENXIO,
}
"""What a user mends by naming another path (exit code 2); the rest, such as a full disk, is the machine's state (1)."""
_LONGEST_WORD = 240


def in_one_line(error: BaseException) -> Said | None:
    """What a command says of an error that a user can mend; None for a defect, which keeps its traceback.

    These are errors with an `exit_code`, and what a machine refuses: a path, a file, memory, threads, and input that is nested
    more deeply than Python goes.
    """
    exit_code = getattr(error, "exit_code", None)
    if isinstance(exit_code, int):
        return Said("\n  ".join(map(_shortened, getattr(error, "lines", [str(error)]))), exit_code)
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        where = ": ".join(
            str(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
        )
        line = _shortened(f"{where}: {reason}" if where else reason)
        return Said(line, 2 if error.errno in _WRONG_PATH and where else 1)
    if isinstance(error, RecursionError):
        return Said("the input is nested more deeply than Python can follow; write it flat", 2)
    # Torch raises plain RuntimeErrors for the memory of a CPU and of threads, and its own type for a GPU's.
    said, words = (
        str(error),
        ("allocate memory", "bad_alloc", "can't start new thread", os.strerror(errno.EAGAIN)),
    )
    of_torch = type(error).__name__ == "OutOfMemoryError" or any(word in said for word in words)
    of_torch = of_torch or said.strip() == "could not create a primitive"  # oneDNN's words for it
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and of_torch):
        detail = _shortened(said).partition(" Exception raised from")[0]
        return Said(
            "this process may have no more memory, or no more threads: take smaller sizes, or raise the limit"
            + (f" ({detail})" if detail else ""),
            1,
        )
    return None


def _shortened(text: str) -> str:
    """One line without control characters, in which no word is too long to read the rest."""
    words = [
        word if len(word) <= _LONGEST_WORD else f"{word[:160]}...{word[-40:]}"
        for word in text.split()
    ]
    return printable(" ".join(words))


def printable(line: str) -> str:
    """The line with an escape, as JSON knows it, for what breaks lines, moves the cursor, turns the text or shows nothing."""
    shown = (
        c if c.isprintable() else c.encode("unicode_escape").decode().replace("\\x", "\\u00")
        for c in line
    )
    return line if line.isprintable() else "".join(shown)


def folded(line: str) -> str:
    """A sentence for people, at 80 columns; what goes on is indented, and a path or another long word stays whole."""
    parts = wrap(line, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts)


def say(*lines: str, file: TextIO | None = None, folds: bool = False) -> None:
    """Prints lines that may hold text from a file, each as one line; all that commands say of a folder goes through here.

    Args:
        folds: the lines are sentences, not commands or JSON.
    """
    for line in map(printable, lines):
        print(folded(line) if folds else line, file=file, flush=True)
