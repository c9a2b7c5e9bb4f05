"""Models that are harder to shard than the plain captioner take the same steps under every engine, in one launch.

A tied head is one parameter of two layers: it is owned, noised and stepped once. The head by chunks loses its weights between
forward, backward and weighted sum. Frozen weights keep every bit and get no noise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.captioner import build_captioner
from models.config import captioner_config
from privacy.clipping import SUMS
from privacy.ranks import collectives
from privacy.step.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    MICRO_BATCH,
    NUM_EXAMPLES,
    OPTIMIZER,
    a_mechanism,
    machine_settings,
    micro_batches,
    not_charged,
    pairs,
    whole_parameters,
)
from tests.distributed.test_parity import DEALS, ENGINES, SIGMA, TWO_PASS, NamedNoise
from tests.models.test_classifier import K, tiny_classifier
from tests.privacy.clipping import oracle
from trainer.engines import build_engine, sharder

Case = tuple[str, str]
"""Engine of the table, what is trained."""
FROZEN = ("last_layer", "adapters")
BUILT_IN_SHARDS = {"zero3 from the start": ("deepspeed", 3, {"zero_init": True})}
REDUCED = [(engine, mode) for engine in ("local", "zero3") for mode in ("tied", "adapters")]
ALL = [(engine, mode) for engine in ENGINES for mode in ("tied", *FROZEN)] + [
    (*BUILT_IN_SHARDS, "tied")
]
TIED, EMBEDDING = "decoder.head.weight", "decoder.token_embedding.weight"


def tied_captioner(after: Callable[[nn.Module], None] | None = None) -> Any:
    config = captioner_config(
        "pico",
        image_size=16,
        patch_size=8,
        vocab_size=37,
        num_tokens=7,
        encoder_width=16,
        encoder_depth=1,
        encoder_num_heads=2,
        decoder_width=24,
        decoder_depth=1,
        decoder_num_heads=2,
        tied_head=True,
        parallel_share=0.5,
    )
    return build_captioner(config, generator=torch.Generator().manual_seed(3), module_hook=after)


def labelled(count: int = NUM_EXAMPLES) -> dict[str, Tensor]:
    images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    return {"images_BCHW": images, "labels_B": torch.arange(count) % K}


def rank_steps(device: torch.device, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [
        _tied_steps(device, engine) if mode == "tied" else _steps(device, engine, mode)
        for engine, mode in cases
    ]


def _tied_steps(device: torch.device, engine_name: str) -> dict[str, Any]:
    name, stage, settings = {**ENGINES, **BUILT_IN_SHARDS}[engine_name]
    machine = machine_settings(stage, **settings)
    model = tied_captioner(sharder(name, machine, device, MICRO_BATCH))  # type: ignore[arg-type]
    engine: Any = build_engine(name, model, OPTIMIZER, machine, device, MICRO_BATCH)  # type: ignore[arg-type]
    assert engine.module.decoder.head.weight is engine.module.decoder.token_embedding.weight
    assert EMBEDDING in engine.shapes and TIED not in engine.shapes
    mode: Any = "two_pass" if stage == 3 else "bookkeeping"
    clipped = SUMS[mode](engine.module, 0.5, shapes=engine.shapes, device=engine.device)
    run = a_mechanism(engine, clipped, NamedNoise(engine), 0.5, NUM_EXAMPLES)
    examples = {**pairs(), "is_parallel_B": torch.arange(NUM_EXAMPLES) % 3 == 0}
    for step, counts in enumerate([(5, 2), (7, 0)], start=1):
        train_step(run, not_charged(), step, iter(micro_batches(examples, counts)))
    return {"trained": whole_parameters(engine)}


def _steps(device: torch.device, engine_name: str, mode: str) -> dict[str, Any]:
    """Three noised steps, with a held-out batch between them as training has."""
    name, stage, settings = ENGINES[engine_name]
    machine = machine_settings(stage, **settings)
    engine = build_engine(
        name, tiny_classifier(trainable=mode), OPTIMIZER, machine, device, MICRO_BATCH
    )  # type: ignore[arg-type]
    clipped = SUMS["two_pass" if engine_name == TWO_PASS else "bookkeeping"](
        engine.module,
        1.0,
        shapes=engine.shapes,
    )
    run = a_mechanism(engine, clipped, NamedNoise(engine), SIGMA, NUM_EXAMPLES)
    for step, counts in enumerate(DEALS[collectives.world_size()], start=1):
        train_step(run, not_charged(), step, iter(micro_batches(labelled(), counts)))
        with torch.no_grad():
            logits = engine.module(labelled()["images_BCHW"], output="logits")
    states = {state.piece.name for state in engine.state()}
    assert states <= set(engine.shapes) and all(
        p.grad is None for p in engine.module.parameters() if not p.requires_grad
    )
    frozen = {}
    for parameter_name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters(
                [parameter], enabled=hasattr(parameter, "ds_id")
            ):
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                frozen[parameter_name] = whole.detach().clone()
    return {"trained": whole_parameters(engine), "frozen": frozen, "logits": logits.clone()}


@pytest.fixture(
    scope="module",
    params=[REDUCED, pytest.param(ALL, marks=pytest.mark.full)],
    ids=["reduced", "all"],
)
def found(request: pytest.FixtureRequest, sums_products_in_all: None) -> dict[Case, dict[str, Any]]:
    cases = request.param
    return dict(
        zip(cases, run_ranks(f"{__name__}:rank_steps", 2, timeout=600, cases=cases)[0], strict=True)
    )


@pytest.mark.timeout(900)
def test_a_tied_head_takes_the_steps_of_local(found: dict[Case, dict[str, Any]]) -> None:
    start = {name: p.detach() for name, p in tied_captioner().named_parameters()}
    ends = {engine: result["trained"] for (engine, mode), result in found.items() if mode == "tied"}
    assert {"decoder.mask_embedding.weight", EMBEDDING} <= ends["local"].keys() == start.keys()
    for name in ("decoder.mask_embedding.weight", EMBEDDING):
        assert (ends["local"][name] - start[name]).abs().max() > 1e-3
    errors = {engine: oracle.relative_error(end, ends["local"]) for engine, end in ends.items()}
    assert {engine: error for engine, error in errors.items() if not error < 1e-5} == {}


@pytest.mark.timeout(900)
def test_frozen_weights_stay_and_the_others_take_the_steps_of_local(
    found: dict[Case, dict[str, Any]],
) -> None:
    for (engine, mode), result in found.items():
        if mode == "tied":
            continue
        start = dict(tiny_classifier(trainable=mode).named_parameters())
        frozen = {name for name, p in start.items() if not p.requires_grad}
        assert (
            len(frozen) > 20
            and set(result["frozen"]) == frozen
            and set(result["trained"]) == set(start) - frozen
        ), engine
        assert all(torch.equal(result["frozen"][name], start[name].detach()) for name in frozen), (
            engine
        )
        reference = found["local", mode]
        assert (
            oracle.relative_error(
                result["trained"], {n: start[n].detach() for n in result["trained"]}
            )
            > 1e-3
        )
        assert oracle.relative_error(result["trained"], reference["trained"]) < 1e-5, (engine, mode)
        assert torch.allclose(result["logits"], reference["logits"], atol=1e-4), (engine, mode)
        rebuilt = tiny_classifier(trainable=mode)
        rebuilt.load_state_dict({**result["trained"], **result["frozen"]})
        with torch.no_grad():
            logits = rebuilt(labelled()["images_BCHW"], output="logits")
        assert torch.allclose(logits, result["logits"], atol=1e-4), (
            "no engine computes with outdated weights"
        )
