"""Writes files that survive a power cut: temporary name, fsync, rename, fsync of the folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data.errors import DataError


def fsync_path(path: Path) -> None:
    """Makes the content of a file or folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yields an empty file to fill, which gets the name `path` at the end.

    Readers see the old or the new content, never a part. After an error only the old content stays.

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
        # A failed write names no file, since it sees only a descriptor.
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def write_durably(path: Path, content: str | bytes) -> None:
    """Replaces the content of `path`, whole or not at all."""
    content_bytes = content.encode() if isinstance(content, str) else content
    with atomic_file(path) as temporary:
        temporary.write_bytes(content_bytes)


@contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that its owner alone can read, and which replaces `path` when it is whole.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with atomic_file(path, 0o600) as temporary, open(temporary, "wb") as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
