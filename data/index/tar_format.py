"""A header walk over tar archives that never touches payloads.

The standard `tarfile` builds an object per member and follows links; an index over hundreds of millions of members
needs neither. The same walk serves the index (over a file) and the reader (over one example in memory), so that both
always agree on what a member is.

GNU long names and pax headers (`path`, `size`) are understood. Names stay bytes: their encoding is nobody's business
here. A name never becomes a path on this machine, so one that climbs (`../x`) is a key like any other. Who walks passes
over what is no regular file: a link is never followed.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "jpe", "jfif", "png", "webp"})
OTHER_PICTURES = frozenset({"gif", "bmp", "tif", "tiff", "avif", "heic", "heif", "jp2"})
"""Pictures that no example is read from; with a text of the same name each is a pair all the same."""
BLOCK = 512
MAX_NAME_BYTES = 1 << 20
_NO_EXAMPLE = re.compile(rb"^__[^/]*__(/|\Z)|(^|/)PaxHeaders(\.[^/]*)?/")
"""webdataset's own names, and where an old tar unpacks attributes: each file's name once more."""
_REGULAR = frozenset(b"\x000" + b"7")
_NO_PAYLOAD = frozenset(b"123456")
_ZERO_BLOCK = bytes(BLOCK)
_MOST_RECORD_BLOCKS = 20
"""tar and its kin pad an archive to whole records of at most this many blocks, unless an option says otherwise."""
_SCAN_BYTES = 1 << 16
TEXTS = ("txt", "json", "cls")
"""Last part of the extensions of what belongs to a picture; the first kind that an example has counts."""

ReadAt = Callable[[int, int], bytes]


class TarFormatError(ValueError):
    """The bytes are not a well-formed tar archive."""


class CutOffError(TarFormatError):
    """Bytes at the end of the archive are missing."""


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


def split_key(name: bytes, until_last_dot: bool = False) -> tuple[bytes, str] | None:
    """Splits a member's name as webdataset does.

    Args:
        name: path inside the archive.
        until_last_dot: the key ends at the last dot instead (of `a.1.jpg.txt`, which names a picture, at that of `a.1`), and
            what it holds of dots is written %2E, so that a name made of both parts is split there by everybody.

    Returns:
        (key, extension): the key is the path up to the first dot of its last part; the extension what follows, in
        lower case. None for names that belong to no example: without a dot, hidden (`.name`, also macOS `._name`), tar's own
        folders `PaxHeaders`, or webdataset's own entries `__name__` and what lies in such a folder.
    """
    base = name.rpartition(b"/")[2]
    stem, dot, extension = base.partition(b".")
    if not dot or not stem or _NO_EXAMPLE.search(name):
        return None
    if until_last_dot:
        stem, _, extension = base.rpartition(b".")
        inner, _, picture = stem.rpartition(b".")
        if inner and is_image(picture.decode("utf-8", "replace").lower()):
            stem, extension = inner, picture + b"." + extension
        stem = stem.replace(b"%", b"%25").replace(b".", b"%2E")
    return name[: len(name) - len(base)] + stem, extension.decode("utf-8", "replace").lower()


def is_image(extension: str) -> bool:
    """Whether a member with this extension is taken for a picture: `jpg`, and also `left.jpg`."""
    return extension.rpartition(".")[2] in IMAGE_EXTENSIONS


def iter_members(read_at: ReadAt, total_bytes: int, *, needs_end: bool, first: int = 0) -> Iterator[Member]:
    """Walks the headers.

    Args:
        read_at: `read_at(offset, length)` returns exactly `length` bytes.
        total_bytes: length of the archive, or of the piece of it.
        needs_end: True for a whole archive: it has an end marker (a zero block), and only padding follows. False for an
            extent cut out of one, which holds members to its last byte.
        first: byte at which the first header begins.

    Yields:
        All members in their order.

    Raises:
        CutOffError: a member that reaches past the end, no end marker, or zeros where members should be.
        TarFormatError: a bad checksum, other bytes behind the end marker, a sparse member.
    """
    position = first
    start: int | None = None
    long_name: bytes | None = None
    pax: dict[bytes, bytes] = {}
    while position + BLOCK <= total_bytes:
        header = read_at(position, BLOCK)
        if header == _ZERO_BLOCK:
            if start is not None or not needs_end:
                raise TarFormatError(f"zeros at byte {position} stand where a member should begin")
            require_padding(read_at, position, total_bytes, first)
            return
        if not has_checksum(header, position):
            raise TarFormatError(f"no tar header at byte {position} (checksum)")
        kind = header[156]
        if kind == ord("S"):
            raise TarFormatError(f"the member at byte {position} is sparse; write it as an ordinary file")
        size = int(pax[b"size"]) if b"size" in pax else _number(header[124:136], position)
        payload = position + BLOCK
        start = position if start is None else start
        position = payload if kind in _NO_PAYLOAD else payload + _round_up(size)
        if position > total_bytes:
            raise CutOffError(
                f"the member {shown(header[:100].rstrip(bytes(1)))} at byte {start} reaches past the end at byte {total_bytes}"
            )
        if kind in b"LKxg":
            if size > MAX_NAME_BYTES:
                raise TarFormatError(f"the extended header at byte {payload - BLOCK} is {size} bytes long")
            body = read_at(payload, size) if size else b""
            if kind == ord("L"):
                long_name = body.split(b"\0", 1)[0]
                if not long_name:
                    raise TarFormatError(f"the long name at byte {start} is empty")
            elif kind in b"xg":
                records = _parse_pax(body, start)
                if kind == ord("g") and (b"path" in records or b"size" in records):
                    raise TarFormatError(
                        "a global pax header sets a path or a size for all members; write the archive without it"
                    )
                if kind == ord("x"):
                    pax |= {key: records[key] for key in (b"path", b"size") if key in records}
            continue
        short_name = header[:100].split(b"\0", 1)[0]
        if header[257:263] == b"ustar\0" and (prefix := header[345:500].split(b"\0", 1)[0]):
            short_name = prefix + b"/" + short_name
        name = pax.get(b"path") or long_name or short_name
        yield Member(name, start, payload, 0 if kind in _NO_PAYLOAD else size, kind in _REGULAR)
        start, long_name, pax = None, None, {}
    if needs_end:
        raise CutOffError(f"there is no end marker before its end at byte {total_bytes}")
    if position != total_bytes or start is not None:
        raise TarFormatError("the piece does not end with a whole member")


def shown(name: bytes) -> str:
    """A member's name or key as messages show it."""
    return repr(name.decode("utf-8", "backslashreplace")[:100])


