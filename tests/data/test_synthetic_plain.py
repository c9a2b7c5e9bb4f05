"""Content "shapes": captions are true of the drawn scene, and only the said relation holds; what it changes elsewhere."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from data.errors import DataError
from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER, CaptionTokenizer
from data.examples.transforms import eval_image
from data.reading.reader import RawExample
from data.synthetic.compose import compose_shapes
from data.synthetic.generate import SyntheticData
from data.synthetic.write import PROVENANCE, Settings, encode, write_synthetic

SHAPES_TOKENIZER = EMBEDDED_TOKENIZER.with_name("shapes.json")
DATA = SyntheticData(3, 64, "shapes")
SIGN = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}


def test_only_the_said_relation_holds() -> None:
    for seed in range(200):
        scene, said = compose_shapes(np.random.default_rng(seed))
        assert [(s.name, s.colour) for s in scene.shapes] == [(g.shape, g.colour) for g in said.groups]
        centres = np.array([(s.x, s.y) for s in scene.shapes])
        assert len({s.name for s in scene.shapes}) == len({s.colour for s in scene.shapes}) == len(scene.shapes)
        if len(centres) == 2:
            axis, sign = SIGN[str(said.relation)]
            apart = centres[0] - centres[1]
            assert sign * apart[axis] > 0.35 and abs(apart[1 - axis]) < 0.1
        elif len(centres) == 3:
            axis = {"right": 0, "down": 1}[str(said.relation)]
            assert (np.diff(centres[:, axis]) > 0.2).all()


def test_shapes_neither_touch_nor_leave_the_picture() -> None:
    for seed in range(200):
        scene, _ = compose_shapes(np.random.default_rng(seed))
        for i, shape in enumerate(scene.shapes):
            assert min(shape.x, shape.y, 1 - shape.x, 1 - shape.y) > shape.radius
            for other in scene.shapes[:i]:
                assert np.hypot(shape.x - other.x, shape.y - other.y) > shape.radius + other.radius


def test_captions_are_plain() -> None:
    captions = [example.caption for example in map(DATA.example, range(60))]
    assert all(caption.startswith(("a ", "an ")) for caption in captions)
    assert any(" left of " in caption for caption in captions)
    assert any(caption.endswith("from left to right") for caption in captions)


def test_another_content_is_another_folder(tmp_path: Path) -> None:
    settings = Settings(4, 16, 0, "png", content="shapes")
    write_synthetic(tmp_path / "a", settings)
    record = json.loads((tmp_path / "a" / PROVENANCE).read_text())
    assert record["content"] == "shapes"
    with pytest.raises(DataError, match="differs in content"):
        write_synthetic(tmp_path / "a", Settings(4, 16, 0, "png"))
    with pytest.raises(DataError, match="choose one of all, shapes"):
        SyntheticData(0, 16, "animals")


def test_training_without_augmentation_sees_the_picture_as_it_is() -> None:
    image = encode(DATA.example(0), "png")
    raw = RawExample(image, {"txt": b"a gray circle"})
    plain = CaptionExample(64, 12, EMBEDDED_TOKENIZER, augment=False)
    for key in range(5):
        np.testing.assert_array_equal(plain(raw, key)["images_CHW"], eval_image(image, 64))
    changed = CaptionExample(64, 12, EMBEDDED_TOKENIZER)(raw, 5)["images_CHW"]
    assert np.abs(changed - eval_image(image, 64)).max() > 0.1


def test_the_tokenizer_of_shapes_knows_every_word() -> None:
    tokenizer = CaptionTokenizer.from_file(SHAPES_TOKENIZER)
    unknown = Tokenizer.from_file(str(SHAPES_TOKENIZER)).token_to_id("<unk>")
    captions = [DATA.composition(index)[1] for index in range(300)]
    for caption in captions:
        tokens, mask = tokenizer.encode(caption, 18)
        assert tokenizer.decode(tokens) == caption and unknown not in tokens
        assert mask.sum() == len(caption.replace(",", " ,").split()) + 2
