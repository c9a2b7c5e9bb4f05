"""The masked autoencoder, whose mask token is used a different number of times than there are tokens, through the oracle."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.masked_autoencoder import MaskedAutoencoder, build_masked_autoencoder
from privacy.clipping import ClippedSum
from privacy.releases import SENSITIVITY_SLACK
from tests.models.test_masked_autoencoder import masks, tiny
from tests.privacy.clipping import oracle

B = 5


def model_and_inputs(normalise: bool) -> tuple[MaskedAutoencoder, dict[str, Tensor]]:
    config = tiny(normalise_pixels=normalise)
    model = build_masked_autoencoder(config, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from zeros and ones, so that every parameter has a gradient of its own
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    images = torch.randn(B, 3, 16, 16, generator=generator) * torch.logspace(-1, 0.7, B)[:, None, None, None]
    return model, {"images_BCHW": images, "mask_BP": masks(config, B)}


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("normalise", [False, True])
def test_equals_the_loop_in_float64(mode: str, normalise: bool) -> None:
    model, inputs = model_and_inputs(normalise)
    model, inputs = model.double(), {**inputs, "images_BCHW": inputs["images_BCHW"].double()}
    c = oracle.median_norm(model, model, inputs)
    clipped = ClippedSum(model, c, mode=mode, self_check=False)  # type: ignore[arg-type]
    stats = clipped.add_micro_batch(model, inputs, torch.zeros(B, dtype=torch.bool))
    assert 1 <= int(stats.num_clipped) <= 4
    sums = dict(clipped.sums())
    assert oracle.relative_error(sums, oracle.clipped_sum(model, model, inputs, c)) < 1e-9
    assert all(total.abs().max() > 0 for total in sums.values()), "every parameter, the mask token too, has a gradient"


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_4_one_image_moves_the_sum_by_at_most_c(dtype: torch.dtype, mode: Any) -> None:
    model, inputs = model_and_inputs(False)
    model = model.to(dtype)
    base = {**inputs, "images_BCHW": inputs["images_BCHW"].to(dtype)}
    for image in (1e4, -1e-4, float("nan"), float("inf"), 1000.0):
        with_it = {**base, "images_BCHW": base["images_BCHW"].clone()}
        with_it["images_BCHW"][2] = with_it["images_BCHW"][2] * 0.01 + image if image == 1000.0 else image
        sums = []
        for leave_out in (False, True):
            clipped = ClippedSum(model, 0.5, mode=mode, self_check=False)
            is_padding = torch.zeros(B, dtype=torch.bool)
            is_padding[2] = leave_out
            clipped.add_micro_batch(model, with_it, is_padding)
            sums.append(oracle.flat(dict(clipped.sums())))
        assert float((sums[0] - sums[1]).norm()) <= 0.5 * (1 + SENSITIVITY_SLACK)
