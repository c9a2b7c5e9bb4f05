"""What is compiled on CUDA, compiled for this CPU: whole numbers to the last bit, norms within their bound, sums of whole models.

And the ghost norm of bf16 on matrix units, of which emulations stand here; the kernels themselves on a GPU.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import SUMS, ClippedSum
from privacy.clipping.clipped_sum import needs_blanking
from privacy.clipping.norms import rounding
from privacy.gradients import per_example_gradients as contributions
from privacy.gradients.per_example_gradients import OuterProducts, blank_rows
from privacy.gradients.rules import _layer_norm, _rms_norm
from privacy.numerics import fused
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.sums.grid import Grid
from privacy.sums.totals import ParameterSum
from tests.privacy.clipping import oracle
from tests.privacy.clipping.neighbours import Product
from tests.privacy.clipping.test_sensitivity import cancelling, change

CPU = torch.device("cpu")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Fused functions run compiled; their names gather in the set."""
    names: set[str] = set()

    def launch(
        function: Callable[..., Any], arguments: tuple[Any, ...], for_all_sizes: bool
    ) -> Any:
        names.add(function.__name__)
        return fused.compiled(function, for_all_sizes)(*arguments)

    monkeypatch.setattr(fused, "launch", launch)
    limits = ParameterSum._limits  # as on CUDA: numbers are tensors
    full = lambda x: None if x is None else torch.full((), x, dtype=torch.float64)  # noqa: E731
    monkeypatch.setattr(
        ParameterSum, "_limits", lambda self, count: tuple(map(full, limits(self, count)))
    )
    yield names
    torch._dynamo.reset()
    fused.compiled.cache_clear()


def addends(generator: torch.Generator, unit: float, most: float, dtype: torch.dtype) -> Tensor:
    """Ordinary ones, half-way points and their neighbours, the largest, what is larger, and no numbers."""
    halves = (torch.randint(-1000, 1000, (500,), generator=generator).double() + 0.5) * unit
    near = torch.nextafter(halves.to(dtype), torch.tensor(math.inf, dtype=dtype))
    large = (
        torch.tensor(
            [most, -most, 1.5 * most, -7 * most, 1e30, -1e30, math.inf, -math.inf, math.nan]
        ).double()
        * unit
    )
    ordinary = torch.randn(3001, generator=generator, dtype=torch.float64) * most * unit / 3
    return torch.cat([halves.to(dtype), near, large.to(dtype), ordinary.to(dtype), -near])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contract_4_compiled_rounding_has_the_bits_of_the_reference(
    dtype: torch.dtype, compiles: set[str]
) -> None:
    """`make test` compares the sums of a whole model, below."""
    generator = torch.Generator().manual_seed(0)
    for cap, num_examples, parts in [(64, 64, 1), (200_000, 64, 1), (200_000, 500, 3)]:
        grid = Grid.of(190_000_000, torch.float32, cap, 6000)
        unit = grid.unit(0.7)
        assert unit is not None
        values = [
            addends(generator, 2.0**-unit.exponent, num_examples * unit.largest, dtype)
            for _ in range(parts)
        ]
        sums = []
        for is_compiled in (False, True):
            (total,) = ParameterSum.zeros([len(values[0]) + 5], grid.layout, unit, CPU)
            for _ in range(5):  # and carries
                total.make_room()
                if is_compiled:
                    total.add([x.clone() for x in values], num_examples, 3)
                else:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(
                            fused, "launch", lambda function, arguments, _: function(*arguments)
                        )
                        total.add([x.clone() for x in values], num_examples, 3)
            sums.append((total.low, total.high, total.read(slice(None))))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*sums, strict=True))  # type: ignore[arg-type]
        assert sums[0][2].any()
    assert compiles == {"_add", "_carry"}


@pytest.fixture
def on_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 takes CUDA's way; products, whose operands are widened first, are those of the CPU."""
    monkeypatch.setattr(contributions, "_has_bf16_units", lambda device: True)


SHAPES = [(2, 530, 40, 90), (3, 59, 100, 1300), (1, 1, 1, 1), (2, 5, 3, 70), (2, 300, 2500, 30)]
"""(B, T, d, p): one strip of tokens or two, sums in one part or two."""


def cases(shapes: list[tuple[int, int, int, int]] = SHAPES) -> Iterator[tuple[Tensor, Tensor]]:
    """Random ones, and activations with a common mean whose gradients cancel over the tokens."""
    generator = torch.Generator().manual_seed(3)
    for batch_size, tokens, d, p in shapes:
        a = torch.randn(batch_size, d, tokens, generator=generator).transpose(1, 2)
        yield a, torch.randn(batch_size, tokens, 2 * p, generator=generator)[:, :, ::2]
    for mean in (30.0, 1e5):
        example = cancelling(58, 150, 1200, mean, 0)
        yield example["x"], example["w"]


