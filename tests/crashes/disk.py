"""A disk that forgets: records what the file layer (privacy/files/durable.py) does, and lists what a power cut may leave.

The real code runs on real files, so that it reads what it wrote; each system call that changes something is recorded as well.
From the record follow the legal states of the disk (POSIX, as ALICE, OSDI 2014, and SQLite's crash tests read it):

* what was written to a file and not yet followed by its fsync is there whole, not at all, cut (after its first byte, in
  the middle, before its last byte), or as zeros, in its first half or altogether (the size reached the disk, the data did not);
* a name that was made, changed or removed, and not yet followed by an fsync of its directory, is old or new; a rename is one
  change;
* all of these are independent of each other and of their order: a later one may be there and an earlier one not.

Not modelled: a disk that loses what it has acknowledged an fsync for, and garbage other than zeros in place of lost bytes.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from privacy.files import durable

MOST = 4096
"""States of the disk at one crash point that are taken one by one."""
Tree = dict[str, bytes | None]
"""Relative path -> content; None for a directory."""


@dataclass(frozen=True)
class Write:
    """`data` at `offset` of a file, or for `data` None a cut to `offset`."""

    inode: int
    offset: int
    data: bytes | None


@dataclass(frozen=True)
class Names:
    """Changes of names in a directory, which happen together: name -> inode, or None for none."""

    inode: int
    changes: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Sync:
    """Of a file's content or a directory's names."""

    inode: int


@dataclass(frozen=True)
class Event:
    """Something that a crash must not undo, such as noise that was drawn."""

    what: Any


@dataclass
class Image:
    """What is on the disk: directories' names and files' bytes, by inode."""

    names: dict[int, dict[str, int]] = field(default_factory=dict)
    content: dict[int, bytes] = field(default_factory=dict)

    def apply(self, step: "Write | Names") -> None:
        if isinstance(step, Write):
            old = self.content[step.inode]
            if step.data is None:
                self.content[step.inode] = old[: step.offset].ljust(step.offset, b"\0")
            else:
                whole = old.ljust(step.offset, b"\0")
                self.content[step.inode] = (
                    whole[: step.offset] + step.data + whole[step.offset + len(step.data) :]
                )
            return
        names = self.names[step.inode]
        for name, inode in step.changes:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode

    def copy(self) -> "Image":
        return Image(
            {inode: dict(names) for inode, names in self.names.items()}, dict(self.content)
        )

    def tree(self, inode: int = 0, above: str = "") -> Tree:
        found: Tree = {}
        for name, child in self.names[inode].items():
            if child in self.names:
                found[above + name] = None
                found |= self.tree(child, f"{above}{name}/")
            else:
                found[above + name] = self.content[child]
        return found


class Recorder:
    """Records the calls of the file layer below a folder while `watching`.

    Attributes:
        start: the disk before the record began; files and directories that are made later are in it without a name.
        log: what was done, in order.
        kill_after: so long a record kills the program.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start = Image({0: {}}, {})
        self.log: list[Write | Names | Sync | Event] = []
        self.kill_after: int | None = None
        self._inodes = {os.stat(root).st_ino: 0}
        self._count = itertools.count(1)
        for path in sorted(root.rglob("*")):
            inode = self._new(path)
            self.start.names[self._inodes[os.stat(path.parent).st_ino]][path.name] = inode
            if path.is_dir():
                self.start.names[inode] = {}
            else:
                self.start.content[inode] = path.read_bytes()

    def note(self, step: "Write | Names | Sync | Event") -> None:
        self.log.append(step)
        if self.kill_after is not None and len(self.log) >= self.kill_after:
            raise Killed

    def _new(self, path: Path) -> int:
        inode = self._inodes[os.stat(path, follow_symlinks=False).st_ino] = next(self._count)
        return inode

    def _of(self, path: Path) -> int:
        return self._inodes[os.stat(path).st_ino]

    def watching(self, patch: pytest.MonkeyPatch) -> None:
        """Puts itself into the file layer; nothing is really synced, since the disk is this one."""
        real = {
            name: getattr(durable, name)
            for name in ("create_file", "write", "truncate", "make_one_directory")
        }

        def made(name: str) -> Callable[[Path, int], Any]:
            def make(path: Path, mode: int) -> Any:
                result = real[name](path, mode)
                inode = self._new(path)
                if name == "create_file":
                    self.start.content[inode] = b""
                else:
                    self.start.names[inode] = {}
                self.note(Names(self._of(path.parent), ((path.name, inode),)))
                return result

            return make

        def write(descriptor: int, data: bytes) -> None:
            end = os.fstat(descriptor).st_size
            real["write"](descriptor, data)
            self.note(Write(self._inodes[os.fstat(descriptor).st_ino], end, data))

        def truncate(descriptor: int, size: int) -> None:
            real["truncate"](descriptor, size)
            self.note(Write(self._inodes[os.fstat(descriptor).st_ino], size, None))

        def fsync(descriptor: int) -> None:
            self.note(Sync(self._inodes[os.fstat(descriptor).st_ino]))

        def fsync_path(path: Path) -> None:
            self.note(Sync(self._of(path)))

        def renamed(source: Path, target: Path) -> None:
            inode, before, after = (
                self._of(source),
                self._of(source.parent),
                self._of(target.parent),
            )
            assert before == after, "a rename between directories is not modelled"
            os.rename(source, target)
            self.note(Names(before, ((source.name, None), (target.name, inode))))

        def linked(source: Path, target: Path) -> None:
            os.link(source, target)
            self.note(Names(self._of(target.parent), ((target.name, self._of(source)),)))

        def removed(really: Callable[[Path], None]) -> Callable[[Path], None]:
            def remove(path: Path) -> None:
                if path.exists():
                    really(path)
                    self.note(Names(self._of(path.parent), ((path.name, None),)))

            return remove

        functions: dict[str, Callable[..., Any]] = {
            **{name: made(name) for name in ("create_file", "make_one_directory")},
            **{"write": write, "truncate": truncate, "fsync": fsync, "fsync_path": fsync_path},
            **{"fsync_directory": fsync_path, "rename": renamed, "link": linked},
            **{"unlink": removed(os.unlink), "remove_one_directory": removed(os.rmdir)},
        }
        for name, function in functions.items():
            patch.setattr(durable, name, function)


