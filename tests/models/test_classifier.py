"""Classifier: features, loss and adapters against other implementations, and what each mode leaves alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.classifier import (
    AdaptedLinear,
    Classifier,
    adapters,
    build_classifier,
    classification_loss,
    is_adapter,
)
from models.config import ClassifierConfig, classifier_config
from models.converters.huggingface import to_vit_model
from tests.models.test_converters import loaded, write

K = 5


def tiny(**overrides: Any) -> ClassifierConfig:
    shape = {
        "image_size": 16,
        "patch_size": 8,
        "encoder_width": 24,
        "encoder_depth": 2,
        "encoder_num_heads": 2,
    }
    return classifier_config(
        "pico", **{**shape, "num_classes": K, "adapter_rank": 3, "adapter_alpha": 6.0, **overrides}
    )


def stirred(model: nn.Module, seed: int = 1) -> nn.Module:
    """Away from zeros and ones, frozen weights too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def tiny_classifier(dtype: torch.dtype = torch.float32, **overrides: Any) -> Classifier:
    model = stirred(build_classifier(tiny(**overrides), generator=torch.Generator().manual_seed(0)))
    assert isinstance(model, Classifier)
    return model.to(dtype)


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("features", ["class_token", "pooled"])
@pytest.mark.parametrize("feature_norm", [True, False])
def test_scores_equal_transformers(features: str, feature_norm: bool, tmp_path: Path) -> None:
    model = tiny_classifier(features=features, feature_norm=feature_norm)
    theirs = loaded(
        "ViTModel", write(tmp_path, to_vit_model(model.encoder)), add_pooling_layer=False
    )
    tokens = theirs(images()).last_hidden_state
    expected = tokens[:, 0] if features == "class_token" else tokens[:, 1:].mean(1)
    if feature_norm:
        centred = expected - expected.mean(1, keepdim=True)
        expected = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    expected = expected @ model.head.weight.T + model.head.bias
    assert torch.allclose(model(images(), output="logits"), expected, atol=1e-5)


def test_the_loss_in_numbers() -> None:
    logits, labels = (
        torch.randn(6, K, generator=torch.Generator().manual_seed(0)).double(),
        torch.arange(6) % K,
    )
    loss_B, smoothed_B = (classification_loss(logits, labels, share) for share in (0.0, 0.1))
    log_p_BK = (logits.exp() / logits.exp().sum(1, keepdim=True)).log()
    torch.testing.assert_close(loss_B, -log_p_BK[torch.arange(6), labels])
    torch.testing.assert_close(smoothed_B, 0.9 * loss_B - 0.1 * log_p_BK.mean(1))
    assert classification_loss(logits.bfloat16(), labels).dtype == torch.float32
    model, labels = tiny_classifier(label_smoothing=0.2), torch.arange(4)
    assert torch.allclose(
        model(images(), labels), classification_loss(model(images(), output="logits"), labels, 0.2)
    )
    with pytest.raises(ValueError, match="labels_B"):
        model(images())


@pytest.mark.parametrize("layers", ["attention", "all"])
def test_adapters_equal_a_dense_sum_of_matrices(layers: str) -> None:
    """A plain classifier with W + (alpha / r) U D in place of W; and without the adapters it is another function."""
    model = tiny_classifier(trainable="adapters", adapter_layers=layers)
    dense = tiny_classifier()
    state = {
        name: value.clone() for name, value in model.state_dict().items() if not is_adapter(name)
    }
    paths = [name for name, m in model.named_modules() if isinstance(m, AdaptedLinear)]
    assert len(paths) == 2 * (2 if layers == "attention" else 4)
    dense.load_state_dict(state)
    assert not torch.allclose(
        dense(images(), output="logits"), model(images(), output="logits"), atol=1e-2
    )
    own = model.state_dict()
    for path in paths:
        state[f"{path}.weight"] += (
            6.0 / 3 * own[f"{path}.adapter_up.weight"] @ own[f"{path}.adapter_down.weight"]
        )
    dense.load_state_dict(state)
    assert torch.allclose(
        dense(images(), output="logits"), model(images(), output="logits"), atol=1e-4
    )


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_what_each_mode_trains() -> None:
    whole, last, low_rank = (
        build_classifier(tiny(trainable=mode), generator=torch.Generator().manual_seed(0))
        for mode in ("all", "last_layer", "adapters")
    )
    everything = {name for name, _ in whole.named_parameters()}
    assert trained(whole) == everything and trained(last) == {"head.weight", "head.bias"}
    factors = {name for name, _ in low_rank.named_parameters() if is_adapter(name)}
    assert trained(low_rank) == {"head.weight", "head.bias"} | factors
    assert {name for name, _ in low_rank.named_parameters()} - factors == everything, (
        "the others keep their names"
    )
    count = sum(p.numel() for p in low_rank.parameters() if p.requires_grad)
    assert count == 24 * K + K + 2 * (3 * (24 + 3 * 24) + 3 * (24 + 24)), (
        "r (in + out) for qkv and out of two blocks"
    )


@pytest.mark.parametrize("mode", ["all", "last_layer", "adapters"])
def test_a_fresh_classifier_knows_nothing_and_changes_no_encoder(mode: str) -> None:
    model = build_classifier(tiny(trainable=mode), generator=torch.Generator().manual_seed(0))
    assert model(images(), torch.arange(4)).tolist() == pytest.approx([math.log(K)] * 4, rel=1e-6)
    for layer in adapters(model):
        x = torch.randn(2, layer.in_features)
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert layer.adapter_down.weight.std() > 0


def test_a_frozen_encoder_leaves_no_graph() -> None:
    labels = torch.arange(4)
    assert tiny_classifier(trainable="all").features(images()).requires_grad
    assert tiny_classifier(trainable="adapters").features(images()).requires_grad
    model = tiny_classifier(trainable="last_layer")
    for (
        parameter
    ) in model.encoder.parameters():  # not even where something else makes them require gradients
        parameter.requires_grad_(True)
    assert not model.features(images()).requires_grad and model(images(), labels).requires_grad
