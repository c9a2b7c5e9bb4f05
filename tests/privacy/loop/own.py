"""A small loop of one's own for tests, and an independent second way to its weights."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.ledger.records import LedgerState, read_ledger
from privacy.loop import PrivateLoop, floats, integers
from privacy.plan.numbers import PrivacyPlan
from privacy.run import mechanism
from privacy.sampling.keys import SamplingKey
from privacy.sampling.sampler import sampler_of

N, D, K = 60, 6, 3


class Rows(list[Any]):
    """A data set of tuples, as torch and Hugging Face have them: a list. What is read of it goes through `change`."""

    change: Callable[[Any], Any] = staticmethod(lambda item: item)

    def __getitem__(self, index: Any) -> Any:
        return self.change(super().__getitem__(index))


def rows(count: int = N) -> Rows:
    generator = torch.Generator().manual_seed(7)
    x, y = (
        torch.randn(count, D, generator=generator),
        torch.randint(K, (count,), generator=generator),
    )
    return Rows((a, int(b)) for a, b in zip(x, y, strict=True))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, K))


def cross_entropy(model: nn.Module) -> Callable[..., Tensor]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    return loss


def make(
    run_dir: Path, model: nn.Module | None = None, dataset: Any = None, **changes: Any
) -> PrivateLoop:
    """A loop of six steps; `optimizer` is made of the model's trainable parameters unless it is given."""
    model = net() if model is None else model
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(trainable, lr=0.5)
    asked = {
        "loss": cross_entropy(model),
        "example": (floats(D), integers(K)),
        "expected_batch_size": 15,
        "num_steps": 6,
        "noise_multiplier": 16.0,
        "micro_batch_size": 8,
        "starts_from": "public",
    }
    return PrivateLoop(
        model,
        optimizer,
        rows() if dataset is None else dataset,
        run_dir=run_dir,
        **(asked | changes),
    )


class Silent:
    """A noise source that adds nothing, so that weights can be compared with sums that somebody else computes."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)


@contextlib.contextmanager
def quick(*, silent: bool = False, same_coins: bool = False) -> Iterator[pytest.MonkeyPatch]:
    """Without the seconds that an accountant takes; `silent` without noise, and `same_coins` draws the same items in all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "privacy.accounting.accountants.EpsilonTable.epsilon", lambda *_arguments: 1.0
        )
        patch.setattr(PrivacyPlan, "epsilon_after", lambda *_arguments: 1.0)
        if silent:
            patch.setattr(mechanism, "SystemNoise", Silent)
        for name in (
            ("coin_key", "row_key", "example_key") if same_coins else ()
        ):  # a session has others
            patch.setattr(SamplingKey, name, lambda *_: bytes(32))
        yield patch


def ledger_of(run_dir: Path) -> LedgerState:
    return read_ledger(run_dir / "ledger.jsonl")


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def members_of(loop: PrivateLoop, step: int, nonce: bytes, attempt: int = 0) -> np.ndarray:
    """Who is in a step, by the sampler alone."""
    sampler = sampler_of(loop.plan)
    return sampler.members(sampler.coin_key(loop._ledger.key, nonce, attempt), step)


def clipped_mean(
    model: nn.Module, items: list[tuple[Tensor, int]], batch_size: int, bound: float = 1.0
) -> list[Tensor]:
    """The sum of clipped gradients over the public batch size, example by example with torch's backward."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    totals = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for x, y in items:
        loss = F.cross_entropy(model(x[None]), torch.tensor([y]))
        gradients = [g.double() for g in torch.autograd.grad(loss, parameters)]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        factor = min(1.0, bound / float(norm))
        for total, g in zip(totals, gradients, strict=True):
            total += factor * g
    return [total / batch_size for total in totals]
