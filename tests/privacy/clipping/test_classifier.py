"""The classifier in all three modes through the oracle and the sensitivity test; frozen parameters get no sum."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.classifier import Classifier
from privacy.clipping import ClippedSum
from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError
from privacy.releases import SENSITIVITY_SLACK
from tests.models.test_classifier import K, build_classifier, tiny, tiny_classifier
from tests.privacy.clipping import oracle

B = 5
TRAINABLE = ["all", "last_layer", "adapters"]


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    pictures = torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pictures *= torch.logspace(-1, 0.7, B)[:, None, None, None]
    return {"images_BCHW": pictures.to(dtype), "labels_B": torch.arange(B) % K}


def classifier(trainable: str, dtype: torch.dtype = torch.float32) -> Classifier:
    return tiny_classifier(dtype, trainable=trainable, features="pooled", label_smoothing=0.1, adapter_layers="all")


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("trainable", TRAINABLE)
def test_equals_the_loop_in_float64(trainable: str, mode: str) -> None:
    model = classifier(trainable, torch.float64)
    c = oracle.median_norm(model, model, inputs(torch.float64))
    clipped = ClippedSum(model, c, mode=mode, self_check=False)  # type: ignore[arg-type]
    stats = clipped.add_micro_batch(model, inputs(torch.float64), torch.zeros(B, dtype=torch.bool))
    assert 1 <= int(stats.num_clipped) <= 4
    sums = dict(clipped.sums())
    assert set(sums) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert oracle.relative_error(sums, oracle.clipped_sum(model, model, inputs(torch.float64), c)) < 1e-9
    assert all(total.abs().max() > 0 for total in sums.values())


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainable", TRAINABLE)
def test_contract_4_one_image_moves_the_sum_by_at_most_c(trainable: str, dtype: torch.dtype, mode: Any) -> None:
    model, base, c = classifier(trainable, dtype), inputs(dtype), 0.5
    moved = 0
    for label, image in enumerate((1e4, -1e-4, float("nan"), float("inf"), 1000.0)):
        with_it = {**base, "images_BCHW": base["images_BCHW"].clone(), "labels_B": base["labels_B"].clone()}
        with_it["images_BCHW"][2] = with_it["images_BCHW"][2] * 0.01 + image if image == 1000.0 else image
        with_it["labels_B"][2] = label
        sums = []
        for leave_out in (False, True):
            clipped = ClippedSum(model, c, mode=mode, self_check=False)
            is_padding = torch.zeros(B, dtype=torch.bool)
            is_padding[2] = leave_out
            clipped.add_micro_batch(model, with_it, is_padding)
            sums.append(oracle.flat(dict(clipped.sums())))
        change = float((sums[0] - sums[1]).norm())
        assert change <= c * (1 + SENSITIVITY_SLACK)
        moved += change > 0.1 * c
    assert moved >= 2


@pytest.mark.parametrize("trainable", TRAINABLE)
def test_the_self_check_sees_behind_layers_that_start_at_zero(trainable: str) -> None:
    """Head and adapters start at zero, where every gradient before them is zero; a wrong one is found nevertheless."""
    fresh = build_classifier(tiny(trainable=trainable), generator=torch.Generator().manual_seed(0))
    before = {name: p.detach().clone() for name, p in fresh.named_parameters()}
    check_against_autograd(fresh, inputs())
    assert all(torch.equal(p, before[name]) for name, p in fresh.named_parameters())
    if trainable == "last_layer":
        return
    layer = fresh.encoder.blocks[0].attention.qkv
    target = layer.adapter_down if trainable == "adapters" else layer
    target.forward = lambda x: torch.nn.functional.linear(x, target.weight * target.weight, target.bias)
    with pytest.raises(PrivacyConfigError, match=r"encoder\.blocks\.0\.attention\.qkv"):
        check_against_autograd(fresh, inputs())
