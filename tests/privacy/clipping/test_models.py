"""The models that are trained, through the oracle and the sensitivity test: captioner, masked autoencoder, classifier."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models.masked_autoencoder import build_masked_autoencoder
from privacy.clipping import SUMS
from privacy.clipping.clipped_sum import Mode
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.distributed.test_engines import pairs, tiny_captioner
from tests.models.test_classifier import K, stirred, tiny_classifier
from tests.models.test_masked_autoencoder import masks
from tests.models.test_masked_autoencoder import tiny as tiny_of_autoencoder
from tests.privacy.clipping import oracle
from tests.privacy.clipping.test_sensitivity import change

B = 5
MODES = ["bookkeeping", "two_pass"]
Made = tuple[nn.Module, dict[str, Tensor]]


def images() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(B, 3, 16, 16, generator=generator)
        * torch.logspace(-1, 0.7, B)[:, None, None, None]
    )


def captioner() -> Made:
    return tiny_captioner(), {name: x[:B] for name, x in pairs().items()}


def masked_autoencoder() -> Made:
    """Its mask token is used another number of times than there are tokens."""
    config = tiny_of_autoencoder(normalise_pixels=True)
    model = stirred(build_masked_autoencoder(config, generator=torch.Generator().manual_seed(0)))
    return model, {"images_BCHW": images(), "mask_BP": masks(config, B)}


def classifier(trainable: str) -> Made:
    model = tiny_classifier(
        trainable=trainable, features="pooled", label_smoothing=0.1, adapter_layers="all"
    )
    return model, {"images_BCHW": images(), "labels_B": torch.arange(B) % K}


MODELS: dict[str, Callable[[], Made]] = {
    "captioner": captioner,
    "masked_autoencoder": masked_autoencoder,
    "classifier": lambda: classifier("all"),
    "last_layer": lambda: classifier("last_layer"),
    "adapters": lambda: classifier("adapters"),
}


def cast(made: Made, dtype: torch.dtype) -> Made:
    model, inputs = made
    return model.to(dtype), {
        name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loop_in_float64(name: str, mode: Mode) -> None:
    """Frozen parameters get no sum; clipping is active for about half of the batch."""
    model, inputs = cast(MODELS[name](), torch.float64)
    c = oracle.median_norm(model, model, inputs)
    clipped = SUMS[mode](model, c)
    stats = clipped.add_micro_batch(model, inputs, torch.zeros(B, dtype=torch.bool))
    assert 1 <= int(stats.num_clipped) <= 4
    sums = dict(clipped.sums())
    assert set(sums) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert oracle.relative_error(sums, oracle.clipped_sum(model, model, inputs, c)) < 1e-9
    assert all(total.abs().max() > 0 for total in sums.values())


@pytest.mark.parametrize("mode", ["bookkeeping", pytest.param("two_pass", marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "captioner"])
def test_contract_4_one_image_moves_the_sum_by_at_most_c(
    name: str, dtype: torch.dtype, mode: Mode
) -> None:
    """The captioner: test_sensitivity.py, and every variant of it in tests/models/test_captioner_variants.py."""
    (model, base), moved = cast(MODELS[name](), dtype), 0
    for image in (1e4, -1e-4, float("nan"), float("inf"), 1000.0):
        example = {name: x[2:3].clone() for name, x in base.items()}
        example["images_BCHW"] = 0.01 * example["images_BCHW"] * (image == 1000.0) + image
        size = change(model, {name: x[[0, 1, 3, 4]] for name, x in base.items()}, example, mode)
        assert size <= 1 + SENSITIVITY_SLACK
        moved += size > 0.1
    assert moved >= 2
