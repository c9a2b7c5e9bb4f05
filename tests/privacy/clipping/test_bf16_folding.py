"""Contract 4 where the clip factor is folded into a bf16 operand, as on CUDA: the arithmetic of that path, on any device.

The matrix product itself is that of the device; what the factor does to the operand's bits is the same everywhere.
"""

import pytest
import torch
from torch import nn

from privacy.clipping import ClippedSum, contributions, norms
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


def test_without_the_allowance_equal_roundings_break_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear(64, 96)
    others = {key: value.bfloat16() for key, value in cancelling(5, 64, 96, 0.0, 99).items()}
    monkeypatch.setattr(norms, "fold_error", lambda contribution: 0.0)
    assert max(change(model, others, rounding_up(5, 64, 96, m)) for m in range(128)) > 1 + SENSITIVITY_SLACK


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
    total = ClippedSum(model, C, mode=mode)  # type: ignore[arg-type]
    total.add_micro_batch(model, inputs, torch.zeros(4, dtype=torch.bool))
    wide = WeightedOutput(nn.Linear(64, 96, bias=False)).double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    expected = oracle.clipped_sum(wide, wide, {key: value.double() for key, value in inputs.items()}, C)
    assert 1e-4 < oracle.relative_error(dict(total.sums()), expected) <= 2e-2  # rounded, and clipped a little more
