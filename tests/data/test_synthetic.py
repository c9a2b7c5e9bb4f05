"""Synthetic pictures show what their captions say, and stay what they are."""

import hashlib
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from data.errors import DataError
from data.synthetic import shapes
from data.synthetic.generate import GENERATOR_VERSION, SyntheticData
from data.synthetic.render import draw
from data.synthetic.scene import Scene, Texture
from data.synthetic.texture_kinds import KINDS, describe, random_colours, random_texture
from data.synthetic.vocabulary import COLOURS, COUNTS, colour_distance, rgb
from tests.data.conftest import ROOT
from tests.data.support.pictures_of_shapes import Picture, components

DATA = SyntheticData(3, 224)
DIGEST = "2a18b2f75e6bfc88ffee5acad44ac49a60e9f24f663e93df3cffaa6eac81c7aa"


def check_captions(indices: range) -> None:
    """The caption of plain shapes holds in the pixels; the next picture's with as many shapes does not."""
    data, before = SyntheticData(3, 224, "shapes"), ""
    for index in indices:
        example = data.example(index)
        picture = Picture(example.image_HWC)
        assert picture.is_true(example.caption), example.caption
        assert before in ("", example.caption) or not picture.is_true(before), (example.caption, before)
        before = example.caption


def test_captions_are_true_of_the_pixels() -> None:
    check_captions(range(16))


@pytest.mark.full
def test_many_captions() -> None:
    check_captions(range(60, 1060))


def check_counts(count: int) -> None:
    """Groups of solid shapes: as many connected areas of the colour as the caption says."""
    checked: Counter[int] = Counter()
    for example in map(DATA.example, range(count)):
        scene, said = example.scene, example.statement
        if not said.groups or said.relation in ("inside", "around"):
            continue
        others = [g.second for g in said.groups if g.second] + list(scene.textures[0].colours)
        among = list(dict.fromkeys([group.colour for group in said.groups] + others))
        for group in said.groups:
            if group.fill != "solid" or scene.textures[0].program in ("clouds", "gradient"):
                continue  # two colours that flow into each other make colours in between
            found = components(example.image_HWC, group.colour, among)
            assert len(found) == group.count, (example.caption, len(found))
            assert group.colour in example.caption and (group.count == 1 or COUNTS[group.count] in example.caption)
            checked[group.count] += 1
    assert {1, 2, 3, 4, 5} <= set(checked)


def test_counts_and_colours_of_drawn_shapes() -> None:
    check_counts(160)


@pytest.mark.full
def test_many_counts_and_colours() -> None:
    check_counts(4000)


@pytest.mark.parametrize("kind", KINDS)
def test_a_texture_shows_all_colours_it_is_said_to_have(kind: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        texture = random_texture(rng, kinds=[kind])
        image = draw(Scene((texture,)), 64)
        caption = describe(texture, rng)
        values = np.stack([rgb(name) * 255 for name in texture.colours])
        nearest = ((image[:, :, None] - values) ** 2).sum(-1).argmin(-1)
        shares = [(nearest == place).mean() for place in range(len(values))]
        assert min(shares) > 0.025, (texture, shares)
        assert all(name in caption for name in texture.colours) and "  " not in caption and "{" not in caption


def digest() -> str:
    """Every texture program, and pictures of both contents, as one number."""
    found = hashlib.sha256()
    rng = np.random.default_rng(1)
    for kind in KINDS:
        found.update(b"".join(draw(Scene((random_texture(rng, kinds=[kind]),)), 96).tobytes() for _ in range(4)))
    for data in (SyntheticData(0, 97), SyntheticData(1, 32), SyntheticData(2, 64, "shapes")):
        for example in map(data.example, range(60)):
            found.update(example.image_HWC.tobytes() + example.caption.encode())
    return found.hexdigest()


def test_examples_are_those_of_the_generators_version() -> None:
    assert (GENERATOR_VERSION, digest()) == (1, DIGEST), "GENERATOR_VERSION changes whenever an example does"


@pytest.mark.full
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_processor_draws_the_same(every: bool) -> None:
    """numpy computes some functions otherwise on processors with fewer instructions; pictures must not show it.

    `make test` takes the one with the fewest, `make test-all` all between it and this one.
    """
    features = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    if not features:
        pytest.skip("numpy has one way of computing on this processor")
    for start in range(len(features) if every else 1):
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(features[start:])}
        program = "from tests.data.test_synthetic import digest; print(digest())"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT
        )
        assert done.stdout.strip() == DIGEST, (features[start:], done.stderr)


