"""Errors that a user can mend, and their line on a command's console, which `in_one_line` writes.

An exception with `exit_code` ends a command with one line and that code.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple, TextIO

DONE = 0
"""Exit code of a run whose steps are all done."""
BUDGET_SPENT = 3
"""Exit code of a run whose budget is spent while steps remain."""
STOPPED_EARLY = 7
"""Exit code of a run that stopped on request."""


class PrivacyConfigError(ValueError):
    """The privacy parameters, or the model that they protect, are refused."""

    exit_code = 2


class BudgetSpent(RuntimeError):
    """The next intent would pass the budget; steps remain."""

    exit_code = 3


class PrivacyStateRefused(RuntimeError):
    """Ledger, key, mirror or manifest do not fit together: a start could spend budget unseen."""

    exit_code = 4


class MixedExamples(PrivacyStateRefused):
    """The loss of an example depended on others, so the run's guarantee does not hold."""


class NotRecorded(PrivacyStateRefused):
    """A checkpoint is not the one that the ledger around it recorded."""


class ConfigError(ValueError):
    """A recipe, an override, a ds_config or a run folder is wrong.

    The message names the fault, its place and the way out. It has several lines where a file has
    several faults, so that one start shows them all.
    """

    exit_code = 2

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class WeightsNotFinite(RuntimeError):
    """The weights hold NaN or infinity: further steps would be charged and of no use."""

    exit_code = 1


class StepDropped(RuntimeError):
    """All ranks agreed to drop a step before its intent.

    No value of the step left its process, and it costs no charge.
    """


class RemoteError(RuntimeError):
    """Another rank failed; carries its exit code so that all ranks end alike."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def refusing(task: str, kind: Callable[[str], Exception] = PrivacyStateRefused) -> Iterator[None]:
    """Yields; turns an error of the operating system inside into one of `kind`, in one line.

    Args:
        task: begins the line, which ends with the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{task}: {error.strerror or error}") from error


@contextlib.contextmanager
def placed(path: str | Path) -> Iterator[None]:
    """Yields; an error of the operating system inside that names no file names this one.

    Such is the error of a write to a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


class ErrorLine(NamedTuple):
    """The last line of a command that fails, and its exit code."""

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
"""Errors that a user mends by naming another path (exit code 2).

The others, such as that of a full disk, are the machine's state (exit code 1).
"""
_LONGEST_WORD = 240


def in_one_line(error: BaseException) -> ErrorLine | None:
    """Returns a command's line for an error that a user can mend, or None for a defect.

    A defect keeps its traceback. Users can mend errors with an `exit_code`, and refusals of the
    machine: a path, a file, memory, threads, and input that is nested more deeply than Python goes.
    """
    exit_code = getattr(error, "exit_code", None)
    if isinstance(exit_code, int):
        lines = getattr(error, "lines", [str(error)])
        return ErrorLine("\n  ".join(map(_shortened, lines)), exit_code)
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        names = [
            name for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
        ]
        place = ": ".join(map(str, names))
        line = _shortened(f"{place}: {reason}" if place else reason)
        return ErrorLine(line, 2 if error.errno in _WRONG_PATH and place else 1)
    if isinstance(error, RecursionError):
        return ErrorLine("the input is nested more deeply than Python can follow; write it flat", 2)
    # Torch raises plain RuntimeErrors for the memory of a CPU and of threads, a type of its own for
    # a GPU's memory, and oneDNN's message where oneDNN has no memory.
    message = str(error)
    marks = ("allocate memory", "bad_alloc", "can't start new thread", os.strerror(errno.EAGAIN))
    is_of_torch = (
        type(error).__name__ == "OutOfMemoryError"
        or any(mark in message for mark in marks)
        or message.strip() == "could not create a primitive"
    )
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_of_torch):
        line = (
            "this process may have no more memory, or no more threads: take smaller sizes, or "
            "raise the limit"
        )
        detail = _shortened(message).partition(" Exception raised from")[0]
        return ErrorLine(f"{line} ({detail})" if detail else line, 1)
    return None


def _shortened(text: str) -> str:
    """Returns one line without control characters, and without a word too long to read on."""
    words = []
    for word in text.split():
        is_long = len(word) > _LONGEST_WORD
        words.append(f"{word[:160]}...{word[-40:]}" if is_long else word)
    return printable(" ".join(words))


def printable(line: str) -> str:
    """Returns the line with a JSON escape for each character that is not printable.

    Such characters break lines, move the cursor, turn the text or show no glyph.
    """
    if line.isprintable():
        return line
    characters = []
    for character in line:
        escape = character.encode("unicode_escape").decode().replace("\\x", "\\u00")
        characters.append(character if character.isprintable() else escape)
    return "".join(characters)


def folded(line: str) -> str:
    """Folds a sentence at 80 columns, with further lines indented; long words stay whole."""
    parts = wrap(line, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts)


def say(*lines: str, file: TextIO | None = None, folds: bool = False) -> None:
    """Prints lines that may hold text from a file, each as one line.

    Commands print all text of a folder through this function.

    Args:
        folds: the lines are sentences, not commands or JSON.
    """
    for line in map(printable, lines):
        print(folded(line) if folds else line, file=file, flush=True)
