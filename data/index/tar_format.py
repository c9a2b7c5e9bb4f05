"""A walk over the members of a tar archive that never touches payloads, and the rules by which names are grouped to examples.

`tarfile` parses the headers. What it forgives is refused here: an archive without its end, a header that was overwritten, names
that were lost. The same walk serves the index (over a file) and the reader (over one example in memory), so that both always
agree on what a member is.

Names stay bytes: their encoding is nobody's business here. A name never becomes a path on this machine, so one that climbs
(`../x`) is a key like any other. Who walks passes over what is no regular file: a link is never followed.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Self

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "jpe", "jfif", "png", "webp"})
OTHER_PICTURES = frozenset({"gif", "bmp", "tif", "tiff", "avif", "heic", "heif", "jp2"})
"""Pictures that no example is read from; with a text of the same name each is a pair all the same."""
MACOS_PREFIX = "._"
"""How the names of the files begin in which macOS keeps attributes beside others."""
MACOS_MAGIC = b"\0\x05\x16\x07"
"""How such a file begins (AppleDouble)."""
BLOCK = 512
MAX_NAME_BYTES = 1 << 20
_NO_EXAMPLE = re.compile(rb"^__[^/]*__(/|\Z)|(^|/)PaxHeaders(\.[^/]*)?/")
"""webdataset's own names, and where an old tar unpacks attributes: each file's name once more."""
_MOST_RECORD_BLOCKS = 20
"""tar and its kin pad an archive to whole records of at most this many blocks, unless an option says otherwise."""
_SCAN_BYTES = 1 << 16
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
TEXTS = ("txt", "json", "cls")
"""Last part of the extensions of what belongs to a picture; the first kind that an example has counts."""


class TarFormatError(ValueError):
    """The bytes are not a well-formed tar archive."""


class CutOffError(TarFormatError):
    """Bytes at the end of the archive are missing."""


class LongHeaderError(TarFormatError):
    """A name, or attributes, that are longer than any that is read."""


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
        return self.payload_offset + -(-self.size // BLOCK) * BLOCK


def split_key(name: bytes) -> tuple[bytes, str] | None:
    """Splits a member's name as webdataset does.

    Args:
        name: path inside the archive.

    Returns:
        (key, extension): the key is the path up to the first dot of its last part; the extension what follows, in
        lower case. None for names that belong to no example: without a dot, hidden (`.name`, also macOS `._name`), tar's own
        folders `PaxHeaders`, or webdataset's own entries `__name__` and what lies in such a folder.
    """
    base = name.rpartition(b"/")[2]
    stem, dot, extension = base.partition(b".")
    if not dot or not stem or _NO_EXAMPLE.search(name):
        return None
    return name[: len(name) - len(base)] + stem, extension.decode("utf-8", "replace").lower()


def is_image(extension: str) -> bool:
    """Whether a member with this extension is taken for a picture: `jpg`, and also `left.jpg`."""
    return extension.rpartition(".")[2] in IMAGE_EXTENSIONS


class _Header(tarfile.TarInfo):
    """A header whose size cannot take all memory or lead backwards, and whose name is what tar wrote.

    `tarfile` believes any size, and takes the times that GNU tar keeps in incremental archives for the start of a name.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _EXTENDED and header.size >= MAX_NAME_BYTES:
            raise LongHeaderError(
                f"an extended header (a long name, comments or attributes) states {header.size:,} bytes, and fewer than "
                f"{MAX_NAME_BYTES:,} are read"
            )
        if not 0 <= header.size < 1 << 62:
            raise tarfile.HeaderError(f"{header.size} bytes stated")
        if buf[257:263] != b"ustar\0":
            header.name = bytes(buf[:100]).partition(b"\0")[0].decode(encoding, errors)
        return header


