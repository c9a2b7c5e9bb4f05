"""Real shards, written by webdataset itself."""

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from data.index.build import build_index
from data.index.tar_index import ExampleTable

ROOT = Path(__file__).resolve().parents[2]
Content = list[tuple[str, bytes]]


def picture(
    seed: int, *, width: int = 40, height: int = 30, fmt: str = "JPEG", mode: str = "RGB"
) -> bytes:
    """An encoded picture of smooth random colours."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return encode(small.resize((width, height), Image.Resampling.BICUBIC).convert(mode), fmt)


def encode(image: Image.Image, fmt: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)
    return buffer.getvalue()


def write_shard(path: Path, samples: list[dict[str, object]]) -> Path:
    """Writes samples with webdataset.TarWriter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def members(num_examples: int, rng: np.random.Generator, *, long_names: bool = False) -> Content:
    """Pairs in order, some with a third member; no payload is empty or holds a zero."""
    folder = "long" * 40 + "/" if long_names else "d/"
    found = []
    for number in range(num_examples):
        for extension in ("jpg", "txt", "json")[: 2 + number % 2]:
            body = rng.integers(1, 256, rng.integers(1, 3000), dtype=np.uint8).tobytes()
            found.append((f"{folder}{number:03d}.{extension}", body))
    return found


def archive(content: Content, fmt: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=fmt) as tar:
        for name, body in content:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A small PNG that claims many pixels."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(100))),
    ]
    parts = [
        struct.pack(">I", len(b)) + t + b + struct.pack(">I", zlib.crc32(t + b))
        for t, b in [*chunks, (b"IEND", b"")]
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three shards with 7, 1 and 4 examples; example 5 cannot be decoded, 8 has no caption, 9 no image."""
    root = tmp_path_factory.mktemp("shards")
    counts, paths, ordinal = (7, 1, 4), [], 0
    for shard, count in enumerate(counts):
        samples: list[dict[str, object]] = []
        for _ in range(count):
            sample: dict[str, object] = {
                "__key__": f"folder/ex{ordinal:04d}",
                "txt": f"a picture {ordinal}".encode(),
            }
            sample["jpg"] = picture(ordinal) if ordinal != 5 else b"\xff\xd8 garbage"
            if ordinal == 8:
                del sample["txt"]
            if ordinal == 9:
                del sample["jpg"]
            samples.append(sample)
            ordinal += 1
        paths.append(write_shard(root / f"train-{shard:03d}.tar", samples))
    return paths


@pytest.fixture
def table(shards: list[Path], tmp_path: Path) -> ExampleTable:
    return build_index(shards, tmp_path / "index")
