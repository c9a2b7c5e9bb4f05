"""ViP's released masked autoencoders, and vision transformers under the names of timm and ViTDet.

Source of the names: He et al. 2021 (https://arxiv.org/abs/2111.06377), whose released definition ViP (Yu et al. 2023,
https://arxiv.org/abs/2306.08842) shares. ViP's script leaves the sin-cos tables trainable, so a table is taken as it is: fixed
if it is the sin-cos one, else learned.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.config import PositionKind, VitConfig
from models.converters.native import parameters_from, with_tables
from models.converters.weights import (
    PartNames,
    Renaming,
    Unstated,
    WeightsError,
    count_blocks,
    mlp_ratio,
    rename_back,
    shape_of,
)
from models.image_encoder import EncoderConfig
from models.layers import image_sincos_table
from models.mae_config import MAE_SIZES, MaskedAutoencoderConfig, PixelDecoderConfig
from models.vit import VisionTransformer

POSITION_TOLERANCE = 1e-6
"""A table this close to the sin-cos one is it: other programs compute it in other orders."""

_BLOCK = {
    "norm1": ("norm1",),
    "attention.qkv": ("attn.qkv",),
    "attention.out": ("attn.proj",),
    "norm2": ("norm2",),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.fc2",),
}
_ENCODER = PartNames(
    {"class_token": "cls_token", "position.table": "pos_embed"},
    {"patch_embedding": "patch_embed.proj", "norm": "norm"},
    "blocks.",
    _BLOCK,
)
_DECODER = PartNames(
    {"mask_token": "mask_token", "position.table": "decoder_pos_embed"},
    {"embedding": "decoder_embed", "norm": "decoder_norm", "head": "decoder_pred"},
    "decoder_blocks.",
    _BLOCK,
)
_DECODER_PREFIXES = ("decoder_", "mask_token")


def from_vip(
    state: Mapping[str, Tensor],
    what: str,
    unstated: Unstated = Unstated(),  # noqa: B008  (immutable)
) -> tuple[MaskedAutoencoderConfig | EncoderConfig, dict[str, Tensor]]:
    """Configuration and parameters of a released checkpoint: the whole masked autoencoder, or the encoder where no name of
    the decoder is there.

    Args:
        what: the file, for errors.
        unstated: heads, the epsilon of all norms, the activation of all MLPs, and whether normalised pixels are predicted. A
            whole masked autoencoder of the shapes of one of ViP's sizes has that one's; an encoder alone may come from any
            project under timm's names.

    Returns:
        The parameters by our names ("encoder.class_token", ...), in fp32.

    Raises:
        WeightsError: missing or unknown names, shapes that do not fit together, or something is not stated.
    """
    shape = encoder_shape(state, what)
    if not any(name.startswith(_DECODER_PREFIXES) for name in state):
        told = unstated.decided(("num_heads", "norm_eps", "activation"), None, what)
        encoder = VitConfig(**shape, qkv_bias=True, num_heads=told["num_heads"], norm_eps=told["norm_eps"])
        alone = EncoderConfig(encoder=encoder)
        return alone, parameters_from(state, alone, encoder_renamings(encoder), what)
    width, _ = shape_of(state, "decoder_embed.weight", 2, what)
    hidden, _ = shape_of(state, "decoder_blocks.0.mlp.fc1.weight", 2, what)
    pixels: dict[str, Any] = {
        "width": width,
        "depth": count_blocks(state, "decoder_blocks.", what),
        "mlp_ratio": mlp_ratio(hidden, width),
    }
    size: MaskedAutoencoderConfig | None = published(MAE_SIZES, "vip_", shape, pixels)
    known = (
        None
        if size is None
        else Unstated(
            num_heads=size.encoder.num_heads,
            decoder_heads=size.decoder.num_heads,
            norm_eps=size.encoder.norm_eps,
            normalise_pixels=size.normalise_pixels,
            activation="gelu",
        )
    )
    asked = ("num_heads", "decoder_heads", "norm_eps", "normalise_pixels", "activation")
    decided = unstated.decided(asked, known, what)
    encoder = VitConfig(**shape, qkv_bias=True, num_heads=decided["num_heads"], norm_eps=decided["norm_eps"])
    decoder = PixelDecoderConfig(
        **pixels,
        num_heads=decided["decoder_heads"],
        norm_eps=decided["norm_eps"],
        position=position_kind(state, "decoder_pos_embed", encoder.grid_size, width, what),
    )
    config = MaskedAutoencoderConfig(encoder=encoder, decoder=decoder, normalise_pixels=decided["normalise_pixels"])
    return config, parameters_from(state, config, autoencoder_renamings(config), what)


def to_timm(encoder: VisionTransformer) -> dict[str, Tensor]:
    """The encoder under timm's names, as ViTDet-style codes load it; the positions are a tensor whatever their kind."""
    named = {f"encoder.{name}": value for name, value in with_tables(encoder).items()}
    return rename_back(named, encoder_renamings(encoder.config))


