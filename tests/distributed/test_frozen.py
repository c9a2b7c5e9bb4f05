"""Frozen weights under every engine: trained ones take the steps of `local`, frozen ones keep every bit and get no noise."""

from collections.abc import Sequence
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from privacy.clipping import ClippedSum
from privacy.step.engine import Engine
from privacy.step.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    MICRO_BATCH,
    NUM_EXAMPLES,
    OPTIMIZER,
    a_mechanism,
    machine_settings,
    micro_batches,
    whole_parameters,
)
from tests.distributed.test_parity import DEALS, ENGINES, SIGMA, TWO_PASS, NamedNoise
from tests.models.test_classifier import K, tiny_classifier
from tests.privacy.clipping import oracle
from trainer.engines import build_engine
from trainer.ranks import distributed

Case = tuple[str, str]
"""Engine of the table, what is trained."""
REDUCED = [(engine, mode) for engine in ("local", "zero3") for mode in ("last_layer", "adapters")]
ALL = [(engine, mode) for engine in ENGINES for mode in ("last_layer", "adapters")]


def labelled(count: int = NUM_EXAMPLES) -> dict[str, Tensor]:
    images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    return {"images_BCHW": images, "labels_B": torch.arange(count) % K}


def rank_steps(device: torch.device, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [_steps(device, *case) for case in cases]


def _steps(device: torch.device, engine_name: str, mode: str) -> dict[str, Any]:
    """Three noised steps, with a held-out batch between them as training has."""
    name, stage, settings = ENGINES[engine_name]
    machine = machine_settings(stage, **settings)
    engine = build_engine(name, tiny_classifier(trainable=mode), OPTIMIZER, machine, device, MICRO_BATCH)  # type: ignore[arg-type]
    clipped = ClippedSum(
        engine.module,
        1.0,
        shapes=engine.shapes,
        mode="two_pass" if engine_name == TWO_PASS else "bookkeeping",
        self_check=False,
    )
    run = a_mechanism(engine, clipped, NamedNoise(engine), SIGMA, NUM_EXAMPLES)
    for step, counts in enumerate(DEALS[distributed.world_size()], start=1):
        train_step(run, step, iter(micro_batches(labelled(), counts)))
        with torch.no_grad():
            logits = engine.module(labelled()["images_BCHW"], output="logits")
    states = {state.piece.name for state in engine.state()}
    assert states <= set(engine.shapes) and all(
        p.grad is None for p in engine.module.parameters() if not p.requires_grad
    )
    return {"trained": whole_parameters(engine), "frozen": whole_frozen(engine), "logits": logits.clone()}


def whole_frozen(engine: Engine) -> dict[str, Tensor]:
    frozen = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
    return {name: _whole(parameter).detach().clone() for name, parameter in frozen.items()}


def _whole(parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [REDUCED, pytest.param(ALL, marks=pytest.mark.full)], ids=["reduced", "all"])
def test_frozen_weights_stay_and_the_others_take_the_steps_of_local(cases: list[Case]) -> None:
    found = dict(zip(cases, run_ranks(f"{__name__}:rank_steps", 2, timeout=600, cases=cases)[0], strict=True))
    for (engine, mode), result in found.items():
        start = dict(tiny_classifier(trainable=mode).named_parameters())
        frozen = {name for name, p in start.items() if not p.requires_grad}
        assert len(frozen) > 20 and set(result["frozen"]) == frozen and set(result["trained"]) == set(start) - frozen, (
            engine
        )
        assert all(torch.equal(result["frozen"][name], start[name].detach()) for name in frozen), engine
        reference = found["local", mode]
        assert oracle.relative_error(result["trained"], {n: start[n].detach() for n in result["trained"]}) > 1e-3
        assert oracle.relative_error(result["trained"], reference["trained"]) < 1e-5, (engine, mode)
        assert torch.allclose(result["logits"], reference["logits"], atol=1e-4), (engine, mode)
        rebuilt = tiny_classifier(trainable=mode)
        rebuilt.load_state_dict({**result["trained"], **result["frozen"]})
        with torch.no_grad():
            logits = rebuilt(labelled()["images_BCHW"], output="logits")
        assert torch.allclose(logits, result["logits"], atol=1e-4), "no engine computes with outdated weights"