def iter_members(file: BinaryIO, total_bytes: int, *, needs_end: bool) -> Iterator[Member]:
    """Walks the headers. Each member begins where the one before it ends, so that no byte between them is left out.

    Args:
        file: the archive, or a piece of it; read from where the walk needs it.
        total_bytes: its length.
        needs_end: True for a whole archive: it has an end marker (a zero block), and only padding follows. False for an
            extent cut out of one, which holds members to its last byte.

    Yields:
        All members in their order.

    Raises:
        CutOffError: a member that reaches past the end, no end marker, or zeros where members should be.
        TarFormatError: a bad checksum, other bytes behind the end marker, a sparse member.
    """
    position = 0
    try:
        file.seek(0)
        tar = tarfile.open(  # noqa: SIM115
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape", tarinfo=_Header
        )
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it keeps every member that it has seen
            if member.issparse():
                raise TarFormatError(
                    f"the member at byte {position} is sparse; write it as an ordinary file"
                )
            if {"path", "size"} & tar.pax_headers.keys():
                raise TarFormatError(
                    "a global pax header sets a path or a size for all members; write the archive without it"
                )
            name = member.name.encode("utf-8", "surrogateescape")
            if member.offset_data - position > BLOCK:
                # Only headers have a checksum. Where zeros took the place of a long name, tarfile goes on without it.
                file.seek(position)
                is_pax = file.read(BLOCK)[156:157] == tarfile.XHDTYPE
                if not name or (is_pax and not member.pax_headers):
                    raise TarFormatError(f"the long name at byte {position} is empty")
            has_payload = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES
            found = Member(
                name,
                position,
                member.offset_data,
                member.size if has_payload else 0,
                member.isreg(),
            )
            if member.size < 0 or found.end_offset > total_bytes:
                raise CutOffError(
                    f"the member {shown(name)} at byte {position} reaches past the end at byte {total_bytes}"
                )
            yield found
            position = found.end_offset
    except (TarFormatError, OSError):
        raise
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError) as error:
        kind = CutOffError if total_bytes - position < BLOCK else TarFormatError
        problem = (
            error if isinstance(error, tarfile.TarError) else type(error).__name__
        )  # others quote the bytes
        raise kind(f"no tar header at byte {position} ({problem})") from error
    # `tarfile` ends at the first block that is no header, whatever it is.
    file.seek(position)
    following = file.read(BLOCK)
    if len(following) == BLOCK and not (needs_end and following == bytes(BLOCK)):
        raise TarFormatError(f"no tar header at byte {position} (checksum)")
    if not needs_end:
        if position != total_bytes:
            raise TarFormatError("the piece does not end with a whole member")
        return
    if len(following) < BLOCK:
        raise CutOffError(f"there is no end marker before its end at byte {total_bytes}")
    # An end marker of one or two zero blocks, and zeros up to a whole record behind one of two blocks. A longer run of zeros is
    # what a download leaves that took its place on the disk before its bytes came; within the last record the two look the same.
    file.seek(position)
    for at in range(position, total_bytes, _SCAN_BYTES):
        piece = file.read(min(_SCAN_BYTES, total_bytes - at))
        if rest := piece.lstrip(b"\0"):
            raise TarFormatError(
                f"a zero block at byte {position} ends it, but other bytes follow from byte {at + len(piece) - len(rest)}: a "
                "header was overwritten, or archives were joined by cat (tar --ignore-zeros unpacks those, --concatenate joins)"
            )
    padding = total_bytes - position - 2 * BLOCK
    records = (blocks * BLOCK for blocks in range(1, _MOST_RECORD_BLOCKS + 1))
    if padding != -BLOCK and not any(
        0 <= padding < size and total_bytes % size == 0 for size in records
    ):
        raise CutOffError(
            f"the zeros from byte {position} to its end at byte {total_bytes} are no padding to a record of at most "
            f"{_MOST_RECORD_BLOCKS} blocks, so members may be missing (if tar -t lists all of them, then "
            f"truncate -s {position + 2 * BLOCK} mends it)"
        )


def shown(name: bytes) -> str:
    """A member's name or key as messages show it."""
    return repr(name.decode("utf-8", "backslashreplace")[:100])