class Killed(BaseException):
    """The program ends here; what it wrote is in the page cache, and the next start goes on from it."""


@dataclass
class States:
    """The distinct states of the disk that a power cut during a record may leave, each with what had happened by then at most.

    Attributes:
        cut: crash points with more than MOST states; only those were taken where at most one change differs from all others.
    """

    trees: dict[frozenset[tuple[str, bytes | None]], list[Any]] = field(default_factory=dict)
    cut: int = 0

    def add(self, recorder: Recorder, events: list[Any], first: int = 0) -> None:
        """All crash points of a record, and all states of the disk after each.

        Args:
            events: what had happened before the record began.
            first: the crash points before this one are left out.
        """
        settled, pending, happened = recorder.start.copy(), list[Write | Names](), list(events)
        for number, step in enumerate((None, *recorder.log)):
            if isinstance(step, Sync):
                for waiting in pending:
                    if waiting.inode == step.inode:
                        settled.apply(waiting)
                pending = [waiting for waiting in pending if waiting.inode != step.inode]
            elif isinstance(step, Event):
                happened.append(step.what)
            elif step is not None:
                pending.append(step)
            if number < first:
                continue
            outcomes = [list(_outcomes(waiting)) for waiting in pending]
            choices: Iterable[tuple[Write | Names | None, ...]] = itertools.product(*outcomes)
            if math.prod(map(len, outcomes)) > MOST:
                self.cut += 1
                choices = [
                    (*others[:place], outcome, *others[place + 1 :])
                    for others in ([None] * len(pending), pending)
                    for place in range(len(pending))
                    for outcome in outcomes[place]
                ]
            for chosen in choices:
                image = settled.copy()
                for outcome in chosen:
                    if outcome is not None:
                        image.apply(outcome)
                self.trees[frozenset(image.tree().items())] = list(
                    happened
                )  # later points know of more


def _outcomes(step: Write | Names) -> Iterator[Write | Names | None]:
    """What a power cut may make of one change that nothing has made durable."""
    yield None
    yield step
    if isinstance(step, Write) and step.data is not None:
        size = len(step.data)
        for cut in sorted({1, size // 2, size - 1} - {0, size}):
            yield replace(step, data=step.data[:cut])
        if size:
            yield replace(step, data=bytes(size))
            yield replace(step, data=bytes(size // 2) + step.data[size // 2 :])


def put(root: Path, tree: Tree) -> None:
    """Makes a folder hold exactly a tree."""
    _remove_others(str(root), "", tree)
    for name, content in sorted(tree.items()):
        path = f"{root}/{name}"
        if content is None:
            if not os.path.isdir(path):
                os.mkdir(path)
        else:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, content)
            os.close(descriptor)


def _remove_others(folder: str, above: str, tree: Tree) -> None:
    """All files, and the directories that are not in the tree."""
    for entry in os.scandir(folder):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
            continue
        _remove_others(entry.path, f"{above}{entry.name}/", tree)
        if above + entry.name not in tree:
            os.rmdir(entry.path)
