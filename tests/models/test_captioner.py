import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import tiny_batch, tiny_captioner

VARIANTS = [
    {},
    {"decoder_norm_position": "pre", "decoder_bias": True, "decoder_activation": "relu"},
    {"encoder_position": "learned", "decoder_position": "learned", "encoder_qkv_bias": True},
]


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("kept", [0, 1], ids=["no token at all", "only the first token"])
def test_row_without_targets_has_zero_loss_and_zero_gradient(kept: int) -> None:
    model = tiny_captioner()
    images_BCHW, tokens_BL, mask_BL = tiny_batch()
    mask_BL[2] = torch.arange(7) < kept
    loss_B = model(images_BCHW, tokens_BL, mask_BL)
    assert loss_B[2] == 0 and loss_B.isfinite().all()
    assert all(not g.any() for g in gradients(model, loss_B[2]))


@pytest.mark.parametrize("overrides", VARIANTS)
def test_bfloat16_model_has_finite_float32_losses(overrides: dict[str, object]) -> None:
    model = tiny_captioner(**overrides)
    expected_B = model(*tiny_batch())
    loss_B = model.bfloat16()(*tiny_batch())
    assert loss_B.dtype == torch.float32 and loss_B.isfinite().all()
    torch.testing.assert_close(loss_B, expected_B, atol=0.1, rtol=0.05)
    assert all(g.isfinite().all() and g.dtype == torch.bfloat16 for g in gradients(model, loss_B.sum()))


def test_bad_calls_are_refused() -> None:
    model = tiny_captioner()
    assert [type(block).__name__ for block in model.blocks()] == ["EncoderBlock"] * 2 + ["DecoderBlock"] * 2
    images_BCHW, tokens_BL, mask_BL = tiny_batch(length=11)
    with pytest.raises(ValueError, match="needs token_mask_BL"):
        model(images_BCHW, tokens_BL)
    with pytest.raises(ValueError, match="10 tokens, but the model was built for at most 9"):
        model(images_BCHW, tokens_BL, mask_BL)
