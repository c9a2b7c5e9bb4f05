"""Files that must survive a crash: created whole or not at all, and durable before a call returns.

Ledger, mirror, keys, the private record and checkpoints are written by the functions of the first
part alone, one system call each. tests/crashes/ runs the real code and tries every state of the
disk that a power cut may leave behind these calls: a write or a name that no fsync has made durable
may be lost, or be there while an earlier one is not.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import PrivacyConfigError

# One system call each.


def create_file(path: Path, mode: int) -> int:
    """Creates an empty file and returns its descriptor; FileExistsError when the name is taken."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)


def write(descriptor: int, data: bytes) -> None:
    """Writes all of `data` in one call; OSError, which names the file, when fewer bytes fit."""
    with _named(descriptor):
        num_written = os.write(descriptor, data)
        if num_written != len(data):
            reason = (
                f"only {num_written} of {len(data)} bytes were written: a full disk, a quota, or "
                "ulimit -f"
            )
            raise OSError(errno.ENOSPC, reason)


def truncate(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)


def fsync(descriptor: int) -> None:
    with _named(descriptor):
        os.fsync(descriptor)


@contextlib.contextmanager
def _named(descriptor: int) -> Iterator[None]:
    """Yields; an error inside names the file, which system calls of a descriptor do not know."""
    try:
        yield
    except OSError as error:
        # Only Linux has this folder.
        with contextlib.suppress(OSError):
            error.filename = os.readlink(f"/proc/self/fd/{descriptor}")
        raise


def fsync_directory(directory: Path) -> None:
    """Makes the names inside `directory` durable (POSIX: a name needs its own fsync)."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_path(path: Path) -> None:
    """Makes the content of a file that another library has written durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """Gives a file a second name; FileExistsError when the name is taken."""
    os.link(source, target)


def rename(source: Path, target: Path) -> None:
    """Renames a file or folder; a file of the name `target` is replaced."""
    os.rename(source, target)


def unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def make_one_directory(path: Path, mode: int) -> None:
    path.mkdir(mode)


def remove_one_directory(path: Path) -> None:
    path.rmdir()


# Built from the calls above.


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Makes a directory, and those above it, durably; an existing one stays as it is."""
    if not path.parent.is_dir():
        make_directory(path.parent)
    if not path.is_dir():
        try:
            make_one_directory(path, mode)
        # Another program made it in between.
        except FileExistsError:
            if not path.is_dir():
                raise
    fsync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a directory and its content; no caller relies on any part of that being durable."""
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            unlink(child)
    remove_one_directory(path)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Creates `path` with exactly `data`; a failure leaves no file behind.

    Raises:
        FileExistsError: `path` exists.
    """
    descriptor = create_file(path, mode)
    try:
        write(descriptor, data)
        fsync(descriptor)
    except BaseException:
        unlink(path)
        raise
    finally:
        os.close(descriptor)
    fsync_directory(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Gives `path` new content; after a crash at any time a reader sees the old or the new one."""
    temporary = _temporary(path)
    write_new(temporary, data, 0o666)
    try:
        rename(temporary, path)
    except BaseException:
        unlink(temporary)
        raise
    fsync_directory(path.parent)


def publish_new(path: Path, data: bytes, mode: int) -> None:
    """Creates `path` as `write_new` does, but no reader ever sees it partly written.

    The bytes are made durable under a temporary name and get theirs by a hard link, which fails
    when `path` exists (a rename would replace it). After a crash no caller has relied on the
    temporary file.
    """
    temporary = _temporary(path)
    write_new(temporary, data, mode)
    try:
        link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without hard links: the caller holds the run's lock, so no other program
        # creates `path` in between.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        rename(temporary, path)
    finally:
        unlink(temporary)
    fsync_directory(path.parent)


def _temporary(path: Path) -> Path:
    """Returns a name of this call alone: of two programs that create a file one must succeed."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def torn_line_end(descriptor: int) -> bytes:
    """Returns the missing end of an open file's last line, or b"" if the line is whole.

    Without it, the line that a crash tore would spoil the next one.
    """
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def require_distinct_files(roles: Mapping[str, Path], run_dir: Path | None = None) -> None:
    """Refuses files of one program that are one file, or no files, before any of them is opened.

    Opening a pipe would block, and a file in two roles is not a copy.

    Args:
        roles: role of each file -> the file, which need not exist yet.
        run_dir: a run folder, in which none of them may be: a copy inside is copied and restored
            with the run, and shows no rollback.

    Raises:
        PrivacyConfigError: two roles have one file, also by links; the folder of a file is missing;
            or it is not a regular file.
    """
    files: dict[Path | tuple[int, int], str] = {}
    if run_dir is not None:
        for pattern in ("*", "private/*"):
            for path in run_dir.glob(pattern):
                if path.is_file():
                    # By inode, since a link from outside leads to it, too.
                    files[_inode(path)] = str(path)
    for role, path in roles.items():
        if os.path.lexists(path) and not path.is_file():
            raise PrivacyConfigError(
                f"{role} {path}: is not a regular file, or a link that leads to none; name another "
                "one"
            )
        # Unlike Path.resolve, this ends where links lead in a circle.
        place = Path(os.path.realpath(path))
        if run_dir is not None and place.is_relative_to(os.path.realpath(run_dir)):
            raise PrivacyConfigError(
                f"{role} {path}: is in the run folder {run_dir}, and is rolled back together "
                "with it; name a file elsewhere"
            )
        if not place.parent.is_dir():
            raise PrivacyConfigError(
                f"{role} {path}: its folder is not there; make it, or name another one"
            )
        keys: list[Path | tuple[int, int]] = [place]
        if place.exists():
            keys.append(_inode(place))
        for key in keys:
            if key in files:
                raise PrivacyConfigError(
                    f"{role} {path}: is the same file as {files[key]}; name another one"
                )
        files |= dict.fromkeys(keys, f"{role} {path}")


def _inode(path: Path) -> tuple[int, int]:
    return path.stat().st_dev, path.stat().st_ino
