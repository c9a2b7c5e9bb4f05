"""Features against plain re-computations; the same rows from every kind of source, number of workers and number of ranks."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.examples.transforms import eval_image
from data.index.tar_writer import write_shard
from evaluation.command_options import FeatureOptions, LabelledOptions
from evaluation.encoder import check_options, encoder_of, features, token_maps
from evaluation.features import Features, extract, read_features, stored_features
from evaluation.sources import Arrays, encode_png, open_source
from models.config import masked_autoencoder_config
from models.masked_autoencoder import build_masked_autoencoder
from tests.distributed.ranks import run_ranks
from tests.evaluation.support import pictures
from tests.models.tiny import tiny_captioner
from trainer.errors import ConfigError
from trainer.weights.open_model import OpenedModel

SIZE = 16


def opened_captioner(seed: int = 0) -> OpenedModel:
    """Two blocks of width 16, images of 16 pixels in patches of 8; learned positions would be zero, so they are fixed."""
    model = tiny_captioner(seed).eval()
    return OpenedModel(model, None, {"seal": f"captioner {seed}", "step": 3}, Path("nowhere"))  # type: ignore[arg-type]


def opened_autoencoder() -> OpenedModel:
    config = masked_autoencoder_config("pico", image_size=SIZE, patch_size=8, encoder_depth=3)
    model = build_masked_autoencoder(config, generator=torch.Generator().manual_seed(0)).eval()
    return OpenedModel(model, None, {"seal": "autoencoder", "step": 0}, Path("nowhere"))  # type: ignore[arg-type]


@torch.no_grad()
def test_each_kind_is_what_its_name_says() -> None:
    model = opened_captioner().model
    encoder = encoder_of(model)
    images = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    blocks: list[torch.Tensor] = []  # their outputs in the model's own forward
    hooks = [
        block.register_forward_hook(lambda _m, _i, out: blocks.append(out))
        for block in encoder.blocks
    ]
    out = encoder(images)
    for hook in hooks:
        hook.remove()
    expected = {
        "pooled": out[:, 1:].mean(1),
        "class_token": out[:, 0],
        "blocks": torch.cat([block[:, 1:].mean(1) for block in blocks], dim=1),
        "memory": model.encode(images).mean(1),
    }
    for kind, values in expected.items():
        found = features(model, images, FeatureOptions(features=kind, num_blocks=2))  # type: ignore[arg-type]
        assert torch.equal(found, values), kind
    last = features(model, images, FeatureOptions(features="blocks", num_blocks=1))
    assert torch.equal(last, blocks[-1][:, 1:].mean(1)) and not torch.allclose(
        last, expected["pooled"], atol=0.1
    )
    assert torch.equal(token_maps(encoder, images).flatten(2).transpose(1, 2), out[:, 1:])


@torch.no_grad()
def test_token_maps_of_other_sizes() -> None:
    """A picture twice as wide as high; row order, and positions that are the model's own where the grids agree."""
    encoder = encoder_of(opened_autoencoder().model)
    maps = token_maps(encoder, torch.randn(2, 3, 16, 32))
    assert maps.shape == (2, encoder.config.width, 2, 4)
    for parameter in (p for block in encoder.blocks for p in block.parameters()):
        parameter.zero_()  # blocks add nothing: a token is its patch and its position
    image = torch.zeros(1, 3, 24, 40)
    image[:, :, 8:16, 24:32] = 1
    bare = token_maps(encoder, torch.zeros(1, 3, 24, 40))
    changed = (token_maps(encoder, image) - bare).abs().sum(dim=(0, 1)) > 1e-4
    assert changed.nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            FeatureOptions(features="blocks", num_blocks=3),
            "3 blocks were asked for; the encoder has 2",
        ),
        (FeatureOptions(features="blocks", num_blocks=0), "0 blocks"),
        (
            FeatureOptions(features="pooled", num_blocks=1, image_size=20),
            "no whole number of patches of 8",
        ),
        (FeatureOptions(features="memory", num_blocks=1, image_size=32), "model's image size only"),
    ],
)
def test_options_that_a_model_cannot_follow(options: FeatureOptions, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_options(opened_captioner().model, options)
    with pytest.raises(ConfigError, match="only a captioner"):
        check_options(opened_autoencoder().model, FeatureOptions(features="memory"))
    with pytest.raises(ConfigError, match="no vision transformer"):
        check_options(torch.nn.Linear(2, 2), FeatureOptions())


def as_shards(root: Path, images: np.ndarray, labels: np.ndarray, field: str = "cls") -> str:
    for shard, rows in enumerate(np.array_split(np.arange(len(images)), 2)):
        members = []
        for i in rows:
            label = (
                {"cls": str(labels[i]).encode()}
                if field == "cls"
                else {"json": json.dumps({field: int(labels[i])}).encode()}
            )
            members.append((f"{i:04d}", {"png": encode_png(images[i]), **label}))
        write_shard(root / f"{field}-{shard}.tar", members)
    return f"shards:{root}/{field}-{{0..1}}.tar"


def as_folder(root: Path, images: np.ndarray, labels: np.ndarray) -> str:
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        (root / f"class-{label}").mkdir(parents=True, exist_ok=True)
        (root / f"class-{label}/{i:04d}.png").write_bytes(encode_png(image))
    return f"folder:{root}"


def test_every_source_gives_the_same_features(tmp_path: Path) -> None:
    """Also those of `eval_image`, the transform of training's evaluation, on pictures that are not square."""
    images, labels = pictures(8)
    images = images[:, :12]
    np.savez(tmp_path / "pictures.npz", images=images, labels=labels)
    sources = {
        "arrays": f"arrays:{tmp_path}/pictures.npz",
        "shards": as_shards(tmp_path, images, labels),
        "json": as_shards(tmp_path, images, labels, "category"),
        "folder": as_folder(tmp_path / "folder", images, labels),
    }
    opened = opened_captioner()
    two = extract(
        opened, Arrays("here", images, labels), FeatureOptions(batch_size=3, num_workers=2)
    )
    model_in = torch.from_numpy(np.stack([eval_image(encode_png(image), SIZE) for image in images]))
    with torch.no_grad():
        expected = opened.model.encoder(model_in)[:, 1:].mean(1).numpy()
    assert two is not None and two.values_ND == pytest.approx(expected, abs=1e-6), (
        "worker processes"
    )
    for name, text in sources.items():
        options = LabelledOptions(
            label_field="category" if name == "json" else "cls", cache=tmp_path / "cache"
        )
        source = open_source(text, options)
        found = extract(opened, source, FeatureOptions(batch_size=3))
        assert found is not None
        order = np.argsort(labels, kind="stable") if name == "folder" else np.arange(len(labels))
        assert found.values_ND == pytest.approx(expected[order], abs=1e-6), name
        assert found.labels_N.tolist() == labels[order].tolist() and found.is_usable_N.all()
        assert found.class_names == (("class-0", "class-1", "class-2") if name == "folder" else ())


def test_resize_then_crop_is_that_of_the_papers() -> None:
    """The shorter side to this number of pixels, then the centre: by Pillow, as torchvision does it."""
    images, labels = pictures(2, side=40)
    images = images[:, :, :35]
    found = extract(opened_captioner(), Arrays("here", images, labels), FeatureOptions(resize=20))
    rows = []
    for image in images:
        small = Image.fromarray(image).resize(
            (20, 20), Image.Resampling.BICUBIC, box=(0, 2, 35, 37)
        )
        rows.append(eval_image(encode_png(np.asarray(small)[2:18, 2:18]), SIZE))
    with torch.no_grad():
        expected = features(
            opened_captioner().model, torch.from_numpy(np.stack(rows)), FeatureOptions()
        ).numpy()
    assert found is not None and found.values_ND == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match="brought to 12 pixels, fewer than the 16"):
        check_options(opened_captioner().model, FeatureOptions(resize=12))


