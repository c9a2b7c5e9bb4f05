"""Captioners under engines that shard: a tied head is owned, noised and stepped once; the vocabulary head works by chunks.

A tied head is one parameter of two layers. The head by chunks loses its weights between forward, backward and weighted sum.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.captioner import build_captioner
from models.config import captioner_config
from privacy.clipping import ClippedSum
from privacy.step.step import train_step
from tests.distributed import test_parity
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    MICRO_BATCH,
    NUM_EXAMPLES,
    OPTIMIZER,
    a_mechanism,
    machine_settings,
    micro_batches,
    pairs,
    whole_parameters,
)
from tests.privacy.clipping import oracle
from trainer.engines import build_engine, sharder

BUILT_IN_SHARDS = "zero3 from the start"
ENGINES = {**test_parity.ENGINES, BUILT_IN_SHARDS: ("deepspeed", 3, {"zero_init": True})}
TIED, EMBEDDING = "decoder.head.weight", "decoder.token_embedding.weight"


def tied_captioner(after: Callable[[nn.Module], None] | None = None) -> Any:
    config = captioner_config(
        "pico", image_size=16, patch_size=8, vocab_size=37, num_tokens=7, encoder_width=16, encoder_depth=1,
        encoder_num_heads=2, decoder_width=24, decoder_depth=1, decoder_num_heads=2, tied_head=True, parallel_share=0.5,
    )  # fmt: skip
    return build_captioner(config, generator=torch.Generator().manual_seed(3), after=after)


def examples() -> dict[str, Tensor]:
    return {**pairs(), "is_parallel_B": torch.arange(NUM_EXAMPLES) % 3 == 0}


def rank_two_steps(device: torch.device, engines: list[str]) -> list[dict[str, Tensor]]:
    return [_two_steps(device, engine) for engine in engines]


def _two_steps(device: torch.device, engine_name: str) -> dict[str, Tensor]:
    name, stage, settings = ENGINES[engine_name]
    machine = machine_settings(stage, **settings)
    model = tied_captioner(sharder(name, machine, device, MICRO_BATCH))  # type: ignore[arg-type]
    engine: Any = build_engine(name, model, OPTIMIZER, machine, device, MICRO_BATCH)  # type: ignore[arg-type]
    assert engine.module.decoder.head.weight is engine.module.decoder.token_embedding.weight
    assert EMBEDDING in engine.shapes and TIED not in engine.shapes
    mode: Any = "two_pass" if stage == 3 else "bookkeeping"
    clipped = ClippedSum(engine.module, 0.5, shapes=engine.shapes, mode=mode, device=engine.device, self_check=False)
    run = a_mechanism(engine, clipped, test_parity.NamedNoise(engine), 0.5, NUM_EXAMPLES)
    for step, counts in enumerate([(5, 2), (7, 0)], start=1):
        train_step(run, step, iter(micro_batches(examples(), counts)))
    return whole_parameters(engine)


@pytest.mark.parametrize(
    "engines",
    [["local", "zero3"], pytest.param(list(ENGINES), marks=[pytest.mark.full])],
    ids=["some", "all"],
)
def test_every_engine_takes_the_steps_of_local(engines: list[str]) -> None:
    start = {name: p.detach() for name, p in tied_captioner().named_parameters()}
    found, *_ = run_ranks(f"{__name__}:rank_two_steps", 2, engines=engines)
    ends = dict(zip(engines, found, strict=True))
    assert {"decoder.mask_embedding.weight", EMBEDDING} <= ends["local"].keys() == start.keys()
    for name in ("decoder.mask_embedding.weight", EMBEDDING):
        assert (ends["local"][name] - start[name]).abs().max() > 1e-3
    errors = {engine: oracle.relative_error(end, ends["local"]) for engine, end in ends.items()}
    assert {engine: error for engine, error in errors.items() if not error < 1e-5} == {}