def encoder_renamings(config: VitConfig) -> list[Renaming]:
    """timm's names of the encoder, positions included."""
    return _ENCODER.renamings("encoder", config.depth, qkv_bias=config.qkv_bias)


def autoencoder_renamings(config: MaskedAutoencoderConfig) -> list[Renaming]:
    """ViP's names of the whole masked autoencoder, positions included."""
    return encoder_renamings(config.encoder) + _DECODER.renamings("decoder", config.decoder.depth)


def position_kind(state: Mapping[str, Tensor], name: str, grid_size: int, width: int, what: str) -> PositionKind:
    """ "sincos" if the table is the fixed one (class token's row zero), else "learned"."""
    shape = shape_of(state, name, 3, what)
    if width % 4 or shape != (1, 1 + grid_size**2, width):
        return "learned"  # another width than a fixed one's; or a wrong shape, which `rename` reports
    table = image_sincos_table(grid_size, width)
    return "sincos" if bool((state[name][0].double() - table).abs().max() <= POSITION_TOLERANCE) else "learned"


def encoder_shape(state: Mapping[str, Tensor], what: str) -> dict[str, Any]:
    """What the tensors of an encoder under timm's names tell of its `VitConfig`: everything but heads, biases and epsilon.

    Raises:
        WeightsError: missing names, or shapes that do not fit together.
    """
    width, channels, patch, _ = shape_of(state, "patch_embed.proj.weight", 4, what)
    _, num_tokens, _ = shape_of(state, "pos_embed", 3, what)
    hidden, _ = shape_of(state, "blocks.0.mlp.fc1.weight", 2, what)
    depth, grid = count_blocks(state, "blocks.", what), round(max(num_tokens - 1, 0) ** 0.5)
    if grid < 1 or grid**2 != num_tokens - 1:
        raise WeightsError(
            f"{what}: pos_embed has {num_tokens} rows, but a class token and a square of patches are expected"
        )
    return {
        "image_size": grid * patch,
        "patch_size": patch,
        "num_channels": channels,
        "width": width,
        "depth": depth,
        "mlp_ratio": mlp_ratio(hidden, width),
        "position": position_kind(state, "pos_embed", grid, width, what),
    }


def published(sizes: Mapping[str, Any], prefix: str, encoder: Mapping[str, Any], decoder: Mapping[str, Any]) -> Any:
    """The configuration of the published size with these shapes, or None.

    Images and positions may differ, which heads do not depend on.

    Args:
        sizes: configurations by name.
        prefix: of the names of published sizes.
    """

    def fits(config: Any, shape: Mapping[str, Any]) -> bool:
        return all(getattr(config, n) == value for n, value in shape.items() if n not in ("image_size", "position"))

    candidates = (size for name, size in sizes.items() if name.startswith(prefix))
    return next((size for size in candidates if fits(size.encoder, encoder) and fits(size.decoder, decoder)), None)
