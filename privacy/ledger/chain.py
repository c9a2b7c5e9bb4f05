"""Files of hash-chained lines that only grow: the run's ledger and a data owner's shared ledger.

Every line is a JSON object `{"seq", "type", "time_utc", "previous", ...}` in the form that
`encode_line` writes. Every line is durable before the next is begun, the file before its mirror.
docs/ledger.md lists the crash points and shows that none loses a line that was relied on.
One process writes at a time, under the file's lock.
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
    """A line that is not legal at its place; becomes PrivacyStateRefused with file and line."""


def encode_line(
    seq: int, kind: str, time_utc: str, previous: str, fields: Mapping[str, Any]
) -> bytes:
    """Returns the canonical bytes of a record without the newline: header, then sorted fields.

    Args:
        seq: number of the line, from 0.
        previous: SHA-256 of the bytes of the line before, in hex; `NO_PREVIOUS` in the first line.
    """
    header_names = [name for name in _HEADER if name in fields]
    if header_names:
        raise PrivacyStateRefused(f"a ledger record cannot carry its own {', '.join(header_names)}")
    # Through JSON once, so that nested objects are sorted too while the header keeps its place in
    # front: the type of a torn line must show in its first bytes.
    sorted_fields = json.loads(json.dumps(dict(fields), sort_keys=True, allow_nan=False))
    record = {"seq": seq, "type": kind, "time_utc": time_utc, "previous": previous, **sorted_fields}
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def parse_line(line: bytes) -> dict[str, Any]:
    """Returns the record that `encode_line` wrote; LineRefused for anything else."""
    try:
        record = json.loads(line)
        header = [record.pop(name) for name in _HEADER]
        seq, kind, time_utc, previous = header
        canonical = encode_line(seq, kind, time_utc, previous, record)
        # Half of a character (a surrogate) cannot be encoded: no card and no page could show it.
        if b"\\ud" in line:
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
    # Every field but `seq` is text; `type` refuses true, which Python counts among the integers.
    has_header_types = type(seq) is int and all(isinstance(word, str) for word in header[1:])
    if canonical != line or not has_header_types:
        raise LineRefused("not in the ledger's canonical form")
    fields: dict[str, Any] = dict(zip(_HEADER, header, strict=True)) | record
    return fields


def is_torn(line: bytes) -> bool:
    """Returns whether a crash cut the write of a line: its end is missing, or zeros fill gaps."""
    return line.endswith(TORN_MARK) or b"\0" in line


def hash_line(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def require(condition: bool, message: str) -> None:
    """Raises LineRefused with `message` unless the condition holds."""
    if not condition:
        raise LineRefused(message)


Kind = type | tuple[type, ...] | Callable[[Any], bool]
"""The values that a field of a record may have: a type, one of several types, or a test."""


def require_fields(
    record: Mapping[str, Any], fields: Mapping[str, Kind], *, exact: bool = True
) -> None:
    """Raises LineRefused unless the record has these fields beside its header, each of its kind.

    Args:
        fields: name -> kind; a name that ends in `?` may be missing.
        exact: whether the record may have no others.
    """
    kinds = {name.removesuffix("?"): kind for name, kind in fields.items()}
    missing_names = [name for name in fields if not name.endswith("?") and name not in record]
    unknown_names = sorted(record.keys() - {*_HEADER, *kinds}) if exact else []
    require(not missing_names, f"`{record['type']}` lacks {', '.join(missing_names)}")
    require(not unknown_names, f"`{record['type']}` has no field {', '.join(unknown_names)}")
    for name, kind in kinds.items():
        if name not in record:
            continue
        content = record[name]
        fits = isinstance(content, kind) if isinstance(kind, type | tuple) else kind(content)
        if not fits:
            excerpt = str(content)[:60]
            raise LineRefused(f"{name} of `{record['type']}` cannot be {excerpt!r}")


def is_hex(value: object, digits: int = 64) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def is_positive(value: object) -> bool:
    return is_count(value) and value != 0


def is_number(value: object) -> bool:
    """Returns whether `value` is a finite integer or floating-point number, and not a bool."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass
