"""The released weights of ViP and DP-Cap, and vision transformers under the names of timm and ViTDet.

ViP (Yu et al. 2023, https://arxiv.org/abs/2306.08842): its script leaves the sin-cos tables trainable, so a table is taken as it
is: fixed if it is the sin-cos one, else learned.

DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506), by the model definition of its release, of which names, shapes and
the order of operations are used here. Where a parameter goes that has no counterpart of its own:

* `encoder_image_type_embedding` is added to every image token behind the patch embedding: it becomes part of the patch
  embedding's bias and of the class token. Checkpoints without it are taken as they are.
* `decoder_image_type_embedding` and `decoder_text_type_embedding` are our `memory.type_embedding`, `decoder.type_embedding`.
* Stored positions that are the sin-cos tables are left out (`position = "sincos"`); any others become learned positions.

The release's captioning does not use text positions and text type at encoder width, nor the mask tokens (of masked images, and
of a parallel mode that was not trained); and its buffers with the causal mask are no weights.

No tensor tells the activation of the decoder's MLP: the release's models without biases, which are those of the publication,
have GELU; its models with biases, and its class by default, have ReLU.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.config import SIZES, CaptionerConfig, DecoderConfig, VitConfig
from models.converters.names import DPCAP, TIMM, VIP
from models.converters.native import parameters_from
from models.converters.weights import Unstated, WeightsError, count_blocks, mlp_ratio, position_kind, shape_of
from models.image_encoder import EncoderConfig
from models.layers import image_sincos_table, text_sincos_table
from models.mae_config import MAE_SIZES, MaskedAutoencoderConfig, PixelDecoderConfig

_ENCODER_TYPE = "encoder_image_type_embedding"
_UNUSED = ("text_pos_embed", "mask_token", "mask_token_text", "encoder_text_type_embedding")
_CAUSAL_MASK = re.compile(r"decoder\.layers\.\d+\.self_attn\.bias")


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
    image = _encoder_shape(state, what)
    if not any(name.startswith(("decoder_", "mask_token")) for name in state):
        told = unstated.decided(("num_heads", "norm_eps", "activation"), None, what)
        alone = EncoderConfig(encoder=VitConfig(**image, num_heads=told["num_heads"], norm_eps=told["norm_eps"]))
        return alone, parameters_from(state, alone, TIMM, what)
    width, _ = shape_of(state, "decoder_embed.weight", 2, what)
    hidden, _ = shape_of(state, "decoder_blocks.0.mlp.fc1.weight", 2, what)
    pixels: dict[str, Any] = {
        "width": width,
        "depth": count_blocks(state, "decoder_blocks.", what),
        "mlp_ratio": mlp_ratio(hidden, width),
    }
    asked = ("num_heads", "decoder_heads", "norm_eps", "normalise_pixels", "activation")
    told = unstated.decided(asked, _published(MAE_SIZES, "vip_", image, pixels), what)
    encoder = VitConfig(**image, num_heads=told["num_heads"], norm_eps=told["norm_eps"])
    position = position_kind(state, "decoder_pos_embed", image_sincos_table, encoder.grid_size, width, what)
    decoder = PixelDecoderConfig(
        **pixels, num_heads=told["decoder_heads"], norm_eps=told["norm_eps"], position=position
    )
    config = MaskedAutoencoderConfig(encoder=encoder, decoder=decoder, normalise_pixels=told["normalise_pixels"])
    return config, parameters_from(state, config, VIP, what)


def from_dpcap(
    state: Mapping[str, Tensor],
    what: str = "DP-Cap checkpoint",
    unstated: Unstated = Unstated(),  # noqa: B008  (immutable)
) -> tuple[CaptionerConfig, dict[str, Tensor]]:
    """Configuration and parameters of a released checkpoint, as `from_vip` returns them.

    Args:
        state: tensors by name, what the file holds under `model`.
        what: the file, for errors.
        unstated: heads, the activations of both parts, and the epsilon of the encoder's norms (the decoder's is 1e-5 in all of
            the release). A captioner with the shapes and biases of one of DP-Cap's sizes has that one's.

    Returns:
        Token ids are those of BERT's vocabulary, which the release uses.

    Raises:
        WeightsError: as for `from_vip`.
    """
    vocab_size, width = shape_of(state, "text_embedding_layer_SimVLM.weight", 2, what)
    hidden, _ = shape_of(state, "decoder.layers.0.linear1.weight", 2, what)
    _, num_tokens, _ = shape_of(state, "text_decoder_pos_embed", 3, what)
    image = _encoder_shape(state, what)
    text: dict[str, Any] = {
        "width": width,
        "depth": count_blocks(state, "decoder.layers.", what),
        "mlp_ratio": mlp_ratio(hidden, width),
        "bias": "decoder.layers.0.linear1.bias" in state,
    }
    asked = ("num_heads", "decoder_heads", "decoder_activation", "norm_eps", "activation")
    told = unstated.decided(asked, _published(SIZES, "dpcap_", image, text), what)
    encoder = VitConfig(**image, num_heads=told["num_heads"], norm_eps=told["norm_eps"])
    # The tables of image and text have one kind: learned, unless both are the fixed ones.
    position = position_kind(state, "text_decoder_pos_embed", text_sincos_table, num_tokens, width, what)
    if position == "sincos":
        position = position_kind(state, "decoder_pos_embed", image_sincos_table, encoder.grid_size, width, what)
    decoder = DecoderConfig(
        **text,
        num_heads=told["decoder_heads"],
        activation=told["decoder_activation"],
        norm_position="post",
        position=position,
        norm_eps=1e-5,
    )
    config = CaptionerConfig(encoder=encoder, decoder=decoder, vocab_size=vocab_size, num_tokens=num_tokens)
    unused = [*_UNUSED, _ENCODER_TYPE, *(name for name in state if _CAUSAL_MASK.fullmatch(name))]
    renamed = parameters_from(state, config, DPCAP, what, unused=unused)
    if _ENCODER_TYPE in state:
        # What is added to every token of the encoder goes into what makes them, positions untouched.
        type_11D, class_token = state[_ENCODER_TYPE], renamed["encoder.class_token"]
        if type_11D.shape != class_token.shape:
            raise WeightsError(
                f"{what}: {_ENCODER_TYPE} has shape {tuple(type_11D.shape)}, but {tuple(class_token.shape)} was expected"
            )
        class_token += type_11D.float()
        renamed["encoder.patch_embedding.bias"] += type_11D.float().flatten()
    return config, renamed


def _encoder_shape(state: Mapping[str, Tensor], what: str) -> dict[str, Any]:
    """What the tensors of an encoder under timm's names tell of its `VitConfig`: everything but heads and epsilon.

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
        "position": position_kind(state, "pos_embed", image_sincos_table, grid, width, what),
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
    }


def _published(
    sizes: Mapping[str, Any], prefix: str, encoder: Mapping[str, Any], decoder: Mapping[str, Any]
) -> Unstated | None:
    """What the published size with these shapes has, or None. Images and positions may differ, which heads do not depend on."""
    for name, size in sizes.items():
        shapes = ((size.encoder, encoder), (size.decoder, decoder))
        differs = (getattr(part, n) != value for part, shape in shapes for n, value in shape.items() if n not in _FREE)
        if name.startswith(prefix) and not any(differs):
            return Unstated(
                num_heads=size.encoder.num_heads,
                decoder_heads=size.decoder.num_heads,
                decoder_activation=getattr(size.decoder, "activation", None),
                norm_eps=size.encoder.norm_eps,
                normalise_pixels=getattr(size, "normalise_pixels", None),
                activation="gelu",
            )
    return None


_FREE = ("image_size", "position")
