"""Which files of a run folder are public, and how they are read.

Files are public by a list: what the list does not know stays where it is, and is named. No symbolic link is followed, neither
to a file nor through a folder, so that no name in the run folder leads into `private/` or to another part of the disk.
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
    r"config\.toml|ds_config\.json|environment\.json|ledger\.jsonl|metrics\.jsonl|verify\.py|head\.json|head\.safetensors"
    r"|behind/ledger-\d{1,3}\.jsonl"
    rf"|{_EVENTS}|evaluation/{_EVENTS}|evaluation/(heldout|metrics)\.jsonl|evaluation/(samples-\d{{8}}|answers)\.png"
    r"|evaluation/[a-z_-]+-step-\d{8,}-[0-9a-f]{8}\.json"
    r"|report/privacy_card\.(json|md|html)|report/audit[\w-]{0,60}\.json|report/fingerprint\.(txt|tsq|tsr)"
)
"""Paths in a run folder that may be published; checkpoints are chosen apart."""
_FOLDERS = re.compile(r"""(?<![\w./])(?:file://)?(?:~[\w.-]*)?/(?=[^/\s])(?:[^/,"'{}\n]+/)*""")


def require_ledger(run_dir: Path) -> Path:
    """Returns the ledger's path; ConfigError where there is none."""
    ledger = run_dir / "ledger.jsonl"
    if run_dir.is_file():
        raise ConfigError(f"{run_dir} is a file: give the run folder in which it lies")
    if not run_dir.is_dir():
        raise ConfigError(f"run folder {run_dir} does not exist")
    if not ledger.exists():
        above = next(
            (one for one in run_dir.resolve().parents if (one / ledger.name).is_file()), None
        )
        way_out = f"give {above}" if above else "nothing was trained here"
        raise ConfigError(f"run folder {run_dir} has no ledger.jsonl: {way_out}")
    if not ledger.is_file():  # a pipe would block whoever reads it
        raise ConfigError(f"{ledger}: is no regular file: put the ledger itself there")
    return ledger


def without_folders(text: str) -> str:
    """The text with absolute paths reduced to their last names: the others may name a user, a host or a customer."""
    return _FOLDERS.sub("", text)


class Survey(NamedTuple):
    """What lies in a run folder, without its checkpoints and `private/`.

    Attributes:
        public: paths that may be published.
        left_out: path -> why it may not.
    """

    public: list[str]
    left_out: dict[str, str]


def survey(run_dir: Path) -> Survey:
    """Looks at every name; a folder in which nothing is public is named once."""
    inside = {
        _identity(path.lstat()) for path in (run_dir / "private").rglob("*") if not path.is_dir()
    }
    found = Survey([], {})
    for name, entry in _walk(run_dir, ""):
        status = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            found.left_out[name] = "it is a symbolic link, and none is followed"
        elif not stat.S_ISREG(status.st_mode):
            found.left_out[name] = "it is no regular file"
        elif _identity(status) in inside:
            found.left_out[name] = "it is a file of private/ under another name"
        elif PUBLIC_FILES.fullmatch(name) is None:
            found.left_out[name] = "it is not on the list of public files"
        else:
            found.public.append(name)
    return found


def open_public(run_dir: Path, name: str) -> BinaryIO:
    """Opens the regular file `name`, a path relative to the run folder, without following a link on the way.

    Raises:
        OSError: it is not there, or a link or a special file has its name.
    """
    *folders, file = name.split("/")
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part, flags in [
            *((folder, os.O_DIRECTORY) for folder in folders),
            (file, os.O_NONBLOCK),
        ]:
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{name} is no regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_public(run_dir: Path, name: str) -> bytes:
    """The content of a file; errors as `open_public`."""
    with open_public(run_dir, name) as file:
        return file.read()


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Every name but checkpoints and `private/`, with the folders in which something may be public opened."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = prefix + entry.name
            if name in ("private", "checkpoints") and entry.is_dir(follow_symlinks=False):
                continue
            opened = ("behind", "evaluation", "report", "tensorboard", "evaluation/tensorboard")
            if name in opened and entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name, f"{name}/")
            else:
                yield name, entry


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