def check_norm(a: Tensor, g: Tensor) -> None:
    """Within the bound of norms.py of the exact one."""
    part = OuterProducts(a, g)
    squared_B, gross_B, underflow_B = part.norm()
    wide_a, wide_g = a.double(), g.double()
    exact_B = torch.bmm(wide_g.transpose(1, 2), wide_a).square().sum((1, 2))
    exact_gross_B = (wide_a.norm(dim=2) * wide_g.norm(dim=2)).sum(1)
    bound_B = part.norm_terms * 2.0**-24 * exact_gross_B.square() + underflow_B**2
    assert ((squared_B - exact_B).abs() <= bound_B).all()
    torch.testing.assert_close(
        gross_B.double(), exact_gross_B, rtol=1e-3 if a.is_cuda else 1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_4_norms_of_strips_and_parts(dtype: torch.dtype, on_matrix_units: None) -> None:
    for a, g in cases():
        check_norm(a.to(dtype), g.to(dtype))


@pytest.mark.full
def test_contract_4_compiled_norms(on_matrix_units: None, compiles: set[str]) -> None:
    """`make test` has those of a whole model, below."""
    for a, g in cases(SHAPES[:2]):
        check_norm(a.bfloat16(), g.bfloat16())
    assert compiles == {"_strip", "_norm_of_strips"}


@pytest.mark.parametrize("tokens", [39, 197])
@pytest.mark.parametrize("width", [64, 1024, 16384])
def test_contract_4_truncating_matrix_units_stay_within_the_bound(
    width: int, tokens: int, on_matrix_units: None
) -> None:
    """Matrix units as measured by Fasi, Higham, Mikaitis and Pranesh (PeerJ CS 2021), on sums that only grow.

    Sixteen exact products and the accumulator are aligned to the largest, cut off two bits below its last, added, cut off.
    """
    generator = np.random.default_rng(width)
    x = torch.from_numpy(generator.uniform(1, 2, (8, width))).bfloat16().double().numpy()
    products = x * x
    chunked = np.zeros(8, dtype=np.float32)
    at_once, each = contributions._terms_of_gram(torch.zeros(1, tokens, width).bfloat16())
    for start in range(0, width, at_once):
        chunked += unit_sum(products[:, start : start + at_once]).astype(np.float32)
    exact = products.sum(1)
    assert (
        float(np.abs(chunked / exact - 1).max())
        <= contributions.roundings(width, at_once, each) * 2.0**-24
    )
    if (
        width == 16384
    ):  # the danger is real: one long sum in the unit reads lower than random roundings would
        assert float((1 - unit_sum(products) / exact).max()) > rounding(width, torch.float32)


def unit_sum(products: np.ndarray) -> np.ndarray:
    total = np.zeros(len(products))
    for start in range(0, products.shape[1], 16):
        terms = np.concatenate([total[:, None], products[:, start : start + 16]], 1)
        last_bit = 2.0 ** (np.floor(np.log2(terms.max(1, keepdims=True))) - 23)
        total = (np.floor(terms / (last_bit / 4)) * (last_bit / 4)).sum(1)
        total = np.floor(total / (bit := 2.0 ** (np.floor(np.log2(total)) - 23))) * bit
    return total


@pytest.mark.full
def test_compiled_norm_layers_repeat_their_bits(compiles: set[str]) -> None:
    """Shapes that another graph would fit as well come between the two calls: two_pass sums what the second of them gives."""
    torch.manual_seed(0)
    for call in (_layer_norm, _rms_norm):
        inputs = [tuple(torch.randn(2, *shape).bfloat16()) for shape in ((3, 50, 64), (4, 7, 96))]
        first, *_ = [call(x, g, x.shape[2:], 1e-5) for x, g in inputs]
        again = call(*inputs[0], inputs[0][0].shape[2:], 1e-5)
        reference = call.__wrapped__(*(x.double() for x in inputs[0]), inputs[0][0].shape[2:], 1e-5)  # type: ignore[attr-defined]
        results = [x if isinstance(x, tuple) else (x,) for x in (first, again, reference)]
        for a, b, expected in zip(*results, strict=True):
            assert torch.equal(a, b) and a.dtype == torch.float32
            torch.testing.assert_close(a.double(), expected, rtol=1e-4, atol=1e-4)
    assert compiles == {"_layer_norm", "_rms_norm"}


@pytest.mark.parametrize("mode", ["bookkeeping", pytest.param("two_pass", marks=pytest.mark.full)])
def test_contract_4_a_model_compiled(
    mode: Any, compiles: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sum is that of the loop and rounded as without a compiler, and an example whose tokens cancel moves it by at most C."""
    torch.manual_seed(0)
    model = Product(nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 72)))
    others = cancelling(5, 64, 72, 0.0, 99)
    for mean in (0.0, 1000.0):
        moved = change(model, others, cancelling(5, 64, 72, mean, 1), mode)
        assert moved <= 1 + SENSITIVITY_SLACK and (moved > 0.9 or mean > 0)
    inputs = {
        name: x.expand(2, -1, -1) * torch.arange(1, 3)[:, None, None] for name, x in others.items()
    }
    compile_all, sums = fused.launch, []
    for whole_numbers in (compile_all, lambda function, arguments, _: function(*arguments)):
        by_name = {"_add": whole_numbers, "_carry": whole_numbers}
        monkeypatch.setattr(
            fused, "launch", lambda f, *how, by=by_name: by.get(f.__name__, compile_all)(f, *how)
        )
        total = SUMS[mode](model, 0.1)
        total.add_micro_batch(model, inputs, torch.zeros(2, dtype=torch.bool))
        sums.append(dict(total.sums()))
        total.detach()
    assert all(torch.equal(value, sums[1][name]) for name, value in sums[0].items())
    assert oracle.relative_error(sums[0], oracle.clipped_sum(model, model, inputs, 0.1)) < 1e-4
    assert {"_add", "_strip", "_norm_of_strips", "_layer_norm"} <= compiles


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_5_blanked_rows(dtype: torch.dtype, device: str) -> None:
    x = torch.arange(1, 5 * 3 * 700 + 1, device=device).view(5, 3, 700).to(dtype)
    x[1, 2, 3], x[4] = torch.nan, torch.inf
    excluded_B = torch.tensor([False, True, False, False, True], device=device)
    good, place = x[~excluded_B].clone(), x.data_ptr()
    y = blank_rows(x, excluded_B)
    assert torch.equal(y[~excluded_B], good) and not y[excluded_B].any()
    assert (y.data_ptr() == place) == (device == "cuda")
    wide = (
        torch.zeros(5, 1, device=device, dtype=dtype).fill_(torch.nan).expand(5, 4)
    )  # not contiguous
    assert not blank_rows(wide, torch.ones_like(excluded_B)).any()
    assert not needs_blanking(torch.tensor([True, True])) and needs_blanking(
        torch.tensor([True, False])
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_contract_5_rows_that_are_zeroed_where_they_stand(
    mode: Any, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA's kernel does it, unseen by autograd: the second backward then differs in the excluded rows, which is no fault."""

    def in_place(x: Tensor, excluded_B: Tensor, y: Tensor | None = None) -> Tensor:
        for tensor in (x, *(() if y is None else (y,))):
            tensor.data[excluded_B] = 0
        return x

    monkeypatch.setattr(contributions, "_in_place", lambda x: x.is_contiguous())
    monkeypatch.setattr(contributions, "blank_rows_", in_place)
    torch.manual_seed(0)
    model = Product(
        nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 72), nn.Linear(72, 72))
    )
    inputs = {
        name: torch.cat([x, 2 * x, bad * x]) for name, x in cancelling(5, 64, 72, 0.0, 99).items()
    }
    total = SUMS[mode](model, 0.1)
    stats = total.add_micro_batch(
        model, {n: x.clone() for n, x in inputs.items()}, torch.zeros(3, dtype=torch.bool)
    )
    total.require_repeated()
    assert int(stats.num_nonfinite) == 1
    found = {name: value.clone() for name, value in total.sums()}
    expected = oracle.clipped_sum(model, model, {n: x[:2] for n, x in inputs.items()}, 0.1)
    assert oracle.relative_error(found, expected) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_4_norms_on_a_gpu(dtype: torch.dtype) -> None:
    for a, g in (
        *cases(),
        *((cancelling(197, 768, 3072, mean, 0)[n] for n in "xw") for mean in (0.0, 1000.0)),
    ):
        a, g = a.to("cuda", dtype), g.to("cuda", dtype)
        check_norm(a, g)
        assert torch.equal(
            OuterProducts(a, g).norm().squared_B, OuterProducts(a, g).norm().squared_B
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_5_blanked_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 6).cuda().to(dtype)
    x = torch.randn(4, 5, 8, device="cuda", dtype=dtype)
    x[2, 1] = torch.nan
    before = x.clone()
    total, padding_B = (
        ClippedSum(model, 1.0),
        torch.zeros(4, dtype=torch.bool, device="cuda"),
    )

    def task(x: Tensor) -> Tensor:
        return model(x).float().sum((1, 2))

    total.add_micro_batch(task, {"x": x}, padding_B)  # compiles
    torch.cuda.set_sync_debug_mode("error")  # a wait for the device is an error
    try:
        stats = total.add_micro_batch(task, {"x": x}, padding_B)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(stats.num_nonfinite) == 1
    assert torch.equal(x.isnan(), before.isnan())  # the caller's tensor is as it was
    assert all(value.isfinite().all() for _, value in total.sums())
