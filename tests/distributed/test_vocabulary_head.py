"""The vocabulary head by chunks under engines that take the weights away between forward, backward and weighted sum."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.clipping import ClippedSum
from privacy.step.reduction import reduce_to_owners
from tests.distributed import test_parity
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import MICRO_BATCH, OPTIMIZER, double, micro_batches, pairs, tiny_captioner
from tests.privacy.clipping import oracle
from trainer.engines import build_engine

COUNTS = (5, 2)
MODES = ("bookkeeping", "two_pass")


def chunked_captioner(dtype: torch.dtype = torch.float32) -> Any:
    """A micro-batch of 2 captions of 6 tokens and 37 words is cut into five parts."""
    model: Any = tiny_captioner(dtype)
    model.decoder.head.max_logits = 100
    return model


def rank_sums(device: torch.device, engines: list[str], c: float) -> list[dict[str, Tensor]]:
    return [dict(_sums(device, engine, mode, c)) for engine in engines for mode in MODES]


def _sums(device: torch.device, engine_name: str, mode: Any, c: float) -> Iterator[tuple[str, Tensor]]:
    name, stage, settings = test_parity.ENGINES[engine_name]
    machine = test_parity.machine_settings(stage, **settings)
    engine = build_engine(name, chunked_captioner(), OPTIMIZER, machine, device, MICRO_BATCH)  # type: ignore[arg-type]
    clipped = ClippedSum(engine.module, c, shapes=engine.shapes, mode=mode, device=engine.device, self_check=False)
    for batch in micro_batches(pairs(), COUNTS):
        clipped.add_micro_batch(engine.module, batch.inputs, batch.is_padding_B)
    for shard in reduce_to_owners(clipped, engine.layout):
        yield f"{shard.name}|{shard.offset}", shard.values


@pytest.mark.parametrize("engines", [["zero3"], pytest.param(list(test_parity.ENGINES), marks=[pytest.mark.full])])
def test_clipped_sums_are_as_good_as_a_float32_loop(engines: list[str]) -> None:
    exact_model, model, inputs = chunked_captioner(torch.float64), chunked_captioner(), pairs()
    c = oracle.median_norm(exact_model, exact_model, double(inputs))
    exact = oracle.clipped_sum(exact_model, exact_model, double(inputs), c)
    loop_error = oracle.relative_error(oracle.clipped_sum(model, model, inputs, c), exact)
    results = run_ranks(f"{__name__}:rank_sums", 2, engines=engines, c=c)
    for i, case in enumerate((engine, mode) for engine in engines for mode in MODES):
        found = {n: torch.full((p.numel(),), torch.nan, dtype=torch.float64) for n, p in model.named_parameters()}
        for rank in results:
            for key, values in rank[i].items():
                parameter, offset = key.split("|")
                found[parameter][int(offset) : int(offset) + len(values)] = values
        error = oracle.relative_error(found, exact)
        assert error <= 2 * loop_error, (case, error, loop_error)
