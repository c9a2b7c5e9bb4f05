import math

import pytest
import torch
from torch import nn

from models.base import EMBEDDING_STD
from models.captioner import Captioner, build_captioner
from models.config import captioner_config
from tests.models.tiny import tiny_captioner, tiny_config


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_of_the_model_does_not_change_the_draw(dtype: torch.dtype) -> None:
    expected = tiny_captioner(seed=5)
    model = Captioner(tiny_config()).to(dtype)
    model.init_weights(torch.Generator().manual_seed(5))
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(a, b.to(dtype)) for a, b in pairs)


def test_nor_does_the_default_dtype_of_the_program() -> None:
    expected = tiny_captioner(seed=5)
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_captioner(seed=5)
    finally:
        torch.set_default_dtype(torch.float32)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in pairs)


def test_distributions() -> None:
    model = build_captioner(captioner_config("pico"), generator=torch.Generator().manual_seed(0))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            num_out, num_in = module.weight.flatten(1).shape
            bound = math.sqrt(6 / (num_in + num_out))
            assert module.weight.abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and not module.bias.any()
    std = model.config.decoder.embedding_std
    assert model.decoder.token_embedding.weight.std().item() == pytest.approx(std, rel=0.02)
    for raw in (
        model.encoder.class_token,
        model.memory.type_embedding,
        model.decoder.type_embedding,
    ):
        assert raw.std().item() == pytest.approx(EMBEDDING_STD, rel=0.4)
