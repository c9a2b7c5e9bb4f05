"""What benchmarks/ordering.py says of differences between encoders, and which pictures it keeps from them."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import ordering, pictures
from data.errors import DataError
from evaluation.sources import encode_png


def seeds(gap: float, spread: float) -> list[dict[str, Any]]:
    """Five seeds whose arms differ by `gap` each, the worst last, with a spread of seeds and of runs."""
    rng = np.random.default_rng(0)
    order = ("non_private", "dpcap", "vip", "synthetic", "dpcap_random", "untrained", "pixels")
    found = []
    for _ in range(5):
        common = rng.normal(0, 0.1)  # of the seed: it cancels in paired differences
        one = {arm: {"probe": 0.5 - gap * n + common + rng.normal(0, spread)} for n, arm in enumerate(order)}
        heldout = {"vip": {"loss": 1.0, "blind_loss": 1.5}}
        found.append({"accuracy": one, "blind_accuracy": {"probe": 0.1}, "heldout": heldout})
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


def test_probes_are_tested_on_other_pictures_than_they_are_trained_on() -> None:
    every = pictures.Labelled(np.arange(6000), np.arange(6000) % 3)
    for seed in range(2):
        train, test = pictures.judges({"large": every, "small": every.rows(slice(900))}, seed)["large"]
        assert (len(train.labels), len(test.labels)) == (2000, 1000) and not set(train.pictures) & set(test.pictures)
    train, test = pictures.judges({"small": every.rows(slice(900))}, 0)["small"]
    assert sorted([*train.pictures, *test.pictures]) == list(range(900)) and len(test.labels) == 300


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pictures, "SOURCE", tmp_path / "none")
    with pytest.raises(DataError, match="install dataset-fashion-mnist"):
        pictures.clothes()
    with pytest.raises(DataError, match="install openclipart-png"):
        pictures.in_folders(tmp_path / "none", "openclipart-png")


def test_folders_are_classes(tmp_path: Path) -> None:
    for name, count in (("few", pictures.LEAST - 1), ("many", pictures.MOST + 1), ("some", pictures.LEAST)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.png").write_bytes(encode_png(np.full((40, 30), len(name), np.uint8)))
    found = pictures.in_folders(tmp_path, "none")
    assert found.pictures.shape == (pictures.MOST + pictures.LEAST, 28, 28) and set(found.pictures.flat) == {4}
    assert found.labels.tolist() == [0] * pictures.MOST + [1] * pictures.LEAST


PLACES = [pictures.SOURCE, *(folder for folder, _ in pictures.FOLDERS.values())]


@pytest.mark.full
@pytest.mark.skipif(
    not all(folder.is_dir() for folder in PLACES), reason="tests/install_packages.sh installs its pictures"
)
def test_probes_see_classes_that_no_training_saw(tmp_path: Path) -> None:
    train, test, unseen, facts = pictures.gathered()
    assert facts["unseen_clothes"] == ["a dark jumper", "a dark coat", "a dark shirt"]
    assert facts["judging_pictures"]["digits"] == 1797 and min(facts["judging_pictures"].values()) > 500
    assert set(unseen["other clothes"].labels) == {0, 1, 2} and len(train.labels) == 42_000
    pictures.write_shards(test, tmp_path / "pairs/test.tar")
    with tarfile.open(tmp_path / "pairs/test.tar") as shard:
        said = {shard.extractfile(name).read().decode() for name in shard.getnames() if name.endswith("txt")}  # type: ignore[union-attr]
    assert len(said) == 14 and not any(word in text for text in said for word in ("jumper", "coat", " shirt"))
