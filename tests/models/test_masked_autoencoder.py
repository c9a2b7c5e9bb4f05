"""Masked autoencoder: published sizes, golden losses, transformers' ViTMAE with the same weights, masks from keys."""

import numpy as np
import pytest
import torch
from torch import Tensor

from data.examples.examples import MaskedImageExample
from models.errors import ModelConfigError
from models.mae_config import MAE_SIZES, MaskedAutoencoderConfig, masked_autoencoder_config
from models.masked_autoencoder import (
    MaskedAutoencoder,
    build_masked_autoencoder,
    from_patches,
    normalised,
    reconstruction_loss,
    to_patches,
)

# Encoder and decoder of ViP's definitions, position tables included; and those tables, which are fixed buffers here.
PUBLISHED = {
    "vip_nano": (5_524_416, 13_204_736, 138_688),
    "vip_tiny": (21_665_664, 13_303_040, 176_512),
    "vip_small": (48_423_744, 13_401_344, 214_336),
    "vip_base": (85_798_656, 13_499_648, 252_160),
    "vip_large": (303_301_632, 13_630_720, 302_592),
}


def tiny(**overrides: object) -> MaskedAutoencoderConfig:
    shape = {"image_size": 16, "patch_size": 4, "encoder_width": 24, "encoder_depth": 2, "decoder_width": 16}
    return masked_autoencoder_config("pico", **{**shape, "encoder_num_heads": 2, "decoder_num_heads": 2, **overrides})


def masks(config: MaskedAutoencoderConfig, count: int) -> Tensor:
    make = MaskedImageExample(config.encoder.image_size, config.encoder.patch_size, config.num_visible)
    return torch.from_numpy(np.stack([make.mask(key) for key in range(count)]))


def images(count: int, size: int = 16) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_parameter_counts(size: str) -> None:
    with torch.device("meta"):
        model = MaskedAutoencoder(MAE_SIZES[size])
    encoder, decoder, tables = PUBLISHED[size]
    assert sum(p.numel() for p in model.parameters()) == encoder + decoder - tables
    fixed = sum(b.numel() for b in model.buffers())
    assert fixed == tables
    assert MAE_SIZES[size].num_visible == 49


def test_loss_is_zero_on_a_perfect_prediction() -> None:
    target = to_patches(images(3), 4)
    mask = masks(tiny(), 3)
    assert reconstruction_loss(target, target, mask).tolist() == [0, 0, 0]
    visible_wrong = torch.where(mask[:, :, None], target, target + 5)
    assert reconstruction_loss(visible_wrong, target, mask).tolist() == [0, 0, 0], "visible patches do not count"


