"""The embedded pictures are what their READMEs say, and the clothes become shards once."""

import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data.embedded import FASHION_FOLDER, PARTS, unpack_fashion
from data.errors import DataError
from data.examples.examples import CaptionExample
from data.index.build import build_index
from data.index.shards import ShardSet, find_shards
from data.reading.reader import RawExample, TarReader
from tests.data.conftest import ROOT

DEMO = ROOT / "data" / "demo"
FEW = {"train": 1000, "choice": 300, "test": 500}
CLOTHES = CaptionExample(28, 8, ROOT / "data/tokenizer/fashion.json", train=False)


def read(shards: ShardSet, index: Path) -> list[RawExample]:
    table = build_index(shards, index)
    return list(TarReader(table).read_all(range(len(table))))


@pytest.mark.parametrize("parts", [FEW, pytest.param(PARTS, marks=pytest.mark.full)])
def test_clothes_are_captioned_and_split(
    parts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caption is so frequent that saying it blindly is of use, half of them say dark, and the ground is white."""
    monkeypatch.setattr("data.embedded.PARTS", parts)
    unpack_fashion(tmp_path)
    clothes = {
        part: read(find_shards(f"runs/fashion/{part}-*.tar", tmp_path), tmp_path / part)
        for part in parts
    }
    assert {part: len(examples) for part, examples in clothes.items()} == parts
    for examples in clothes.values():
        captions = Counter(raw.caption or "" for raw in examples)
        assert len(captions) == 20 and max(captions.values()) <= 0.12 * len(examples)
        assert (
            0.45
            < sum(count for text, count in captions.items() if " dark " in text) / len(examples)
            < 0.55
        )
        for text in captions:
            tokens_L, mask_L = CLOTHES.tokenizer.encode(text, 8)
            assert (
                tokens_L[mask_L][-1] == CLOTHES.tokenizer.eos_id
                and CLOTHES.tokenizer.decode(tokens_L) == text
            )
    pictures = {
        tone: [
            CLOTHES(raw, 0)["images_CHW"]
            for raw in clothes["choice"]
            if f" {tone} " in str(raw.caption)
        ]
        for tone in ("dark", "light")
    }
    assert np.mean(pictures["dark"]) < np.mean(pictures["light"]) - 0.3
    images = {part: {raw.image for raw in examples} for part, examples in clothes.items()}
    assert (
        not images["test"] & (images["train"] | images["choice"])
        and not images["choice"] & images["train"]
    )


def test_shards_are_made_where_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first who asks, with the same plain bytes everywhere; nothing else stays in the folder."""
    monkeypatch.setattr("data.embedded.PARTS", {"train": 90, "choice": 20, "test": 30})
    (tmp_path / "elsewhere").mkdir()
    reference = unpack_fashion(tmp_path / "elsewhere")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(find_shards, "runs/fashion/test-*.tar", tmp_path) for _ in range(2)]
        assert {one.result().names for one in asked} == {("test-00000.tar",)}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["fashion"]
    made = sorted((tmp_path / FASHION_FOLDER).iterdir())
    assert [path.read_bytes() for path in made] == [
        (reference / path.name).read_bytes() for path in made
    ]
    for path in (*made, *DEMO.glob("*.tar")):
        with tarfile.open(path) as tar:
            assert all(
                member.isreg() and member.mtime == 0 and member.uname == "" for member in tar
            )


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_a_damaged_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    file = tmp_path / "pairs.npz.xz"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr("data.embedded.FASHION_FILE", file)
    with pytest.raises(DataError, match=r"cannot unpack .*pairs\.npz\.xz"):
        unpack_fashion(tmp_path)
    assert not list((tmp_path / "runs").iterdir())
