"""Writes that survive a power cut: to a temporary name, fsynced, renamed, and the folder fsynced."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data.errors import DataError


def fsync_path(path: Path) -> None:
    """Makes a file's or folder's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named_when_whole(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file to fill, which gets its name `path` at the end: readers see the old or the new content, never a part.

    After an error the old content stays, and nothing else does.

    Args:
        mode: permissions of the file, less the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode))
        yield temporary
        fsync_path(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a write knows a descriptor alone
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def write_durably(path: Path, content: str | bytes) -> None:
    """Replaces `path` by `content`, whole or not at all."""
    with named_when_whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that its owner alone can read; it replaces `path` when it is whole.

    Raises:
        DataError: it cannot be written.
    """
    try:
        with named_when_whole(path, 0o600) as temporary, open(temporary, "wb") as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