def test_golden_loss() -> None:
    """Two patches of two pixels; by hand: only the masked patch counts, (1 + 9) / 2 = 5."""
    predicted = torch.tensor([[[0.0, 0.0], [1.0, 2.0]]])
    target = torch.tensor([[[7.0, 7.0], [2.0, 5.0]]])
    assert reconstruction_loss(predicted, target, torch.tensor([[False, True]])).tolist() == [5.0]
    assert normalised(torch.tensor([[[1.0, 3.0]]]))[0, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_patches_and_back() -> None:
    x = images(2)
    assert torch.equal(from_patches(to_patches(x, 4), 4), x)
    first = to_patches(x, 4)[0, 1]  # the second patch of the first row
    assert torch.equal(first.view(4, 4, 3), x[0, :, :4, 4:8].permute(1, 2, 0))


def one_block(size: str) -> MaskedAutoencoderConfig:
    """The size's widths, heads and patches on 16 patches, with one block in each stack."""
    side = 4 * MAE_SIZES[size].encoder.patch_size
    return masked_autoencoder_config(size, image_size=side, encoder_depth=1, decoder_depth=1)


@pytest.mark.parametrize(
    "config",
    [tiny(), tiny(normalise_pixels=True), tiny(mask_ratio=0.5), *(one_block(size) for size in MAE_SIZES)],
    ids=lambda c: f"{c.encoder.width}-{c.encoder.num_heads}-{c.normalise_pixels}-{c.mask_ratio}",
)
def test_equals_transformers(config: MaskedAutoencoderConfig) -> None:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    normalise = config.normalise_pixels
    ours = build_masked_autoencoder(config, generator=torch.Generator().manual_seed(0))
    encoder, decoder = config.encoder, config.decoder
    theirs = ViTMAEForPreTraining(
        ViTMAEConfig(
            hidden_size=encoder.width, num_hidden_layers=encoder.depth, num_attention_heads=encoder.num_heads,
            intermediate_size=4 * encoder.width, image_size=encoder.image_size, patch_size=encoder.patch_size,
            decoder_hidden_size=decoder.width, decoder_num_hidden_layers=decoder.depth,
            decoder_num_attention_heads=decoder.num_heads, decoder_intermediate_size=4 * decoder.width,
            layer_norm_eps=1e-6, norm_pix_loss=normalise, mask_ratio=config.mask_ratio,
        )
    ).eval()  # fmt: skip
    theirs.load_state_dict(_their_names(ours, theirs), strict=True)
    mask, x = masks(config, 5), images(5, encoder.image_size)
    # They sort noise to choose patches: small noise for the visible ones, in our order.
    rank = torch.linspace(0, 1, mask.shape[1]).expand(5, -1)
    noise = mask.float() * 2 + rank
    with torch.no_grad():
        found = theirs(pixel_values=x, noise=noise)
        predicted = ours(x, mask, output="patches")
        assert torch.equal(found.mask.bool(), mask)
        assert torch.allclose(predicted, found.logits, atol=1e-5)
        loss_B = ours(x, mask)
    assert float(loss_B.mean()) == pytest.approx(float(found.loss), rel=1e-5)


def _their_names(ours: MaskedAutoencoder, theirs: torch.nn.Module) -> dict[str, Tensor]:
    """Our weights under transformers' names."""
    own, out = ours.state_dict(), dict(theirs.state_dict())
    layer_names = {
        "norm1": "layernorm_before", "norm2": "layernorm_after", "attention.out": "attention.o_proj",
        "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
    }  # fmt: skip

    def stack(ours_prefix: str, theirs_prefix: str, depth: int) -> None:
        for i in range(depth):
            for kind in ("weight", "bias"):
                for a, b in layer_names.items():
                    key = f"{theirs_prefix}.{i}.{b}.{kind}"
                    assert key in out, key
                    out[key] = own[f"{ours_prefix}.{i}.{a}.{kind}"]
                parts = own[f"{ours_prefix}.{i}.attention.qkv.{kind}"].chunk(3)
                for name, part in zip("qkv", parts, strict=True):
                    key = f"{theirs_prefix}.{i}.attention.{name}_proj.{kind}"
                    assert key in out, key
                    out[key] = part

    stack("encoder.blocks", "vit.layers", ours.config.encoder.depth)
    stack("decoder.blocks", "decoder.decoder_layers", ours.config.decoder.depth)
    for kind in ("weight", "bias"):
        out[f"vit.embeddings.patch_embeddings.projection.{kind}"] = own[f"encoder.patch_embedding.{kind}"]
        out[f"vit.layernorm.{kind}"] = own[f"encoder.norm.{kind}"]
        out[f"decoder.decoder_embed.{kind}"] = own[f"decoder.embedding.{kind}"]
        out[f"decoder.decoder_norm.{kind}"] = own[f"decoder.norm.{kind}"]
        out[f"decoder.decoder_pred.{kind}"] = own[f"decoder.head.{kind}"]
    out["vit.embeddings.cls_token"] = own["encoder.class_token"]
    out["decoder.mask_token"] = own["decoder.mask_token"]
    out["vit.embeddings.position_embeddings"] = ours.encoder.position.table
    out["decoder.decoder_pos_embed"] = ours.decoder.position.table
    return out


def test_masked_pixels_are_not_seen() -> None:
    """Changing what is masked changes no prediction."""
    config = tiny()
    model = build_masked_autoencoder(config, generator=torch.Generator().manual_seed(0))
    mask, x = masks(config, 3), images(3)
    changed = from_patches(torch.where(mask[:, :, None], torch.tensor(9.0), to_patches(x, 4)), 4)
    with torch.no_grad():
        before, after = (model(i, mask, output="patches") for i in (x, changed))
    assert torch.equal(before, after)


def test_masks() -> None:
    """Every example has as many visible patches; each patch is visible equally often; a key always gives the same mask."""
    config = tiny()
    drawn = masks(config, 4000)
    assert (~drawn).sum(1).eq(config.num_visible).all()
    visible = (~drawn).float().mean(0)
    expected = config.num_visible / config.encoder.num_patches
    assert (visible - expected).abs().max() < 5 * (expected * (1 - expected) / 4000) ** 0.5
    assert torch.equal(drawn[:10], masks(config, 10))
    make = MaskedImageExample(16, 4, 4)
    pairs = [tuple(np.flatnonzero(~make.mask(k))) for k in range(3000)]
    assert len(set(pairs)) > 1300, "of 1820 subsets most are seen"


@pytest.mark.parametrize(
    "overrides", [{"mask_ratio": 0.0}, {"mask_ratio": 1.0}, {"mask_ratio": 0.99}, {"decoder_num_heads": 3}]
)
def test_refused(overrides: dict[str, float]) -> None:
    with pytest.raises(ModelConfigError):
        tiny(**overrides)
