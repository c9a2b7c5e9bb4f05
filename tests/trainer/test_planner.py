"""The planner's numbers against real models, real memory, closed forms and published figures."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.index.build import build_index
from data.index.shards import find_shards
from models.config import VitConfig
from models.vit import VisionTransformer
from privacy.accounting.accountants import ReleaseGroup, epsilon_rdp, total_amount_of_noise
from privacy.plan.numbers import PrivacyPlan, make_plan
from trainer.config.machine import MachineSettings, load_machine_settings
from trainer.config.recipe import RunConfig, load_config
from trainer.engines import require_supported
from trainer.errors import ConfigError
from trainer.hardware import GPUS, find_gpu
from trainer.planner.memory import largest_that_fits, trained_count
from trainer.planner.probe import MemoryTimeline, count_flops
from trainer.planner.resources import (
    BYTES_PER_EXAMPLE,
    Cluster,
    Examples,
    examples,
    micro_batches,
    padding,
    padding_note,
    plan_resources,
    planning_task,
    staged_bytes,
)
from trainer.tasks import make_task

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
RECIPES_TABLE = (ROOT / "recipes" / "README.md").read_text().splitlines()


def machine(name: str = "zero3", **changes: Any) -> MachineSettings:
    return replace(load_machine_settings(ROOT / f"ds_configs/{name}.json"), **changes)


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config(ROOT / f"recipes/{name}.toml", overrides)


def clip_art(*overrides: str) -> RunConfig:
    return load_config(ROOT / "tests/trainer/clip_art.toml", overrides)


def planned(config: RunConfig) -> PrivacyPlan:
    """A plan that makes the recipe's clipper, whatever the number of examples; nothing is calibrated."""
    size = config.privacy.expected_batch_size
    request = config.privacy.request(config.train.num_steps, 100 * size)
    return make_plan(replace(request, noise_multiplier=100.0, target_epsilon=None))


# Parameters and FLOP


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_parameters_of_every_recipe_are_those_of_its_table(path: Path) -> None:
    config = load_config(path)
    task, notes = planning_task(config, ROOT)
    model = task.skeleton()
    assert bool(notes) == (
        not (ROOT / config.data.tokenizer).exists() and config.model.kind == "captioner"
    )
    rows = [line.split("|") for line in RECIPES_TABLE if line.startswith("| `")]
    stated = [
        row[2].strip()
        for row in rows
        if f"`{path.stem}`" in row[1] and row[2].strip().endswith("M")
    ]
    assert stated or path.stem.startswith("synthetic_")
    for text in stated[:1]:
        whole = [float(number.rstrip("M")) for number in text.split(" of ")]
        assert whole[0] == pytest.approx(trained_count(model) / 1e6, abs=0.05)
        assert whole[-1] == pytest.approx(
            sum(p.numel() for p in model.parameters()) / 1e6, abs=0.05
        )


def test_the_skeleton_is_the_model() -> None:
    config = clip_art()
    task = make_task(config, ROOT)
    real, planned = task.build(torch.Generator().manual_seed(0)), task.skeleton()
    assert {n: p.shape for n, p in real.named_parameters()} == {
        n: p.shape for n, p in planned.named_parameters()
    }
    assert all(p.is_meta for p in planned.parameters())


@pytest.mark.parametrize(("width", "heads", "published"), [(384, 6, 4.6e9), (768, 12, 17.6e9)])
def test_forward_flop_of_vit_s_and_b(width: int, heads: int, published: float) -> None:
    """Published multiply-adds of ViT-S/16 and ViT-B/16 at 224 pixels (Touvron et al. 2021), and the closed form."""
    with torch.device("meta"):
        model = VisionTransformer(VitConfig(width=width, depth=12, num_heads=heads))
        images = torch.empty(2, 3, 224, 224)
    counted = count_flops(lambda: model(images)) / 2
    tokens = 197
    closed = 12 * (2 * tokens * 12 * width**2 + 4 * tokens**2 * width) + 2 * 196 * 768 * width
    assert counted == pytest.approx(closed, rel=1e-3)
    assert counted / 2 == pytest.approx(published, rel=0.02)


# Memory


def test_every_tensor_is_counted_from_birth_to_death() -> None:
    before = torch.zeros(1000)

    def work() -> Tensor:
        x = before + 1  # 4000
        view = x.view(10, 100)  # no memory of its own
        y = view.square().sum()  # 8000, then 8004
        del x, view
        before.add_(1)  # in place, and not ours
        return y * 2  # the square and the view are gone: 4 + 4

    with MemoryTimeline() as timeline:
        kept = work()
    del kept
    assert timeline.live_bytes == [4000, 4000, 8000, 8004, 4, 8]


@pytest.mark.parametrize(
    ("peak", "available", "expected"),
    [
        (lambda n: 100 + 10 * n, 1000, 88),
        (lambda n: 100 + 10 * n, 10**6, 1024),
        (lambda n: 100 + 10 * n, 99, 0),
        (lambda n: 100 + 10 * n, 160, 6),
        (
            lambda n: 100 + (10 * n if n < 40 else 200 + 5 * n),
            1000,
            136,
        ),  # the head works by chunks
    ],
)
def test_largest_micro_batch(peak: Callable[[int], int], available: int, expected: int) -> None:
    assert largest_that_fits(peak, available) == expected


# Hardware


