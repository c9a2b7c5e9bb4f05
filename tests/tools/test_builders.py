"""What built the embedded demo and the embedded tokenizers."""

from pathlib import Path

import pytest

from data.errors import DataError
from tests.data.conftest import ROOT, picture
from tests.processes import run_python
from tools.demo_build import build_demo
from tools.demo_captions import Captioner, Metadata
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
