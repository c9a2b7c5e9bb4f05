"""A header walk over tar archives that never touches payloads.

The standard `tarfile` builds an object per member and follows links; an index over hundreds of millions of members
needs neither. The same walk serves the index (over a file) and the reader (over one example in memory), so that both
always agree on what a member is.

GNU long names and pax headers (`path`, `size`) are understood. Names stay bytes: their encoding is nobody's business
here. A name never becomes a path on this machine, so one that climbs (`../x`) is a key like any other. Who walks passes
over what is no regular file: a link is never followed.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK = 512
MAX_NAME_BYTES = 1 << 20
_REGULAR = frozenset(b"\x000" + b"7")
_NO_PAYLOAD = frozenset(b"123456")
_ZERO_BLOCK = bytes(BLOCK)

ReadAt = Callable[[int, int], bytes]


class TarFormatError(ValueError):
    """The bytes are not a well-formed tar archive."""


class Member(NamedTuple):
    """One member. Offsets and sizes in bytes from the start of what was walked."""

    name: bytes
    header_offset: int  # of its first header block, long-name and pax headers included
    payload_offset: int
    size: int
    is_regular: bool  # a file; not a folder, link or device

    @property
    def end_offset(self) -> int:
        """Where the next member starts: the payload's end, rounded up to whole blocks."""
        return self.payload_offset + _round_up(self.size)


def split_key(name: bytes) -> tuple[bytes, str] | None:
    """Splits a member's name as webdataset does.

    Args:
        name: path inside the archive.

    Returns:
        (key, extension): the key is the path up to the first dot of its last part; the extension what follows, in
        lower case. None for names that belong to no example: without a dot, hidden (`.name`, also macOS `._name`), or
        webdataset's own `__name__` entries.
    """
    folder, _, base = name.rpartition(b"/")
    stem, dot, extension = base.partition(b".")
    if not dot or not stem or (not folder and base.startswith(b"__") and base.endswith(b"__")):
        return None
    return name[: len(name) - len(base)] + stem, extension.decode("utf-8", "replace").lower()


def iter_members(read_at: ReadAt, total_bytes: int, *, needs_end: bool) -> Iterator[Member]:
    """Walks the headers from offset 0.

    Args:
        read_at: `read_at(offset, length)` returns exactly `length` bytes.
        total_bytes: length of the archive, or of the piece of it.
        needs_end: True for a whole archive: a missing end marker (a zero block) means that it was cut off. False for
            an extent cut out of one.

    Yields:
        All members in their order.

    Raises:
        TarFormatError: a bad checksum, a member that reaches past the end, a missing end, a sparse member.
    """
    position = 0
    start: int | None = None
    long_name: bytes | None = None
    pax: dict[bytes, bytes] = {}
    while position + BLOCK <= total_bytes:
        header = read_at(position, BLOCK)
        if header == _ZERO_BLOCK:
            return
        kind = _check_header(header, position)
        size = int(pax[b"size"]) if b"size" in pax else _number(header[124:136], position)
        payload = position + BLOCK
        start = position if start is None else start
        position = payload if kind in _NO_PAYLOAD else payload + _round_up(size)
        if position > total_bytes:
            raise TarFormatError(f"the member at byte {start} reaches past the end of the file: it is cut off")
        if kind in b"LKxg":
            body = _read_extended(read_at, payload, size)
            if kind == ord("L"):
                long_name = body.split(b"\0", 1)[0]
            elif kind in b"xg":
                records = _parse_pax(body, start)
                _refuse_global(kind, records)
                if kind == ord("x"):
                    pax |= {key: records[key] for key in (b"path", b"size") if key in records}
            continue
        name = pax.get(b"path") or long_name or _short_name(header)
        yield Member(name, start, payload, 0 if kind in _NO_PAYLOAD else size, kind in _REGULAR)
        start, long_name, pax = None, None, {}
    if needs_end:
        raise TarFormatError("there is no end marker: it is cut off")
    if position != total_bytes:
        raise TarFormatError("the piece does not end at a block")


def _check_header(header: bytes, position: int) -> int:
    """Returns the type flag of a header whose checksum is right."""
    stored = _number(header[148:156], position)
    unsigned = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if stored != unsigned and stored != unsigned - 256 * sum(byte > 127 for byte in header):
        raise TarFormatError(f"no tar header at byte {position} (checksum)")
    if header[156] == ord("S"):
        raise TarFormatError(f"the member at byte {position} is sparse; write it as an ordinary file")
    return header[156]


def _number(field: bytes, position: int) -> int:
    """An octal or (first bit set) base-256 number."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") - (0x80 << (8 * len(field) - 8))
    else:
        digits = field.split(b"\0", 1)[0].strip()
        if digits and not (digits.isdigit() and b"8" not in digits and b"9" not in digits):
            raise TarFormatError(f"no tar header at byte {position} (number)")
        value = int(digits or b"0", 8)
    if not 0 <= value < 1 << 62:
        raise TarFormatError(f"no tar header at byte {position} (number out of range)")
    return value


def _read_extended(read_at: ReadAt, offset: int, size: int) -> bytes:
    """The payload of a long-name or pax header."""
    if size > MAX_NAME_BYTES:
        raise TarFormatError(f"the extended header at byte {offset - BLOCK} is {size} bytes long")
    return read_at(offset, size) if size else b""


def _short_name(header: bytes) -> bytes:
    """Name of a header without extensions; only POSIX archives keep a prefix."""
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        return prefix + b"/" + name if prefix else name
    return name


def _parse_pax(body: bytes, position: int) -> dict[bytes, bytes]:
    """Records `length key=value newline`, where the length counts the whole record."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(body) and body[at] != 0:
        digits, space, _ = body[at : at + 24].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        key, equals, value = body[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if not equals or length < len(digits) + 3 or at + length > len(body):
            raise TarFormatError(f"malformed pax header at byte {position}")
        records[key] = value
        at += length
    if not records.get(b"size", b"0").isdigit() or len(records.get(b"size", b"")) > 20:
        raise TarFormatError(f"malformed pax header at byte {position}")
    if int(records.get(b"size", b"0")) >= 1 << 62 or any(key.startswith(b"GNU.sparse.") for key in records):
        raise TarFormatError(f"the member at byte {position} is sparse or too large; write it as an ordinary file")
    return records


def _refuse_global(kind: int, records: dict[bytes, bytes]) -> None:
    """A global path or size would change members that are read alone."""
    if kind == ord("g") and (b"path" in records or b"size" in records):
        raise TarFormatError("a global pax header sets a path or a size for all members; write the archive without it")


def _round_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
