"""Writes tar shards as plain ustar without times or owners: equal content gives equal bytes."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from data.files import atomic_file

Example = tuple[str, Mapping[str, bytes]]
"""Key and its members, extension -> bytes."""


def write_shard(path: Path, examples: Iterable[Example], mode: int = 0o666) -> int:
    """Writes one shard, which gets its name when it is whole and durable.

    Args:
        path: of the shard; an older file is replaced.
        examples: written one by one, so that one at a time is in memory.
        mode: permissions of the file, less the umask.

    Returns:
        The number of examples.

    Raises:
        OSError: the shard cannot be written.
    """
    count = 0
    with (
        atomic_file(path, mode) as temporary,
        tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for key, members in examples:
            count += 1
            for extension, payload in members.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))
    return count
