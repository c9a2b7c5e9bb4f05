"""The builder of the embedded pictures of clothes."""

import gzip
import io
import lzma
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from tools.fashion_build import CAPTIONS, FASHION_TOKENIZER, TONES, build_fashion, fashion_tokenizer


def test_the_tokenizer_of_clothes_is_the_one_that_is_shipped() -> None:
    captions = [caption.format(tone) for caption in CAPTIONS for tone in TONES]
    assert FASHION_TOKENIZER.read_text() == fashion_tokenizer(captions).to_str(pretty=True) + "\n"


def test_the_builder_of_clothes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negatives become positives, tones follow the darkness of the thing, and a test picture that was trained on is left out."""
    monkeypatch.setattr("tools.fashion_build.PARTS", {"train": 4, "choice": 1, "test": 2})
    rng = np.random.default_rng(0)
    ink_NHW = rng.integers(0, 256, (10, 28, 28), dtype=np.uint8)
    ink_NHW[:, :7] = 0
    ink_NHW[1] = ink_NHW[1] // 2
    test_NHW = np.concatenate([ink_NHW[:1], ink_NHW[4:]])
    for split, images_NHW in (("train", ink_NHW[:4]), ("t10k", test_NHW)):
        labels = np.arange(len(images_NHW), dtype=np.uint8)
        for kind, header, payload in (("images-idx3", 16, images_NHW), ("labels-idx1", 8, labels)):
            path = tmp_path / f"{split}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(bytes(header) + payload.tobytes()))
    outputs = [tmp_path / name for name in ("a.xz", "b.xz")]
    for output in outputs:
        assert build_fashion(tmp_path, output, tmp_path / "tokenizer.json") == output.stat().st_size
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    with np.load(io.BytesIO(lzma.decompress(outputs[0].read_bytes()))) as held:
        said = [str(held["captions"][number]) for number in held["caption_N"]]
        shades_NHW = held["shades_NHW"]
    assert said[0] == "a light t-shirt" and said[1] == "a pair of light trousers"
    assert [one.split()[-1] for one in said[4:]] == ["trousers", "jumper", "dress"], (
        "the first test picture was trained on"
    )
    assert (shades_NHW[:, :7] == 31).all() and abs(shades_NHW * 255.0 / 31 - (255 - ink_NHW[:7])).max() <= 255 / 62
    with pytest.raises(DataError, match="install dataset-fashion-mnist"):
        build_fashion(tmp_path / "none", outputs[0], tmp_path / "tokenizer.json")
