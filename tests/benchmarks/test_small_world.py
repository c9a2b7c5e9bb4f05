"""benchmarks/small_world.py in seconds: two steps of the arms, one judge, and what stands in its JSON."""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import small_world
from data.synthetic.scenes import Scenes, pools


def one_judge(
    world: Scenes, seed: int
) -> dict[str, tuple[small_world.Labelled, small_world.Labelled]]:
    placed = world.placements(np.arange(120) + small_world.JUDGED, pools()["clothes"])
    images, kinds = world.render(placed, pools()["clothes"]), placed.kind[:, 0]
    return {"clothes": ((images[:90], kinds[:90]), (images[90:], kinds[90:]))}


@pytest.mark.parametrize(
    "arms", [("start", "dpcap"), pytest.param(("start", "dpcap_ledger"), marks=pytest.mark.full)]
)
def test_arms_are_trained_judged_and_kept(
    arms: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(small_world, "judges", one_judge)
    monkeypatch.setattr(
        small_world,
        "synthetic_pictures",
        cache(lambda: torch.zeros(9, 3, 32, 32, dtype=torch.uint8)),
    )
    monkeypatch.setattr(small_world, "N", 2000)
    monkeypatch.setattr(small_world, "plan_of", lambda *_: SimpleNamespace(noise_multiplier=1.0))
    whole = small_world.heldout_scores
    monkeypatch.setattr(
        small_world,
        "heldout_scores",
        lambda *given, **_: whole(*given[:3], *given[3:4] or ["captioned"], 100),
    )
    for name in arms:
        monkeypatch.setitem(
            small_world.ARMS, name, replace(small_world.ARMS[name], steps=2, batch=20)
        )
    told = ["small_world.py", "--output", str(tmp_path), "--arms", "colours", "untrained", *arms]
    monkeypatch.setattr(sys, "argv", told)
    small_world.main()
    found = json.loads(capsys.readouterr().out)
    assert set(found["arms"]) == {"colours", "untrained", *arms} and found["processor_seconds"] > 0
    for arm in found["arms"].values():
        assert {
            "mean_of_probes",
            "probes",
            "heldout_loss",
            "epsilon",
            "seeds",
        } <= arm.keys() and arm["seeds"] == [0]
        assert (
            set(arm["probes"]) == {"clothes, 10 shots", "clothes, linear"}
            and 0 < arm["mean_of_probes"] <= 1
        )
    last = found["arms"][arms[-1]]
    assert last["epsilon"] == 8 and found["arms"]["start"]["epsilon"] is None
    assert {"loss", "blind_loss", "exact", "exact, left-out pairs"} <= last["runs"]["0"][
        "heldout_new_sprites"
    ].keys()
    if arms[-1] == "dpcap_ledger":
        assert (
            last["runs"]["0"]["formal_guarantee"] and last["runs"]["0"]["verify"]["exit_code"] == 0
        )
    weights = tmp_path / "plain" / f"0-{arms[-1]}.pt"
    made = weights.stat().st_mtime_ns
    small_world.main()  # what is there is not trained again
    assert weights.stat().st_mtime_ns == made and json.loads(capsys.readouterr().out) == found


def test_ridge_finds_what_is_there_and_nothing_in_noise() -> None:
    """Both ways of computing it, for more and for fewer features than examples."""
    rng = np.random.default_rng(0)
    y, asked = rng.integers(0, 3, 90), rng.integers(0, 3, 300)
    for width in (5, 200):
        signal, noise = rng.normal(size=(3, width)), rng.normal(size=(390, width))
        x = np.concatenate([3 * signal[y], 3 * signal[asked]]) + noise
        assert small_world.ridge_accuracy((x[:90], y), (x[90:], asked)) > 0.95
        assert small_world.ridge_accuracy((noise[:90], y), (noise[90:], asked)) < 0.45
