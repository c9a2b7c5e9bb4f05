"""The head by chunks of the vocabulary against torch's own cross-entropy on all logits at once."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from models.vocabulary_head import VocabularyHead, token_losses

B, L, D, V = 3, 5, 8, 29
CHUNKS = [1, 2, 4, 7, 29]
"""None of them but the first and the last divides 29."""


def head_and_inputs(
    num_chunks: int, dtype: torch.dtype, *, bias: bool = True
) -> tuple[VocabularyHead, Tensor, Tensor]:
    torch.manual_seed(0)
    head = VocabularyHead(D, V, bias=bias, max_logits=-(-B * L * V // num_chunks)).to(dtype)
    hidden_BLD = torch.randn(B, L, D, dtype=dtype, requires_grad=True)
    targets_BL = torch.randint(0, V, (B, L))
    targets_BL[0, :3] = torch.tensor([0, V - 1, V // 2])
    assert head.num_chunks(hidden_BLD) == num_chunks
    return head, hidden_BLD, targets_BL


def reference(head: nn.Linear, hidden_BLD: Tensor, targets_BL: Tensor) -> Tensor:
    logits_BLV = F.linear(hidden_BLD, head.weight, head.bias)
    wide = logits_BLV if logits_BLV.dtype == torch.float64 else logits_BLV.float()
    return F.cross_entropy(wide.transpose(1, 2), targets_BL, reduction="none")


def gradients(loss_BL: Tensor, weight_BL: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((loss_BL * weight_BL).sum(), tensors))


@pytest.mark.parametrize("num_chunks", CHUNKS)
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_all_gradients_in_float64(num_chunks: int, bias: bool) -> None:
    head, hidden_BLD, targets_BL = head_and_inputs(num_chunks, torch.float64, bias=bias)
    weight_BL = torch.randn(B, L, dtype=torch.float64)
    weight_BL[1] = 0  # padding
    tensors = [hidden_BLD, *head.parameters()]
    loss_BL, expected_BL = (
        head.token_losses(hidden_BLD, targets_BL),
        reference(head, hidden_BLD, targets_BL),
    )
    torch.testing.assert_close(loss_BL, expected_BL, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(
        gradients(loss_BL, weight_BL, tensors),
        gradients(expected_BL, weight_BL, tensors),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_in_low_precision(dtype: torch.dtype) -> None:
    """No further from float64 than torch's own path, up to a factor; the loss is float32 in both."""
    head, hidden_BLD, targets_BL = head_and_inputs(4, dtype)
    exact = VocabularyHead(D, V, max_logits=2**27).double()
    exact.load_state_dict({k: v.double() for k, v in head.state_dict().items()})
    wide_BLD = hidden_BLD.detach().double().requires_grad_()
    ones = torch.ones(B, L)
    wanted = gradients(
        reference(exact, wide_BLD, targets_BL), ones.double(), [wide_BLD, *exact.parameters()]
    )
    loss_BL, plain_BL = (
        head.token_losses(hidden_BLD, targets_BL),
        reference(head, hidden_BLD, targets_BL),
    )
    assert loss_BL.dtype == torch.float32
    torch.testing.assert_close(
        loss_BL, plain_BL, rtol=1e-6, atol=1e-6
    )  # the same logits, rounded to the same dtype
    tensors = [hidden_BLD, *head.parameters()]
    for found, plain, exact_gradient in zip(
        gradients(loss_BL, ones, tensors), gradients(plain_BL, ones, tensors), wanted, strict=True
    ):
        assert found.dtype == dtype
        error, plain_error = (float((x.double() - exact_gradient).norm()) for x in (found, plain))
        assert error <= 2 * plain_error + 1e-7 * float(exact_gradient.norm())


def test_autocast_reaches_the_matrix_product_only() -> None:
    head, hidden_BLD, targets_BL = head_and_inputs(4, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_BL = head.token_losses(hidden_BLD, targets_BL)
        expected_BL = token_losses(head(hidden_BLD), targets_BL)
    torch.testing.assert_close(loss_BL, expected_BL, rtol=1e-6, atol=1e-6)
    found = gradients(loss_BL, torch.ones(B, L), [hidden_BLD, *head.parameters()])
    wanted = gradients(expected_BL, torch.ones(B, L), [hidden_BLD, *head.parameters()])
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * float(y.abs().max()))


def test_extreme_logits_overflow_nowhere() -> None:
    head, hidden_BLD, targets_BL = head_and_inputs(4, torch.float32)
    with torch.no_grad():
        head.weight.mul_(1e4)
    loss_BL, expected_BL = (
        head.token_losses(hidden_BLD, targets_BL),
        reference(head, hidden_BLD, targets_BL),
    )
    torch.testing.assert_close(loss_BL, expected_BL, rtol=1e-6, atol=1e-2)
    (found,) = gradients(loss_BL, torch.ones(B, L), [hidden_BLD])
    (wanted,) = gradients(expected_BL, torch.ones(B, L), [hidden_BLD])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1.0)
    assert found.isfinite().all()


@pytest.mark.parametrize(("num_chunks", "passes"), [(1, 3), (4, 5)])
def test_matrix_products_of_a_plain_training_step(num_chunks: int, passes: int) -> None:
    """Scores, hidden gradient, weight gradient; by chunks the scores again for each of the two gradients."""
    head, hidden_BLD, targets_BL = head_and_inputs(num_chunks, torch.float32)
    with FlopCounterMode(display=False) as counter:
        head.token_losses(hidden_BLD, targets_BL).sum().backward()
    assert counter.get_total_flops() == passes * 2 * B * L * D * V
