"""Contract 4 for the whole sum, rounding included: an example that is zeroed out leaves its neighbours' gradients as they were.

Here all neighbours are equal, so that roundings of them would add up instead of averaging out, and the micro-batch is large.
"""

import pytest
import torch
from torch import Tensor

from models.captioner import build_captioner
from models.config import captioner_config
from privacy.adaptive_clipping import LARGEST_BOUND, SMALLEST_BOUND
from privacy.clipping import ClippedSum
from privacy.releases import SENSITIVITY_SLACK

C, B, L = 1.0, 64, 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_contract_4_zeroing_one_example_out_moves_the_sum_by_at_most_c(dtype: torch.dtype, mode: str) -> None:
    small = {"encoder_depth": 1, "decoder_depth": 1}
    config = captioner_config("pico", image_size=32, num_tokens=L, vocab_size=64, pad_id=0, bos_id=1, eos_id=2, **small)
    model = build_captioner(config, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = summed(model, mode, inputs(dtype, long=True), is_out=False)
    out = summed(model, mode, inputs(dtype, long=False), is_out=True)
    difference = float(torch.linalg.vector_norm(there - out))
    assert 0.99 * C < difference <= C * (1 + SENSITIVITY_SLACK)


def inputs(dtype: torch.dtype, *, long: bool) -> dict[str, Tensor]:
    """The first caption is `L - 2` tokens long, or 2 (as of an example that cannot be decoded); all others are alike, 7 long."""
    generator = torch.Generator().manual_seed(1)
    images_BCHW = torch.randn(1, 3, 32, 32, generator=generator).expand(B, -1, -1, -1).clone()
    images_BCHW[0] = torch.randn(3, 32, 32, generator=generator) * long
    tokens_BL = torch.randint(3, 64, (1, L), generator=generator).expand(B, -1).clone()
    lengths_B = torch.full((B,), 7)
    lengths_B[0] = L - 2 if long else 2
    mask_BL = torch.arange(L) < lengths_B[:, None]
    return {"images_BCHW": images_BCHW.to(dtype), "tokens_BL": tokens_BL * mask_BL, "token_mask_BL": mask_BL}


def summed(model: torch.nn.Module, mode: str, batch: dict[str, Tensor], *, is_out: bool) -> Tensor:
    clipped = ClippedSum(model, C, mode=mode, self_check=False)
    is_padding_B = torch.arange(B) < is_out
    clipped.add_micro_batch(model, batch, is_padding_B)
    total = torch.cat([value.double().flatten() for _, value in clipped.sums()])
    clipped.detach()
    return total


@pytest.mark.parametrize("bound", [SMALLEST_BOUND, LARGEST_BOUND])
def test_contract_4_squares_neither_underflow_nor_overflow(bound: float) -> None:
    """Gradients from far below to far above C, spread over a million entries."""
    layer = torch.nn.Linear(1000, 1000, bias=False)
    for scale in (0.5, 1.0, 2.0, 1e3):
        clipped = ClippedSum(layer, bound, self_check=False)
        x_BD = torch.full((1, 1000), bound * scale / 1000)
        clipped.add_micro_batch(lambda x: layer(x).sum(dim=1), {"x": x_BD}, torch.zeros(1, dtype=torch.bool))
        (_, total), *_ = clipped.sums()
        norm = float(total.double().norm()) / bound
        clipped.detach()
        assert norm == pytest.approx(min(scale, 1), rel=SENSITIVITY_SLACK)
