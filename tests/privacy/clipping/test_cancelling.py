"""Examples whose own tokens cancel: what they contribute, and who is told."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.certified.certified_sum import CertifiedSum
from privacy.clipping import SUMS
from privacy.clipping.clipped_sum import Mode
from privacy.clipping.norms import NormTally
from privacy.gradients.per_example_gradients import (
    Contribution,
    Dense,
    EmbeddingGradient,
    OuterProducts,
)
from privacy.plan.lattice import Lattice
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle


class Scores(nn.Module):
    """A score for each token behind a LayerNorm of width 2, which makes almost all tokens equal, and a softmax over tokens."""

    def __init__(self, width: int, *, words: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(6, 2) if words else nn.Linear(2, 2)
        self.norm, self.a, self.b = nn.LayerNorm(2), nn.Linear(2, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.b(self.a(self.norm(self.first(x).relu() + 0.1 * self.first(x))))
        return F.cross_entropy(self.last(h).flatten(1), y, reduction="none")


def example(width: int, *, words: bool = False) -> tuple[nn.Module, dict[str, Tensor], list[float]]:
    """A model in fp64, its inputs and the norms of their gradients."""
    torch.manual_seed(0)
    model = Scores(width, words=words).double()
    x = torch.randint(6, (10, 5)) if words else torch.randn(10, 5, 2).double()
    inputs = {"x": x, "y": torch.randint(0, 5, (10,))}
    return (
        model,
        inputs,
        [oracle.norm(g) for g in oracle.per_example_gradients(model, model, inputs)],
    )


def contribution(
    model: nn.Module, inputs: dict[str, Tensor], row: int, bound: float, mode: Mode
) -> tuple[float, int]:
    """(length of what one example adds, whether it is counted as cancelled)."""
    total = SUMS[mode](model, bound)
    stats = total.add_micro_batch(model, inputs, torch.arange(10) != row)
    total.detach()
    return oracle.norm(dict(total.sums())), int(stats.num_cancelled)


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize(
    ("width", "words", "writes_out"),
    [(32, False, True), (32, True, True), pytest.param(100, False, True, marks=pytest.mark.full)],
    indirect=["writes_out"],
)
def test_small_parameters_make_every_contribution_exact(
    mode: Mode, width: int, words: bool, writes_out: bool
) -> None:
    model, inputs, norms = example(width, words=words)
    for row in [i for i, norm in enumerate(norms) if norm > 1e-9]:
        length, cancelled = contribution(model, inputs, row, norms[row] / 4, mode)
        assert length == pytest.approx(norms[row] / 4, rel=1e-3) and cancelled == 0


def test_others_contribute_less_and_are_counted() -> None:
    """Where gradients are too large to be written out."""
    model, inputs, norms = example(32)
    found = [contribution(model, inputs, row, norms[row] / 4, "bookkeeping") for row in range(10)]
    shares = [length / (norm / 4) for (length, _), norm in zip(found, norms, strict=True)]
    assert min(shares) < 0.9 and max(shares) <= 1.001
    assert [cancelled for _, cancelled in found] == [int(share < 0.999) for share in shares]
    assert (
        contribution(model, inputs, 0, 1e9, "bookkeeping")[1] == 0
    )  # not clipped, so nothing is lost


def test_contract_4_the_longest_sum_counts_wherever_its_parameter_comes() -> None:
    """Of 2,000 tokens 960 cancel 960 others: S is 25 N, and e(64 T) S is more than r / 2 pays for."""
    signs_T = torch.tensor([1.0] * 1040 + [-1.0] * 960)
    matrix = OuterProducts(signs_T.view(1, -1, 1), torch.ones(1, 2000, 1))
    others: list[Contribution] = [
        Dense(torch.zeros(1, 3)),
        EmbeddingGradient(torch.zeros(1, 1).long(), torch.zeros(1, 1, 2)),
    ]
    orders: list[list[Contribution]] = [[matrix, *others], [*others, matrix]]
    norms = []
    for contributions in orders:
        tally = NormTally(1, torch.device("cpu"), torch.float32)
        for contribution in contributions:
            tally.add([contribution])
        norms.append(float(tally.safe_norm()))
    norm, gross, u = 80.0, 2000.0, 2.0**-24
    error = matrix.norm_terms * u * gross**2
    rounding = (8 + 4 * (64 * 2000) ** 0.5) * u * gross
    assert norms[0] == norms[1] >= ((norm**2 + error) ** 0.5 + rounding) / 1.0005 * (1 - 1e-6)


def call(kind: str, sign: float) -> Contribution:
    """One call that adds `sign` to the one number of a parameter."""
    one, signed = torch.ones(1, 1, 1), torch.full((1, 1, 1), sign)
    match kind:
        case "rows":
            return EmbeddingGradient(torch.zeros(1, 1).long(), signed)
        case "written":
            return Dense(signed)
    return OuterProducts(one, signed)


@pytest.mark.parametrize(
    "kinds", [("products",), ("rows",), ("written",), ("products", "rows"), ("products", "written")]
)
def test_contract_4_lengths_of_all_calls_of_a_parameter_add_up(kinds: tuple[str, ...]) -> None:
    """Of 100 calls 49 cancel 49 others: together they are 100 long, of which at most 32 C are added in part."""
    calls = [call(kinds[i % len(kinds)], 1.0 if i < 51 else -1.0) for i in range(100)]
    tally = NormTally(1, torch.device("cpu"), torch.float32)
    tally.add(calls)
    assert float(tally.totals.squared_B) == pytest.approx(4.0)
    assert float(tally.totals.gross_squared_B.sqrt()) >= 100 * (1 - 1e-6)
    assert 100 / float(tally.safe_norm()) <= 32 * (1 + SENSITIVITY_SLACK / 2) * (1 + 1e-6)


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass", "certified"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_micro_batch_without_rows_adds_nothing(mode: Mode, dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Linear(4, 3), nn.LayerNorm(3), nn.Flatten(), nn.Linear(6, 1), nn.Flatten(0)
    ).to(dtype)
    total = (
        CertifiedSum(model, Lattice.of(1.0, 64, 1.0))
        if mode == "certified"
        else SUMS[mode](
            model,
            1.0,
        )
    )
    some = total.add_micro_batch(
        model, {"input": torch.randn(3, 2, 4, dtype=dtype)}, torch.zeros(3, dtype=torch.bool)
    )
    before = {name: value.clone() for name, value in total.sums()}
    none = total.add_micro_batch(
        model, {"input": torch.zeros(0, 2, 4, dtype=dtype)}, torch.zeros(0, dtype=torch.bool)
    )
    assert all(torch.equal(value, before[name]) for name, value in total.sums())
    assert [float(x) for x in none] == [0.0] * len(none)
    assert [x.dtype for x in none] == [x.dtype for x in some] and [x.shape for x in none] == [
        x.shape for x in some
    ]
