"""Files that must survive a crash: created whole or not at all, and on the disk before the call returns.

Everything that the ledger, its mirror, the keys, the private record and the checkpoints write goes through the functions of the
first part, one system call each: tests/crashes/ runs the real code and puts every state of the disk that a power cut may leave
behind these calls (a write or a name that no fsync has made durable may be lost, or be there while an earlier one is not).
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
    """A descriptor of a new, empty file; FileExistsError when the name is taken."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)


def write(descriptor: int, data: bytes) -> None:
    """One write of all of `data`; OSError, which names the file, when anything of it falls short."""
    with _named(descriptor):
        written = os.write(descriptor, data)
        if written != len(data):
            short = f"only {written} of {len(data)} bytes were written: a full disk, a quota, or ulimit -f"
            raise OSError(errno.ENOSPC, short)


def truncate(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)


def fsync(descriptor: int) -> None:
    with _named(descriptor):
        os.fsync(descriptor)


@contextlib.contextmanager
def _named(descriptor: int) -> Iterator[None]:
    """Inside, an error names the file; the system calls of a descriptor know no name."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):  # only Linux has this folder
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
    """Makes the content of a file durable that another library has written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link(source: Path, target: Path) -> None:
    """A second name; FileExistsError when it is taken."""
    os.link(source, target)


def rename(source: Path, target: Path) -> None:
    """Replaces what `target` names."""
    os.rename(source, target)


def unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def make_one_directory(path: Path, mode: int) -> None:
    path.mkdir(mode)


def remove_one_directory(path: Path) -> None:
    path.rmdir()


# What is made of them.


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Makes a directory, and those above it, durably; nothing changes where it is there already."""
    if not path.parent.is_dir():
        make_directory(path.parent)
    if not path.is_dir():
        try:
            make_one_directory(path, mode)
        except FileExistsError:  # another program made it in between
            if not path.is_dir():
                raise
    fsync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a directory and everything in it; nothing relies on any part of that being durable."""
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            unlink(child)
    remove_one_directory(path)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Creates `path` (FileExistsError when it exists) with exactly `data`; on failure nothing is left behind."""
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
    """Gives `path` new content: whatever the moment of the crash, a reader sees the old or the new one, whole."""
    temporary = _temporary(path)
    write_new(temporary, data, 0o666)
    try:
        rename(temporary, path)
    except BaseException:
        unlink(temporary)
        raise
    fsync_directory(path.parent)


def publish_new(path: Path, data: bytes, mode: int) -> None:
    """Like `write_new`, but a reader never sees a partly written `path`, whatever the moment of the crash.

    The bytes are made durable under a name of this call's own and get theirs by a hard link, which fails when `path`
    exists (a rename would replace it). A temporary file left by a crash holds nothing that was relied on.
    """
    temporary = _temporary(path)
    write_new(temporary, data, mode)
    try:
        link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without hard links: the caller holds the run's lock, so nobody creates `path` in between.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        rename(temporary, path)
    finally:
        unlink(temporary)
    fsync_directory(path.parent)


def _temporary(path: Path) -> Path:
    """A name that no other call uses: two programs may create the same file, and one of them succeeds."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def torn_line_end(descriptor: int) -> bytes:
    """What ends the last line of an open file, so that it spoils no later one; empty unless a crash tore that line."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def require_apart(roles: Mapping[str, Path], run_dir: Path | None = None) -> None:
    """Looks at the names of files before any of them is opened: a pipe blocks its reader, and a file in two roles is no copy.

    Args:
        roles: what each file is for -> the file, which need not be there yet.
        run_dir: a run folder, which none of them may lie in, since what is copied or restored with the run shows no rollback.

    Raises:
        PrivacyConfigError: two roles have one file, also by links; the folder of one is missing; or it is no regular file.
    """
    files: dict[Path | tuple[int, int], str] = {}
    if run_dir is not None:
        inside = (
            path
            for pattern in ("*", "private/*")
            for path in run_dir.glob(pattern)
            if path.is_file()
        )
        files |= {
            _inode(path): str(path) for path in inside
        }  # a link from outside leads to them, too
    for role, path in roles.items():
        if os.path.lexists(path) and not path.is_file():
            raise PrivacyConfigError(
                f"{role} {path}: is no regular file, or a link that leads to none; name another one"
            )
        place = Path(os.path.realpath(path))  # which ends where links lead in a circle
        if run_dir is not None and place.is_relative_to(os.path.realpath(run_dir)):
            raise PrivacyConfigError(
                f"{role} {path}: lies in the run folder {run_dir}, and is rolled back together with it; name a file elsewhere"
            )
        if not place.parent.is_dir():
            raise PrivacyConfigError(
                f"{role} {path}: its folder is not there; make it, or name another one"
            )
        names: list[Path | tuple[int, int]] = [place]
        if place.exists():
            names.append(_inode(place))
        other = next((files[name] for name in names if name in files), None)
        if other is not None:
            raise PrivacyConfigError(
                f"{role} {path}: is the same file as {other}; name another one"
            )
        files |= dict.fromkeys(names, f"{role} {path}")


def _inode(path: Path) -> tuple[int, int]:
    return path.stat().st_dev, path.stat().st_ino
