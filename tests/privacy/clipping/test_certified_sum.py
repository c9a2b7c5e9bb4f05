"""Certified sums are those of clipping, in whole numbers, and neighbours differ by one example's integers and nothing else."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from privacy.certified import certified_sum
from privacy.certified.certified_sum import CertifiedSum
from privacy.clipping.clip_factors import FUNCTIONS, ClippingFunction
from privacy.errors import PrivacyConfigError
from privacy.guards.certified_rows import check_rows
from privacy.plan.lattice import Lattice
from tests.distributed.test_engines import pairs, tiny_captioner
from tests.privacy.clipping import oracle
from tests.privacy.clipping.test_oracle import tiny

Inputs = dict[str, Tensor]


def sums(
    model: nn.Module,
    inputs: Inputs,
    bound: float = 1.0,
    *,
    micro: int = 7,
    out: frozenset[int] = frozenset(),
    task: Callable[..., Tensor] | None = None,
    **options: Callable[[list[str], float], ClippingFunction],
) -> dict[str, Tensor]:
    """Integers by parameter; `out` rows are padding; the last micro-batch is filled up with padding."""
    total = CertifiedSum(model, Lattice.of(bound, 1 << 16, 1.0), **options)
    count = len(next(iter(inputs.values())))
    for start in range(0, count, micro):
        rows = torch.arange(start, start + micro)
        is_padding_B = (rows >= count) | torch.tensor([int(r) in out for r in rows])
        total.add_micro_batch(
            task or model,
            {n: x[rows.clamp(max=count - 1)] for n, x in inputs.items()},
            is_padding_B,
        )
    result = {name: value.clone() for name, value in total.sums()}
    total.detach()
    return result


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def squared_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    return sum(x * x for name in a for x in (a[name] - b[name]).flatten().tolist())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_sum_is_that_of_clipping(name: str, tied: bool) -> None:
    model, inputs = tiny(tied=tied, dtype=torch.float32)
    c = oracle.median_norm(model, model, inputs)
    grid = Lattice.of(c, 1 << 16, 1.0)
    actual = {
        n: x.double() * 2.0**-grid.exponent
        for n, x in sums(model, inputs, c, function=FUNCTIONS[name]).items()
    }
    expected = oracle.clipped_sum(
        model, model, inputs, c, function=FUNCTIONS[name], dtype=torch.float64
    )
    assert oracle.relative_error(actual, expected) < 3e-6


def test_parts_are_of_equal_size_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the order of examples."""
    model, inputs = tiny(dtype=torch.float32)
    inputs = {n: x[torch.arange(12) % 7] for n, x in inputs.items()}
    in_threes = sums(model, inputs, micro=3)
    coordinates = sum(p.numel() for p in model.parameters() if p.requires_grad)
    monkeypatch.setattr(certified_sum, "WRITTEN_BYTES", 4 * coordinates * 3 + 8)
    grid = CertifiedSum(model, Lattice.of(1.0, 64, 1.0))
    assert [grid.size_of_part(n) for n in (12, 7, 8, 2)] == [3, 1, 2, 2]
    grid.detach()
    assert equal(in_threes, sums(model, inputs, micro=12))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert equal(in_threes, sums(model, {n: x[order] for n, x in inputs.items()}, micro=6))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_an_example_that_is_not_finite_contributes_zero(bad: float) -> None:
    model, inputs = tiny(dtype=torch.float32)
    without = sums(model, inputs, out=frozenset({3}))
    inputs["images_BCHW"][3] = bad
    total = sums(model, inputs)
    limit = Lattice.of(1.0, 1 << 16, 1.0).limit
    assert equal(without, total) if bad != 3e38 else squared_distance(without, total) <= limit


def test_neighbours_of_both_kinds_differ_by_one_vector_within_the_bound() -> None:
    """Zeroed out, or not drawn and the rows behind it closed up: the integers of the others stay what they were."""
    model, inputs = tiny(dtype=torch.float32)
    limit = Lattice.of(0.01, 1 << 16, 1.0).limit
    whole = sums(model, inputs, 0.01, micro=3)
    for i in range(7):
        zeroed = sums(model, inputs, 0.01, micro=3, out=frozenset({i}))
        others = [j for j in range(7) if j != i]
        left_out = sums(model, {n: x[others] for n, x in inputs.items()}, 0.01, micro=3)
        assert equal(zeroed, left_out)
        assert 0.999 * limit < squared_distance(whole, zeroed) <= limit


@given(
    a=st.floats(-38, 38),
    g=st.floats(-38, 38),
    spread=st.floats(0, 20),
    tokens=st.integers(1, 40),
    bound=st.sampled_from([1e-12, 0.3, 1.0, 1e12]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_one_example_of_any_size_is_within_the_bound(
    a: float, g: float, spread: float, tokens: int, bound: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(24, 8)

    def values(exponent: float, width: int) -> Tensor:
        size = exponent + spread * (torch.rand(2, tokens, width, generator=generator) - 0.5)
        return torch.randn(2, tokens, width, generator=generator) * 10.0**size

    inputs = {"x": values(a, 24), "g": values(g, 8)}
    task = lambda x, g: (layer(x) * g).sum((1, 2))  # noqa: E731
    whole, zeroed = (
        sums(layer, inputs, bound, micro=2, task=task, out=o) for o in (frozenset(), frozenset({0}))
    )
    bound_squared = Fraction(bound) ** 2 * Fraction(4) ** Lattice.of(bound, 1 << 16, 1.0).exponent
    assert squared_distance(whole, zeroed) <= bound_squared


class Leaking(nn.Module):
    """Its gradient depends, a little, on the row or on the neighbours."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.clean, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.clean(x)
        if self.kind == "row":
            y = y * (1 + 1e-6 * torch.arange(len(x))[:, None])
        elif self.kind == "neighbours":
            y = y * (1 + 1e-6 * y.detach().abs().nan_to_num().max().clamp(max=5))
        elif self.kind == "padding":
            y = y * (1 + 1e-6 * (x == x).all(1).sum())
        return self.layer(y).sum(1)


@pytest.mark.parametrize("kind", ["row", "neighbours", "padding"])
def test_the_check_finds_gradients_that_depend_on_others(kind: str) -> None:
    torch.manual_seed(0)
    model = Leaking(kind)
    grid = CertifiedSum(model, Lattice.of(1.0, 64, 1.0))
    with pytest.raises(
        PrivacyConfigError, match=r"(clean|layer)\.(weight|bias).*micro_batch_size = 1"
    ):
        check_rows(grid, model, {"x": torch.randn(6, 4)})
    if kind == "row":  # with one row there is nothing to depend on
        check_rows(grid, model, {"x": torch.randn(1, 4)})


@pytest.mark.parametrize(
    "size", [1, *(pytest.param(size, marks=pytest.mark.full) for size in (2, 5)), 16]
)
def test_the_check_passes_on_the_captioner(size: int) -> None:
    """And its kernels give an example the same bits in every row."""
    model = tiny_captioner()
    grid = CertifiedSum(model, Lattice.of(1.0, 64, 1.0))
    found = check_rows(grid, model, pairs(size))
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_sum_needs_a_lattice_that_is_fine_enough() -> None:
    with pytest.raises(PrivacyConfigError, match="smaller batch"):
        CertifiedSum(nn.Linear(1000, 1000), Lattice(1.0, 8))
