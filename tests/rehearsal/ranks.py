"""What rank 0 does in Python for 8, 128 and 1,024 ranks of `dpcap_large`, without as many processes.

Collectives are stand-ins, and what is packed for others is one number a call, so what is measured is the processor time that
rank 0 spends besides computing and moving bytes. The store is a real one: the other ranks are connections of one process.
"""

import functools
import gc
import itertools
import json
import math
import multiprocessing
import os
import pickle
import resource
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from privacy.clipping import ClippedSum
from privacy.ledger.attempts import MarkedLedger, MembersRecord, read_lines
from privacy.ledger.ledger import Ledger
from privacy.plan.numbers import make_plan
from privacy.ranks import collectives
from privacy.ranks.engine import ShardLayout
from privacy.run.run_ledger import RunLedger
from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import slice_bounds
from privacy.sampling.sampler import sampler_of
from privacy.step.batches import LogicalBatches, StepBatch, max_micro_batches
from privacy.sums import reduction
from privacy.sums.grid import SHORT, Grid
from privacy.sums.local import LocalSums
from privacy.sums.reduction import reduce_to_owners
from privacy.sums.totals import ParameterSum
from tests.distributed.ranks import free_port
from tests.rehearsal.part import ROOT, Part, lap
from trainer.config.cli import open_files_of
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import RunConfig, load_config
from trainer.engines.layouts import layout_of
from trainer.ranks.heartbeat import Beat, Heartbeat, Timing
from trainer.ranks.rendezvous import Place, connect, find_store, meet, settings_of
from trainer.tasks import make_task

STAGES_OF_ZERO = (1, 3)
PATIENCE = 300.0
"""Seconds that ranks wait for each other, which are threads of one process here."""
CONNECTING = 32
"""Connections that the other process makes at a time."""
GLOO_SIZES = (4, 8, 16)
GLOO_GROUPS = 2
"""Groups of all ranks in training: the project's own, and the one that DeepSpeed makes."""
RECORDS = 20
"""Records of members that are written, and read again."""


@dataclass(frozen=True)
class Fleet:
    """What is rehearsed.

    Attributes:
        watched_seconds: how long rank 0's heartbeat is measured.
    """

    recipe: str = "recipes/dpcap_large.toml"
    overrides: tuple[str, ...] = ("init.parts=none",)
    world_sizes: tuple[int, ...] = (8, 128, 1024)
    timing: Timing = Timing()  # noqa: RUF009 - never changed
    watched_seconds: float = 10.0

    @functools.cached_property
    def config(self) -> RunConfig:
        return load_config(ROOT / self.recipe, self.overrides)

    @functools.cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Full shapes of the trained parameters, in the model's order."""
        return {
            name: p.shape for name, p in make_task(self.config, ROOT).skeleton().named_parameters()
        }

    @functools.cached_property
    def batches(self) -> LogicalBatches:
        """The plans of a session of this recipe, with keys that nobody else has."""
        config = self.config
        assert config.data.num_examples is not None
        plan = make_plan(config.privacy.request(config.train.num_steps, config.data.num_examples))
        key, nonce = SamplingKey(secrets.token_bytes(32)), secrets.token_bytes(16)
        return LogicalBatches(sampler_of(plan), key, nonce, {}, config.train.micro_batch_size)

    def layout(self, stage: int, world_size: int) -> ShardLayout:
        machine = load_machine_settings(ROOT / "ds_configs" / f"zero{stage}.json")
        return layout_of("deepspeed", self.shapes, self.config.optimizer, machine, world_size)

    def sums(self, world_size: int) -> LocalSums:
        """Sums of a rank in the bytes that a coordinate takes there, each of a few numbers in place of all."""
        sampler, size = self.batches.sampler, self.config.train.micro_batch_size
        rows = 2 * size * max_micro_batches(sampler, world_size, size)
        count = sum(shape.numel() for shape in self.shapes.values())
        grid = Grid.of(count, torch.float32, sampler.cap, rows)
        sums = LocalSums(
            dict.fromkeys(self.shapes, torch.Size([SHORT + 1])), grid, torch.device("cpu")
        )
        sums.zero_(grid.unit(self.config.privacy.max_grad_norm))
        sums.start(0)
        return sums


