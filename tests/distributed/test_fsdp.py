"""FSDP2 as this project uses it: it never reduces a gradient, replicas hold the same bits, and nothing stays gathered."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from privacy.clipping import ClippedSum
from privacy.noise.source import SystemNoise
from privacy.ranks import collectives
from privacy.ranks.engine import Engine, Piece
from privacy.step.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_accumulation import Collectives
from tests.distributed.test_engines import (
    a_mechanism,
    machine_settings,
    micro_batches,
    not_charged,
    pairs,
    tiny_captioner,
    whole_parameters,
)
from tests.distributed.test_parity import CPU, MAX_GRAD_NORM, build
from trainer.engines import require_supported
from trainer.errors import ConfigError

NUM_BLOCKS, NUM_MICRO_BATCHES = 3, 4
GATHERS = {
    "fsdp": NUM_MICRO_BATCHES
    * (2 * NUM_BLOCKS + 1),  # blocks for forward and backward, the rest once
    "fsdp gathered": NUM_BLOCKS + 1,
}


def raw_shards(engine: Engine) -> dict[str, Tensor]:
    """This rank's own memory of the weights, read without a collective."""
    shards = {}
    for name, parameter in engine.module.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is still gathered"
        shards[name] = parameter.detach().to_local().clone()
    return shards


def a_noisy_step(engine: Engine, step: int) -> None:
    run = a_mechanism(
        engine,
        ClippedSum(engine.module, 1.0, shapes=engine.shapes),
        SystemNoise(),
        1.0,
        7,
    )
    train_step(run, not_charged(), step, iter(micro_batches(pairs(), (5, 2))))


def rank_everything(device: torch.device) -> tuple[Any, Any]:
    """In one pair of processes: starting those is what costs."""
    return _replicas(device), [_collectives(device, engine) for engine in GATHERS]


@pytest.fixture(scope="module")
def two_ranks(sums_products_in_all: None) -> list[tuple[Any, Any]]:
    return run_ranks(f"{__name__}:rank_everything", 2)


def _replicas(device: torch.device) -> list[dict[str, Tensor]]:
    """Raw weights after a step, after loading another state (given by the owners only), and after one more step."""
    engine = build(device, "hsdp 2x1")
    a_noisy_step(engine, 1)
    stepped = raw_shards(engine)
    owned = engine.layout.owned_by(collectives.rank())
    values = {
        kind: torch.Generator().manual_seed(i)
        for i, kind in enumerate(("param", "exp_avg", "exp_avg_sq"))
    }
    whole = {
        (kind, name): torch.rand(shape.numel(), generator=generator)
        for kind, generator in values.items()
        for name, shape in engine.shapes.items()
    }

    def part(kind: str, piece: Piece) -> Tensor:
        return whole[kind, piece.name][piece.offset : piece.offset + piece.length]

    engine.load_state(
        {piece: {kind: part(kind, piece) for kind in values} for piece in owned}, num_steps=1
    )
    state = {kind: whole_parameters(engine, kind) for kind in values}
    assert all(
        torch.equal(state[kind][name].view(-1), expected)
        for (kind, name), expected in whole.items()
    )
    loaded = raw_shards(engine)
    assert all(torch.equal(loaded[name].view(-1), whole["param", name]) for name in loaded)
    a_noisy_step(engine, 2)
    return [stepped, loaded, raw_shards(engine)]


def test_contract_7_replicas_take_the_noise_from_its_owner(
    two_ranks: list[tuple[Any, Any]],
) -> None:
    (first, _), (second, _) = two_ranks
    start = {name: p.detach() for name, p in tiny_captioner().named_parameters()}
    for mine, others in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], others[name]) for name in start)
        assert all(not torch.equal(mine[name], start[name]) for name in start)
    assert all(not torch.equal(first[1][name], first[2][name]) for name in start)


def _collectives(device: torch.device, engine: str) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives while gradients are computed, and the units whose weights are whole afterwards and after the step."""
    wrapped = build(device, engine)
    clipped = ClippedSum(wrapped.module, MAX_GRAD_NORM, shapes=wrapped.shapes)
    batches = micro_batches(pairs(), (5, 2))
    assert len(batches) == NUM_MICRO_BATCHES
    with Collectives(least=0) as counter:
        for batch in batches:
            clipped.add_micro_batch(wrapped.module, batch.inputs, batch.is_padding_B)
    assert all(parameter.grad is None for parameter in wrapped.module.parameters())
    whole = {"before": gathered_units(wrapped.module)}
    a_noisy_step(wrapped, 1)
    whole["after"] = gathered_units(wrapped.module)
    with (
        torch.no_grad()
    ):  # a held-out batch in between must not leave outdated weights for the next step
        wrapped.module(**pairs(2))
    a_noisy_step(wrapped, 2)
    raw_shards(wrapped)
    return Counter(name for name, _ in counter.seen), whole


def gathered_units(model: nn.Module) -> int:
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    assert len(units) == NUM_BLOCKS + 1
    return sum(any(not isinstance(p, DTensor) for p in unit.parameters()) for unit in units)


def test_weights_are_gathered_and_no_gradient_is_reduced(two_ranks: list[tuple[Any, Any]]) -> None:
    for _, found in two_ranks:
        for engine, (counted, whole) in zip(GATHERS, found, strict=True):
            assert sum(counted.values()) == GATHERS[engine], counted
            assert all(
                "gather" in operation and "scatter" not in operation for operation in counted
            )
            assert whole == {"before": 0 if engine == "fsdp" else NUM_BLOCKS + 1, "after": 0}


PARTITION = "zero_optimization.zero_hpz_partition_size"


@pytest.mark.parametrize(
    ("engine", "stage", "key", "value", "said"),
    [
        ("fsdp", 3, "zero_hpz_partition_size", 2, f"{PARTITION} 2 must divide the 1 ranks"),
        (
            "deepspeed",
            3,
            "zero_hpz_partition_size",
            1,
            f"{PARTITION} (groups of ranks that each hold the whole model)",
        ),
        (
            "local",
            1,
            "zero_hpz_partition_size",
            1,
            f"{PARTITION} (groups of ranks that each hold the whole model)",
        ),
        (
            "fairscale",
            1,
            "zero_hpz_partition_size",
            1,
            f"{PARTITION} (groups of ranks that each hold the whole model)",
        ),
        ("fsdp", 2, "offload_optimizer", CPU, "zero_optimization.offload_optimizer: FSDP2 keeps"),
        (
            "fairscale",
            2,
            "offload_optimizer",
            CPU,
            "zero_optimization.offload_optimizer: --engine fairscale cannot",
        ),
        (
            "fairscale",
            3,
            "stage3_param_persistence_threshold",
            0,
            "zero_optimization.stage 3 is refused",
        ),
    ],
)
def test_what_an_engine_cannot_honour_is_refused(
    engine: Any, stage: int, key: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^ds_config .*{re.escape(said)}"):
        require_supported(engine, machine_settings(stage, **{key: value}), 1)
