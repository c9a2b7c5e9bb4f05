"""One example changes no public byte except through the noised sums (contract 12).

Each test trains on neighbouring data with the same coins, noise, key and nonce, with clipped sums replaced by equal ones, and
with clocks that advance differently. What `report.py --publish` makes of the two run folders is equal to the last byte.
"""

import fcntl
import hashlib
import io
import itertools
import json
import os
import random
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from data.examples.examples import ImageExample
from data.index.tar_index import ExampleTable
from data.index.tar_writer import write_shard
from data.reading.reader import RawExample
from launch_scripts.report import ReportOptions, report
from privacy.card.ledger_card import read_snapshot
from privacy.card.model import LedgerFile
from privacy.ledger import ledger as run_ledger
from privacy.sampling.poisson import Decisions, PoissonSampler
from privacy.step import step as one_step
from privacy.step.run_folder import RunFolder
from tests.distributed.ranks import ROOT, run_ranks
from tests.e2e.planted_train import SeededNoise
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.publish import publish
from trainer.ranks.discovery import Ranks, discover_ranks
from trainer.run import clipping_mode
from trainer.run.start import train

ALONE = Ranks()
MACHINE = load_machine_settings(ROOT / "ds_configs" / "zero1.json")
X = 7
"""The id of the example in which the data differ."""
ENCODER = [
    "model.overrides.encoder_width=16",
    "model.overrides.encoder_depth=1",
    "model.overrides.encoder_num_heads=2",
]
DECODER = [
    "model.overrides.decoder_width=16",
    "model.overrides.decoder_depth=1",
    "model.overrides.decoder_num_heads=2",
]
SHORT = [
    "schedule.warmup_steps=1",
    "train.num_steps=3",
    "train.micro_batch_size=4",
    "data.num_workers=0",
]
SHORT += [
    "train.checkpoint_every=1",
    "heldout.num_examples=4",
    "heldout.num_captions=2",
    "heldout.every_steps=2",
]
AT_RANDOM = ["init.parts=none", "data.image_size=32", "model.overrides.patch_size=8"]
RECIPES = {
    "tiny": [],
    "quickstart": [],
    "dpcap_tiny": [*ENCODER, *DECODER, *AT_RANDOM, "schedule.decay_steps=4", "data.num_tokens=12"],
    "vip_nano": [*ENCODER, *DECODER, *AT_RANDOM],
    "finetune_vit_base": [
        *ENCODER,
        *AT_RANDOM,
        "model.overrides.num_classes=10",
        "data.label_field=label",
    ],
}
SAMPLING = {0.05: (40, 2), 0.96: (25, 24)}
"""Sampling rate -> number of examples, expected batch size."""


class Neighbour(NamedTuple):
    """What is put in the place of X, and whether it is drawn; the seed makes clocks, host and process."""

    kind: str
    seed: int
    is_drawn: bool = True


PLAIN = Neighbour("plain", 1)
OTHERS = [
    Neighbour("zero", 2),
    Neighbour("undecodable", 3),
    Neighbour("huge", 4),
    Neighbour("slow", 5),
    Neighbour("nan", 6),
    Neighbour("plain", 7, is_drawn=False),
    Neighbour("huge", 8, is_drawn=False),
]


