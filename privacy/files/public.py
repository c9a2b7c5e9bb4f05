"""The public files of a run folder, and how they are read.

Files are public by a list; a file that is not on the list stays where it is, and is named. No
symbolic link is followed, neither to a file nor through a folder, so that no name in the run folder
leads into `private/` or to another part of the disk.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import ConfigError

_EVENTS = r"tensorboard/events\.out\.tfevents\.\d{10}"
PUBLIC_FILES = re.compile(
    r"config\.toml|ds_config\.json|environment\.json|ledger\.jsonl|metrics\.jsonl|verify\.py"
    r"|head\.json|head\.safetensors"
    r"|behind/ledger-\d{1,3}\.jsonl"
    rf"|{_EVENTS}|evaluation/{_EVENTS}|evaluation/(heldout|metrics)\.jsonl"
    r"|evaluation/(samples-\d{8}|answers)\.png"
    r"|evaluation/[a-z_-]+-step-\d{8,}-[0-9a-f]{8}\.json"
    r"|report/privacy_card\.(json|md|html)|report/audit[\w-]{0,60}\.json"
    r"|report/fingerprint\.(txt|tsq|tsr)"
)
"""Paths in a run folder that may be published; checkpoints are chosen apart."""
_PUBLIC_FOLDERS = ("behind", "evaluation", "report", "tensorboard", "evaluation/tensorboard")
_FOLDERS = re.compile(r"""(?<![\w./])(?:file://)?(?:~[\w.-]*)?/(?=[^/\s])(?:[^/,"'{}\n]+/)*""")


def require_ledger(run_dir: Path) -> Path:
    """Returns the path of a run folder's ledger; ConfigError if it has none."""
    ledger = run_dir / "ledger.jsonl"
    if run_dir.is_file():
        raise ConfigError(f"{run_dir} is a file: give its run folder")
    if not run_dir.is_dir():
        raise ConfigError(f"run folder {run_dir} does not exist")
    if not ledger.exists():
        hint = "nothing was trained here"
        for parent in run_dir.resolve().parents:
            if (parent / ledger.name).is_file():
                hint = f"give {parent}"
                break
        raise ConfigError(f"run folder {run_dir} has no ledger.jsonl: {hint}")
    # A pipe would block its reader.
    if not ledger.is_file():
        raise ConfigError(f"{ledger}: is not a regular file: put the ledger itself there")
    return ledger


def without_folders(text: str) -> str:
    """Returns a text with absolute paths reduced to their last names.

    The others may name a user, a host or a customer.
    """
    return _FOLDERS.sub("", text)


class Survey(NamedTuple):
    """Holds the paths of a run folder, without its checkpoints and `private/`.

    Attributes:
        public: paths that may be published.
        left_out: path that may not be published -> reason.
    """

    public: list[str]
    left_out: dict[str, str]


def survey(run_dir: Path) -> Survey:
    """Sorts all paths into public ones and others; a folder without public files is named once."""
    private_files = set()
    for path in (run_dir / "private").rglob("*"):
        if not path.is_dir():
            private_files.add(_identity(path.lstat()))
    public: list[str] = []
    left_out: dict[str, str] = {}
    for name, entry in _walk(run_dir, ""):
        status = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            left_out[name] = "it is a symbolic link, and none is followed"
        elif not stat.S_ISREG(status.st_mode):
            left_out[name] = "it is not a regular file"
        elif _identity(status) in private_files:
            left_out[name] = "it is a file of private/ under another name"
        elif PUBLIC_FILES.fullmatch(name) is None:
            left_out[name] = "it is not on the list of public files"
        else:
            public.append(name)
    return Survey(public, left_out)


def open_public(run_dir: Path, name: str) -> BinaryIO:
    """Opens a regular file without following a link on the way.

    Args:
        name: path relative to the run folder.

    Raises:
        OSError: it is missing, or a link or a special file has its name.
    """
    *folders, file = name.split("/")
    parts = [(folder, os.O_DIRECTORY) for folder in folders]
    # Without O_NONBLOCK a pipe of this name would block.
    parts.append((file, os.O_NONBLOCK))
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part, flags in parts:
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{name} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_public(run_dir: Path, name: str) -> bytes:
    """Returns the content of a file; raises errors as `open_public`."""
    with open_public(run_dir, name) as file:
        return file.read()


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Yields every name but checkpoints and `private/`; enters folders of public files."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = prefix + entry.name
            if name in ("private", "checkpoints") and entry.is_dir(follow_symlinks=False):
                continue
            if name in _PUBLIC_FOLDERS and entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name, f"{name}/")
            else:
                yield name, entry


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