class ChainState(ABC):
    """The content of the lines so far. `check` tests the next line, `absorb` adds it.

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
        """Raises LineRefused unless `record` may come next; changes nothing. None: a torn line."""

    @abstractmethod
    def take_record(self, record: dict[str, Any] | None, line: bytes) -> None:
        """Adds a record that `check_record` has accepted; `hashes` does not hold `line` yet."""

    @property
    def num_lines(self) -> int:
        return len(self.hashes)

    def check(self, line: bytes) -> dict[str, Any] | None:
        """Returns the record of the next line, None for a torn one; LineRefused if illegal."""
        if is_torn(line):
            if not self.hashes:
                raise LineRefused("a torn line where no line can be written")
            self.check_record(None)
            return None
        record = parse_line(line)
        if record["seq"] != self.num_lines:
            raise LineRefused(f"sequence number {record['seq']} where {self.num_lines} must follow")
        previous = self.hashes[-1] if self.hashes else NO_PREVIOUS
        if record["previous"] != previous:
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
        """Checks the next line and adds it to the state."""
        record = self.check(line)
        if record is not None and record["type"] == "open":
            self.opened = record
        self.take_record(record, line)
        self.hashes.append(hash_line(line))


State = TypeVar("State", bound=ChainState)


def read_chain(data: bytes, state: ChainState, name: str) -> bytes:
    """Adds every whole line to a new state and returns the unterminated last bytes, checked too.

    Args:
        name: the file, for errors.

    Raises:
        PrivacyStateRefused: the chain breaks; the message names file and line.
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
        mend = (
            "the file was altered or damaged: restore it from a backup, a run's ledger together "
            "with private/"
        )
        raise PrivacyStateRefused(f"{name}: line {state.num_lines + 1}: {error}; {mend}") from error
    return tail


def create_chain(path: Path, state: ChainState, time_utc: str, fields: Mapping[str, Any]) -> None:
    """Creates a file with its `open` record alone, durable and whole or not at all.

    Args:
        state: a new one, which checks the record.

    Raises:
        FileExistsError: the file exists; it is never overwritten.
        OSError, LineRefused, ValueError, TypeError: it cannot be written, or the record is refused.
    """
    line = encode_line(0, "open", time_utc, NO_PREVIOUS, fields)
    state.check(line)
    publish_new(path, line + b"\n", 0o644)


def create_mirror(path: Path) -> None:
    """Creates an empty file that the next `ChainFile` completes; PrivacyStateRefused on failure."""
    with refusing(f"{path}: cannot create the mirror"):
        os.close(durable.create_file(path, 0o644))
        durable.fsync_directory(path.parent)


class AppendOnly:
    """A file that only grows, and only by this object.

    Every method raises PrivacyStateRefused where the operating system refuses a call.

    Args:
        label: name of the file in errors.
    """

    def __init__(self, path: Path, label: str) -> None:
        self.path = path
        self._label = label
        self._size = 0
        with self._refusing("open"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND)

    def _refusing(self, verb: str) -> AbstractContextManager[None]:
        return refusing(f"{self.path}: cannot {verb} the {self._label}")

    def release(self) -> None:
        # Another part of the program may have closed the descriptor.
        with suppress(OSError):
            os.close(self._descriptor)

    def lock(self, patience: float) -> None:
        """Takes the file's lock and holds it; PrivacyStateRefused after `patience` seconds."""
        deadline = time.monotonic() + patience
        waits_forever = patience == math.inf
        operation = fcntl.LOCK_EX if waits_forever else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            with self._refusing("lock"):
                try:
                    fcntl.flock(self._descriptor, operation)
                    return
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise PrivacyStateRefused(
                            f"{self.path}: another program has the {self._label} open"
                        ) from error
            time.sleep(0.05)

    def read(self) -> bytes:
        """Returns the content of the file, which later appends expect to find unchanged."""
        parts: list[bytes] = []
        offset = 0
        with self._refusing("read"):
            while part := os.pread(self._descriptor, 1 << 24, offset):
                parts.append(part)
                offset += len(part)
            # What decisions rest on must not vanish in a power cut: a record may have been read
            # from the page cache whose fsync never returned, in a file whose maker died before it
            # made the file's name durable.
            durable.fsync(self._descriptor)
            durable.fsync_directory(self.path.parent)
        self._size = offset
        return b"".join(parts)

    def append(self, data: bytes) -> None:
        """Writes `data` at the end by one write and one fsync.

        Raises:
            PrivacyStateRefused: another file has the name, another program has written to the
                file, or the write or the fsync falls short.
        """
        with self._refusing("write"):
            opened_file = os.fstat(self._descriptor)
            named_file = os.stat(self.path)
            opened_identity = (opened_file.st_dev, opened_file.st_ino)
            if opened_identity != (named_file.st_dev, named_file.st_ino):
                raise OSError("another file has taken its name")
            if opened_file.st_size != self._size:
                raise OSError(
                    f"it has {opened_file.st_size} bytes where this process left {self._size}"
                )
            durable.write(self._descriptor, data)
            durable.fsync(self._descriptor)
        self._size += len(data)

    def cut(self, size: int) -> None:
        """Removes all bytes after the first `size`; the next `append` makes that durable."""
        with self._refusing("write"):
            durable.truncate(self._descriptor, size)
        self._size = size


