"""Random access to examples: one `pread` each, then the headers are parsed in memory.

A failure to read (a vanished shard, a disk error, bytes that no longer fit the index) is a ReadError: the step must not
be taken. Whatever is wrong inside well-read bytes (no image, a caption that is no UTF-8) is left as None and becomes a
zero gradient later.
"""

import json
import os
from collections import OrderedDict
from typing import Any, NamedTuple

from data.errors import ReadError
from data.tar_format import TarFormatError, iter_members, split_key
from data.tar_index import ExampleTable

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp"})
MAX_OPEN_SHARDS = 64
MAX_EXAMPLE_BYTES = 256 << 20


class RawExample(NamedTuple):
    """One example as stored.

    Attributes:
        image: bytes of its first image member (jpg, jpeg, png, webp), or None.
        caption: its first `.txt` member, or else the string `caption` of a `.json` member; None when there is none or
            it is no UTF-8.
        fields: extension -> bytes of every member; of a repeated extension the first.
    """

    image: bytes | None
    caption: str | None
    fields: dict[str, bytes]


class TarReader:
    """Reads examples by id. Cheap to pickle: every process opens its own files when it first needs them."""

    def __init__(self, table: ExampleTable, *, max_open_shards: int = MAX_OPEN_SHARDS):
        self.table = table
        self._max_open = max_open_shards
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table, "_max_open": self._max_open}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["table"], max_open_shards=state["_max_open"])  # type: ignore[misc]

    def read(self, example_id: int) -> RawExample:
        """Reads one example.

        Raises:
            ReadError: the bytes that the index promises cannot be had.
            DataError: no such id.
        """
        shards, offsets, lengths = self.table.extent(example_id)
        if lengths[0] > MAX_EXAMPLE_BYTES:  # decided from its own size alone: undecodable
            return RawExample(None, None, {})
        ordinal = int(shards[0])
        extent = self._pread(ordinal, int(offsets[0]), int(lengths[0]))
        try:
            return parse_example(extent)
        except TarFormatError as error:
            path = self.table.shard_path(ordinal)
            raise ReadError(f"example {example_id} in {path} does not fit its index ({error}); verify it") from error

    def close(self) -> None:
        """Closes all files; the next read opens them again."""
        descriptors, self._descriptors = self._descriptors, OrderedDict()
        if self._owner == os.getpid():
            for descriptor in descriptors.values():
                os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptors", None):
            self.close()

    def _pread(self, ordinal: int, offset: int, length: int) -> bytes:
        """Exactly `length` bytes; a file system may return them in pieces."""
        path = self.table.shard_path(ordinal)
        pieces: list[bytes] = []
        missing = length
        try:
            descriptor = self._descriptor(ordinal)
            while missing:
                piece = os.pread(descriptor, missing, offset + length - missing)
                if not piece:
                    raise ReadError(f"short read of {path} at byte {offset}: {missing} of {length} bytes are missing")
                pieces.append(piece)
                missing -= len(piece)
        except ReadError:
            raise
        except OSError as error:
            raise ReadError(f"cannot read {path} at byte {offset}: {error.strerror or error}") from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _descriptor(self, ordinal: int) -> int:
        """An open file for the shard, the least recently used one closed first."""
        if self._owner != os.getpid():
            self._descriptors, self._owner = OrderedDict(), os.getpid()
        descriptor = self._descriptors.pop(ordinal, None)
        if descriptor is None:
            descriptor = self._open(ordinal)
            if len(self._descriptors) >= self._max_open:
                os.close(self._descriptors.popitem(last=False)[1])
        self._descriptors[ordinal] = descriptor
        return descriptor

    def _open(self, ordinal: int) -> int:
        path, entry = self.table.shard_path(ordinal), self.table.entries[ordinal]
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(descriptor).st_size
        if size != entry.size:
            os.close(descriptor)
            raise ReadError(f"{path} has {size} bytes, its index says {entry.size}; restore the shard or index again")
        return descriptor


def parse_example(extent: bytes) -> RawExample:
    """Parses the members of one example.

    Args:
        extent: headers and payloads, as `ExampleTable.extent` delimits them.

    Raises:
        TarFormatError: these are not whole members.
    """
    image: bytes | None = None
    fields: dict[str, bytes] = {}
    for member in iter_members(lambda at, length: extent[at : at + length], len(extent), needs_end=False):
        split = split_key(member.name)
        if split is None:
            continue
        payload = extent[member.payload_offset : member.payload_offset + member.size]
        fields.setdefault(split[1], payload)
        if image is None and split[1].rpartition(".")[2] in IMAGE_EXTENSIONS:
            image = payload
    return RawExample(image, _caption(fields), fields)


def _caption(fields: dict[str, bytes]) -> str | None:
    """The caption as text, or None; every failure here is the example's own."""
    try:
        if "txt" in fields:
            return fields["txt"].decode("utf-8")
        record = json.loads(fields["json"].decode("utf-8")) if "json" in fields else None
    except (ValueError, RecursionError):
        return None
    caption = record.get("caption") if isinstance(record, dict) else None
    return caption if isinstance(caption, str) else None
