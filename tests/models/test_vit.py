from dataclasses import replace

import pytest
import torch
from torch import nn

from models.config import SIZES, VitConfig
from models.initialization import init_weights
from models.mae_config import MAE_SIZES
from models.vit import VisionTransformer


def small_encoder(**fields: object) -> VisionTransformer:
    defaults = {"image_size": 24, "patch_size": 8, "width": 32, "depth": 3, "num_heads": 4}
    model = VisionTransformer(VitConfig(**(defaults | fields)))
    init_weights(model)
    for parameter in model.parameters():  # biases and norms away from 0 and 1
        nn.init.normal_(parameter, std=0.2)
    return model


def hugging_face_copy(model: VisionTransformer) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    c = model.config
    reference = transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=c.width,
            num_hidden_layers=c.depth,
            num_attention_heads=c.num_heads,
            intermediate_size=int(c.width * c.mlp_ratio),
            image_size=c.image_size,
            patch_size=c.patch_size,
            qkv_bias=c.qkv_bias,
            layer_norm_eps=c.norm_eps,
        ),
        add_pooling_layer=False,
    )
    weights = {
        "embeddings.cls_token": model.class_token,
        "embeddings.position_embeddings": model.position.table,
        "embeddings.patch_embeddings.projection.weight": model.patch_embedding.weight,
        "embeddings.patch_embeddings.projection.bias": model.patch_embedding.bias,
        "layernorm.weight": model.norm.weight,
        "layernorm.bias": model.norm.bias,
    }
    renamed = {
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "attention.o_proj": "attention.out",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    }
    for i, block in enumerate(model.blocks):
        ours = dict(block.named_parameters())
        for theirs, name in renamed.items():
            for kind in ("weight", "bias"):
                weights[f"layers.{i}.{theirs}.{kind}"] = ours[f"{name}.{kind}"]
        for kind in ("weight", "bias") if c.qkv_bias else ("weight",):
            for letter, part in zip("qkv", ours[f"attention.qkv.{kind}"].chunk(3), strict=True):
                weights[f"layers.{i}.attention.{letter}_proj.{kind}"] = part
    reference.load_state_dict(weights)
    return reference.eval()


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("position", ["learned", "sincos"])
@torch.no_grad()
def test_encoder_equals_transformers(qkv_bias: bool, position: str) -> None:
    model = small_encoder(qkv_bias=qkv_bias, position=position)
    images_BCHW = torch.randn(2, 3, 24, 24)
    expected = hugging_face_copy(model)(images_BCHW).last_hidden_state
    tokens_BTD = model(images_BCHW)
    assert tokens_BTD.shape == (2, 10, 32)
    torch.testing.assert_close(tokens_BTD, expected, atol=1e-5, rtol=1e-5)


ENCODERS_OF_ALL_SIZES = {
    (c.encoder.width, c.encoder.num_heads, c.encoder.qkv_bias): name for name, c in (*SIZES.items(), *MAE_SIZES.items())
}


@pytest.mark.parametrize("name", ENCODERS_OF_ALL_SIZES.values())
@torch.no_grad()
def test_encoder_of_every_size_equals_transformers(name: str) -> None:
    """Each width, number of heads and kind of bias, in one block on four patches."""
    config = (SIZES.get(name) or MAE_SIZES[name]).encoder
    model = VisionTransformer(replace(config, depth=1, image_size=2 * config.patch_size))
    init_weights(model, torch.Generator().manual_seed(0))
    images_BCHW = torch.randn(2, 3, model.config.image_size, model.config.image_size)
    expected = hugging_face_copy(model)(images_BCHW).last_hidden_state
    torch.testing.assert_close(model(images_BCHW), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 24, 32), (2, 1, 24, 24), (3, 24, 24), (2, 3, 16, 16)])
def test_other_image_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images must have shape \(B, 3, 24, 24\)"):
        small_encoder()(torch.zeros(shape))
