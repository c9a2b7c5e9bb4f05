"""optimizer.layer_decay: which part of the rate each layer takes, and that a step takes it."""

import pytest
import torch

from tests.models.test_classifier import tiny_classifier
from trainer.config.recipe import OptimizerSection
from trainer.errors import ConfigError
from trainer.optimizers import layer_rates, make_optimizer, parameter_groups, set_step


def published(name: str, depth: int, decay: float) -> float:
    """As in the masked autoencoder's release: layer 0 is the embedding, block i layer i + 1, the rest layer depth + 1."""
    if name.startswith(("encoder.class_token", "encoder.position", "encoder.patch_embedding")):
        layer = 0
    elif name.startswith("encoder.blocks"):
        layer = int(name.split(".")[2]) + 1
    else:
        layer = depth + 1
    return decay ** (depth + 1 - layer)


@pytest.mark.parametrize("trainable", ["all", "adapters"])
def test_rates_are_the_published_ones(trainable: str) -> None:
    model = tiny_classifier(trainable=trainable, encoder_depth=3, encoder_position="learned")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    rates = layer_rates(names, 0.5)
    assert rates == {name: published(name, 3, 0.5) for name in names}
    assert set(layer_rates(names, None).values()) == {1.0}
    with pytest.raises(ConfigError, match=r"layer_decay.*no encoder\.blocks"):
        layer_rates(["head.weight"], 0.75)


def test_a_step_takes_its_layers_part_of_the_rate() -> None:
    model = tiny_classifier()
    config = OptimizerSection(name="sgd", peak_lr=1.0, momentum=0.0, layer_decay=0.5)
    named, before = dict(model.named_parameters()), {n: p.detach().clone() for n, p in model.named_parameters()}
    groups = parameter_groups(named.items(), {n: p.shape for n, p in named.items()}, config)
    optimizer = make_optimizer(groups, config)
    for step, lr in enumerate((0.1, 0.3)):
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        set_step(optimizer.param_groups, lr=lr, noise_variance=0.0)
        optimizer.step()
        moved = 0.1 if step == 0 else 0.4
        for name, parameter in named.items():
            assert torch.allclose(before[name] - parameter, torch.tensor(moved * published(name, 2, 0.5)), atol=1e-6), (
                name
            )
