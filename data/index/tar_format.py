"""Walks the members of a tar archive without its payloads, and groups names to examples.

`tarfile` parses the headers. Errors that it forgives are refused here: a missing end, overwritten
headers, lost names. The index walks a file and the reader one example in memory, so that both agree
on members. A name never becomes a path on this machine: `../x` is a key like any other. Callers
skip members that are not regular files, so no link is followed.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Self

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "jpe", "jfif", "png", "webp"})
OTHER_PICTURES = frozenset({"gif", "bmp", "tif", "tiff", "avif", "heic", "heif", "jp2"})
"""Pictures that examples are never read from; with a text of the same name each is a pair too."""
MACOS_PREFIX = "._"
"""Prefix of the files in which macOS keeps attributes of other files."""
MACOS_MAGIC = b"\0\x05\x16\x07"
"""First bytes of such a file (AppleDouble)."""
BLOCK = 512
MAX_NAME_BYTES = 1 << 20
_NO_EXAMPLE = re.compile(rb"^__[^/]*__(/|\Z)|(^|/)PaxHeaders(\.[^/]*)?/")
"""webdataset's own names, and folders where an old tar unpacks attributes under files' names."""
_MOST_RECORD_BLOCKS = 20
"""tar programs pad an archive to whole records of at most this many blocks by default."""
_SCAN_BYTES = 1 << 16
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
TEXTS = ("txt", "json", "cls")
"""Last part of the extensions of a picture's texts; the first kind that an example has counts."""


class TarFormatError(ValueError):
    """The bytes are not a well-formed tar archive."""


class CutOffError(TarFormatError):
    """Bytes at the end of the archive are missing."""


class LongHeaderError(TarFormatError):
    """A name or attributes above the limit of length."""