class ChainFile(Generic[State]):
    """An open, verified file of hash-chained lines with its mirror.

    `append` is durable when it returns. It needs `mend` first, and nothing is written before
    `mend`, so that a file that is refused stays as it was.

    Args:
        state: a new one, to which the lines are added.
        label: name of the file in errors.
        mirror: chooses the mirror, or none, from the verified state.
        patience: seconds to wait for another program that holds the file's lock; this object holds
            it until `release`.
        makes_mirror: whether a mirror that does not exist yet may be made.

    Raises:
        PrivacyStateRefused: the chain breaks (the line is named), or file and mirror do not fit
            together. Nothing was written.
    """

    def __init__(
        self,
        path: Path,
        state: State,
        label: str,
        mirror: Callable[[State], Path | None],
        *,
        patience: float = math.inf,
        makes_mirror: bool = False,
    ) -> None:
        self.path = path
        self.state = state
        self._refusal: str | None = NOT_MENDED
        # Bytes that a mirror keeps before `mend` appends the rest; None keeps them all.
        self._mirror_size: int | None = None
        self._files = [AppendOnly(path, label)]
        try:
            self._files[0].lock(patience)
            content = self._files[0].read()
            self._tail = read_chain(content, state, str(path))
            mirror_path = mirror(state)
            is_new = makes_mirror and mirror_path is not None and not mirror_path.exists()
            self._new_mirror = mirror_path if is_new else None
            self._mirror_rest = content
            if mirror_path is not None and not is_new:
                self._files.append(AppendOnly(mirror_path, "mirror"))
                copy = self._files[1].read()
                # A crash costs a mirror the end of the last line, or leaves zeros there. A mirror
                # that is new may lack everything.
                last_line = content.rfind(b"\n", 0, -1) + 1 if state.mirrored else 0
                if len(copy) < last_line and content.startswith(copy):
                    cause = "the mirror was cut, or the ledger's last lines are not its own"
                    raise PrivacyStateRefused(
                        f"{mirror_path}: the mirror lacks more than the last line of {path}: "
                        f"{cause}"
                    )
                has_first_lines = copy[:last_line] == content[:last_line]
                byte_pairs = zip(copy[last_line:], content[last_line:], strict=False)
                has_zeros_alone = all(copied in (0, byte) for copied, byte in byte_pairs)
                if len(copy) > len(content) or not has_first_lines or not has_zeros_alone:
                    relation = "is longer than" if copy.startswith(content) else "differs from"
                    raise PrivacyStateRefused(
                        f"{mirror_path}: the mirror {relation} {path}: the ledger was rolled back"
                    )
                if content.startswith(copy):
                    self._mirror_rest = content[len(copy) :]
                else:
                    self._mirror_size = last_line
                    self._mirror_rest = content[last_line:]
        except BaseException:
            self.release()
            raise

    def mend(self) -> None:
        """Completes the mirror and ends a torn line, once; PrivacyStateRefused if a write fails."""
        if self._refusal != NOT_MENDED:
            return
        if self._new_mirror is not None:
            create_mirror(self._new_mirror)
            self._files.append(AppendOnly(self._new_mirror, "mirror"))
        for mirror in self._files[1:]:
            if self._mirror_size is not None:
                mirror.cut(self._mirror_size)
            if self._mirror_rest:
                mirror.append(self._mirror_rest)
        self._mirror_rest = b""
        self._refusal = None
        if self._tail:
            self._write(self._tail + TORN_MARK, TORN_MARK + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Closes the files and gives the lock back."""
        self._refusal = self._refusal or "it was released"
        while self._files:
            self._files.pop().release()

    def append(self, kind: str, time_utc: str, fields: Mapping[str, Any]) -> None:
        """Writes one record.

        Raises:
            PrivacyStateRefused: the record is not legal here (then nothing is written), or it
                cannot be written.
        """
        try:
            line = encode_line(self.state.num_lines, kind, time_utc, self.state.hashes[-1], fields)
            self.state.check(line)
        except (LineRefused, ValueError, TypeError) as error:
            raise PrivacyStateRefused(f"{self.path}: refused to write `{kind}`: {error}") from error
        self._write(line, line + b"\n")

    def _write(self, line: bytes, data: bytes) -> None:
        """Appends `data`, which ends `line`, to file and mirror, and then adds the line."""
        if self._refusal is not None:
            raise PrivacyStateRefused(f"{self.path}: no further records: {self._refusal}")
        # Set before the write and lifted at the very end: an interruption in between leaves it set.
        # What reached the disk is unknown then, and a second fsync may succeed without the data.
        self._refusal = "an earlier write did not finish"
        for file in self._files:
            file.append(data)
        self.state.absorb(line)
        self._refusal = None
