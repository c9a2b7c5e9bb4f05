"""Contract 4 where the clip factor is folded into a bf16 operand, as on CUDA: the arithmetic of that path, on any device.

The matrix product itself is that of the device; what the factor does to the operand's bits is the same everywhere.
"""

from typing import Any

import pytest
import torch
from torch import nn

from privacy.clipping import ClippedSum, accumulators, contributions
from privacy.clipping.contributions import OuterProducts
from privacy.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle
from tests.privacy.clipping.test_sensitivity import C, WeightedOutput, cancelling, change


@pytest.fixture(autouse=True)
def folding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "_has_bf16_units", lambda device: True)


def linear(d: int, p: int) -> nn.Module:
    torch.manual_seed(0)
    return WeightedOutput(nn.Linear(d, p, bias=False)).bfloat16()


def rounding_up(tokens: int, d: int, p: int, mantissa: int) -> dict[str, torch.Tensor]:
    """Equal tokens, so that nothing cancels and every rounding goes the same way: gross norm = norm."""
    value = 1 + mantissa / 128
    return {"x": torch.ones(1, tokens, d).bfloat16(), "w": torch.full((1, tokens, p), value).bfloat16()}


def test_contract_4_equal_roundings() -> None:
    model = linear(64, 96)
    assert OuterProducts(torch.zeros(1, 5, 64).bfloat16(), torch.zeros(1, 5, 96).bfloat16()).folds_in_bf16
    others = {key: value.bfloat16() for key, value in cancelling(5, 64, 96, 0.0, 99).items()}
    for mantissa in range(128):
        assert change(model, others, rounding_up(5, 64, 96, mantissa)) <= 1 + SENSITIVITY_SLACK


@pytest.mark.parametrize("mean", [0.0, 30.0, 1000.0])
def test_contract_4_cancelling_activations(mean: float) -> None:
    model = linear(256, 512)
    others = {key: value.bfloat16() for key, value in cancelling(64, 256, 512, 0.0, 99).items()}
    for seed in range(10):
        example = {key: value.bfloat16() for key, value in cancelling(64, 256, 512, mean, seed).items()}
        assert change(model, others, example) <= 1 + SENSITIVITY_SLACK, seed


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_the_sum_is_that_of_the_loop_up_to_the_rounding(mode: str) -> None:
    model = linear(64, 96)
    inputs = {key: value.bfloat16().expand(4, -1, -1) for key, value in cancelling(5, 64, 96, 0.0, 1).items()}
    inputs["w"] = inputs["w"] * torch.arange(1, 5)[:, None, None]
    total = ClippedSum(model, C, mode=mode, self_check=False)  # type: ignore[arg-type]
    total.add_micro_batch(model, inputs, torch.zeros(4, dtype=torch.bool))
    wide = WeightedOutput(nn.Linear(64, 96, bias=False)).double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    expected = oracle.clipped_sum(wide, wide, {key: value.double() for key, value in inputs.items()}, C)
    assert 1e-4 < oracle.relative_error(dict(total.sums()), expected) <= 2e-2  # rounded, and clipped a little more


@pytest.mark.parametrize("micro_batch", [4, 40])
@pytest.mark.parametrize("width", [6, 96])
def test_products_in_fp32_and_their_fall_back_give_one_sum(
    micro_batch: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no products of bf16 that come in fp32: stand-ins with CUDA's signature take their place."""
    model = linear(width, width)
    inputs = {
        key: value.bfloat16().expand(micro_batch, -1, -1) for key, value in cancelling(5, width, width, 0.0, 1).items()
    }
    sums, forms = [], []
    for is_there in (False, True):
        total = ClippedSum(model, C, self_check=False)
        with monkeypatch.context() as patch:
            if is_there:
                for module in (accumulators, contributions):
                    patch.setattr(module, "has_fp32_products_of_bf16", lambda device: True)
                for name in ("mm", "bmm", "addmm"):
                    patch.setattr(torch, name, with_out_dtype(getattr(torch, name), forms))
            for _ in range(2):
                total.add_micro_batch(model, inputs, torch.zeros(micro_batch, dtype=torch.bool))
        sums.append(dict(total.sums()))
        total.detach()
    assert forms and all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


def with_out_dtype(product: Any, forms: list[str]) -> Any:
    def widened(*matrices: torch.Tensor, out_dtype: torch.dtype | None = None, **rest: Any) -> torch.Tensor:
        if out_dtype is None:
            return product(*matrices, **rest)
        forms.append(product.__name__)
        assert out_dtype == torch.float32 and matrices[-1].dtype == matrices[-2].dtype == torch.bfloat16
        return product(*(matrix.float() for matrix in matrices), **rest)

    return widened
