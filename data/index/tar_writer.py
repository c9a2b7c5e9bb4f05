"""Writes tar shards: plain ustar without times or owners, so that equal content gives equal bytes."""

import io
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

Example = tuple[str, Mapping[str, bytes]]
"""Key and its members, extension -> bytes."""


def write_shard(path: Path, examples: Iterable[Example]) -> int:
    """Writes one shard; it gets its name when it is whole and on the disk.

    Args:
        path: of the shard; an older file is replaced.
        examples: written one by one, so that memory holds one.

    Returns:
        The number of examples.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with open(temporary, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for key, members in examples:
                    count += 1
                    for extension, payload in members.items():
                        member = tarfile.TarInfo(f"{key}.{extension}")
                        member.size = len(payload)
                        tar.addfile(member, io.BytesIO(payload))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count