def has_checksum(header: bytes, position: int) -> bool:
    """Whether a block of 512 bytes, at `position`, is a header with the checksum that it states.

    Raises:
        TarFormatError: it states none.
    """
    stored = _number(header[148:156], position)
    unsigned = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    # Some old programs added signed bytes; that sum is slow, and seldom needed.
    return stored == unsigned or stored == unsigned - 256 * sum(byte > 127 for byte in header)


def require_padding(read_at: ReadAt, end: int, total_bytes: int, first: int = 0) -> None:
    """Accepts an end marker of one or two zero blocks, and zeros up to a whole record behind one of two blocks.

    A longer run of zeros is what a download leaves that took its place on the disk before its bytes came. Within the last
    record the two look the same.

    Args:
        end: byte behind the last member.
        total_bytes: byte behind the padding.
        first: byte at which the archive begins, from which records are counted.

    Raises:
        TarFormatError: other bytes than zeros, or more zeros than tar writes.
    """
    for at in range(end, total_bytes, _SCAN_BYTES):
        piece = read_at(at, min(_SCAN_BYTES, total_bytes - at))
        if rest := piece.lstrip(b"\0"):
            raise TarFormatError(
                f"a zero block at byte {end} ends it, but other bytes follow from byte {at + len(piece) - len(rest)}: a "
                "header was overwritten, or archives were joined by cat, which tar --concatenate does rightly"
            )
    padding = total_bytes - end - 2 * BLOCK
    records = (blocks * BLOCK for blocks in range(1, _MOST_RECORD_BLOCKS + 1))
    if padding != -BLOCK and not any(0 <= padding < size and (total_bytes - first) % size == 0 for size in records):
        raise CutOffError(
            f"the zeros from byte {end} to its end at byte {total_bytes} are no padding to a record of at most "
            f"{_MOST_RECORD_BLOCKS} blocks, so members may be missing (if tar -t lists all of them, then "
            f"truncate -s {end + 2 * BLOCK} mends it)"
        )


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


def _parse_pax(body: bytes, position: int) -> dict[bytes, bytes]:
    """Records `length key=value newline`, where the length counts the whole record."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
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


def _round_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
