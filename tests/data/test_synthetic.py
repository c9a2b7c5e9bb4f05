"""Synthetic pictures show what their captions say, whatever draws them."""

from collections import Counter

import numpy as np
import pytest

from data.errors import DataError
from data.synthetic import generate, shapes
from data.synthetic.compose import compose
from data.synthetic.generate import SyntheticData
from data.synthetic.render_glsl import GlslRenderer
from data.synthetic.render_numpy import NumpyRenderer
from data.synthetic.scene import Scene, Texture
from data.synthetic.texture_kinds import KINDS
from data.synthetic.textures import describe, random_colours, random_texture
from data.synthetic.vocabulary import COLOURS, COUNTS, colour_distance, rgb
from tests.data.pictures_of_shapes import Picture, components


@pytest.fixture(scope="module", params=["numpy", "glsl"])
def data(request: pytest.FixtureRequest) -> SyntheticData:
    return open_or_skip(request.param, 224)


def open_or_skip(backend: str, image_size: int, seed: int = 3) -> SyntheticData:
    try:
        return SyntheticData(seed, image_size, backend)
    except DataError as error:
        pytest.skip(str(error))


def check_relations(data: SyntheticData, indices: range, allowed: int = 0) -> None:
    """The true caption holds in the pixels, and no wrong one does.

    Args:
        allowed: how many true captions the judge may miss (thin outlines on a busy background).
    """
    seen: Counter[str] = Counter()
    missed = []
    for test in data.relation_tests(indices):
        picture = Picture(test.image_HWC)
        if not picture.is_true(test.caption):
            missed.append(test.caption)
        for what, wrong in test.wrong.items():
            assert not picture.is_true(wrong), (test.caption, what, wrong)
            seen[what] += 1
    assert len(missed) <= allowed, missed
    changes = {"swapped_order", "swapped_colours", "swapped_shapes", "opposite_relation"}
    assert changes | {"wrong_colour", "wrong_count", "wrong_shape"} == set(seen)


def test_relation_captions_are_true_and_wrong_ones_false(data: SyntheticData) -> None:
    check_relations(data, range(60))


@pytest.mark.full
def test_many_relation_captions(data: SyntheticData) -> None:
    check_relations(data, range(60, 1060), allowed=10)


def check_counts(data: SyntheticData, count: int) -> None:
    """Groups of solid shapes: as many connected areas of the colour as the caption says."""
    checked: Counter[int] = Counter()
    for example in data.examples(range(count)):
        scene, said = example.scene, example.statement
        if not said.groups or said.relation in ("inside", "around"):
            continue
        others = [g.second for g in said.groups if g.second] + list(scene.textures[0].colours)
        among = list(dict.fromkeys([group.colour for group in said.groups] + others))
        for group in said.groups:
            if group.fill != "solid" or scene.textures[0].program in ("clouds", "gradient"):
                continue  # two colours that flow into each other make colours in between
            found = components(example.image_HWC, group.colour, among, thin=False)
            assert len(found) == group.count, (example.caption, len(found))
            assert group.colour in example.caption and (group.count == 1 or COUNTS[group.count] in example.caption)
            checked[group.count] += 1
    assert {1, 2, 3, 4, 5} <= set(checked)


def test_counts_and_colours_of_drawn_shapes(data: SyntheticData) -> None:
    check_counts(data, 160)


@pytest.mark.full
def test_many_counts_and_colours(data: SyntheticData) -> None:
    check_counts(data, 4000)


@pytest.mark.parametrize("kind", KINDS)
def test_a_texture_shows_all_colours_it_is_said_to_have(kind: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        texture = random_texture(rng, kinds=[kind])
        image = NumpyRenderer(64).render([Scene((texture,))])[0]
        caption = describe(texture, rng)
        values = np.stack([rgb(name) * 255 for name in texture.colours])
        nearest = ((image[:, :, None] - values) ** 2).sum(-1).argmin(-1)
        shares = [(nearest == place).mean() for place in range(len(values))]
        assert min(shares) > 0.025, (texture, shares)
        assert all(name in caption for name in texture.colours) and "  " not in caption and "{" not in caption


def test_both_renderers_draw_the_same() -> None:
    """Up to roundings, which flip single pixels of sharp borders and of fractals."""
    glsl = open_or_skip("glsl", 96)
    rng = np.random.default_rng(1)
    scenes = [Scene((random_texture(rng, kinds=[kind]),)) for kind in KINDS for _ in range(3)]
    scenes += [compose(rng).scene for _ in range(100)]
    difference = np.abs(glsl.renderer.render(scenes).astype(int) - NumpyRenderer(96).render(scenes))
    assert difference.mean(axis=(1, 2, 3)).max() < 2.5
    assert difference.mean() < 0.1


def test_an_example_depends_on_seed_and_index_alone(data: SyntheticData) -> None:
    many = data.examples(range(70))
    for index in (0, 5, 63, 64, 69):
        alone = data.example(index)
        assert np.array_equal(alone.image_HWC, many[index].image_HWC) and alone.caption == many[index].caption
    assert SyntheticData(4, 224, "numpy").composition(0)[1] != many[0].caption
    assert len({example.caption for example in many}) == 70
    assert many[0].image_HWC.shape == (224, 224, 3) and many[0].image_HWC.dtype == np.uint8


def test_captions_have_hundreds_of_words() -> None:
    data = SyntheticData(0, 16, "numpy")
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
        assert distance[radius > 1.06].min() > 0, name
        near = np.abs(distance) < 0.1
        slope = np.hypot(*np.gradient(distance, step))[near]
        assert 0.7 < np.median(slope) < 1.1 and slope.max() < 2.5, name


@pytest.mark.parametrize(
    ("seed", "size", "backend"), [(-1, 32, "numpy"), (0, 8, "numpy"), (0, 9999, "auto"), (0, 32, "x")]
)
def test_bad_settings(seed: int, size: int, backend: str) -> None:
    with pytest.raises(DataError):
        SyntheticData(seed, size, backend)


def test_without_opengl_numpy_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(image_size: int) -> GlslRenderer:
        raise DataError("no OpenGL 3.3 by EGL on this machine (no display); apt-get install libegl1")

    monkeypatch.setattr(generate, "GlslRenderer", broken)
    data = SyntheticData(0, 32, "auto")
    assert data.renderer.name == "numpy" and "apt-get install" in (data.fallback_reason or "")
    with pytest.raises(DataError, match="apt-get install"):
        SyntheticData(0, 32, "glsl")


def test_plain_texture_is_one_colour(data: SyntheticData) -> None:
    image = data.renderer.render([Scene((Texture("plain", ("teal",)),))])[0]
    assert (image == COLOURS["teal"]).all()
