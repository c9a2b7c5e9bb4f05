"""Tar archives of pairs, good ones in every form, and what independent readers find in them."""

import io
import itertools
import tarfile
from pathlib import Path

import numpy as np
import webdataset

from tests.data.conftest import picture

BLOCK = 512
RECORD = 20 * BLOCK
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
Fields = dict[str, bytes]
Content = list[tuple[str, bytes]]


def members(num_examples: int, rng: np.random.Generator, *, long_names: bool = False) -> Content:
    """Pairs in order, some with a third member; no payload is empty or holds a zero."""
    folder = "long" * 40 + "/" if long_names else "d/"
    found = []
    for number in range(num_examples):
        for extension in ("jpg", "txt", "json")[: 2 + number % 2]:
            body = rng.integers(1, 256, rng.integers(1, 3000), dtype=np.uint8).tobytes()
            found.append((f"{folder}{number:03d}.{extension}", body))
    return found


def archive(content: Content, fmt: int = tarfile.GNU_FORMAT, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=fmt) as tar:
        for name, body in content:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def end_of_members(content: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        last = tar.getmembers()[-1]
    return last.offset_data + -(-last.size // BLOCK) * BLOCK


def without_padding(content: bytes) -> bytes:
    """As bsdtar, Go and Rust end a file: two blocks of zeros and nothing else."""
    return content[: end_of_members(content) + 2 * BLOCK]


def by_webdataset(path: Path) -> list[Fields]:
    samples = webdataset.WebDataset([str(path)], shardshuffle=False)
    own = ("__key__", "__url__", "__local_path__")
    return [{name: body for name, body in sample.items() if name not in own} for sample in samples]


def by_key(content: Content) -> list[Fields]:
    runs = itertools.groupby(content, key=lambda member: member[0].split(".")[0])
    return [{name.split(".", 1)[1]: body for name, body in run} for _, run in runs]


def as_sets(examples: list[Fields]) -> list[tuple[tuple[str, bytes], ...]]:
    return sorted(tuple(sorted(fields.items())) for fields in examples)


def folder_of(content: Content, root: Path) -> list[str]:
    for name, body in content:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
    return [name for name, _ in content]


def shard_of(path: Path, names: list[str]) -> Path:
    """A shard of pictures, each another, and texts that say their names."""
    content = []
    for number, name in enumerate(names):
        is_picture = name.rpartition(".")[2].lower() in ("jpg", "jpe", "jfif", "png")
        content.append((name, picture(number) if is_picture else b'{"caption": "%s"}' % name.encode()))
    path.write_bytes(archive(content))
    return path


def pairs(*stems: str, text: str = "txt") -> list[str]:
    return [f"{stem}.{extension}" for stem in stems for extension in ("jpg", text)]