class Rows:
    """Stands in for (ranks, size) numbers: what is written goes to one number, so its time is that of the call."""

    def __init__(
        self, world_size: int, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._number, self.nbytes = (
            torch.empty(1, 1, dtype=dtype, device=device),
            world_size * size * dtype.itemsize,
        )

    def __setitem__(self, place: tuple[int, slice], values: torch.Tensor) -> None:
        self._number[0, 0:1] = values

    def new_empty(self, size: int) -> torch.Tensor:
        return self._number.new_empty(size)


def read_one(total: ParameterSum, some: slice) -> torch.Tensor:
    """Reads one entry, by as many operations as `some` takes."""
    return read(total, slice(0, 1))


read = ParameterSum.read


def rehearse(part: Part, fleet: Fleet | None = None) -> None:
    fleet = fleet or Fleet()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    python: dict[int, dict[str, float]] = {world_size: {} for world_size in fleet.world_sizes}

    def stage(name: str, work: Callable[[int], dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Measures for each number of ranks."""
        return {
            w: part.stage(f"{name}, {w:,} ranks", lambda w=w: work(w)) for w in fleet.world_sizes
        }

    for zero in STAGES_OF_ZERO:
        stage(f"layout of ZeRO-{zero}", functools.partial(lay_out, fleet, zero))
        for world_size, measured in stage(
            f"reduction of ZeRO-{zero}", functools.partial(reduce, fleet, zero)
        ).items():
            python[world_size][f"ZeRO-{zero}"] = measured["reduce_processor_seconds"]
    for world_size, measured in stage("plan", functools.partial(pull_plan, fleet)).items():
        python[world_size]["plan"] = measured["plan_processor_seconds"]
    members = functools.partial(record_members, fleet, part.folder)
    for world_size, measured in stage("members", members).items():
        python[world_size]["members"] = measured["note_processor_seconds"] / RECORDS
    sockets = part.stage("sockets of gloo", sockets_of_gloo)
    for world_size, measured in stage("store", functools.partial(keep_store, fleet)).items():
        python[world_size]["heartbeat_a_second"] = measured["heartbeat_processor_seconds_a_second"]
        of_groups = GLOO_GROUPS * (world_size + sockets["beside_one_a_rank"])
        of_rank_0 = of_groups + measured["open_files_of_rank_0"]
        assert of_rank_0 <= open_files_of(world_size), "train.py asks for fewer"
        files = functools.partial(dict, of_gloo=of_groups, of_rank_0=of_rank_0)
        part.stage(f"open files, {world_size:,} ranks", files)
    for world_size, seconds in python.items():
        part.stage(
            f"a logical step, {world_size:,} ranks", functools.partial(step_seconds, seconds)
        )
    part.ran(ranks=max(fleet.world_sizes))


def sockets_of_gloo() -> dict[str, Any]:
    """Open files of a rank in one gloo group: one for each rank, and how many beside them."""
    pipe, process = start_process(count_sockets)
    counted = pipe.recv()
    process.join()
    beside = {world_size: total / world_size - world_size for world_size, total in counted.items()}
    return {f"{w}_ranks": total for w, total in counted.items()} | {
        "beside_one_a_rank": math.ceil(max(beside.values()))
    }


def step_seconds(seconds: dict[str, float]) -> dict[str, Any]:
    """Adds up what rank 0 does in Python once a logical step."""
    often = seconds["plan"] + seconds["members"]
    sums = {
        f"ZeRO-{zero}_sum_processor_seconds": often + seconds[f"ZeRO-{zero}"]
        for zero in STAGES_OF_ZERO
    }
    return {name: round(value, 4) for name, value in (seconds | sums).items()}


def lay_out(fleet: Fleet, stage: int, world_size: int) -> dict[str, Any]:
    """Deals out the coordinates, once a start; every one has one owner."""
    measured: dict[str, Any] = {}
    with lap(measured, "layout"):
        layout = fleet.layout(stage, world_size)
    with lap(measured, "check"):
        layout.check(fleet.shapes)
    numbers = [layout.count(rank) for rank in range(world_size)]
    assert sum(numbers) == sum(shape.numel() for shape in fleet.shapes.values())
    pieces = sum(len(owned) for owned in layout.pieces)
    return measured | {
        "pieces": pieces,
        "least_numbers": min(numbers),
        "most_numbers": max(numbers),
    }


def reduce(fleet: Fleet, stage: int, world_size: int) -> dict[str, Any]:
    """Packs the sums for all owners and takes rank 0's own."""
    layout, sums = fleet.layout(stage, world_size), fleet.sums(world_size)
    assert sums.unit is not None
    stand_in = SimpleNamespace(
        accumulator=sums, exponent=sums.unit.exponent, require_repeated=lambda: None
    )
    clipped = cast(ClippedSum, stand_in)
    measured, reductions = dict[str, Any](), list[int]()

    def note(out: torch.Tensor, rows: Rows) -> None:
        reductions.append(rows.nbytes - out.nbytes)

    standing_in = patch.multiple(
        collectives,
        rank=lambda: 0,
        world_size=lambda: world_size,
        all_reduce_sum=lambda values: values.mul_(world_size),
        reduce_scatter_sum=note,
    )
    on_numbers = patch.object(torch, "zeros", Rows), patch.object(ParameterSum, "read", read_one)
    trimming = patch.object(reduction, "give_back_freed_memory")  # which GPUs do not need
    with standing_in, on_numbers[0], on_numbers[1], trimming, lap(measured, "reduce"):
        shards = reduce_to_owners(clipped.accumulator, clipped.exponent, layout)
    assert [(s.name, s.offset, s.values.numel()) for s in shards] == list(layout.owned_by(0))
    assert not sums._totals, "a sum was not sent whole"
    return measured | {
        "reduce_scatters": len(reductions),
        "bytes": sum(reductions),
        "sums": str(sums._grid.layout),
    }


def pull_plan(fleet: Fleet, world_size: int) -> dict[str, Any]:
    """Decides rank 0's coins, merges those of all ranks, and deals; the members do not depend on the number of ranks."""
    batches, step, measured = fleet.batches, 1, dict[str, Any]()
    sampler = batches.sampler
    key = sampler.coin_key(batches.key, batches.nonce, 0)
    bounds = [slice_bounds(sampler.num_examples, world_size, rank) for rank in range(world_size)]
    pickled = [pickle.dumps(sampler.decide(key, step, *bound)) for bound in bounds[1:]]

    def gather(mine: object) -> list[Any]:
        """As torch does: pickled here, and unpickled from all."""
        return [pickle.loads(pickle.dumps(mine)), *map(pickle.loads, pickled)]

    standing_in = patch.multiple(
        collectives, rank=lambda: 0, world_size=lambda: world_size, gather_objects=gather
    )
    with standing_in, lap(measured, "plan"):
        dealt = batches.plan(step)
    members, count = sampler.members(key, step), len(dealt.example_ids)
    rows = dealt.num_micro_batches * batches.micro_batch_size
    expected = len(members) / world_size
    assert (
        abs(count - expected) < 8 * math.sqrt(expected)
        and np.isin(dealt.example_ids, members).all()
    )
    assert (
        dealt.rows is not None and len(np.unique(dealt.rows)) == count and dealt.rows.max() < rows
    )
    rows_of_all = rows * world_size
    return measured | {
        "members": len(members),
        "micro_batches": dealt.num_micro_batches,
        "rows": rows_of_all,
    }


def record_members(fleet: Fleet, folder: Path, world_size: int) -> dict[str, Any]:
    """Notes attempts in the private record as rank 0 does, and reads them as a start does."""
    path, measured = folder / f"members-{world_size}.jsonl", dict[str, Any]()
    path.write_bytes(b"")
    expected = fleet.config.privacy.expected_batch_size
    ids = np.arange(expected // world_size + 1, dtype=np.int64)
    batches = fleet.batches
    ledger = MarkedLedger(cast(Ledger, SimpleNamespace(position=lambda: (7, "0" * 64))), path)
    rank_0 = SimpleNamespace(
        plan=SimpleNamespace(enabled=True),
        key=batches.key,
        attempts={},
        _nonce=batches.nonce,
        _on_main=ledger,
    )
    standing_in = patch.multiple(
        collectives,
        rank=lambda: 0,
        world_size=lambda: world_size,
        gather_objects=lambda mine: [mine] * world_size,
    )
    with standing_in, lap(measured, "note"):
        for step in range(1, RECORDS + 1):
            dealt = StepBatch(step, ids, np.empty(0, np.uint64), 1)
            RunLedger.note(cast(RunLedger, rank_0), dealt, batches.micro_batch_size)
    with lap(measured, "read"):
        records = list(read_lines(path))
    assert len(records) == RECORDS
    assert all(
        isinstance(record, MembersRecord) and len(record.digests) == world_size
        for record in records
    )
    size = path.stat().st_size / RECORDS
    return measured | {
        "records": RECORDS,
        "bytes_a_record": size,
        "run_bytes": size * fleet.config.train.num_steps,
    }


def keep_store(fleet: Fleet, world_size: int) -> dict[str, Any]:
    """Meets all other ranks, watches them beat, and names the one that falls silent."""
    measured, ends = dict[str, Any](), list[str]()
    machine = load_machine_settings(ROOT / "ds_configs" / "zero3.json")
    settings = settings_of(os.environ, ROOT, fleet.config, machine, {})
    gc.collect()  # of connections of an earlier stage
    before = open_files()
    own, place = find_store("127.0.0.1", free_port(), 0, world_size, PATIENCE)
    pipe, process = start_process(be_the_others, world_size, place.port, settings)
    pipe.recv()
    with lap(measured, "meet"):
        hosts = meet(own, 0, world_size, place, PATIENCE, settings)
        pipe.recv()  # all know everyone, and are connected for their heartbeats
    guest = place._replace(is_host=False)
    heart = Heartbeat(lambda: connect(guest, PATIENCE), 0, hosts, timing=fleet.timing)

    def end(message: str, exit_code: int) -> None:
        ends.append(message)
        heart.leave()

    heart.end = end  # type: ignore[method-assign]
    began, used = time.monotonic(), time.process_time()
    heart.start()
    time.sleep(fleet.watched_seconds)
    share = (time.process_time() - used) / (time.monotonic() - began)
    measured["heartbeat_processor_seconds_a_second"] = round(share, 5)
    assert not ends, ends
    assert all(beat.number > 0 for beat, _ in heart._beats.values()), "a beat was not heard"
    measured["open_files_of_rank_0"] = open_files() - before
    silent, began = world_size - 1, time.monotonic()
    pipe.send(silent)
    while not ends and time.monotonic() < began + 2 * fleet.timing.dead_after + PATIENCE:
        time.sleep(fleet.timing.interval)
    measured["seconds_to_name_the_silent"] = round(time.monotonic() - began, 1)
    pipe.send(None)
    process.join()
    (message,) = ends
    assert f"rank {silent} (host " in message and "is dead (no heartbeat" in message, message
    return measured


def be_the_others(world_size: int, port: int, settings: dict[str, str], pipe: Connection) -> None:
    """Ranks 1 and above: they come as in `meet`, and connect a second time for their heartbeats, which beat in turn."""
    host, posted = socket.gethostname(), json.dumps(settings)

    def come(rank: int) -> tuple[dist.Store, Place]:
        store, place = find_store("127.0.0.1", port, rank, world_size, PATIENCE)
        assert not store.check([f"here/{rank}"])
        for name, value in {"beat": "[]", "process": "", "settings": posted, "here": host}.items():
            store.set(f"{name}/{rank}", value)
        return store, place

    others = range(1, world_size)
    with ThreadPoolExecutor(CONNECTING) as pool:
        pipe.send("is there")
        met = list(pool.map(come, others))
        for store, _ in met:
            while not store.check(["everyone"]):
                time.sleep(0.1)
            store.multi_get([f"here/{rank}" for rank in range(world_size)])
        beating = dict(
            zip(others, pool.map(lambda pair: connect(pair[1], PATIENCE), met), strict=True)
        )
    pipe.send("all beat")
    for number in itertools.count(1):
        began = time.monotonic()
        for rank, store in beating.items():  # what `Heartbeat` asks of the store at each beat
            store.set(f"beat/{rank}", json.dumps(Beat(number, 2, number, "its step")))
            store.multi_get(["beat/0"])
            store.check(["suspicion"])
            store.check(["verdict"])
        while pipe.poll(max(0.0, began + Timing().interval - time.monotonic())):
            silent = pipe.recv()
            if silent is None:
                os._exit(0)
            del beating[silent]


def count_sockets(pipe: Connection) -> None:
    """Sends the open files of all ranks of one gloo group, for groups of GLOO_SIZES ranks that are threads of this process."""
    counted = dict[int, int]()
    for world_size in GLOO_SIZES:
        before = open_files()
        group = gloo_group(world_size)
        counted[world_size] = open_files() - before
        del group
    pipe.send(counted)
    os._exit(0)  # gloo's threads may abort at the interpreter's end


def gloo_group(world_size: int) -> list[dist.ProcessGroupGloo]:
    """One group, as each of its ranks has it."""
    store, limit = dist.HashStore(), timedelta(seconds=PATIENCE)
    with ThreadPoolExecutor(world_size) as pool:
        return list(
            pool.map(
                lambda rank: dist.ProcessGroupGloo(store, rank, world_size, limit),
                range(world_size),
            )
        )


def start_process(work: Callable[..., None], *arguments: Any) -> tuple[Connection, Any]:
    """Starts a fresh interpreter that does `work`, and returns this end of its last argument, a pipe."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=work, args=[*arguments, theirs], daemon=True
    )
    process.start()
    theirs.close()
    return mine, process


def open_files() -> int:
    """Files and sockets that this process has open."""
    return len(os.listdir("/proc/self/fd"))
