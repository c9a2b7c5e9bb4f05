"""bf16 weights and activations, fp32 accumulators: exact to a per cent, and never above the bound.

What is summed are the stored bf16 tensors, widened. A clip factor that is folded into one of them may cost precision, but must
not lengthen the contribution: rounding a scaled bf16 number to bf16 can by itself add 2^-9 = 0.2 %, twice the slack r.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.gradients import per_example_gradients as contributions
from privacy.gradients.per_example_gradients import OuterProducts
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.sums import totals
from tests.privacy.clipping import oracle
from tests.privacy.clipping.neighbours import Product
from tests.privacy.clipping.test_rules import IDS, LAYERS, B, Make, case, randomised
from tests.privacy.clipping.test_sensitivity import C, cancelling, change

MODES = ["bookkeeping", pytest.param("two_pass", marks=pytest.mark.full)]
"""Two passes read the same contributions; `make test` tries them in fp64 and fp32 (test_oracle.py, test_models.py)."""


def summed(model: nn.Module, inputs: dict[str, Tensor], c: float, mode: str) -> dict[str, Tensor]:
    sums = oracle.summed(model, inputs, c, mode=mode)
    assert all(value.dtype == torch.float64 for value in sums.values())
    return sums


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "make", "x"), LAYERS, ids=IDS)
def test_within_a_per_cent_of_the_same_gradients_summed_in_float64(
    name: str, make: Make, x: Callable[[], Tensor], mode: str
) -> None:
    model, inputs = case(make, x)
    model = Product(model.layer).to(torch.bfloat16)
    inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs.items()}
    c = oracle.median_norm(model, model, inputs)
    expected = oracle.clipped_sum(model, model, inputs, c, dtype=torch.float64)
    actual = summed(model, inputs, c, mode)
    # torch's own bf16 GroupNorm over two numbers is 4 % off; ours is then compared with float64 on the same bf16 tensors.
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = oracle.clipped_sum(model.double(), model, wide, c)
    reference = exact if oracle.relative_error(expected, exact) > 1e-2 else expected
    assert oracle.relative_error(actual, reference) <= 1e-2


@pytest.mark.parametrize("mode", ["bookkeeping", pytest.param("two_pass", marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "make", "x"), LAYERS, ids=IDS)
def test_contract_4_equal_examples_that_all_round_the_same_way(
    name: str, make: Make, x: Callable[[], Tensor], mode: str
) -> None:
    """B copies add up to at most B C (1 + r), whatever factor they are clipped with, around 0 and around 1000."""
    for seed, mean in enumerate((0.0, 1000.0, 0.0, 1000.0)):
        torch.manual_seed(seed)
        model = Product(randomised(make())).to(torch.bfloat16)
        one = x()[:1]
        one = (one + mean).to(torch.bfloat16) if one.is_floating_point() else one
        w = torch.randn_like(model.layer(one))
        if w.dim() > 2 and mean:
            w = w - w.mean(1, keepdim=True)
        inputs = {
            "x": one.repeat(B, *[1] * (one.dim() - 1)),
            "w": w.repeat(B, *[1] * (w.dim() - 1)),
        }
        # Almost never a factor that bf16 represents.
        for c in (0.01, 0.0117, 0.00739):
            assert oracle.flat(summed(model, inputs, c, mode)).norm() <= B * c * (
                1 + SENSITIVITY_SLACK
            )


# The clip factor folded into a bf16 operand, as on CUDA. The matrix product is that of the device; what the factor does to the
# operand's bits is the same everywhere.


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "_has_bf16_units", lambda device: True)


def linear(d: int, p: int) -> nn.Module:
    torch.manual_seed(0)
    return Product(nn.Linear(d, p, bias=False)).bfloat16()


def rounding_up(tokens: int, d: int, p: int, mantissa: int) -> dict[str, torch.Tensor]:
    """Equal tokens, so that nothing cancels and every rounding goes the same way: gross norm = norm."""
    value = 1 + mantissa / 128
    return {
        "x": torch.ones(1, tokens, d).bfloat16(),
        "w": torch.full((1, tokens, p), value).bfloat16(),
    }


def test_contract_4_equal_roundings(folding: None) -> None:
    model = linear(64, 96)
    assert OuterProducts(
        torch.zeros(1, 5, 64).bfloat16(), torch.zeros(1, 5, 96).bfloat16()
    ).folds_in_bf16
    others = {key: value.bfloat16() for key, value in cancelling(5, 64, 96, 0.0, 99).items()}
    for mantissa in range(128):
        assert change(model, others, rounding_up(5, 64, 96, mantissa)) <= 1 + SENSITIVITY_SLACK


@pytest.mark.parametrize("mean", [0.0, 30.0, 1000.0])
def test_contract_4_cancelling_activations(folding: None, mean: float) -> None:
    model = linear(256, 512)
    others = {key: value.bfloat16() for key, value in cancelling(64, 256, 512, 0.0, 99).items()}
    for seed in range(10):
        example = {
            key: value.bfloat16() for key, value in cancelling(64, 256, 512, mean, seed).items()
        }
        assert change(model, others, example) <= 1 + SENSITIVITY_SLACK, seed


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_the_sum_is_that_of_the_loop_up_to_the_rounding(folding: None, mode: str) -> None:
    model = linear(64, 96)
    inputs = {
        key: value.bfloat16().expand(4, -1, -1)
        for key, value in cancelling(5, 64, 96, 0.0, 1).items()
    }
    inputs["w"] = inputs["w"] * torch.arange(1, 5)[:, None, None]
    wide = Product(nn.Linear(64, 96, bias=False)).double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    expected = oracle.clipped_sum(
        wide, wide, {key: value.double() for key, value in inputs.items()}, C
    )
    error = oracle.relative_error(oracle.summed(model, inputs, C, mode=mode), expected)
    assert 1e-4 < error <= 2e-2  # rounded, and clipped a little more


@pytest.mark.parametrize("micro_batch", [4, 40])
@pytest.mark.parametrize("width", [6, 96])
def test_products_in_fp32_and_their_fall_back_give_one_sum(
    folding: None, micro_batch: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no products of bf16 that come in fp32: stand-ins with CUDA's signature take their place."""
    model = linear(width, width)
    inputs = {
        key: value.bfloat16().expand(micro_batch, -1, -1)
        for key, value in cancelling(5, width, width, 0.0, 1).items()
    }
    sums, forms = [], []
    for is_there in (False, True):
        total = ClippedSum(model, C)
        with monkeypatch.context() as patch:
            if is_there:
                for module in (totals, contributions):
                    patch.setattr(module, "has_fp32_products_of_bf16", lambda device: True)
                for name in ("mm", "bmm", "addmm"):
                    patch.setattr(torch, name, with_out_dtype(getattr(torch, name), forms))
            for _ in range(2):
                total.add_micro_batch(model, inputs, torch.zeros(micro_batch, dtype=torch.bool))
        sums.append(dict(total.sums()))
        total.detach()
    assert forms and all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


def with_out_dtype(product: Any, forms: list[str]) -> Any:
    def widened(
        *matrices: torch.Tensor, out_dtype: torch.dtype | None = None, **rest: Any
    ) -> torch.Tensor:
        if out_dtype is None:
            return product(*matrices, **rest)
        forms.append(product.__name__)
        assert (
            out_dtype == torch.float32
            and matrices[-1].dtype == matrices[-2].dtype == torch.bfloat16
        )
        return product(*(matrix.float() for matrix in matrices), **rest)

    return widened
