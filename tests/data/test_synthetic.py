"""Synthetic pictures show what their captions say and stay what they are; their shards, and the command that writes them."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import Image
from scipy import ndimage
from tokenizers import Tokenizer

from data.errors import DataError
from data.examples.tokenizer import EMBEDDED_TOKENIZER, CaptionTokenizer
from data.examples.transforms import denormalize, eval_image
from data.reading.pool import worker_pool
from data.synthetic import scenes
from data.synthetic.compose import compose_shapes
from data.synthetic.generate import GENERATOR_VERSION, SyntheticData
from data.synthetic.render import draw
from data.synthetic.scene import Scene, Texture
from data.synthetic.scenes import CAPTIONED, NEVER, Scenes, is_left_out, pools
from data.synthetic.texture_kinds import KINDS, describe, random_colours, random_texture
from data.synthetic.vocabulary import BASIC, COLOURS, COUNTS, rgb
from data.synthetic.write import PROVENANCE, Settings, write_synthetic
from launch_scripts.prepare import main
from tests.data.conftest import ROOT

DATA = SyntheticData(3, 224)
DIGEST = "ae9da2d7901730aee017ef2582d93193735e4178635e345846f6966caa22238b"


MANY = pytest.mark.full


def components(image: np.ndarray, colour: str, among: list[str]) -> list[np.ndarray]:
    """Masks of connected areas whose pixels are nearest to `colour`; soft edges are no areas of their own."""
    values = np.stack([rgb(name) * 255 for name in among])
    nearest = ((image[:, :, None].astype(float) - values) ** 2).sum(-1).argmin(-1)
    mask = ndimage.binary_opening(nearest == among.index(colour))
    labels, count = ndimage.label(mask, np.ones((3, 3)))
    areas = ndimage.sum_labels(mask, labels, range(1, count + 1))
    return [labels == k + 1 for k in range(count) if areas[k] >= 0.4 * max(areas)]


ORDERS = {
    " left of ": (1, 1),
    " right of ": (1, -1),
    " above ": (0, 1),
    " below ": (0, -1),
    " from left to right": (1, 1),
    " from top to bottom": (0, 1),
}
"""The axis of the pixels along which the shapes of a caption with these words follow each other, and which way."""


@pytest.mark.parametrize("indices", [range(16), pytest.param(range(60, 1060), marks=MANY)])
def test_captions_are_true_of_the_pixels(indices: range) -> None:
    """Plain shapes: one area of each colour that the caption names, in the order that it says."""
    for example in map(SyntheticData(3, 224, "shapes").example, indices):
        said, names = (
            example.statement,
            [f"{group.colour} {group.shape}" for group in example.statement.groups],
        )
        assert [*sorted(names, key=example.caption.index)] == names
        among = [*(group.colour for group in said.groups), *example.scene.textures[0].colours]
        found = [components(example.image_HWC, group.colour, among) for group in said.groups]
        assert [len(masks) for masks in found] == [1] * len(names), example.caption
        orders = [order for words, order in ORDERS.items() if words in example.caption]
        assert len(orders) == (len(names) > 1)
        for axis, way in orders:
            spans = [np.flatnonzero(masks[0].any(1 - axis))[[0, -1]] for masks in found][::way]
            assert all(one[1] < two[0] for one, two in pairwise(spans)), example.caption


@pytest.mark.parametrize("count", [80, pytest.param(4000, marks=MANY)])
def test_counts_and_colours_of_drawn_shapes(count: int) -> None:
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
            assert group.colour in example.caption and (
                group.count == 1 or COUNTS[group.count] in example.caption
            )
            checked[group.count] += 1
    assert {1, 2, 3, 4, 5} <= set(checked)


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
        assert (
            all(name in caption for name in texture.colours)
            and "  " not in caption
            and "{" not in caption
        )
    assert (draw(Scene((Texture("plain", ("teal",)),)), 224) == COLOURS["teal"]).all()
    # Where all colours but one are taken, that one is left.
    assert random_colours(rng, 1, avoid=[name for name in COLOURS if name != "cyan"]) == ("cyan",)
    assert sorted(random_colours(rng, len(BASIC), among=BASIC)) == sorted(BASIC)
    for count, avoid, among in (
        (len(BASIC) + 1, (), BASIC),
        (1, tuple(COLOURS), ()),
        (2, BASIC[1:], BASIC),
    ):
        with pytest.raises(ValueError, match=f"{count} colours are asked for, and {count - 1} of"):
            random_colours(rng, count, avoid=avoid, among=among)


def digest() -> str:
    """Every texture program, and pictures of both contents, as one number."""
    found = hashlib.sha256()
    rng = np.random.default_rng(1)
    for kind in KINDS:
        found.update(
            b"".join(
                draw(Scene((random_texture(rng, kinds=[kind]),)), 96).tobytes() for _ in range(4)
            )
        )
    for data in (SyntheticData(0, 97), SyntheticData(1, 32), SyntheticData(2, 64, "shapes")):
        for example in map(data.example, range(60)):
            found.update(example.image_HWC.tobytes() + example.caption.encode())
    return found.hexdigest()


def test_examples_are_those_of_the_generators_version() -> None:
    assert (GENERATOR_VERSION, digest()) == (2, DIGEST), (
        "GENERATOR_VERSION changes whenever an example does"
    )


@pytest.mark.full
def test_every_processor_draws_the_same() -> None:
    """numpy computes some functions otherwise on processors with fewer instructions; pictures must not show it."""
    features = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    if not features:
        pytest.skip("numpy has one way of computing on this processor")
    for start in range(len(features)):
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(features[start:])}
        program = "from tests.data.test_synthetic import digest; print(digest())"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
        )
        assert done.stdout.strip() == DIGEST, (features[start:], done.stderr)


def test_an_example_depends_on_seed_and_index_alone() -> None:
    many = [DATA.example(index) for index in range(70)]
    for index in (69, 5, 0):
        alone = SyntheticData(3, 224).example(index)
        assert (
            np.array_equal(alone.image_HWC, many[index].image_HWC)
            and alone.caption == many[index].caption
        )
    assert SyntheticData(4, 224).composition(0)[1] != many[0].caption
    assert len({example.caption for example in many}) == 70
    assert many[0].image_HWC.shape == (224, 224, 3) and many[0].image_HWC.dtype == np.uint8


SIGN = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}


def test_only_the_said_relation_holds_and_shapes_stand_apart() -> None:
    for seed in range(200):
        scene, said = compose_shapes(np.random.default_rng(seed))
        assert [(s.name, s.colour) for s in scene.shapes] == [
            (g.shape, g.colour) for g in said.groups
        ]
        centres = np.array([(s.x, s.y) for s in scene.shapes])
        assert (
            len({s.name for s in scene.shapes})
            == len({s.colour for s in scene.shapes})
            == len(scene.shapes)
        )
        if len(centres) == 2:
            axis, sign = SIGN[str(said.relation)]
            apart = centres[0] - centres[1]
            assert sign * apart[axis] > 0.35 and abs(apart[1 - axis]) < 0.1
        elif len(centres) == 3:
            axis = {"right": 0, "down": 1}[str(said.relation)]
            assert (np.diff(centres[:, axis]) > 0.2).all()
        for i, shape in enumerate(scene.shapes):
            assert min(shape.x, shape.y, 1 - shape.x, 1 - shape.y) > shape.radius
            for other in scene.shapes[:i]:
                assert np.hypot(shape.x - other.x, shape.y - other.y) > shape.radius + other.radius


SHAPES_TOKENIZER = EMBEDDED_TOKENIZER.with_name("shapes.json")


def test_the_tokenizer_of_shapes_knows_every_word() -> None:
    tokenizer = CaptionTokenizer.from_file(SHAPES_TOKENIZER)
    unknown = Tokenizer.from_file(str(SHAPES_TOKENIZER)).token_to_id("<unk>")
    captions = [SyntheticData(3, 64, "shapes").composition(index)[1] for index in range(300)]
    for caption in captions:
        tokens, mask = tokenizer.encode(caption, 18)
        assert tokenizer.decode(tokens) == caption and unknown not in tokens
        assert mask.sum() == len(caption.replace(",", " ,").split()) + 2


def test_a_scene_is_a_function_of_its_index_in_any_block() -> None:
    """Blocks of every size give the same pixels and tokens, and another seed gives others; in the harder world, too."""
    for world in (Scenes(3), Scenes(3, objects=2, clutter=1.0)):
        index = np.arange(10**12, 10**12 + 70)
        images, tokens = world.pairs(index)
        for size in (1, 16, 33):
            parts = [world.pairs(index[start : start + size]) for start in range(0, 70, size)]
            assert (torch.cat([one[0] for one in parts]) == images).all()
            assert (torch.cat([one[1] for one in parts]) == tokens).all()
        assert (Scenes(4, objects=world.objects).pairs(index)[1] != tokens).any()
    [example] = SyntheticData(3, 32, "scenes").examples([5])
    alone = SyntheticData(3, 32, "scenes").example(5)
    assert (alone.image_HWC == example.image_HWC).all() and alone.caption == example.caption


def test_what_is_kept_for_judges_is_never_captioned() -> None:
    """No kind of NEVER, no pair that is left out, and no sprite of a judge; each of them is in the pools of judges."""
    captioned, index = pools()["captioned"], np.arange(20_000)
    placed = Scenes().placements(index, captioned)
    assert set(captioned.names) == set(CAPTIONED) and NEVER.isdisjoint(captioned.names)
    assert (
        set(pools()["never"].names) == NEVER
        and not is_left_out(captioned.number[placed.kind], placed.colour).any()
    )
    shown = {scenes.caption(tokens_L) for tokens_L in Scenes().tokens(placed, captioned).tolist()}
    assert not any("<unk>" in words for words in shown)
    sprites = {
        name: {one.numpy().tobytes() for one in pool.pictures} for name, pool in pools().items()
    }
    assert all(
        sprites["captioned"].isdisjoint(others)
        for name, others in sprites.items()
        if name != "captioned"
    )
    new = Scenes().placements(index, pools()["new"])
    assert is_left_out(pools()["new"].number[new.kind], new.colour).mean() == pytest.approx(
        1 / 8, abs=0.02
    )


def test_captions_of_scenes_are_true_and_the_tokenizer_knows_their_words() -> None:
    world, pool = Scenes(), pools()["captioned"]
    placed = world.placements(np.arange(300), pool)
    images, tokens = world.render(placed, pool), world.tokens(placed, pool)
    tokenizer = CaptionTokenizer.from_file(EMBEDDED_TOKENIZER.with_name("scenes.json"))
    for image, tokens_L, colour, x, y in zip(
        images, tokens, placed.rgb[:, 0], placed.x[:, 0], placed.y[:, 0], strict=True
    ):
        encoded, mask = tokenizer.encode(scenes.caption(tokens_L.tolist()), 9)
        assert list(encoded) == tokens_L.tolist() and mask.sum() == (tokens_L > 0).sum()
        away = (image.permute(1, 2, 0).numpy() / 255 - colour).__abs__().max(axis=2)
        rows, columns = np.nonzero(away < 0.3)  # the colour is where the caption says
        assert len(rows) > 3 and np.hypot(rows / 32 - y, columns / 32 - x).min() < 0.35


SETTINGS = Settings(num_examples=25, image_size=32, seed=5, shard_examples=10)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_are_the_same_for_any_number_of_processes_and_after_an_interruption(
    tmp_path: Path,
) -> None:
    counts: list[int] = []
    write_synthetic(tmp_path / "one", SETTINGS, advance=counts.append)
    assert sum(counts) == 25
    with worker_pool(2) as pool:
        write_synthetic(tmp_path / "two", SETTINGS, executor=pool.executor)
    (tmp_path / "two" / "synthetic-00001.tar").unlink()
    untouched = (tmp_path / "two" / "synthetic-00000.tar").stat().st_mtime_ns
    counts.clear()
    write_synthetic(tmp_path / "two", SETTINGS, advance=counts.append)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") and counts == [15, 10]
    assert (tmp_path / "two" / "synthetic-00000.tar").stat().st_mtime_ns == untouched
    with tarfile.open(tmp_path / "one" / "synthetic-00002.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert list(members)[:2] == ["000000000020.jpg", "000000000020.txt"] and len(members) == 10
    example = SyntheticData(5, 32).example(20)
    assert members["000000000020.txt"].decode() == example.caption
    decoded = denormalize(eval_image(members["000000000020.jpg"], 32))
    assert np.abs(decoded.astype(int) - example.image_HWC).mean() < 6
    record = json.loads((tmp_path / "one" / PROVENANCE).read_text())
    assert (record["seed"], record["image_size"], record["generator_version"]) == (
        5,
        32,
        GENERATOR_VERSION,
    )
    assert record["libraries"] == f"numpy {np.__version__}, Pillow {PIL.__version__}"
    assert "No photograph" in record["statement"]


def test_a_folder_with_other_foreign_or_damaged_files_is_refused(tmp_path: Path) -> None:
    write_synthetic(tmp_path, SETTINGS)
    before = contents(tmp_path)
    for change in (
        {"seed": 6},
        {"num_examples": 26},
        {"image_format": "webp"},
        {"content": "shapes"},
    ):
        with pytest.raises(DataError, match=f"differs in {next(iter(change))}"):
            write_synthetic(tmp_path, Settings(**(vars(SETTINGS) | change)))  # type: ignore[arg-type]
        assert contents(tmp_path) == before
    with pytest.raises(DataError, match="choose one of all, shapes"):
        SyntheticData(0, 16, "animals")
    (tmp_path / PROVENANCE).unlink()
    with pytest.raises(DataError, match=r"without provenance\.json"):
        write_synthetic(tmp_path, SETTINGS)
    (tmp_path / PROVENANCE).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        write_synthetic(tmp_path, SETTINGS)


def test_command_writes_shards_that_can_be_indexed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, sheet = str(tmp_path / "s"), str(tmp_path / "sheet.png")
    size = ["--num_examples", "12", "--image_size", "24", "--workers", "1"]
    assert main(["synthetic", "--output", shards, *size, "--preview", sheet]) == 0
    assert main(["index", shards, "--workers", "1"]) == 0
    assert capsys.readouterr().out.count("12 examples in 1 shards") == 2
    with Image.open(sheet) as picture:
        assert picture.width > 1000
