"""The part `ranks` of the rehearsal for three ranks of a tiny model."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from privacy.ranks.engine import ShardLayout
from tests.rehearsal import ranks
from tests.rehearsal.part import Part
from tests.rehearsal.ranks import Fleet, gloo_group, open_files, reduce, step_seconds
from tests.rehearsal.record import JSON_RECORD
from trainer.config.cli import open_files_of
from trainer.ranks.heartbeat import Timing

WORLD_SIZE = 3
FLEET = Fleet(
    recipe="recipes/tiny.toml",
    overrides=("data.num_examples=3000",),
    world_sizes=(WORLD_SIZE,),
    timing=Timing(interval=0.05, dead_after=4.0),
    watched_seconds=1.5,
)


@pytest.mark.full
def test_the_part_measures_what_rank_0_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "sockets_of_gloo", lambda: {"beside_one_a_rank": 2})
    part = Part("ranks", tmp_path)
    ranks.rehearse(part, FLEET)
    measured: dict[str, Any] = {stage["name"]: stage["measured"] for stage in part.stages}
    assert part.sizes == {"ranks": WORLD_SIZE} and len(measured) == 9 + 1
    assert all(
        name.endswith(f", {WORLD_SIZE} ranks") for name in measured if name != "sockets of gloo"
    )
    assert measured["members, 3 ranks"]["bytes_a_record"] > 64 * WORLD_SIZE
    store, files = measured["store, 3 ranks"], measured["open files, 3 ranks"]
    assert (
        0 < store["heartbeat_processor_seconds_a_second"] < 1
        and store["seconds_to_name_the_silent"] > 1
    )
    assert files["of_gloo"] == 2 * (WORLD_SIZE + 2) and files["of_rank_0"] > files[
        "of_gloo"
    ] + 2 * (WORLD_SIZE - 1)
    assert Part("ranks", tmp_path).stage("plan, 3 ranks", dict) == measured["plan, 3 ranks"]


def test_what_a_logical_step_takes_is_the_sum_of_its_parts() -> None:
    seconds = {
        "plan": 0.25,
        "members": 0.5,
        "heartbeat_a_second": 9.0,
        "ZeRO-1": 1.0,
        "ZeRO-3": 2.0,
    }
    sums = {"ZeRO-1_sum_processor_seconds": 1.75, "ZeRO-3_sum_processor_seconds": 2.75}
    assert step_seconds(seconds) == seconds | sums


def test_a_reduction_that_leaves_a_sum_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Fleet.layout(FLEET, 1, WORLD_SIZE)
    lost = whole.pieces[2][-1].name
    short = ShardLayout(tuple(tuple(p for p in owned if p.name != lost) for owned in whole.pieces))
    monkeypatch.setattr(Fleet, "layout", lambda *_: short)
    with pytest.raises(AssertionError, match="was not sent whole"):
        reduce(FLEET, 1, WORLD_SIZE)


def test_a_reduction_asks_for_the_pieces_of_a_rank_once_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not once for each parameter as well."""
    asked, owned_by = [], ShardLayout.owned_by
    monkeypatch.setattr(
        ShardLayout, "owned_by", lambda layout, rank: asked.append(rank) or owned_by(layout, rank)
    )
    measured = reduce(FLEET, 3, WORLD_SIZE)
    assert len(asked) <= (WORLD_SIZE + 1) * measured["reduce_scatters"] + 2


def test_a_start_asks_for_as_many_open_files_as_the_record_counted() -> None:
    stages = json.loads(JSON_RECORD.read_text())["ranks"]["stages"]
    counted = {
        stage["name"]: stage["measured"]
        for stage in stages
        if stage["name"].startswith("open files")
    }
    assert len(counted) == 3
    for name, files in counted.items():
        world_size = int(re.sub(r"\D", "", name))
        assert files["of_rank_0"] <= open_files_of(world_size) <= 4 * files["of_rank_0"]


def test_files_of_a_gloo_group_are_counted() -> None:
    before = open_files()
    group = gloo_group(WORLD_SIZE)
    assert open_files() - before >= WORLD_SIZE * (WORLD_SIZE - 1)
    assert len(group) == WORLD_SIZE and open_files() == len(os.listdir("/proc/self/fd"))
