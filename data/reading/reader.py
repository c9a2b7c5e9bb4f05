"""Random access to examples: their bytes from wherever the shards lie, then the headers are parsed in memory.

A failure to read (a vanished shard, a disk or network error, bytes that are not what was indexed) is a ReadError: the
step must not be taken. Whatever is wrong inside well-read bytes (no image, a caption that is no UTF-8) is left out and
becomes a zero gradient later.
"""

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.errors import ReadError
from data.index.shard import walk_shard
from data.index.tar_format import TarFormatError, is_image, iter_members, split_key
from data.index.tar_index import ExampleTable

MAX_EXAMPLE_BYTES = 256 << 20
MAX_CAPTION_BYTES = 1 << 20
_DIGITS = re.compile(r"\s*([0-9]{1,9})\s*", re.ASCII)
_MAX_NUMBER_CHARACTERS = 64


class RawExample(NamedTuple):
    """One example as stored.

    Attributes:
        image: bytes of its first image member (jpg, jpeg, jpe, jfif, png, webp), or None.
        fields: extension -> bytes of every member; of a repeated extension the first.
    """

    image: bytes | None
    fields: dict[str, bytes]

    @property
    def caption(self) -> str | None:
        """The first of `captions()`, or None."""
        return next(iter(self.captions()), None)

    def captions(self, field: str | None = None) -> list[str]:
        """All captions of the example; one that is no UTF-8 or too long counts as none.

        Args:
            field: its name in the `.json` member, a string or a list of strings. None means the text members (`.txt`, `.0.txt`,
                ...), or else the field `caption`.
        """
        if field is None:
            texts = [body for name, body in self.fields.items() if name.rpartition(".")[2] == "txt"]
            if texts:
                return [text for text in map(_text, texts) if text is not None]
        value = json_record(self.fields.get("json", b"")).get(field or "caption")
        values = value if isinstance(value, list) else [value]
        return [caption for caption in values if isinstance(caption, str)]


class TarReader:
    """Reads examples by id. Cheap to pickle: every process opens its own files when it first needs them."""

    def __init__(self, table: ExampleTable):
        self.table = table
        self._storage = table.storage()

    def __reduce__(self) -> tuple[type["TarReader"], tuple[ExampleTable]]:
        return TarReader, (self.table,)

    def read(self, example_id: int) -> RawExample:
        """Reads one example; see `read_all`."""
        return next(self.read_all([example_id]))

    def read_all(self, ids: np.ndarray | Sequence[int]) -> Iterator[RawExample]:
        """Reads examples in this order, later ones ahead while earlier ones are used; fastest when sorted.

        Raises:
            ReadError: the bytes that the index promises cannot be had.
            DataError: no such id.
        """
        requests = self.table.requests(ids)
        # An example above the limit is undecodable, which its own size alone decides.
        extents = self._storage.read_all([r for r in requests if r.length <= MAX_EXAMPLE_BYTES])
        for request in requests:
            if request.length > MAX_EXAMPLE_BYTES:
                yield RawExample(None, {})
                continue
            try:
                yield parse_example(next(extents))
            except TarFormatError as error:
                where = f"{self.table.shard_root}/{request.shard.name} at byte {request.offset}"
                raise ReadError(f"{where} does not fit its index ({error}); index again") from error

    def close(self) -> None:
        """Closes all files and connections; the next read opens them again."""
        self._storage.close()


def read_in_order(path: Path) -> Iterator[tuple[bytes, RawExample]]:
    """Keys and examples of a whole shard, which is walked as the index does it before it is read.

    Raises:
        DataError: it is damaged.
        ReadError: it cannot be read.
    """
    try:
        extents = walk_shard(path, str(path))
        with open(path, "rb") as file:
            for key, (start, end) in zip(extents.keys, extents.bounds_K2.tolist(), strict=True):
                file.seek(start)
                is_readable = end - start <= MAX_EXAMPLE_BYTES
                yield (
                    key,
                    parse_example(file.read(end - start)) if is_readable else RawExample(None, {}),
                )
    except TarFormatError as error:
        raise ReadError(f"the shard {path} changed while it was read ({error})") from error
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        raise ReadError(f"cannot read a shard: {error.strerror}: {path}") from error


def parse_example(extent: bytes) -> RawExample:
    """Parses the members of one example.

    Args:
        extent: headers and payloads, as `ExampleTable.extents` delimits them.

    Raises:
        TarFormatError: these are not whole members.
    """
    image: bytes | None = None
    fields: dict[str, bytes] = {}
    for member in iter_members(io.BytesIO(extent), len(extent), needs_end=False):
        split = split_key(member.name) if member.is_regular else None
        if split is None:
            continue
        payload = extent[member.payload_offset : member.payload_offset + member.size]
        fields.setdefault(split[1], payload)
        if image is None and is_image(split[1]):
            image = payload
    return RawExample(image, fields)


def _text(body: bytes) -> str | None:
    """UTF-8 text without a byte order mark, or None; every failure here is the example's own."""
    try:
        return body.decode("utf-8-sig") if len(body) <= MAX_CAPTION_BYTES else None
    except UnicodeDecodeError:
        return None


def whole_number(value: object) -> int | None:
    """A whole number of at most nine digits from 0 on, or its ASCII digits with or without blanks; None for anything else."""
    if isinstance(value, str):
        digits = _DIGITS.fullmatch(value) if len(value) <= _MAX_NUMBER_CHARACTERS else None
        value = int(digits[1]) if digits else None
    return value if type(value) is int and 0 <= value < 10**9 else None


def json_record(body: bytes) -> dict[str, Any]:
    """The object in a JSON member; one that is broken, longer than a caption may be, or no object counts as empty."""
    text = _text(body)
    try:
        record = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
