"""Tar shards of very many tiny examples, written fast: what an index costs per example shows on these."""

import tarfile
from pathlib import Path


def write_tiny_shards(folder: Path, num_examples: int, *, examples_per_shard: int) -> list[Path]:
    """Writes examples of two members of 20 bytes, `NUMBER.jpg` and `NUMBER.txt`; 2 KiB each on disk."""
    folder.mkdir(parents=True)
    paths = []
    for first in range(0, num_examples, examples_per_shard):
        path = folder / f"tiny-{first // examples_per_shard:05d}.tar"
        with open(path, "wb") as file:
            for start in range(first, min(first + examples_per_shard, num_examples), 1000):
                numbers = range(start, min(start + 1000, first + examples_per_shard, num_examples))
                file.write(b"".join(_member(f"{n:09d}.{kind}".encode()) for n in numbers for kind in ("jpg", "txt")))
            file.write(bytes(1024))
        paths.append(path)
    return paths


def _template() -> tuple[bytes, int]:
    info = tarfile.TarInfo("?" * 13)
    info.size = 20
    header = info.tobuf(tarfile.USTAR_FORMAT)
    unchecked = header[:148] + b" " * 8 + header[156:]
    return header, sum(unchecked) - sum(header[:13])


_HEADER, _SUM = _template()
_PAYLOAD = b"twenty bytes of data".ljust(512, b"\0")


def _member(name: bytes) -> bytes:
    checksum = b"%06o\0 " % (_SUM + sum(name))
    return name + _HEADER[13:148] + checksum + _HEADER[156:] + _PAYLOAD
