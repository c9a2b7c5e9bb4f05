"""The embedded demo is what its README says."""

import re
import tarfile
from collections import Counter

import numpy as np
import pytest

from data.errors import DecodeError
from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.examples.transforms import denormalize, eval_image
from data.index.build import build_index
from data.index.shards import expand_shards
from data.reading.reader import RawExample, TarReader
from tests.data.conftest import ROOT

DEMO = ROOT / "data" / "demo"


@pytest.fixture(scope="module")
def raws(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RawExample]]:
    found = {}
    for part in ("train", "heldout"):
        table = build_index(expand_shards(f"{part}-*.tar", DEMO), tmp_path_factory.mktemp(part))
        reader = TarReader(table)
        found[part] = [reader.read(i) for i in range(len(table))]
    return found


def test_counts_and_sizes(raws: dict[str, list[RawExample]]) -> None:
    assert (len(raws["train"]), len(raws["heldout"])) == (3000, 500)
    assert sum(path.stat().st_size for path in DEMO.glob("*.tar")) <= 12_000_000
    assert all(raw.image and len(raw.image) <= 1536 for part in raws.values() for raw in part)


def test_captions_are_short_clean_and_varied(raws: dict[str, list[RawExample]]) -> None:
    captions = [raw.caption for part in raws.values() for raw in part]
    for caption in captions:
        assert caption and re.fullmatch(r"[a-zà-ÿ]+([ ,]+[a-zà-ÿ]+)*", caption), caption
        assert not re.search(r"clipart|flat icon collection|gramastar|hash|architetto|lemon theme", caption), caption
    assert len(set(captions)) > 2000
    assert Counter(captions).most_common(1)[0][1] <= 4
    tokenizer = CaptionExample(8, 24, EMBEDDED_TOKENIZER).tokenizer
    lengths = [int(tokenizer.encode(caption or "", 64)[1].sum()) for caption in captions]
    assert np.mean(lengths) < 14 and np.quantile(lengths, 0.99) <= 24


def test_heldout_pictures_are_not_in_training(raws: dict[str, list[RawExample]]) -> None:
    thumbs = {}
    for part, examples in raws.items():
        pixels = np.stack([eval_image(raw.image or b"", 16).ravel() for raw in examples])
        pixels -= pixels.mean(axis=1, keepdims=True)
        thumbs[part] = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    nearest = (thumbs["heldout"] @ thumbs["train"].T).max(axis=1)
    assert nearest.max() < 0.985
    heads = {part: {(raw.caption or "").partition(",")[0] for raw in examples} for part, examples in raws.items()}
    assert not heads["train"] & heads["heldout"]


def test_every_example_decodes_to_something(raws: dict[str, list[RawExample]]) -> None:
    make = CaptionExample(32, 24, EMBEDDED_TOKENIZER, train=False)
    for raw in raws["heldout"]:
        try:
            assert denormalize(make(raw, 0)["images_CHW"]).std() > 3
        except DecodeError as error:
            pytest.fail(str(error))


def test_readmes_give_provenance_and_licence() -> None:
    text = (DEMO / "README.md").read_text()
    assert "openclipart" in text and "public domain" in text.lower() and "tools/demo_build.py" in text
    text = (EMBEDDED_TOKENIZER.parent / "README.md").read_text()
    assert (
        "wamerican" in text and "Copyright 2000-2011 by Kevin Atkinson" in text and "tools/tokenizer_build.py" in text
    )


def test_shards_are_plain_and_reproducible() -> None:
    for path in DEMO.glob("*.tar"):
        with tarfile.open(path) as tar:
            assert all(member.isreg() and member.mtime == 0 and member.uname == "" for member in tar)
