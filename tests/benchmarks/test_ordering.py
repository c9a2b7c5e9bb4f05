"""What benchmarks/ordering.py says of differences between encoders, and which pictures it keeps from them."""

from typing import Any

import numpy as np
import pytest

from benchmarks import ordering


def seeds(gap: float, spread: float) -> list[dict[str, Any]]:
    """Five seeds whose arms differ by `gap` each, the worst last, with a spread of seeds and of runs."""
    rng = np.random.default_rng(0)
    order = ("non_private", "dpcap", "vip", "synthetic", "dpcap_random", "untrained", "pixels")
    found = []
    for _ in range(5):
        common = rng.normal(0, 0.1)  # of the seed: it cancels in paired differences
        one = {arm: {"probe": 0.5 - gap * n + common + rng.normal(0, spread)} for n, arm in enumerate(order)}
        found.append({"accuracy": one, "heldout": {"vip": {"loss": 1.0, "blind_loss": 1.5}}})
    return found


@pytest.mark.parametrize(
    ("gap", "spread", "expected"),
    [(0.05, 0.001, "as the papers"), (-0.05, 0.001, "the other way round"), (0.0, 0.01, "not told apart")],
)
def test_claims_are_paired_and_have_intervals(gap: float, spread: float, expected: str) -> None:
    made = seeds(gap, spread)
    said = ordering.summary(made)
    for claim in ("dpcap > vip", "vip > synthetic"):
        one = said["claims"][claim]["probe"]
        assert one["verdict"] == expected
        better, worse = claim.split(" > ")
        differences = [seed["accuracy"][better]["probe"] - seed["accuracy"][worse]["probe"] for seed in made]
        assert one["half_width"] == pytest.approx(2.7764451 * np.std(differences, ddof=1) / 5**0.5)
    assert set(said["accuracy"]) == set(ordering.ARMS)


def test_one_seed_claims_nothing() -> None:
    said = ordering.summary(seeds(0.1, 0.0)[:1])
    assert {one["verdict"] for probes in said["claims"].values() for one in probes.values()} == {"not told apart"}


def test_probes_see_classes_that_no_training_saw() -> None:
    train, test = ordering.judges()["other clothes"]
    assert sorted(set(train.labels)) == sorted(set(test.labels)) == [0, 1, 2]
    assert len(train.labels) == len(train.pictures) > 2000 and len(test.labels) == len(test.pictures) > 200
    _, caption_N, captions = ordering.clothes()
    trained_on = {captions[k] for k in set(caption_N[caption_N // 2 < ordering.TRAINED_ON])}
    assert not any(word in caption for caption in trained_on for word in ("sneaker", "bag", "boot"))
