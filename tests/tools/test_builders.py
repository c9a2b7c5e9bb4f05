"""What built the embedded demo and the embedded tokenizers."""

import gzip
import io
import lzma
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from tests.data.conftest import ROOT, picture
from tests.processes import run_python
from tools.demo_build import build_demo
from tools.demo_captions import Captioner, Metadata
from tools.fashion_build import CAPTIONS, FASHION_TOKENIZER, TONES, build_fashion, fashion_tokenizer
from tools.shapes_tokenizer import SHAPES_TOKENIZER, shapes_tokenizer
from tools.tokenizer_build import train_tokenizer


@pytest.mark.parametrize(
    ("path", "title", "keywords", "caption"),
    [
        ("food/fruit/apple_01", "red apple", ("food", "fruit", "hash"), "red apple, food, fruit"),
        ("signs_and_symbols/flags/africa/algeria", "algeria", ("africa", "flag"), "flag of algeria, africa"),
        ("computer/icons/flat-theme/folder_blue", "Part of the Flat Icon Collection", ("theme",), "blue folder, icon"),
        ("recreation/games/cards/white/white_h_9", "card", (), "nine of hearts, white playing card"),
        ("shapes/stars/star_07pt03step", "gramastar", (), "star with seven points, geometry, shape"),
        ("shapes/stars/star_70pt03step", "gramastar", (), None),
        ("animals/cavallo_architetto_01", "Cavallo", ("animal",), "horse, animal"),
        ("unsorted/0x8b754fc", "", ("hash(0x8b754fc)",), None),
    ],
)
def test_caption_rules(path: str, title: str, keywords: tuple[str, ...], caption: str | None) -> None:
    file = Metadata(path, title, keywords, "PublicDomain")
    words = frozenset(["red", "apple", "blue", "folder", "horse", "animal", "food", "fruit", "africa", "flag", "icon"])
    assert Captioner([file] * 3, words).caption(file) == caption


def test_the_demo_builder_from_a_small_source(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("red\napple\n")
    template = (
        '<svg xmlns="http://www.w3.org/2000/svg"><metadata xmlns:dc="d"><Work><dc:title>{}</dc:title></Work>'
        '<License resource="{}"/></metadata></svg>'
    )
    for name, licence in (("red_apple", "PublicDomain"), ("apple", "GPL"), ("apple_copy", "PublicDomain")):
        for kind in ("svg", "png"):
            (tmp_path / kind).mkdir(exist_ok=True)
        (tmp_path / "svg" / f"{name}.svg").write_text(template.format(name, licence))
        (tmp_path / "png" / f"{name}.png").write_bytes(picture(1, fmt="PNG"))
    lines: list[str] = []
    assert sum(build_demo(tmp_path, tmp_path / "words", tmp_path / "out", lines.append)) == 1
    assert lines[0] == "3 files, 2 of them tagged public domain"


def test_training_is_deterministic(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.write_text("apple\nbanana\ncherry's\n")
    assert train_tokenizer(words, tmp_path / "a.json") == train_tokenizer(words, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    with pytest.raises(DataError, match="no word list"):
        train_tokenizer(tmp_path / "none", tmp_path / "c.json")


def test_the_tokenizer_of_shapes_is_the_one_that_is_shipped() -> None:
    assert SHAPES_TOKENIZER.read_text() == shapes_tokenizer().to_str(pretty=True) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo_build", "--source", "nowhere", "--output", "x"), "openclipart-png"),
        (("tokenizer_build", "--words", "nowhere", "--output", "x"), "no word list"),
        (("tokenizer_build", "--word", "nowhere"), "--output"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run_python([ROOT / "tools" / f"{arguments[0]}.py", *arguments[1:]], cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr
    assert not (tmp_path / "x").exists()


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
