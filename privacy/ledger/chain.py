"""Files of hash-chained lines that only grow: what the run's ledger and a data owner's shared ledger are made of.

Every line is a JSON object `{"seq", "type", "time_utc", "previous", ...}` in exactly the form that `encode_line` writes; `seq` is
the line number from 0, `previous` the SHA-256 of the bytes of the line before (64 zeros for the first, which alone is `open`).
Which records may follow each other is for the state to say (`ChainState`).

Crash points, and why none loses a line that was relied on or blocks a program:
- creating: the file appears whole, with its `open` record, or not at all (`create_chain`);
- inside a write: only the last line can be torn, since each is durable before the next is begun. The torn line stays: the next
  `ChainFile` ends it with ` #torn` and a newline, so that it can never be read as a record, and the chain goes on over its bytes;
- between a file and its mirror: the file is written first, so the mirror can only lack the end of the file's last line, or have
  zeros in its place, which the next `ChainFile` mends. A mirror that lacks more was cut, or the file's end is not its own. The
  other order could not distinguish a crash from a rollback of the file, which is what the mirror is there to find;
- after a failed write or fsync the object refuses all further records: what reached the disk is unknown (a second fsync may
  succeed without the data), and only reading the file again can show it.
One process writes at a time, under the file's lock; a file that changed behind its back is refused.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from ..errors import PrivacyStateRefused, refusing
from ..files import durable
from ..files.durable import publish_new

TORN_MARK = b" #torn"
NOT_MENDED = "it is not mended yet"
NO_PREVIOUS = "0" * 64
_HEADER = ("seq", "type", "time_utc", "previous")


class LineRefused(Exception):
    """A line that is not legal at its place; becomes PrivacyStateRefused with file and line number."""


def encode_line(
    seq: int, kind: str, time_utc: str, previous: str, fields: Mapping[str, Any]
) -> bytes:
    """The canonical bytes of one record, without the newline: header first, then the fields in sorted order."""
    clash = [name for name in _HEADER if name in fields]
    if clash:
        raise PrivacyStateRefused(f"a ledger record cannot carry its own {', '.join(clash)}")
    # Through JSON once, so that nested objects are sorted too while the header keeps its place in front: the type
    # of a torn line must show in its first bytes.
    ordered = json.loads(json.dumps(dict(fields), sort_keys=True, allow_nan=False))
    record = {"seq": seq, "type": kind, "time_utc": time_utc, "previous": previous, **ordered}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode(
        "ascii"
    )


def parse_line(line: bytes) -> dict[str, Any]:
    """The record that `encode_line` wrote; LineRefused for anything else."""
    try:
        record = json.loads(line)
        header = [record.pop(name) for name in _HEADER]
        seq, kind, time_utc, previous = header
        canonical = encode_line(seq, kind, time_utc, previous, record)
        if (
            b"\\ud" in line
        ):  # half of a character (a surrogate) is no text: no card and no page could be written of it
            json.dumps([kind, time_utc, previous, record], ensure_ascii=False).encode()
    except (
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        RecursionError,
        PrivacyStateRefused,
    ) as error:
        raise LineRefused("not a ledger record") from error
    if (
        canonical != line
        or type(seq) is not int
        or not all(isinstance(item, str) for item in header[1:])
    ):
        raise LineRefused("not in the ledger's canonical form")
    fields: dict[str, Any] = dict(zip(_HEADER, header, strict=True)) | record
    return fields


def is_torn(line: bytes) -> bool:
    """Whether a line is what a crash left of a write: its end is missing, or the file system has zeros where bytes were lost."""
    return line.endswith(TORN_MARK) or b"\0" in line


def hash_line(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def require(condition: bool, message: str) -> None:
    """LineRefused with `message` unless the condition holds."""
    if not condition:
        raise LineRefused(message)


Kind = type | tuple[type, ...] | Callable[[Any], bool]
"""What a field of a record may hold: a type, one of several, or what a test says."""


def require_fields(
    record: Mapping[str, Any], fields: Mapping[str, Kind], *, exact: bool = True
) -> None:
    """LineRefused unless the record has these fields, besides those of every record, each of its kind.

    Args:
        fields: name -> kind; a name that ends in `?` may be missing.
        exact: whether the record may have no others.
    """
    known = {name.removesuffix("?"): kind for name, kind in fields.items()}
    missing = [name for name in fields if name.removesuffix("?") == name and name not in record]
    unknown = sorted(record.keys() - {*_HEADER, *known}) if exact else []
    require(not missing, f"`{record['type']}` lacks {', '.join(missing)}")
    require(not unknown, f"`{record['type']}` has no field {', '.join(unknown)}")
    for name, kind in known.items():
        if name in record:
            value = record[name]
            fits = isinstance(value, kind) if isinstance(kind, type | tuple) else kind(value)
            require(
                fits,
                f"{name} of `{record['type']}` cannot be {str(value)[:60]!r}" if not fits else "",
            )


def is_hex(value: object, digits: int = 64) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def is_positive(value: object) -> bool:
    return is_count(value) and value != 0


def is_number(value: object) -> bool:
    """Whether it is a finite integer or floating-point number; a truth value is none."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass
