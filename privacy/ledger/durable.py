"""Files that must survive a crash: created whole or not at all, and on the disk before the call returns."""

import errno
import os
from pathlib import Path


def fsync_directory(directory: Path) -> None:
    """Makes a creation or rename inside `directory` durable (POSIX: the name needs its own fsync)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Creates `path` (FileExistsError when it exists) with exactly `data`; on failure nothing is left behind."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(f"short write to {path}")
        os.fsync(descriptor)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    fsync_directory(path.parent)


def publish_new(path: Path, data: bytes, mode: int) -> None:
    """Like `write_new`, but a reader never sees a partly written `path`, whatever the moment of the crash.

    The bytes are made durable under a temporary name and get their name by a hard link, which fails when `path`
    exists (a rename would replace it). A temporary file left by a crash holds nothing that was relied on.
    """
    temporary = path.with_name(path.name + ".creating")
    temporary.unlink(missing_ok=True)
    write_new(temporary, data, mode)
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without hard links: the caller holds the run's lock, so nobody creates `path` in between.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def torn_line_end(descriptor: int, mark: bytes = b"") -> bytes:
    """What ends the last line of an open file, so that it spoils no later one; empty unless a crash tore that line.

    Args:
        mark: goes before the newline.
    """
    size = os.fstat(descriptor).st_size
    return mark + b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""
