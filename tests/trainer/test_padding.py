"""How much of a logical batch is padding, by hand and against batches that are drawn."""

import pytest
import torch

from tests.trainer.test_planner import ROOT, clip_art, machine, recipe
from trainer.planner.batches import Batches, examples
from trainer.planner.resources import Cluster, plan_resources


def test_padding_by_hand() -> None:
    """100,813 examples at most on 128 ranks: 788 each. Four micro-batches of 256 hold 1,024, four of 200 hold 800."""
    batches = Batches.of(recipe("vip_base"), None)
    assert batches == Batches((100_813,))
    assert batches.micro_batches(128, 256) == 4
    assert batches.padding(128, 256) == pytest.approx(1 - 100_813 / (1024 * 128)) == pytest.approx(0.2308, abs=1e-4)
    assert batches.better_size(128, 256) == 200 and batches.padding(128, 200) < 0.02
    assert batches.note(128, 256) == (
        "padding: 23.1% of the rows, 788 examples a rank in 4 micro-batches of 256; "
        "train.micro_batch_size=200 leaves 1.5%"
    )
    assert batches.note(128, 264) is None and batches.better_size(128, 264) is None
    assert batches.note(128, 800) is None
    assert Batches((4,)).note(1, 3) == "padding: 33.3% of the rows, 4 examples a rank in 2 micro-batches of 3; " + (
        "train.micro_batch_size=2 leaves 0.0%"
    )


def test_padding_of_a_batch_that_fluctuates() -> None:
    """Its number of micro-batches follows the sample: as in batches that are drawn."""
    config = clip_art("privacy.enabled=false")
    batches = Batches.of(config, None)
    drawn = torch.poisson(torch.full((20_000,), 256.0), generator=torch.Generator().manual_seed(0)).clamp(max=384)
    for ranks, size in ((1, 32), (2, 32), (2, 24), (4, 70)):
        expected = (drawn / ranks).ceil().div(size).ceil().mean()
        assert batches.micro_batches(ranks, size) == pytest.approx(float(expected), abs=0.05)
    streamed = config.model_copy(update={"data": config.data.model_copy(update={"streaming": True})})
    assert Batches.of(streamed, None) == Batches((256,))


def test_a_plan_says_when_padding_wastes_much() -> None:
    config = clip_art("train.micro_batch_size=60")
    found = plan_resources(config, machine("zero1"), Cluster("local", 2), examples(config, ROOT, None), None, ROOT)
    (note,) = [note for note in found["notes"] if note.startswith("padding: ")]
    assert f"train.micro_batch_size={found['batch']['better_micro_batch_size']} leaves" in note
    assert found["batch"]["padding_share"] > 0.15 and "\n" not in note