class ChainState(ABC):
    """What the lines so far say. `check` tests the next line, `absorb` adds it.

    Attributes:
        FIELDS: type of a record -> its fields, as `require_fields` takes them.
        OPEN_TO_MORE: types of records that may have further fields.
        hashes: the SHA-256 of every line.
        opened: the `open` record.
        mirrored: whether the lines say that a mirror of them exists.
    """

    FIELDS: ClassVar[Mapping[str, Mapping[str, Kind]]]
    OPEN_TO_MORE: ClassVar[tuple[str, ...]] = ()
    hashes: list[str] = field(default_factory=list)
    opened: dict[str, Any] = field(default_factory=dict)
    mirrored: bool = False

    @abstractmethod
    def check_record(self, record: dict[str, Any] | None) -> None:
        """LineRefused unless `record`, or for None a torn line, may come next; changes nothing."""

    @abstractmethod
    def take_record(self, record: dict[str, Any] | None, line: bytes) -> None:
        """Adds what `check_record` has accepted; `hashes` does not hold `line` yet."""

    @property
    def num_lines(self) -> int:
        return len(self.hashes)

    def check(self, line: bytes) -> dict[str, Any] | None:
        """The record of the next line, or None for a torn line; LineRefused when it is not legal here."""
        if is_torn(line):
            if not self.hashes:
                raise LineRefused("a torn line where no line can be written")
            self.check_record(None)
            return None
        record = parse_line(line)
        if record["seq"] != self.num_lines:
            raise LineRefused(f"sequence number {record['seq']} where {self.num_lines} must follow")
        if record["previous"] != (self.hashes[-1] if self.hashes else NO_PREVIOUS):
            raise LineRefused("the hash chain is broken: it does not continue the line before")
        kind = record["type"]
        if (kind == "open") != (not self.hashes):
            raise LineRefused("the first record, and no other, is `open`")
        if kind not in self.FIELDS:
            raise LineRefused(f"unknown record type {kind[:40]!r}")
        try:
            require_fields(record, self.FIELDS[kind], exact=kind not in self.OPEN_TO_MORE)
            self.check_record(record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LineRefused(f"an incomplete `{kind}`: {error}") from error
        return record

    def absorb(self, line: bytes) -> None:
        """Checks the next line and takes it in."""
        record = self.check(line)
        if record is not None and record["type"] == "open":
            self.opened = record
        self.take_record(record, line)
        self.hashes.append(hash_line(line))


State = TypeVar("State", bound=ChainState)


def read_chain(data: bytes, state: ChainState, name: str) -> bytes:
    """Takes every whole line into a new state and returns the unterminated last bytes, which are checked too.

    PrivacyStateRefused names file and line where the chain breaks.
    """
    *lines, tail = data.split(b"\n")
    if not lines:
        raise PrivacyStateRefused(
            f"{name}: line 1: no whole record; a ledger is created with its first one"
        )
    try:
        for line in lines:
            state.absorb(line)
        if tail:
            state.check(tail + TORN_MARK)
    except LineRefused as error:
        mend = "the file was altered or damaged: restore it from a backup, a run's ledger together with private/"
        raise PrivacyStateRefused(f"{name}: line {state.num_lines + 1}: {error}; {mend}") from error
    return tail


def create_chain(path: Path, state: ChainState, time_utc: str, fields: Mapping[str, Any]) -> None:
    """Creates a file with its `open` record alone, which the new state checks, durable and whole or not at all.

    Raises:
        FileExistsError: the file exists; it is never overwritten.
        OSError, LineRefused, ValueError, TypeError: it cannot be written, or the record is refused.
    """
    line = encode_line(0, "open", time_utc, NO_PREVIOUS, fields)
    state.check(line)
    publish_new(path, line + b"\n", 0o644)


def create_mirror(path: Path) -> None:
    """An empty file that the next `ChainFile` completes; PrivacyStateRefused when it cannot be made."""
    with refusing(f"{path}: cannot create the mirror"):
        os.close(durable.create_file(path, 0o644))
        durable.fsync_directory(path.parent)


class AppendOnly:
    """One file that only grows, and only by us. Every method raises PrivacyStateRefused where the system refuses it something."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what = path, what
        self._size = 0
        with self._refusing("open"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND)

    def _refusing(self, verb: str) -> AbstractContextManager[None]:
        return refusing(f"{self.path}: cannot {verb} the {self._what}")

    def release(self) -> None:
        with suppress(OSError):  # somebody else has closed it
            os.close(self._descriptor)

    def lock(self, patience: float) -> None:
        """Waits until no other process holds the file's lock, and holds it; PrivacyStateRefused after `patience` seconds."""
        deadline = time.monotonic() + patience
        while True:
            with self._refusing("lock"):
                try:
                    return fcntl.flock(
                        self._descriptor,
                        fcntl.LOCK_EX | (0 if patience == math.inf else fcntl.LOCK_NB),
                    )
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise PrivacyStateRefused(
                            f"{self.path}: another program has the {self._what} open"
                        ) from error
            time.sleep(0.05)

    def read(self) -> bytes:
        """The whole content, which from now on is what the file must hold."""
        parts, offset = [], 0
        with self._refusing("read"):
            while part := os.pread(self._descriptor, 1 << 24, offset):
                parts.append(part)
                offset += len(part)
            # What we base decisions on must not vanish in a power cut: a record may have been read from the page
            # cache whose fsync never returned, in a file whose maker died before it made the file's name durable.
            durable.fsync(self._descriptor)
            durable.fsync_directory(self.path.parent)
        self._size = offset
        return b"".join(parts)

    def append(self, data: bytes) -> None:
        """One write, one fsync; refused when the file is not ours any more or anything falls short."""
        with self._refusing("write"):
            opened, named = os.fstat(self._descriptor), os.stat(self.path)
            if (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino):
                raise OSError("another file has taken its name")
            if opened.st_size != self._size:
                raise OSError(f"it has {opened.st_size} bytes where this process left {self._size}")
            durable.write(self._descriptor, data)
            durable.fsync(self._descriptor)
        self._size += len(data)

    def cut(self, size: int) -> None:
        """Removes what follows the first `size` bytes; the next `append` makes that durable."""
        with self._refusing("write"):
            durable.truncate(self._descriptor, size)
        self._size = size


class ChainFile(Generic[State]):
    """An open file of hash-chained lines with its mirror, verified; `append`, after `mend`, is durable when it returns.

    Nothing is written before `mend`, so that what is refused stays as it was.

    Args:
        state: a new one, which takes in the lines.
        what: what errors call the file.
        mirror: chooses the mirror, or none, from the verified state.
        patience: seconds to wait for another program that holds the file's lock; this object holds it until `release`.
        makes_mirror: whether a mirror that is not there yet may be made.

    Raises:
        PrivacyStateRefused: the chain breaks (the line is named), or file and mirror do not fit together. Nothing was written.
    """

    def __init__(
        self,
        path: Path,
        state: State,
        what: str,
        mirror: Callable[[State], Path | None],
        *,
        patience: float = math.inf,
        makes_mirror: bool = False,
    ) -> None:
        self.path, self.state = path, state
        self._broken: str | None = NOT_MENDED
        self._cut: int | None = None
        self._files = [AppendOnly(path, what)]
        try:
            self._files[0].lock(patience)
            self._missing = self._files[0].read()
            self._tail, data = read_chain(self._missing, state, str(path)), self._missing
            second = mirror(state)
            self._new_mirror = (
                second if makes_mirror and second is not None and not second.exists() else None
            )
            if second is not None and self._new_mirror is None:
                self._files.append(AppendOnly(second, "mirror"))
                copied = self._files[1].read()
                # A crash costs a mirror the end of the last line, or leaves zeros there; a mirror that is new may be all behind.
                intact = data.rfind(b"\n", 0, -1) + 1 if state.mirrored else 0
                if len(copied) < intact and data.startswith(copied):
                    why = "the mirror was cut, or the ledger's last lines are not its own"
                    raise PrivacyStateRefused(
                        f"{second}: the mirror lacks more than the last line of {path}: {why}"
                    )
                is_torn_copy = all(
                    byte in (0, own)
                    for byte, own in zip(copied[intact:], data[intact:], strict=False)
                )
                if len(copied) > len(data) or copied[:intact] != data[:intact] or not is_torn_copy:
                    relation = "is longer than" if copied.startswith(data) else "differs from"
                    raise PrivacyStateRefused(
                        f"{second}: the mirror {relation} {path}: the ledger was rolled back"
                    )
                self._cut = None if data.startswith(copied) else intact
                self._missing = data[len(copied) if self._cut is None else intact :]
        except BaseException:
            self.release()
            raise

    def mend(self) -> None:
        """Makes or completes the mirror and ends a torn line, once; PrivacyStateRefused when a file cannot be written."""
        if self._broken != NOT_MENDED:
            return
        if self._new_mirror is not None:
            create_mirror(self._new_mirror)
            self._files.append(AppendOnly(self._new_mirror, "mirror"))
        for copy in self._files[1:]:
            if self._cut is not None:
                copy.cut(self._cut)
            if self._missing:
                copy.append(self._missing)
        self._missing, self._broken = b"", None
        if self._tail:
            self._write(self._tail + TORN_MARK, TORN_MARK + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Closes the files and lets go of the lock."""
        self._broken = self._broken or "it was released"
        while self._files:
            self._files.pop().release()

    def append(self, kind: str, time_utc: str, fields: Mapping[str, Any]) -> None:
        """Writes one record; PrivacyStateRefused when it is not legal here (nothing is written), or cannot be written."""
        try:
            line = encode_line(self.state.num_lines, kind, time_utc, self.state.hashes[-1], fields)
            self.state.check(line)
        except (LineRefused, ValueError, TypeError) as error:
            raise PrivacyStateRefused(f"{self.path}: refused to write `{kind}`: {error}") from error
        self._write(line, line + b"\n")

    def _write(self, line: bytes, data: bytes) -> None:
        """Appends `data`, which ends `line`, to file and mirror, and only then takes the line in."""
        if self._broken is not None:
            raise PrivacyStateRefused(f"{self.path}: no further records: {self._broken}")
        # Set before the write and lifted at the very end: an interruption in between leaves it set.
        self._broken = "an earlier write did not finish"
        for file in self._files:
            file.append(data)
        self.state.absorb(line)
        self._broken = None