class Outcome(NamedTuple):
    """Exit codes, and every published file and folder: name -> (content, mode, modification time)."""

    codes: list[int]
    published: dict[str, tuple[bytes, int, int]]


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def write_data(path: Path, count: int, kind: str = "plain") -> None:
    """Pictures with captions of the quickstart's words and labels; X is as `kind` says."""

    def examples() -> Iterator[tuple[str, dict[str, bytes]]]:
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            image, label = png(Image.fromarray(pixels)), number % 10
            if number == X and kind in ("large", "huge"):
                image = png(Image.new("RGB", (6000, 6000) if kind == "huge" else (1500, 1500)))
            elif number == X and kind == "undecodable":
                image = image[: len(image) // 2]
            record = {
                "caption": "a pair of light trousers",
                "label": label,
                "kind": kind if number == X else "plain",
            }
            fields = {"json": json.dumps(record).encode(), "png": image}
            yield f"{number:04d}", {"json": b"{}"} if number == X and kind == "zero" else fields

    path.unlink(missing_ok=True)
    write_shard(path, examples())


def train_and_publish(
    tmp_path: Path,
    recipe: str,
    rate: float,
    neighbour: Neighbour,
    device: torch.device,
    *more: str,
    real_sums: bool = False,
    ranks: Ranks = ALONE,
) -> Outcome:
    """A run that stops on request and is resumed, and its published folder, under the same names; quickstart's with a card.

    Collective; the others than rank 0 return nothing that was published.
    """
    run, (count, batch_size) = tmp_path / "run", SAMPLING[rate]
    if ranks.is_main:
        write_data(tmp_path / "train.tar", count, neighbour.kind)
    if ranks.is_main and not (tmp_path / "heldout.tar").exists():
        write_data(tmp_path / "heldout.tar", 6)
    if ranks.world_size > 1:
        dist.barrier()
    named = [
        f"data.shards={tmp_path}/train.tar",
        f"heldout.shards={tmp_path}/heldout.tar",
        "heldout.is_public=true",
    ]
    sizes = [f"data.num_examples={count}", f"privacy.expected_batch_size={batch_size}"]
    config = load_config(
        ROOT / "recipes" / f"{recipe}.toml", [*named, *sizes, *SHORT, *RECIPES[recipe], *more]
    )
    with pytest.MonkeyPatch.context() as patched:
        inject(
            patched,
            run,
            neighbour,
            real_sums=real_sums,
            pace=1.0 if ranks.world_size == 1 else 1e-3,
        )
        codes = [
            train(config, MACHINE, "local", run, ROOT, ranks, device, SeededNoise())
            for _ in range(2)
        ]
        if not ranks.is_main:
            return Outcome(codes, {})
        if recipe == "quickstart":
            report(ReportOptions(run_dir=run, publish=tmp_path / "published"))
        else:  # a card takes seconds
            snapshot = read_snapshot(run / "ledger.jsonl")
            ledger = LedgerFile(lines=snapshot.state.num_lines, last_line_sha256=snapshot.last_hash)
            publish(run, tmp_path / "published", ledger)
    found = {}
    for path in sorted((tmp_path / "published").rglob("*")):
        status, name = path.stat(), path.relative_to(tmp_path / "published").as_posix()
        found[name] = (
            b"" if path.is_dir() else path.read_bytes(),
            status.st_mode,
            status.st_mtime_ns,
        )
    for folder in ("run", "published"):
        (tmp_path / folder).rename(
            tmp_path / f"{folder}-{recipe}-{rate}-{'-'.join(map(str, neighbour))}"
        )
    return Outcome(codes, found)


def inject(
    patched: pytest.MonkeyPatch,
    run: Path,
    neighbour: Neighbour,
    *,
    real_sums: bool,
    pace: float = 1.0,
) -> None:
    """Equal: coins, key, nonce, sums, the first program's start. Different: every clock, the host, the process, free memory.

    Args:
        pace: how fast clocks run; ranks that wait for each other give up after minutes of their own clocks.
    """
    numbers, rng = itertools.count(), random.Random(neighbour.seed)

    def keys_and_nonces(size: int = 32) -> bytes:
        return hashlib.sha256(str(next(numbers)).encode()).digest()[:size]

    patched.setattr(secrets, "token_bytes", keys_and_nonces)
    patched.setattr(
        os, "urandom", lambda size: hashlib.shake_256(b"for one key").digest(size)
    )  # others draw from it too
    seconds = [1e6 * neighbour.seed]

    def clock() -> float:
        seconds[0] += pace * rng.expovariate(1 / neighbour.seed)
        return seconds[0]

    for name in ("time", "monotonic", "perf_counter"):
        patched.setattr(time, name, clock)
    patched.setattr(time, "strftime", lambda *arguments: str(clock()))
    patched.setattr(socket, "gethostname", lambda: f"host-{neighbour.seed}")
    patched.setattr(os, "getpid", lambda: 1000 * neighbour.seed)
    patched.setattr(
        clipping_mode.choose_mode, "__defaults__", (lambda device: (10 + neighbour.seed) << 30,)
    )
    patched.setattr(
        fcntl, "flock", lambda *arguments: None
    )  # held until the process ends, and this one resumes
    starts = iter(["2030-01-01T00:00:00+00:00", f"2030-01-01T0{neighbour.seed}:00:00+00:00"])
    # The ledger has an HMAC of the data under the secret key, which tells nothing to anyone without the key.
    patched.setattr(ExampleTable, "manifest_digest", lambda self: bytes(32))

    def take(self: RunFolder) -> None:
        self.create()
        self.stop.unlink(missing_ok=True)
        patched.setattr(run_ledger, "PROGRAM_START", next(starts))

    patched.setattr(RunFolder, "take", take)
    decide = PoissonSampler.decide

    def with_or_without_x(self: PoissonSampler, *arguments: Any) -> Decisions:
        drawn = decide(self, *arguments)
        others = drawn.ids != X
        ids, values = drawn.ids[others], drawn.values[others]
        if neighbour.is_drawn:
            ids, values = np.append(ids, X), np.append(values, np.uint64(1))
        return Decisions(ids, values)

    patched.setattr(PoissonSampler, "decide", with_or_without_x)
    make_image = ImageExample.__call__

    def make_odd_image(self: ImageExample, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        found = make_image(self, raw, key)
        if b'"kind": "nan"' in raw.fields.get("json", b""):
            found["images_CHW"] = np.full_like(found["images_CHW"], np.nan)
        if b'"kind": "slow"' in raw.fields.get("json", b""):
            seconds[0] += pace * 5e4
        return found

    patched.setattr(ImageExample, "__call__", make_odd_image)
    reduce = one_step.reduce_to_owners

    def equal_sums(*arguments: Any) -> Any:
        shards = reduce(*arguments)
        for shard in () if real_sums else shards:
            shard.values.fill_(10_000)
        if not (run / "checkpoints/LATEST").exists():  # in the first step
            RunFolder(run).stop.touch()
        return shards

    patched.setattr(one_step, "reduce_to_owners", equal_sums)


def differing(one: Outcome, other: Outcome) -> list[str]:
    names = sorted({*one.published, *other.published})
    return [name for name in names if one.published.get(name) != other.published.get(name)]


def test_no_neighbour_of_a_small_run_changes_a_public_byte(
    tmp_path: Path, one_rank: torch.device
) -> None:
    """The other neighbours, rates and tasks are below, where all are trained."""
    small = ["privacy.clipping_mode=bookkeeping"]
    one = train_and_publish(tmp_path, "tiny", 0.96, Neighbour("large", 1), one_rank, *small)
    assert one.codes == [7, 0]
    assert {
        "ledger.jsonl",
        "metrics.jsonl",
        "evaluation/heldout.jsonl",
        "checkpoints/LATEST",
    } <= set(one.published)
    for neighbour in (Neighbour("plain", 2, is_drawn=False), Neighbour("undecodable", 3)):
        other = train_and_publish(tmp_path, "tiny", 0.96, neighbour, one_rank, *small)
        assert other.codes == one.codes and differing(one, other) == [], neighbour
    privates = {path.read_text() for path in tmp_path.glob("run-tiny-*/private/metrics.jsonl")}
    assert len(privates) == 3, "the runs did see different things"


@pytest.mark.full
def test_a_profile_changes_no_public_byte_and_is_private(
    tmp_path: Path, one_rank: torch.device
) -> None:
    """The profiled run and the other see different examples, too; only the configuration says that there is a profile."""
    profile = "train.profile=[2, 3]"
    one = train_and_publish(tmp_path, "tiny", 0.96, Neighbour("large", 1), one_rank, profile)
    other = train_and_publish(
        tmp_path, "tiny", 0.96, Neighbour("plain", 2, is_drawn=False), one_rank
    )
    assert one.codes == other.codes == [7, 0] and differing(one, other) == ["config.toml"]
    (run,) = tmp_path.glob("run-tiny-*-large-*")
    (trace,) = run.rglob("*rank-0.json")
    assert trace.parent == run / "private/profile" and trace.name == "steps-2-3-rank-0.json"
    assert trace.parent.stat().st_mode & 0o077 == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names, "the trace shows matrix products"


def on_two_ranks(device: torch.device, folder: str) -> list[Outcome]:
    ranks = discover_ranks(os.environ)
    neighbours = [
        PLAIN,
        Neighbour("large", 2),
        Neighbour("undecodable", 3),
        Neighbour("plain", 4, is_drawn=False),
    ]
    return [
        train_and_publish(Path(folder), "tiny", 0.96, neighbour, device, ranks=ranks)
        for neighbour in neighbours
    ]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_ranks_publish_the_same_bytes_for_all_neighbours(tmp_path: Path) -> None:
    plain, *others = run_ranks(
        "tests.trainer.test_non_interference:on_two_ranks",
        2,
        timeout=400,
        folder=str(tmp_path),
    )[0]
    assert plain.codes == [7, 0] and len(plain.published) > 10
    for other in others:
        assert other.codes == plain.codes and differing(plain, other) == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rate", SAMPLING)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "tiny"])
def test_no_neighbour_changes_a_public_byte(
    recipe: str, rate: float, tmp_path: Path, one_rank: torch.device
) -> None:
    plain = train_and_publish(tmp_path, recipe, rate, PLAIN, one_rank)
    assert plain.codes == [7, 0]
    for neighbour in OTHERS:
        other = train_and_publish(tmp_path, recipe, rate, neighbour, one_rank)
        assert other.codes == plain.codes and differing(plain, other) == [], neighbour
    lines = {
        (tmp_path / name / "private/metrics.jsonl").read_text()
        for name in os.listdir(tmp_path)
        if name[:4] == "run-"
    }
    assert len(lines) == 1 + len(OTHERS), "every run was another one to whoever is inside"


@pytest.mark.full
def test_the_comparison_sees_one_example(tmp_path: Path, one_rank: torch.device) -> None:
    """Without equal sums the same two runs differ in metrics and weights, and nowhere else."""
    one, other = (
        train_and_publish(tmp_path, "tiny", 0.96, neighbour, one_rank, real_sums=True)
        for neighbour in (PLAIN, Neighbour("zero", 2))
    )
    found = set(differing(one, other))
    assert "metrics.jsonl" in found and any(name.endswith(".safetensors") for name in found)
    assert "config.toml" not in found and one.codes == other.codes
