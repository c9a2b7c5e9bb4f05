"""How much of a logical batch is padding, by hand."""

import pytest

from tests.trainer.test_planner import ROOT, clip_art, machine, planned, recipe
from trainer.planner.batches import examples, padding, padding_note
from trainer.planner.resources import Cluster, plan_resources


def test_padding_by_hand() -> None:
    """100,813 examples at most on 128 ranks: 788 each. Four micro-batches of 256 hold 1,024, four of 200 hold 800."""
    count = planned(recipe("vip_base")).max_batch_size
    assert count == 100_813
    assert padding(count, 128, 256) == pytest.approx(1 - 100_813 / (1024 * 128)) == pytest.approx(0.2308, abs=1e-4)
    assert padding_note(count, 128, 256) == (
        "padding: 23.1% of the rows, 788 examples a rank in 4 micro-batches of 256; "
        "train.micro_batch_size=200 leaves 1.5%"
    )
    assert padding_note(count, 128, 264) is None and padding_note(count, 128, 800) is None
    assert padding_note(4, 1, 3) == "padding: 33.3% of the rows, 4 examples a rank in 2 micro-batches of 3; " + (
        "train.micro_batch_size=2 leaves 0.0%"
    )
    assert "no train.micro_batch_size" in str(padding_note(7, 1, 12))


def test_a_plan_says_when_padding_wastes_much() -> None:
    config = clip_art("train.micro_batch_size=60")
    found = plan_resources(
        config, machine("zero1"), Cluster("local", 2), examples(config, ROOT, None), planned(config), ROOT
    )
    (note,) = [note for note in found["notes"] if note.startswith("padding: ")]
    assert "; train.micro_batch_size=" in note
    assert found["batch"]["padding_share"] > 0.15 and "\n" not in note