def test_a_shard_under_two_names_is_refused(tmp_path: Path) -> None:
    """Each of its examples would have two copies in a private head, and epsilon is for one."""
    images, _ = pictures(2)
    members = [(str(i), {"png": encode_png(images[i]), "cls": b"0"}) for i in range(2)]
    write_shard(tmp_path / "x.tar", members)
    (tmp_path / "y.tar").hardlink_to(tmp_path / "x.tar")
    with pytest.raises(DataError, match=r"x\.tar and y\.tar hold the same bytes"):
        open_source(f"shards:{tmp_path}/?.tar", LabelledOptions(cache=tmp_path / "cache"))


def test_unusable_examples_keep_a_row_of_zeros(tmp_path: Path) -> None:
    images, labels = pictures(4)
    members: list[tuple[str, dict[str, bytes]]] = [
        (str(i), {"png": encode_png(images[i]), "cls": str(labels[i]).encode()}) for i in range(4)
    ]
    members[1][1]["png"] = b"no picture"
    members[2][1]["cls"] = b"a cat"
    write_shard(tmp_path / "x.tar", members)
    source = open_source(f"shards:{tmp_path}/x.tar", LabelledOptions(cache=tmp_path))
    found = extract(opened_captioner(), source, FeatureOptions())
    assert found is not None
    assert found.is_usable_N.tolist() == [True, False, False, True] and found.num_unusable == 2
    assert (
        not found.values_ND[1:3].any()
        and found.values_ND[0].any()
        and found.labels_N.tolist() == [0, 0, 0, 0]
    )
    assert len(found.usable()[1]) == 2
    with pytest.raises(DataError, match="both an image and a label"):
        extract(
            opened_captioner(),
            open_source(
                f"shards:{tmp_path}/x.tar", LabelledOptions(label_field="no", cache=tmp_path)
            ),
            FeatureOptions(),
        ).usable()  # type: ignore[union-attr]


