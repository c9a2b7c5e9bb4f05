"""The embedded pictures of clothes are what their README says, and become shards once."""

import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data.embedded import FASHION_FILE, FASHION_FOLDER, PARTS, unpack_fashion
from data.errors import DataError
from data.examples.examples import CaptionExample
from data.index.build import build_index
from data.index.shards import expand_shards, find_shards
from data.reading.reader import RawExample, TarReader
from tests.data.conftest import ROOT

FASHION_TOKENIZER = ROOT / "data/tokenizer/fashion.json"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    unpack_fashion(root)
    return root


@pytest.fixture(scope="module")
def raws(root: Path) -> dict[str, list[RawExample]]:
    found = {}
    for part in PARTS:
        table = build_index(expand_shards(f"runs/fashion/{part}-*.tar", root), root / f"{part}-index")
        found[part] = list(TarReader(table).read_all(range(len(table))))
    return found


@pytest.mark.full
def test_counts_and_size(raws: dict[str, list[RawExample]]) -> None:
    assert {part: len(examples) for part, examples in raws.items()} == PARTS
    assert PARTS["train"] == 10_000 and PARTS["test"] >= 1000
    assert FASHION_FILE.stat().st_size <= 4_000_000


def test_captions_need_looking(raws: dict[str, list[RawExample]]) -> None:
    """No caption is so frequent that saying it blindly is of use, and either tone is as good as half of them."""
    make = CaptionExample(28, 8, FASHION_TOKENIZER, train=False)
    for examples in raws.values():
        captions = Counter(raw.caption or "" for raw in examples)
        assert len(captions) == 20 and max(captions.values()) <= 0.12 * len(examples)
        assert 0.45 < sum(count for text, count in captions.items() if " dark " in text) / len(examples) < 0.55
        for text in captions:
            tokens_L, mask_L = make.tokenizer.encode(text, 8)
            assert tokens_L[mask_L][-1] == make.tokenizer.eos_id and make.tokenizer.decode(tokens_L.tolist()) == text


def test_pictures_are_positives(raws: dict[str, list[RawExample]]) -> None:
    """The ground is white, and dark things are darker than light ones."""
    make = CaptionExample(28, 8, FASHION_TOKENIZER, train=False)
    pictures = {"dark": [], "light": []}  # type: dict[str, list[np.ndarray]]
    for raw in raws["choice"]:
        pictures["dark" if " dark " in (raw.caption or "") else "light"].append(make(raw, 0)["images_CHW"][0])
    dark, light = (np.stack(pictures[tone]) for tone in ("dark", "light"))
    assert dark.mean() < light.mean() - 0.3
    assert dark[:, :, 0].min(axis=1).mean() > dark.min(axis=(1, 2)).mean() + 1


def test_no_picture_is_on_both_sides(raws: dict[str, list[RawExample]]) -> None:
    images = {part: {raw.image for raw in examples} for part, examples in raws.items()}
    assert not images["test"] & (images["train"] | images["choice"]) and not images["choice"] & images["train"]


def test_shards_are_made_where_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first who asks, with the same bytes everywhere; nothing else stays in the folder."""
    monkeypatch.setattr("data.embedded.PARTS", {"train": 90, "choice": 20, "test": 30})
    (tmp_path / "elsewhere").mkdir()
    reference = unpack_fashion(tmp_path / "elsewhere")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(find_shards, "runs/fashion/test-*.tar", tmp_path) for _ in range(2)]
        names = {one.result().names for one in asked}
    assert names == {("test-00000.tar",)}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["fashion"]
    for made in sorted((tmp_path / FASHION_FOLDER).iterdir()):
        assert made.read_bytes() == (reference / made.name).read_bytes()
        with tarfile.open(made) as tar:
            assert all(member.isreg() and member.mtime == 0 for member in tar)


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / FASHION_FOLDER).mkdir(parents=True)
    with pytest.raises(DataError, match="no shards match"):
        find_shards("runs/fashion/train-*.tar", tmp_path)
    assert not list((tmp_path / FASHION_FOLDER).iterdir())


def test_other_patterns_unpack_nothing(tmp_path: Path) -> None:
    for pattern in ("runs/*.tar", "data/fashion/train-*.tar", "runs/fashionable/a.tar"):
        with pytest.raises(DataError):
            expand_shards(pattern, tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_a_damaged_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    file = tmp_path / "pairs.npz.xz"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr("data.embedded.FASHION_FILE", file)
    with pytest.raises(DataError, match=r"cannot unpack .*pairs\.npz\.xz"):
        unpack_fashion(tmp_path)
    assert not list((tmp_path / "runs").iterdir())


def test_readme_gives_provenance_and_licence() -> None:
    text = (FASHION_FILE.parent / "README.md").read_text()
    assert "dataset-fashion-mnist" in text and "tools/fashion_build.py" in text and "MIT" in text
    assert "Zalando" in (FASHION_FILE.parent / "LICENSE").read_text()