def test_what_cannot_run_cannot_be_planned(tmp_path: Path) -> None:
    config = clip_art()
    for engine, settings in (
        ("local", machine("zero3_offload")),
        ("fsdp", machine("zero3", shard_group_size=3)),
    ):
        with pytest.raises(ConfigError) as refused:
            require_supported(engine, settings, 4)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=re.escape(str(refused.value))):
            planned_resources(config, settings, Cluster(engine, 4))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="choose one of"):
        find_gpu("tpu")
    assert GPUS["a100-40gb"].memory_per_rank(8) == 40 * 10**9
    (tmp_path / "meminfo").write_text("MemTotal:       1000 kB\nMemAvailable:    400 kB\n")
    assert (
        GPUS["cpu"].memory_per_rank(4, tmp_path) == 256000
    )  # a machine's memory is shared by its ranks
    with pytest.raises(ConfigError, match="does not say"):
        GPUS["cpu"].memory_per_rank(4, tmp_path / "missing")


# The scaling rule


def test_equal_total_noise_is_equal_epsilon_down_to_sigma_2() -> None:
    """ImageNet of Sander et al. 2023: B 32,768, sigma 2.5, 18,000 steps, delta 8e-7; epsilon by RDP at equal sigma / B."""
    for sigma, published in ((2.0, 8.215), (1.0, 10.67), (0.7, 16.36), (0.5, 35.6)):
        moved = [ReleaseGroup(32_768 * sigma / 2.5 / 1_281_167, sigma, 18_000)]
        assert total_amount_of_noise(moved) == pytest.approx(1.0303, abs=1e-3)
        assert epsilon_rdp(moved, 8e-7) == pytest.approx(
            published, rel=0.03 if sigma == 0.5 else 5e-3
        ), sigma


# Reading


def test_bytes_of_an_example_come_from_the_index(tmp_path: Path) -> None:
    shards = find_shards("data/demo/train-00000.tar", ROOT)
    build_index(shards, tmp_path / "index")
    config = clip_art(f"data.index={tmp_path / 'index'}", "data.shards=data/demo/train-00000.tar")
    found = examples(config, ROOT)
    assert found.count == 1000 and found.source.startswith("index")
    whole = (ROOT / "data/demo/train-00000.tar").stat().st_size
    assert 1000 * found.mean_bytes <= whole < 3000 * found.mean_bytes
    assumed = examples(clip_art(), ROOT)
    assert (assumed.count, assumed.mean_bytes) == (
        None,
        BYTES_PER_EXAMPLE,
    ) and "assumed" in assumed.source


# All of it


def planned_resources(
    config: RunConfig, settings: MachineSettings, cluster: Cluster
) -> dict[str, Any]:
    return plan_resources(config, settings, cluster, examples(config, ROOT), planned(config), ROOT)


def test_padding_by_hand() -> None:
    """100,736 examples at most on 128 ranks: 787 each. Four micro-batches of 256 hold 1,024, four of 200 hold 800."""
    count = planned(recipe("vip_base")).max_batch_size
    assert count == 100_736
    assert (
        padding(count, 128, 256)
        == pytest.approx(1 - 100_736 / (1024 * 128))
        == pytest.approx(0.2314, abs=1e-4)
    )
    assert padding_note(count, 128, 256) == (
        "padding: 23.1% of the rows, 787 examples a rank in micro-batches of 256; "
        "train.micro_batch_size=200 leaves 1.6%"
    )
    assert padding_note(count, 128, 264) is None and "no train.micro_batch_size" in str(
        padding_note(7, 1, 12)
    )
    found = planned_resources(
        clip_art("train.micro_batch_size=60"), machine("zero1"), Cluster("local", 2)
    )
    (note,) = [note for note in found["notes"] if note.startswith("padding: ")]
    assert (
        found["batch"]["padding_share"] > 0.15
        and "; train.micro_batch_size=" in note
        and "\n" not in note
    )
    json.dumps(found, allow_nan=False)
    assert "time" not in found and "fits" not in found["memory"] and found["gpu"] is None, (
        "without an accelerator"
    )
    assert found["memory"]["weights"] >= found["memory"]["masters"] == 4 * found["parameters"]


def test_staging_copies_the_shards_of_a_node_and_has_rows_for_its_largest_share() -> None:
    """233M examples of 50 KB in shards of 10,000, 16 nodes of eight ranks."""
    found = Examples(None, 50_000, "")
    assert staged_bytes(found, 233_000_000, 128, 8) == pytest.approx(233e6 * 50_000 / 16, rel=0.01)
    assert staged_bytes(found, 233_000_000, 8, 8) == 233e6 * 50_000
    # Every node has rows for its largest share: 4 % more than B, as docs/data.md says.
    config = recipe("dpcap_base", "privacy.expected_batch_size=1300000", 'data.staging="/local"')
    cap, size = 1_309_122, config.train.micro_batch_size
    without = math.ceil(math.ceil(cap / 128) / size)
    number = micro_batches(config, cap, 128, 8)
    assert (
        number * size * 128 == pytest.approx(1.3e6 * 1.042, rel=size * 128 / 1.3e6)
        and number > without
    )
    assert micro_batches(config, cap, 8, 8) == math.ceil(cap / 8 / size)
    assert micro_batches(recipe("dpcap_base"), cap, 128, 8) == without