class Member(NamedTuple):
    """A member of an archive. Offsets count bytes from the start of the walked file or extent.

    Attributes:
        name: in bytes, since its encoding does not matter here.
        header_offset: of its first header block, long-name and pax headers included.
        payload_offset: of its first payload byte.
        size: of the payload in bytes.
        is_regular: True for a file, False for a folder, link or device.
    """

    name: bytes
    header_offset: int
    payload_offset: int
    size: int
    is_regular: bool

    @property
    def end_offset(self) -> int:
        """Returns the start of the next member: the payload's end, rounded up to whole blocks."""
        num_blocks = -(-self.size // BLOCK)
        return self.payload_offset + num_blocks * BLOCK


def split_key(name: bytes) -> tuple[bytes, str] | None:
    """Splits a member's name as webdataset does.

    Args:
        name: path inside the archive.

    Returns:
        (key, extension): the key is the path up to the first dot of its last part; the extension is
        the rest in lower case. None for names that belong to no example: without a dot, hidden
        (`.name`, also macOS `._name`), in tar's own folders `PaxHeaders`, or webdataset's own
        entries `__name__` and members of such a folder.
    """
    base = name.rpartition(b"/")[2]
    stem, dot, extension = base.partition(b".")
    if not dot or not stem or _NO_EXAMPLE.search(name):
        return None
    key = name[: len(name) - len(base)] + stem
    return key, extension.decode("utf-8", "replace").lower()


def is_image(extension: str) -> bool:
    """Returns whether an extension is that of a picture: `jpg`, and also `left.jpg`."""
    return extension.rpartition(".")[2] in IMAGE_EXTENSIONS


class _Header(tarfile.TarInfo):
    """A header whose size is possible and whose name is the one that tar wrote.

    `tarfile` accepts sizes that would take all memory or lead backwards, and takes the times that
    GNU tar keeps in incremental archives for the start of a name.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _EXTENDED and header.size >= MAX_NAME_BYTES:
            raise LongHeaderError(
                f"an extended header (a long name, comments or attributes) states {header.size:,} "
                f"bytes, and fewer than {MAX_NAME_BYTES:,} are read"
            )
        if not 0 <= header.size < 1 << 62:
            raise tarfile.HeaderError(f"{header.size} bytes stated")
        # Only POSIX headers have a prefix of the name; GNU tar keeps times in its place.
        if buf[257:263] != b"ustar\0":
            name, _, _ = bytes(buf[:100]).partition(b"\0")
            header.name = name.decode(encoding, errors)
        return header


def iter_members(file: BinaryIO, total_bytes: int, *, needs_end: bool) -> Iterator[Member]:
    """Yields all members in their order, from their headers.

    Each member begins at the end of the member before it, so that every byte is accounted for.

    Args:
        file: the archive, or an extent of it; read from any position.
        total_bytes: its length.
        needs_end: True for a whole archive, which has an end marker (a zero block) and only padding
            behind it. False for an extent of an archive, which has members up to its last byte.

    Raises:
        CutOffError: a member reaches past the end, the end marker is missing, or zeros take the
            place of members.
        TarFormatError: a bad checksum, other bytes behind the end marker, a sparse member.
    """
    position = 0
    try:
        file.seek(0)
        tar = tarfile.open(  # noqa: SIM115
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape", tarinfo=_Header
        )
        while (header := tar.next()) is not None:
            # tarfile would keep every header in memory.
            tar.members.clear()  # type: ignore[attr-defined]
            if header.issparse():
                raise TarFormatError(
                    f"the member at byte {position} is sparse; write it as an ordinary file"
                )
            if {"path", "size"} & tar.pax_headers.keys():
                raise TarFormatError(
                    "a global pax header sets a path or a size for all members; write the archive "
                    "without it"
                )
            name = header.name.encode("utf-8", "surrogateescape")
            if header.offset_data - position > BLOCK:
                # Only headers have a checksum: tarfile accepts zeros in place of a long name.
                file.seek(position)
                is_pax = file.read(BLOCK)[156:157] == tarfile.XHDTYPE
                if not name or (is_pax and not header.pax_headers):
                    raise TarFormatError(f"the long name at byte {position} is empty")
            has_payload = header.isreg() or header.type not in tarfile.SUPPORTED_TYPES
            size = header.size if has_payload else 0
            member = Member(name, position, header.offset_data, size, header.isreg())
            if header.size < 0 or member.end_offset > total_bytes:
                raise CutOffError(
                    f"the member {quoted_name(name)} at byte {position} reaches past the end at "
                    f"byte {total_bytes}"
                )
            yield member
            position = member.end_offset
    except (TarFormatError, OSError):
        raise
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError) as error:
        kind = CutOffError if total_bytes - position < BLOCK else TarFormatError
        # The texts of other errors quote the bytes.
        problem = error if isinstance(error, tarfile.TarError) else type(error).__name__
        raise kind(f"no tar header at byte {position} ({problem})") from error
    # `tarfile` ends at the first block that is not a header, whether zeros or anything else.
    file.seek(position)
    block = file.read(BLOCK)
    is_end_marker = needs_end and block == bytes(BLOCK)
    if len(block) == BLOCK and not is_end_marker:
        raise TarFormatError(f"no tar header at byte {position} (checksum)")
    if not needs_end:
        if position != total_bytes:
            raise TarFormatError("the piece does not end with a whole member")
        return
    if len(block) < BLOCK:
        raise CutOffError(f"there is no end marker before its end at byte {total_bytes}")
    # An end marker is one zero block, or two with zeros up to a whole record behind them. A longer
    # run of zeros is the rest of a download that reserved its place on the disk; within the last
    # record the two look the same.
    file.seek(position)
    for offset in range(position, total_bytes, _SCAN_BYTES):
        piece = file.read(min(_SCAN_BYTES, total_bytes - offset))
        nonzero_bytes = piece.lstrip(b"\0")
        if nonzero_bytes:
            first = offset + len(piece) - len(nonzero_bytes)
            raise TarFormatError(
                f"a zero block at byte {position} ends it, but other bytes follow from byte "
                f"{first}: a header was overwritten, or archives were joined by cat (tar "
                "--ignore-zeros unpacks those, --concatenate joins)"
            )
    is_one_block = total_bytes - position == BLOCK
    padding = total_bytes - position - 2 * BLOCK
    record_sizes = (blocks * BLOCK for blocks in range(1, _MOST_RECORD_BLOCKS + 1))
    fills_record = any(0 <= padding < size and total_bytes % size == 0 for size in record_sizes)
    if not is_one_block and not fills_record:
        raise CutOffError(
            f"the zeros from byte {position} to its end at byte {total_bytes} are not padding to a "
            f"record of at most {_MOST_RECORD_BLOCKS} blocks, so members may be missing (if tar -t "
            f"lists all of them, then truncate -s {position + 2 * BLOCK} mends it)"
        )


def quoted_name(name: bytes) -> str:
    """Returns a member's name or key as messages show it."""
    return repr(name.decode("utf-8", "backslashreplace")[:100])
