"""Small stand-ins for what the guides' commands take for granted: shards, pictures, trained runs, other projects' files."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data.index.tar_writer import write_shard
from tests.docs.pages import ROOT
from tests.e2e.launch import alone
from tests.models.released import vip_file

CAPTIONS = ("a red cat on a chair", "two blue birds", "the green tree is beside the house")
_PICO = "{ encoder_width = 16, encoder_depth = 12, encoder_num_heads = 2, decoder_width = 16, decoder_num_heads = 2 }"


def picture(number: int, side: int = 40) -> bytes:
    """A JPEG of one colour and some noise."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 60, (side, side, 3)) + rng.integers(0, 190, 3)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


def _shards(folder: Path, count: int, examples: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(count):
        numbers = range(shard * examples, (shard + 1) * examples)
        rows = (
            (f"{n:06d}", {"jpg": picture(n), "txt": CAPTIONS[n % 3].encode(), "cls": str(n % 3).encode()})
            for n in numbers
        )
        write_shard(folder / f"train-{shard:04d}.tar", rows)


def shards(project: Path) -> None:
    """128 shards of four examples, and the smaller sets train/, val/ and heldout/."""
    _shards(project / "shards", 128, 4)
    for name in ("train", "val", "heldout"):
        _shards(project / name, 1, 24)


def pictures(project: Path) -> None:
    """Folders of images, with captions or by class; two pictures with labels."""
    for kind in range(3):
        folder = project / "imagenet" / "val" / f"class{kind}"
        folder.mkdir(parents=True)
        for n in range(3):
            (folder / f"{n}.jpg").write_bytes(picture(10 * kind + n))
    (project / "names.txt").write_text("cat\nbird\ntree\n")
    (project / "pictures").mkdir()
    for n in range(3):
        (project / "pictures" / f"{n}.jpg").write_bytes(picture(n))
        (project / "pictures" / f"{n}.txt").write_text(CAPTIONS[n])
    for n, name in enumerate(("cat.jpg", "dog.jpg")):
        (project / name).write_bytes(picture(n))


def benchmarks_of_others(project: Path) -> None:
    """ARO's records, Karpathy's splits, ADE20K's folders."""
    pair = {
        "image_path": "a.jpg", "bbox_x": 0, "bbox_y": 0, "bbox_w": 20, "bbox_h": 20, "relation_name": "on",
        "true_caption": "the cat is on the chair", "false_caption": "the chair is on the cat",
    }  # fmt: skip
    order = {"image": "a.jpg", "caption": ["A cat sits on the red chair, alone."]}
    for name, records, folder in (
        ("visual_genome_relation", [pair], "vg/images"),
        ("coco_karpathy_test", [order], "coco"),
    ):
        (project / folder).mkdir(parents=True)
        (project / folder / "a.jpg").write_bytes(picture(0))
        (project / f"{name}.json").write_text(json.dumps(records))
    for part in ("training", "validation"):
        for kind in ("images", "annotations"):
            (project / "ADE" / kind / part).mkdir(parents=True)
        for n in range(3):
            (project / "ADE" / "images" / part / f"{n}.jpg").write_bytes(picture(n))
            mask = np.random.default_rng(n).integers(1, 4, (40, 40)).astype(np.uint8)
            Image.fromarray(mask).save(project / "ADE" / "annotations" / part / f"{n}.png")


def coco(project: Path) -> None:
    """Captions as COCO has them."""
    (project / "train2017").mkdir()
    for n in range(3):
        (project / "train2017" / f"{n}.jpg").write_bytes(picture(n, side=200))
    table = {
        "images": [{"id": n, "file_name": f"{n}.jpg"} for n in range(3)],
        "annotations": [{"image_id": n, "id": n, "caption": CAPTIONS[n]} for n in range(3)],
    }
    (project / "captions_train2017.json").write_text(json.dumps(table))


def official_vip(project: Path) -> None:
    """A file with the published names and widths that no published size has."""
    torch.save({"model": vip_file()}, project / "ckpt-vip-syn-base.pth")


def small_study(project: Path) -> None:
    """The study of the guide with its first two batches, one seed and few steps."""
    path = project / "studies" / "batch_size_dpcap.toml"
    study = path.read_text()
    for key, values in {
        "privacy.expected_batch_size": [8, 16],
        "train.num_steps": [4, 2],
        "privacy.reserved_attempts": [2, 1],
        "schedule.warmup_steps": [1, 1],
        "heldout.every_steps": [2, 1],
        "optimizer.peak_lr": [1e-2, 1e-2],
        "train.micro_batch_size": [8, 8],
        "seeds": [0],
    }.items():
        study, count = re.subn(rf"^{key} = \[.*\]", f"{key} = {values}", study, flags=re.M)
        assert count == 1, key
    path.write_text(study)


def trained(folder: Path) -> Path:
    """Runs of one step: captioners as dpcap_base and synthetic_shapes, a masked autoencoder of twelve blocks as vip_base."""
    tiny = (ROOT / "recipes/tiny.toml").read_text()
    model = tiny[tiny.index("[model]") : tiny.index("[data]")]
    recipe = folder / "vip.toml"
    recipe.write_text(
        tiny.replace(model, f'[model]\nkind = "masked_autoencoder"\nsize = "pico"\noverrides = {_PICO}\n\n')
    )
    for name, source in (("dpcap_base", "recipes/tiny.toml"), ("vip_base", str(recipe))):
        done = alone(
            ["--engine", "local", "--ds_config", "ds_configs/zero1.json", "--recipe", source, "--run_dir", str(folder / name),
             "train.num_steps=1", "heldout.num_captions=0", "data.num_tokens=24"]
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(folder / "dpcap_base", folder / "synthetic_shapes")
    return folder


def runs(trained_runs: Path) -> Callable[[Path], None]:
    """Puts copies of trained runs into a project."""

    def put(project: Path) -> None:
        for name in ("dpcap_base", "vip_base", "synthetic_shapes"):
            shutil.copytree(trained_runs / name, project / "runs" / name)

    return put


def latest(trained_runs: Path) -> Callable[[Path], None]:
    """What `make quickstart` leaves behind for the commands after it: runs/latest leads to a run of that day."""

    def put(project: Path) -> None:
        shutil.copytree(trained_runs / "dpcap_base", project / "runs" / "quickstart-20261125-120000")
        (project / "runs" / "latest").symlink_to("quickstart-20261125-120000")

    return put