def test_the_cache_is_named_after_weights_data_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = pictures(4)
    cache, counted = tmp_path / "cache", []
    monkeypatch.setattr(
        "evaluation.sources.eval_image",
        lambda data, size: (counted.append(1), eval_image(data, size))[1],
    )

    def computed(seed: int = 0, shift: int = 0, **options: Any) -> int:
        counted.clear()
        source = Arrays("here", images, (labels + shift) % 3)
        found = extract(opened_captioner(seed), source, FeatureOptions(**options), cache=cache)
        plain = extract(opened_captioner(seed), source, FeatureOptions(**options))
        assert found is not None and plain is not None
        assert np.array_equal(found.values_ND, plain.values_ND) and np.array_equal(
            found.labels_N, plain.labels_N
        )
        return len(counted) - 4

    assert [computed(), computed(), computed(seed=1), computed(shift=1)] == [4, 0, 4, 4]
    assert [computed(features="class_token"), computed(image_size=32), computed()] == [4, 4, 0]
    assert cache.stat().st_mode & 0o777 == 0o700
    folder = next(cache.glob("features-*"))
    (folder / "part-00000-of-00001.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="no whole features"):
        read_features(folder)


def on_ranks(device: torch.device, cache: Path, count: int) -> Features | None:
    images, labels = pictures(count)
    return extract(
        opened_captioner(),
        Arrays("here", images, labels),
        FeatureOptions(batch_size=2),
        cache=cache,
    )


def test_two_ranks_share_the_images(tmp_path: Path) -> None:
    first, second = run_ranks(
        "tests.evaluation.test_features:on_ranks", 2, cache=tmp_path / "two", count=5
    )
    alone = on_ranks(torch.device("cpu"), tmp_path / "one", 5)
    assert second is None and alone is not None
    assert first.values_ND == pytest.approx(alone.values_ND, abs=1e-6)
    assert first.labels_N.tolist() == alone.labels_N.tolist()
    assert len(list((tmp_path / "two").glob("*/part-*"))) == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("pictures/", "names no source"),
        ("folder:/nowhere", "is no folder"),
        ("arrays:/nowhere.npz", "is no .npz file"),
        ("shards:/nowhere/*.tar", "no shards match"),
        ("hf:/nowhere", "names no source"),
    ],
)
def test_a_source_that_is_not_there(text: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=match):
        open_source(text, LabelledOptions(cache=tmp_path))


@pytest.mark.filterwarnings("error")  # a warning would tell of an example
def test_stored_features_say_nothing_of_an_example(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(
        path, features=np.array([[1.0, 2.0], [1e300, 0.0], [np.nan, 0.0]]), labels=np.arange(3)
    )
    found = stored_features(path)
    assert found.is_usable_N.tolist() == [True, False, False] and not found.values_ND[1:].any()
    for labels in (np.array([1.0, np.nan]), np.array(["1", "cat"])):
        np.savez(path, features=np.zeros((2, 2)), labels=labels)
        with pytest.raises(DataError, match=r"labels must be whole numbers, not (float64|<U3)$"):
            stored_features(path)


def test_folders_of_equal_names_sizes_and_times_are_told_apart(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name / "0").mkdir(parents=True)
        file = tmp_path / name / "0/0.bmp"
        Image.new("L", (4, 4), 60 * ord(name) % 256).save(file)
        os.utime(file, (1, 1))
    a, b = (open_source(f"folder:{tmp_path}/{name}", LabelledOptions()) for name in "ab")
    assert a.identity() != b.identity()
