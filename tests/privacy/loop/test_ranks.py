"""Ranks with a loop of their own take the same steps and make one claim, and one goes on alone; other data are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from privacy import verify
from privacy.errors import PrivacyConfigError
from privacy.loop import PrivateLoop, floats, integers
from tests.distributed.ranks import run_ranks
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.loop.own import D, K, cross_entropy, net, rows, weights


def rank_loop(
    device: torch.device, run_dir: Path, extra_items: int = 0
) -> tuple[Any, float, float] | str:
    """Weights, epsilon and delta at the end, or the refusal. Ranks begin with different weights: those of rank 0 count.

    So do their buffers, whatever their dtype and strides.
    """
    rank = dist.get_rank()
    model, data = net(seed=rank), rows(60 + rank * extra_items)
    weight = next(model.parameters())
    weight.data = weight.data.t().contiguous().t()
    for number, dtype in enumerate(
        (torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64)
    ):
        model.register_buffer(f"fixed_{number}", torch.full((2, 3), rank).to(dtype).t())
    model.register_buffer("expanded", torch.full((1,), float(rank)).expand(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        with PrivateLoop(
            model,
            optimizer,
            data,
            loss=cross_entropy(model),
            example=(floats(D), integers(K)),
            run_dir=run_dir,
            expected_batch_size=15,
            num_steps=6,
            noise_multiplier=4.0,
            micro_batch_size=4,
            save_every=2,
            starts_from="public",
        ) as loop:
            for _ in loop:
                pass
    except PrivacyConfigError as error:
        return str(error)
    assert not any(x.to(torch.complex64).any() for x in model.buffers())
    return weights(model).tolist(), loop.epsilon, loop.delta


def test_two_ranks_take_the_same_steps_and_one_resumes_them(tmp_path: Path) -> None:
    """The epsilon is that of the verifier, and of somebody who counts lines."""
    first, second = run_ranks(f"{__name__}:rank_loop", 2, run_dir=tmp_path / "run")
    assert first == second
    _, epsilon, delta = first
    code, found = verify.verify(tmp_path / "run", None)
    charged, recounted = recompute(tmp_path / "run/ledger.jsonl")
    assert (code, charged, found["delta"]) == (0, 6, delta)
    assert epsilon == pytest.approx(found["epsilon"], rel=1e-9) and epsilon == pytest.approx(
        recounted, rel=2e-3
    )
    assert run_ranks(f"{__name__}:rank_loop", 1, run_dir=tmp_path / "run") == [first]


def test_ranks_with_other_data_are_refused_on_all_of_them(tmp_path: Path) -> None:
    for said in run_ranks(f"{__name__}:rank_loop", 2, run_dir=tmp_path / "run", extra_items=1):
        assert "ranks have another data set" in said
    assert not (tmp_path / "run").exists()
