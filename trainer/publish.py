"""Which files of a run folder are public, how they are read, and a copy of them that tells nothing else.

Files are public by a list: what the list does not know stays where it is, and is named. No symbolic link is followed, neither
to a file nor through a folder, so that no name in the run folder leads into `private/` or to another part of the disk.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from privacy.card.model import LedgerFile
from privacy.card.report import read_snapshot
from privacy.checkpoints.read import LATEST, MANIFEST, Checkpoint
from privacy.checkpoints.recorded import require_recorded
from privacy.errors import NotRecorded
from privacy.ledger.records import LedgerState
from trainer.errors import ConfigError
from trainer.weights.new_folder import new_folder

_EVENTS = r"tensorboard/events\.out\.tfevents\.\d{10}"
PUBLIC_FILES = re.compile(
    r"config\.toml|ds_config\.json|environment\.json|ledger\.jsonl|metrics\.jsonl|verify\.py|head\.json|head\.safetensors"
    r"|behind/ledger-\d{1,3}\.jsonl"
    rf"|{_EVENTS}|evaluation/{_EVENTS}|evaluation/(heldout|metrics)\.jsonl|evaluation/(samples-\d{{8}}|answers)\.png"
    r"|evaluation/[a-z_-]+-step-\d{8,}-[0-9a-f]{8}\.json"
    r"|report/privacy_card\.(json|md|html)|report/audit[\w-]{0,60}\.json"
)
"""Paths in a run folder that may be published; checkpoints are chosen apart."""
_CHECKPOINT = re.compile(r"step-\d{8,}")
_PART = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")
FIXED_TIME = 946684800
"""2000-01-01 UTC: the modification time of everything that is published."""


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
    inside = {_identity(path.lstat()) for path in (run_dir / "private").rglob("*") if not path.is_dir()}
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
        for part, flags in [*((folder, os.O_DIRECTORY) for folder in folders), (file, os.O_NONBLOCK)]:
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


def publish(run_dir: Path, target: Path, ledger: LedgerFile, *, checkpoints: bool = True) -> list[str]:
    """Copies what is public into the new folder `target`; returns lines about what was copied and what was left out.

    Every file has mode 0644 and every folder 0755, all have one modification time, and they are made in the order of their
    names. The newest whole checkpoint goes with them: it holds noised quantities alone.

    Args:
        ledger: what the privacy card that was just written says of the ledger.

    Raises:
        ConfigError: `target` is not new or lies in the run folder, a file cannot be copied, or the run goes on meanwhile.
        NotRecorded: the newest whole checkpoint is not the one that the ledger recorded.
    """
    if run_dir.resolve() in (target.resolve(), *target.resolve().parents):
        raise ConfigError(f"{target} lies in the run folder that is to be published; give a folder elsewhere")
    found = survey(run_dir)
    checkpoint = _newest_whole(run_dir) if checkpoints else None
    names = found.public
    if checkpoint is not None:
        names = [
            *names,
            f"checkpoints/{LATEST}",
            *(f"checkpoints/{checkpoint.name}/{part}" for part in checkpoint.files),
        ]
    size = 0
    with new_folder(target) as folder:
        for name in sorted(names):
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("xb") as file:
                if checkpoint is not None and name == f"checkpoints/{LATEST}":
                    file.write(f"{checkpoint.name}\n".encode())
                else:
                    with open_public(run_dir, name) as source:
                        while block := source.read(1 << 24):
                            file.write(block)
                size += file.tell()
        copied = read_snapshot(folder / "ledger.jsonl")
        if (copied.state.num_lines, copied.last_hash) != (ledger.lines, ledger.last_line_sha256):
            raise ConfigError(
                f"{run_dir} is being trained: its ledger grew since the card was made; publish when it stands still"
            )
        if checkpoint is not None:
            _require_recorded(run_dir, folder, checkpoint.name, copied.state)
        for path in (*folder.rglob("*"), folder):
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, (FIXED_TIME, FIXED_TIME))
    lines = [f"published: {target} ({len(names)} files, {size:,} bytes)"]
    lines += [f"left out: {_printable(name)}: {reason}" for name, reason in sorted(found.left_out.items())]
    if checkpoint is None:
        lines.append(f"left out: checkpoints: {'there is no whole one' if checkpoints else '--no_checkpoints says so'}")
    else:
        lines.append(f"left out: checkpoints: all but the newest whole one, {checkpoint.name}")
    return [*lines, "left out: private"]


def _require_recorded(run_dir: Path, folder: Path, name: str, state: LedgerState) -> None:
    """Holds the copied checkpoint against the copied ledger; what is said names the run folder."""
    try:
        require_recorded(folder / "checkpoints" / name, state)
    except NotRecorded as error:
        place = str(error).replace(str(folder), str(run_dir))
        raise NotRecorded(f"{place}; --no_checkpoints publishes the other files") from error


class _Chosen(NamedTuple):
    """A checkpoint's folder, and the names of its files."""

    name: str
    files: list[str]


def _newest_whole(run_dir: Path) -> _Chosen | None:
    """The newest checkpoint that is what its manifest says, of regular files with the names that checkpoints have."""
    folder = run_dir / "checkpoints"
    if folder.is_symlink() or not folder.is_dir():
        return None
    for path in sorted(folder.iterdir(), reverse=True):
        if _CHECKPOINT.fullmatch(path.name) is None or path.is_symlink() or not path.is_dir():
            continue
        files = sorted(p.name for p in path.iterdir() if p.name == MANIFEST or _PART.fullmatch(p.name))
        if not all(stat.S_ISREG((path / name).lstat().st_mode) for name in files):
            continue
        try:
            named = set(Checkpoint(path).manifest["files"])
        except ConfigError:
            continue  # damaged, or half removed: an older one may be whole
        if named == {name for name in files if name != MANIFEST}:
            return _Chosen(path.name, files)
    return None


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


def _printable(name: str) -> str:
    return name.encode(errors="backslashreplace").decode() if name.isprintable() else ascii(name)
