"""Who owns which coordinate under each engine, from shapes alone; real engines compare themselves with it at every start."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy.ranks.engine import Piece, ShardLayout
from privacy.ranks.row_shards import row_shard
from trainer.config.machine import MachineSettings, load_machine_settings
from trainer.config.sections import OptimizerSection
from trainer.engines.layouts import layout_of, require_dealt

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = OptimizerSection(peak_lr=1e-2, weight_decay=0.1)
ENGINES = [
    ("local", "zero1"),
    ("fairscale", "zero1"),
    ("fsdp", "zero3"),
    ("deepspeed", "zero2"),
    ("deepspeed", "zero3"),
]


def machine(name: str, **changes: Any) -> MachineSettings:
    return replace(load_machine_settings(ROOT / f"ds_configs/{name}.json"), **changes)


def random_shapes(seed: int) -> dict[str, torch.Size]:
    draw = random.Random(seed)
    return {
        f"p{i}": torch.Size(draw.choice([1, 2, 3, 5, 8, 13]) for _ in range(draw.randint(1, 3)))
        for i in range(draw.randint(1, 12))
    }


@pytest.mark.parametrize(("engine", "name"), ENGINES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 16])
def test_every_coordinate_has_one_owner(engine: Any, name: str, world_size: int) -> None:
    groups = (
        [size for size in range(1, world_size + 1) if world_size % size == 0]
        if engine == "fsdp"
        else [None]
    )
    for seed in range(20):
        shapes = random_shapes(seed)
        for size in groups:
            layout = layout_of(
                engine, shapes, OPTIMIZER, machine(name, shard_group_size=size), world_size
            )
            assert len(layout.pieces) == world_size
            layout.check(shapes)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("shape", [(1,), (5,), (6, 4), (7, 1, 3), (16, 2)])
def test_rows_are_cut_as_torch_cuts_them(shape: tuple[int, ...], num_shards: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = list(whole.chunk(num_shards))
    for index in range(num_shards):
        offset, length = row_shard(whole.shape, index, num_shards)
        expected = chunks[index].flatten() if index < len(chunks) else whole.new_empty(0)
        assert torch.equal(whole.flatten()[offset : offset + length], expected)


@pytest.mark.parametrize(
    "dealt",
    [
        [],
        [Piece("a", 0, 2)],
        [Piece("a", 0, 2), Piece("b", 0, 4)],
        [Piece("b", 0, 3), Piece("a", 0, 2)],
    ],
)
def test_a_library_that_deals_otherwise_is_refused(dealt: list[Piece]) -> None:
    layout = ShardLayout(((Piece("c", 0, 1),), (Piece("a", 0, 2), Piece("b", 0, 3))))
    require_dealt(layout, 1, [Piece("a", 0, 2), Piece("b", 0, 3)], "Library")
    with pytest.raises(RuntimeError, match=r"Library gave .* to rank 1"):
        require_dealt(layout, 1, dealt, "Library")
