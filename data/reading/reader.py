"""Random access to examples: reads their bytes from a storage, and parses the headers in memory.

A failure to read (a vanished shard, a disk or network error, bytes other than those indexed) is a
ReadError: the step must not be taken. Content that cannot be used (no image, a caption that is not
UTF-8) is left out here and becomes a zero gradient later.
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
    """One example, as its shard stores it.

    Attributes:
        image: bytes of its first image member (jpg, jpeg, jpe, jfif, png, webp), or None.
        fields: extension -> bytes of every member; of a repeated extension the first.
    """

    image: bytes | None
    fields: dict[str, bytes]

    @property
    def caption(self) -> str | None:
        """Returns the first of `captions()`, or None."""
        return next(iter(self.captions()), None)

    def captions(self, field: str | None = None) -> list[str]:
        """Returns all captions of the example, without those that are not UTF-8 or too long.

        Args:
            field: its name in the `.json` member, a string or a list of strings. None means the
                text members (`.txt`, `.0.txt`, ...), or else the field `caption`.
        """
        if field is None:
            bodies = [
                body for name, body in self.fields.items() if name.rpartition(".")[2] == "txt"
            ]
            if bodies:
                texts = map(_text, bodies)
                return [text for text in texts if text is not None]
        record = json_record(self.fields.get("json", b""))
        captions = record.get(field or "caption")
        if not isinstance(captions, list):
            captions = [captions]
        return [caption for caption in captions if isinstance(caption, str)]


class TarReader:
    """Reads examples by id; every process opens its own files when it first needs them."""

    def __init__(self, table: ExampleTable):
        self.table = table
        self._storage = table.storage()

    def __reduce__(self) -> tuple[type["TarReader"], tuple[ExampleTable]]:
        return TarReader, (self.table,)

    def read(self, example_id: int) -> RawExample:
        """Reads one example; see `read_all`."""
        return next(self.read_all([example_id]))

    def read_all(self, ids: np.ndarray | Sequence[int]) -> Iterator[RawExample]:
        """Yields examples in the order of their ids, and reads ahead; sorted ids are the fastest.

        Raises:
            ReadError: the bytes that the index promises cannot be read.
            DataError: an id is not in the table.
        """
        requests = self.table.requests(ids)
        # An example above the limit is undecodable, which its own size alone decides.
        readable_requests = [r for r in requests if r.length <= MAX_EXAMPLE_BYTES]
        extents = self._storage.read_all(readable_requests)
        for request in requests:
            if request.length > MAX_EXAMPLE_BYTES:
                yield RawExample(None, {})
                continue
            try:
                yield parse_example(next(extents))
            except TarFormatError as error:
                location = f"{self.table.shard_root}/{request.shard.name} at byte {request.offset}"
                raise ReadError(
                    f"{location} does not fit its index ({error}); index again"
                ) from error

    def close(self) -> None:
        """Closes all files and connections; the next read opens them again."""
        self._storage.close()


def read_in_order(path: Path) -> Iterator[tuple[bytes, RawExample]]:
    """Yields keys and examples of a whole shard, after walking its headers as the index does.

    Raises:
        DataError: the shard is damaged.
        ReadError: the shard cannot be read.
    """
    try:
        extents = walk_shard(path, str(path))
        with open(path, "rb") as file:
            for key, (start, end) in zip(extents.keys, extents.bounds_K2.tolist(), strict=True):
                file.seek(start)
                length = end - start
                example = RawExample(None, {})
                if length <= MAX_EXAMPLE_BYTES:
                    example = parse_example(file.read(length))
                yield key, example
    except TarFormatError as error:
        raise ReadError(f"the shard {path} changed while it was read ({error})") from error
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        raise ReadError(f"cannot read a shard: {error.strerror}: {path}") from error


def parse_example(extent: bytes) -> RawExample:
    """Returns the example whose members these bytes are.

    Args:
        extent: headers and payloads, as `ExampleTable.extents` delimits them.

    Raises:
        TarFormatError: the bytes are not whole members.
    """
    image: bytes | None = None
    fields: dict[str, bytes] = {}
    for member in iter_members(io.BytesIO(extent), len(extent), needs_end=False):
        key_and_extension = split_key(member.name) if member.is_regular else None
        if key_and_extension is None:
            continue
        _, extension = key_and_extension
        payload = extent[member.payload_offset : member.payload_offset + member.size]
        fields.setdefault(extension, payload)
        if image is None and is_image(extension):
            image = payload
    return RawExample(image, fields)


def _text(body: bytes) -> str | None:
    """Returns UTF-8 text without a byte order mark, or None if it is too long or not UTF-8."""
    try:
        return body.decode("utf-8-sig") if len(body) <= MAX_CAPTION_BYTES else None
    except UnicodeDecodeError:
        return None


def whole_number(field: object) -> int | None:
    """Returns a whole number of at most nine digits from 0 on, None for anything else.

    Args:
        field: an integer, or ASCII digits with or without blanks around them.
    """
    number = field
    if isinstance(field, str):
        # A long text is not searched.
        digits = _DIGITS.fullmatch(field) if len(field) <= _MAX_NUMBER_CHARACTERS else None
        number = int(digits[1]) if digits else None
    # True and False are integers to isinstance.
    return number if type(number) is int and 0 <= number < 10**9 else None


def json_record(body: bytes) -> dict[str, Any]:
    """Returns the object in a JSON member.

    Broken JSON, JSON longer than a caption may be, and JSON of another type count as empty.
    """
    text = _text(body)
    try:
        record = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