def test_an_example_depends_on_seed_and_index_alone() -> None:
    many = [DATA.example(index) for index in range(70)]
    for index in (69, 5, 0):
        alone = SyntheticData(3, 224).example(index)
        assert np.array_equal(alone.image_HWC, many[index].image_HWC) and alone.caption == many[index].caption
    assert SyntheticData(4, 224).composition(0)[1] != many[0].caption
    assert len({example.caption for example in many}) == 70
    assert many[0].image_HWC.shape == (224, 224, 3) and many[0].image_HWC.dtype == np.uint8


def test_captions_have_hundreds_of_words() -> None:
    data = SyntheticData(0, 16)
    captions = [data.composition(index)[1] for index in range(3000)]
    words = Counter(word for caption in captions for word in set(caption.replace(",", "").replace(":", "").split()))
    assert sum(count >= 3 for count in words.values()) > 300
    assert len(set(captions)) > 2800
    assert {"left", "above", "inside", "three", "red", "striped", "fractal", "between"} <= set(words)
    assert all(caption == " ".join(caption.split()) and not caption.startswith(("on ", ",")) for caption in captions)
    assert not any(" of from " in caption or " of a checkerboard" in caption for caption in captions)
    for caption in captions:
        for first, second in zip(caption.split(), caption.split()[1:], strict=False):
            assert first not in ("a", "an") or (first == "an") == (second[0] in "aeiou"), caption


def test_colours_of_a_picture_differ_clearly() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        one, two, three = random_colours(rng, 3)
        assert min(colour_distance(one, two), colour_distance(two, three), colour_distance(one, three)) > 0.25
    # Where all but one are taken, that one is left.
    assert random_colours(rng, 1, avoid=[name for name in COLOURS if name != "cyan"]) == ("cyan",)


def test_every_outline_has_the_right_distance() -> None:
    """Negative inside, about one pixel of distance per pixel across the border, and within the unit circle."""
    table = shapes.distance_table()
    ticks = (np.arange(shapes.TABLE_SIZE) + 0.5) / shapes.TABLE_SIZE * 2 * shapes.TABLE_EXTENT - shapes.TABLE_EXTENT
    radius = np.hypot(*np.meshgrid(ticks, ticks))
    step = 2 * shapes.TABLE_EXTENT / shapes.TABLE_SIZE
    for name, distance in zip(shapes.NAMES, table, strict=True):
        assert (distance < 0).mean() > 0.05, name
        assert (distance - (radius - 1.06) / 2)[radius > 1.06].min() > 0, name  # what `render` cuts off is empty
        near = np.abs(distance) < 0.1
        slope = np.hypot(*np.gradient(distance, step))[near]
        assert 0.7 < np.median(slope) < 1.1 and slope.max() < 2.5, name


@pytest.mark.parametrize(
    ("seed", "size", "content", "message"),
    [(-1, 32, "all", "seed"), (0, 8, "all", "16 to 4096"), (0, 9999, "all", "16 to 4096"), (0, 32, "x", "content x")],
)
def test_bad_settings(seed: int, size: int, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        SyntheticData(seed, size, content)


def test_plain_texture_is_one_colour() -> None:
    assert (draw(Scene((Texture("plain", ("teal",)),)), 224) == COLOURS["teal"]).all()
