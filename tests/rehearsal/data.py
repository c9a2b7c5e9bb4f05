"""An index of 233.8 million rows: coins, cap, deal and members of one step, and the part of one of 128 ranks.

The index is written in the format of `prepare.py index` without shards: nothing is decoded here. Everything that a step does with
it is the trainer's own code, and the sampler of the audit, which shares no line with it, finds the same members and rows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from data.index.shard import ROW
from data.index.tar_index import ExampleTable, write_manifest
from data.reading.records import ShardEntry
from privacy.audit.second_sampler import Attempt, SecondSampler
from privacy.plan.numbers import usual_cap
from privacy.ranks import collectives
from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import PoissonSampler, slice_bounds
from privacy.step.batches import LogicalBatches, StepBatch
from tests.rehearsal.part import GIB, ROOT, Part, lap, peak_bytes

NUM_EXAMPLES, BATCH, WORLD_SIZE = 233_804_767, 1_310_720, 128
MICRO_BATCH = 256
EXAMPLES_A_SHARD = 10_000
SECRET, NONCE = bytes(range(32)), bytes(range(16))
"""Of no run: what is dealt here trains nothing."""


def rehearse(part: Part, num_examples: int = NUM_EXAMPLES, batch: int = BATCH) -> None:
    """Writes the index, plans one step of it as one of 128 ranks, and compares all ranks with the audit's sampler."""
    index = part.folder / "index"
    part.stage("write the index", lambda: write_index(index, num_examples))
    for size, examples in (("a tenth", num_examples // 10), ("all", num_examples)):
        part.stage(
            f"coins of {size}",
            lambda examples=examples: draw_coins(examples, batch * examples // num_examples),
        )
    part.stage("one of 128 ranks", lambda: in_own_process(index, num_examples, batch))
    part.stage("the audit's sampler agrees", lambda: compare_with_audit(num_examples, batch))
    part.ran(num_examples=num_examples)


def sampler_of(num_examples: int, batch: int) -> PoissonSampler:
    """The sampler of a recipe with so many examples."""
    return PoissonSampler.with_expected_batch(num_examples, batch, usual_cap(batch))


def write_index(folder: Path, num_examples: int) -> dict[str, Any]:
    """Writes rows of random lengths around 50 kB, shard by shard, and a manifest that names the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = [
        min(EXAMPLES_A_SHARD, num_examples - first)
        for first in range(0, num_examples, EXAMPLES_A_SHARD)
    ]
    header = {
        "descr": np.lib.format.dtype_to_descr(ROW),
        "fortran_order": False,
        "shape": (num_examples,),
    }
    entries, generator = [], np.random.default_rng(0)
    with (folder / "extents-made.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for number, count in enumerate(counts):
            rows = np.zeros(count, ROW)
            rows["low"] = generator.integers(40, 160, count)  # blocks of 512 bytes
            rows["first_block"] = np.cumsum(rows["low"], dtype=np.uint32) - rows["low"]
            file.write(rows.tobytes())
            entries.append(made_entry(number, count, 512 * int(rows["low"].sum())))
    write_manifest(folder, "extents-made.npy", entries)
    return {"bytes": sum(path.stat().st_size for path in folder.iterdir()), "shards": len(entries)}


def made_entry(number: int, count: int, size: int) -> ShardEntry:
    """The entry of a shard that is not there."""
    sha256 = f"{number:064x}"
    return ShardEntry(
        name=f"train-{number:05}.tar",
        size=size,
        version="1",
        sha256=sha256,
        count=count,
        keys_sha256=sha256,
        repeated_keys=0,
        skipped=0,
        several_pictures=0,
        no_picture=0,
        no_text=0,
    )


def draw_coins(num_examples: int, batch: int) -> dict[str, Any]:
    """Decides all examples in one process: how the time grows with their number."""
    measured: dict[str, Any] = {}
    key = SamplingKey(SECRET).coin_key(NONCE, 0)
    sampler = sampler_of(num_examples, batch)
    with lap(measured, "coins"):
        decided = sampler.decide(key, 1)
    with lap(measured, "cap_and_order"):
        members = sampler.merge([decided])
    return {"members": len(members), **measured}


def in_own_process(index: Path, num_examples: int, batch: int) -> dict[str, Any]:
    """Plans one step as rank 77 of 128 in a process of its own, whose memory is that of a rank beside its model."""
    code = (
        "import json, sys; from pathlib import Path; from tests.rehearsal import data; "
        "print(json.dumps(data.plan_as_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 77)))"
    )
    words = [sys.executable, "-c", code, str(index), str(num_examples), str(batch)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    measured: dict[str, Any] = json.loads(ended.stdout)
    return measured


def plan_as_rank(index: Path, num_examples: int, batch: int, rank: int) -> dict[str, Any]:
    """Opens the index, pulls the plan of a step and looks up its examples; the other ranks' coins are drawn beforehand."""
    measured: dict[str, Any] = {}
    sampler = sampler_of(num_examples, batch)
    key = SamplingKey(SECRET).coin_key(NONCE, 0)
    slices = [
        sampler.decide(key, 1, *slice_bounds(num_examples, WORLD_SIZE, other))
        for other in range(WORLD_SIZE)
    ]
    before = peak_bytes()
    with lap(measured, "open"):
        table = ExampleTable.open(index, "shards", check_shards=False)
    with lap(measured, "own_coins"):
        sampler.decide(key, 1, *slice_bounds(num_examples, WORLD_SIZE, rank))
    with lap(measured, "plan"):
        dealt = plan_of_rank(sampler, rank, gathered=slices)
    with lap(measured, "look_up"):
        places = table.extents(dealt.example_ids)
    return {
        "examples": len(dealt.example_ids),
        "micro_batches": dealt.num_micro_batches,
        "shards_of_the_rank": len(np.unique(places.shards)),
        "bytes_read": int(places.lengths.sum()),
        **measured,
        "peak_gib_before": round(before / GIB, 3),
        "peak_gib_after": round(peak_bytes() / GIB, 3),
    }


def plan_of_rank(sampler: PoissonSampler, rank: int, gathered: object) -> StepBatch:
    """The plan of step 1 of one of 128 ranks, where `gathered` stands for what the ranks send each other."""
    batches = LogicalBatches(sampler, SamplingKey(SECRET), NONCE, {}, MICRO_BATCH)
    with (
        mock.patch.object(collectives, "rank", return_value=rank),
        mock.patch.object(collectives, "world_size", return_value=WORLD_SIZE),
        mock.patch.object(collectives, "gather_objects", return_value=gathered),
    ):
        return batches.plan(1)


def compare_with_audit(num_examples: int, batch: int) -> dict[str, Any]:
    """Every member, row and key of all 128 ranks is that of the sampler which the audit recomputes from the contract's text."""
    sampler = sampler_of(num_examples, batch)
    key = SamplingKey(SECRET).coin_key(NONCE, 0)
    slices = [
        sampler.decide(key, 1, *slice_bounds(num_examples, WORLD_SIZE, rank))
        for rank in range(WORLD_SIZE)
    ]
    second, attempt = SecondSampler(SECRET, num_examples, batch, sampler.cap), Attempt(NONCE, 1, 0)
    chosen, members = second.members(attempt)
    assert np.array_equal(members, sampler.merge(slices))
    first = plan_of_rank(sampler, 0, slices)
    expected = second.deal(attempt, members, first.num_micro_batches * MICRO_BATCH, WORLD_SIZE)
    for rank in range(0, WORLD_SIZE, 16):
        dealt = plan_of_rank(sampler, rank, slices)
        ids, rows = expected[rank]
        assert np.array_equal(dealt.example_ids, ids) and np.array_equal(dealt.rows, rows)
        assert np.array_equal(dealt.example_keys, second.keys(attempt, ids))
    return {"chosen": len(chosen), "members": len(members), "ranks_compared": WORLD_SIZE // 16}
