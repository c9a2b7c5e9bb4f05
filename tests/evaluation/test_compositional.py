"""ARO's files, choices by loss, and tests from synthetic programs: false captions are false and as long as the true one."""

import io
import re
from collections import Counter
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.examples.transforms import denormalize
from data.synthetic.generate import SyntheticData
from evaluation import compositional
from evaluation.compositional import Answers, Choice, choose, losses, read_aro, shape_choices
from tests.evaluation.conftest import TOKENIZER, captioner

SHAPES = SyntheticData(8, 32, "shapes")


def test_the_box_is_what_is_shown(tmp_path: Path) -> None:
    """The formats: test_caption_commands.py."""
    halves = np.zeros((20, 40, 3), np.uint8)
    halves[:, :20, 0], halves[:, 20:, 2] = 255, 255  # red on the left, blue on the right
    Image.fromarray(halves).save(tmp_path / "a.png")
    pixels = compositional.pixels_of(Choice(tmp_path / "a.png", ("x",), "g", (20, 0, 40, 20)), 16)
    assert pixels is not None and (denormalize(pixels).reshape(-1, 3) == (0, 0, 255)).all()
    whole = compositional.pixels_of(Choice(tmp_path / "a.png", ("x",), "g"), 16)
    assert whole is not None  # squashed, not cropped: both halves are whole
    assert denormalize(whole)[8, 0].tolist() == [255, 0, 0] and denormalize(whole)[
        8, 15
    ].tolist() == [0, 0, 255]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("{}", "no list"),
        ("[]", "no list"),
        ('[{"image_path": "a"}]', "test 0 is not of the format vg-rel"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_aro(tmp_path / "x.json", tmp_path, "vg-relation")


def test_the_least_loss_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, wrong, and a tie of two among three; an image that is none is left out and counted."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    tests = [Choice(picture.getvalue(), ("a", "b", "c"), group) for group in ("x", "x", "y")]
    tests.append(Choice(b"no image", ("a", "b"), "y"))
    said = [torch.tensor(row) for row in ([1.0, 2, 3], [2.0, 1, 3], [1.0, 1, 3])]
    monkeypatch.setattr(compositional, "losses", lambda *_: {"sum": said})
    chosen, undecodable = choose(captioner(), TOKENIZER, tests)
    answers = chosen["sum"]
    assert (
        undecodable == 1 and answers["x"].credits_N.mean() == answers["y"].credits_N.mean() == 0.5
    )
    assert answers["x"].chances_N == pytest.approx(1 / 3)
    guessing = Answers(
        np.repeat([1.0, 0.0], [60, 40]), np.full(100, 0.5)
    ).p_value  # at least 60 of 100
    assert guessing == pytest.approx(sum(comb(100, k) for k in range(60, 101)) / 2**100)
    with pytest.raises(DataError, match="no tests"):
        choose(captioner(), TOKENIZER, [])


def test_a_model_without_a_look_cannot_do_better_than_chance() -> None:
    """All images black: with the prior every difference vanishes, ties included."""
    model = captioner()
    tests = [
        Choice(test.image, test.captions, test.group)
        for test in shape_choices(SHAPES, 3, ["order"])
    ]
    blank = np.zeros((3, 3, 16, 16), np.float32)
    for loss_O in losses(model, TOKENIZER, tests, blank)["prior"]:
        assert loss_O.abs().max() == 0


def test_false_captions_of_shapes_are_false_and_as_long() -> None:
    """What holds is read off the scene: names, colours and places of the drawn shapes."""
    opposite = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
    tests = shape_choices(SHAPES, 12)
    sizes = {"colour": 11, "shape": 9, "relation": 7, "order": 6}
    assert Counter(test.group for test in tests) == dict.fromkeys(sizes, 12)
    scenes = {}
    for index in range(400):
        composition, caption = SHAPES.composition(index)
        scenes.setdefault(caption, composition.scene)
    for test in tests:
        assert len(set(test.captions)) == len(test.captions) == sizes[test.group]
        assert len({len(caption.split()) for caption in test.captions}) == 1
        if test.group not in ("relation", "order"):
            continue
        scene = scenes[test.captions[0]]
        where = {f"{s.colour} {s.name}": (s.x, s.y) for s in scene.shapes}

        def holds(caption: str, where: dict[str, tuple[float, float]] = where) -> bool:
            plain = re.sub(r"\ban ", "a ", caption)
            for words, (axis, sign) in opposite.items():
                if f" {words} " in plain:
                    pair = [part.removeprefix("a ") for part in plain.split(f" {words} ")]
                    return (
                        all(p in where for p in pair)
                        and sign * (where[pair[0]][axis] - where[pair[1]][axis]) > 0.2
                    )
            axis = 0 if plain.endswith("left to right") else 1
            listed = plain.partition(" from ")[0].replace(" and ", ", ").split(", ")
            places = [where[part.removeprefix("a ")][axis] for part in listed]
            return places == sorted(places)

        assert [holds(caption) for caption in test.captions] == [True] + [False] * (
            len(test.captions) - 1
        )
