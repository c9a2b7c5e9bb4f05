"""Wirings that no rule foresaw, alone and in generated chains: never silently wrong."""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.privacy.clipping.wirings import PIECES, Model, outcome


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", PIECES)
def test_a_foreign_wiring_is_exact_or_refused_or_found(name: str) -> None:
    expected, make = PIECES[name]
    torch.manual_seed(0)
    assert outcome(Model(make()).double()).startswith(expected)


def pieces_of(seed: int) -> list[str]:
    """Two to four pieces, most of them right, so that what is wrong has company."""
    draw = random.Random(seed)
    right = [name for name, (expected, _) in PIECES.items() if expected == "exact"]
    names = draw.choices(right, k=draw.randint(2, 4))
    if draw.random() < 0.5:
        names[draw.randrange(len(names))] = draw.choice(list(PIECES))
    return names


def chain(seed: int) -> nn.Module:
    """Pieces of `pieces_of`, some weights shared between pieces, some pieces called twice, some under a checkpoint."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    pieces = [PIECES[name][1]() for name in pieces_of(seed)]
    if draw.random() < 0.4 and "parameter_hook" not in pieces_of(seed):  # which belongs to one weight
        pieces[-1].a.weight = pieces[0].a.weight  # type: ignore[union-attr]
    if draw.random() < 0.3 and "parameter_in_a_closure" not in pieces_of(
        seed
    ):  # which would keep what is no parameter then
        pieces[0].gain = pieces[-1].norm.weight  # type: ignore[union-attr]
    if draw.random() < 0.3:
        pieces.append(pieces[0])
    if draw.random() < 0.3:
        pieces[0] = Checkpointed(pieces[0])
    return Model(*pieces).double()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def tried(seeds: range) -> Counter[str]:
    """How many chains of what outcome; a chain with a wrong piece is never exact."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        result = outcome(chain(seed)).partition(":")[0]
        if any(PIECES[name][0] != "exact" for name in pieces_of(seed)):
            assert result != "exact", pieces_of(seed)
        seen[result] += 1
    return seen


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_chains_of_wirings() -> None:
    seen = tried(range(25))
    assert seen["exact"] >= 5 and seen["found"] >= 2 and seen["refused"] >= 2


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_many_chains_of_wirings() -> None:
    assert tried(range(25, 2025)).total() == 2000
