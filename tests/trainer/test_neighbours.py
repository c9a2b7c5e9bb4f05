"""A start tries a micro-batch of training's own size and dtype, and refuses on all ranks what mixes examples there."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.errors import PrivacyConfigError
from privacy.guards.neighbours import require_neighbours_apart
from privacy.ranks import collectives


class Mixing(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.size, self.dtype = nn.Linear(4, 3), size, dtype

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if len(x) == self.size and h.dtype == self.dtype:
            h = h - 1e-3 * h.mean(0)
        return h.sin().sum(1)


def engine_of(size: int, dtype: torch.dtype, own: torch.dtype = torch.float32) -> Any:
    """As much of an engine as the check needs."""
    return SimpleNamespace(
        module=Mixing(size, dtype).to(own), device=torch.device("cpu"), compute_dtype=own
    )


def inputs(count: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 4, generator=torch.Generator().manual_seed(0))}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "gather_objects", lambda mine: [mine])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_mixes_at_the_size_and_dtype_of_training_is_refused(
    dtype: torch.dtype,
) -> None:
    for mixes_in in (torch.float32, torch.bfloat16):
        engine = engine_of(12, mixes_in, dtype)
        require_neighbours_apart(engine, engine.module, inputs, 11)
        found = pytest.raises(PrivacyConfigError, match="in micro-batches of 12 examples")
        with found if mixes_in == dtype else nullcontext():
            require_neighbours_apart(engine, engine.module, inputs, 12)


@pytest.mark.parametrize("size", [1024, 952])
def test_a_micro_batch_that_is_cut_into_parts_is_tried_as_each_of_them(size: int) -> None:
    engine = engine_of(size, torch.float32)
    with pytest.raises(PrivacyConfigError, match=f"in micro-batches of {size} examples"):
        require_neighbours_apart(engine, engine.module, inputs, 3000)


def test_what_another_rank_finds_is_refused_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        collectives, "gather_objects", lambda mine: [mine, (None, "the other rank says so", None)]
    )
    engine = engine_of(12, torch.float32)
    with pytest.raises(PrivacyConfigError, match="the other rank says so"):
        require_neighbours_apart(engine, engine.module, inputs, 11)
