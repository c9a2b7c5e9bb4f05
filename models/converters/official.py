"""The released weights of ViP and DP-Cap, and encoders under the names of timm and ViTDet.

The caller names the size of a file, and every shape is compared with it. A size also states what
tensors do not: the numbers of heads, the epsilons of the norms, the exact GELU of every vision
transformer here. Its fields are replaced as in a recipe.

ViP (Yu et al. 2023, https://arxiv.org/abs/2306.08842): its script leaves the sin-cos tables
trainable, so a stored table is fixed if it is the sin-cos one, else learned.

DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506), by names, shapes and order of
operations of its released model definition. Parameters without a counterpart of their own become
part of others:

* `encoder_image_type_embedding` is added to every image token behind the patch embedding: it
  becomes part of the patch embedding's bias and of the class token. Checkpoints without it are
  imported unchanged.
* `decoder_image_type_embedding` and `decoder_text_type_embedding` are our `memory.type_embedding`,
  `decoder.type_embedding`.
* Stored positions that are the sin-cos tables are left out (`position = "sincos"`); any others
  become learned positions.

The release's captioning does not use text positions and text type at encoder width, nor the mask
tokens (of masked images, and of a parallel mode that was not trained); and its buffers with the
causal mask are not weights.

Tensors do not state the activation of the decoder's MLP: the release's models without biases, which
are those of the publication, have GELU; its models with biases, and its class by default, have
ReLU.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from models.config import (
    ENCODERS,
    CaptionerConfig,
    EncoderConfig,
    MaskedAutoencoderConfig,
    captioner_config,
    masked_autoencoder_config,
    named_size,
    with_overrides,
)
from models.converters.names import DPCAP, TIMM, VIP
from models.converters.native import parameters_from
from models.converters.weights import WeightsError, position_kind
from models.layers import image_sincos_table, text_sincos_table

_ENCODER_TYPE = "encoder_image_type_embedding"
_UNUSED = ("text_pos_embed", "mask_token", "mask_token_text", "encoder_text_type_embedding")
_CAUSAL_MASK = re.compile(r"decoder\.layers\.\d+\.self_attn\.bias")
_OF_ANY_PROJECT = ("encoder_num_heads", "encoder_norm_eps")
"""Fields of an encoder that its tensors, under timm's names, do not state."""


def from_vip(
    state: Mapping[str, Tensor], source: str, size: str, overrides: Mapping[str, Any]
) -> tuple[MaskedAutoencoderConfig | EncoderConfig, dict[str, Tensor]]:
    """Returns configuration and parameters of a released checkpoint of ViP.

    That is a masked autoencoder, or an encoder if the file has no name of a decoder.

    Args:
        source: the file, for errors.
        size: of `models.config.MAE_SIZES`; of an encoder alone also a captioner's.
        overrides: fields of the size that are replaced, as in `model.overrides` of a recipe.

    Returns:
        The parameters by our names ("encoder.class_token", ...), in fp32.

    Raises:
        WeightsError: missing or unknown names, or other shapes than those of the size. Or an
            encoder alone, which may come from any project under timm's names, without its heads and
            epsilon.
        ModelConfigError: an unknown size or field.
    """
    if any(name.startswith(("decoder_", "mask_token")) for name in state):
        config = masked_autoencoder_config(size, **overrides)
        encoder = config.encoder
        decoder = config.decoder
        grid = encoder.grid_size
        encoder_kind = position_kind(
            state, "pos_embed", image_sincos_table, grid, encoder.width, source
        )
        decoder_kind = position_kind(
            state, "decoder_pos_embed", image_sincos_table, grid, decoder.width, source
        )
        encoder = replace(encoder, position=encoder_kind)
        decoder = replace(decoder, position=decoder_kind)
        config = replace(config, encoder=encoder, decoder=decoder)
        return config, parameters_from(state, config, VIP, source)
    missing = [name for name in _OF_ANY_PROJECT if name not in overrides]
    if missing:
        ways = " and ".join(f"--override {name}=..." for name in missing)
        raise WeightsError(
            f"{source} is an encoder alone, of any project: state {ways} as in the code that "
            "trained it, which must have the exact GELU (docs/models.md)"
        )
    encoder_config = with_overrides(EncoderConfig(encoder=named_size(ENCODERS, size)), overrides)
    encoder = encoder_config.encoder
    encoder_kind = position_kind(
        state, "pos_embed", image_sincos_table, encoder.grid_size, encoder.width, source
    )
    encoder_config = replace(encoder_config, encoder=replace(encoder, position=encoder_kind))
    return encoder_config, parameters_from(state, encoder_config, TIMM, source)


def from_dpcap(
    state: Mapping[str, Tensor], source: str, size: str, overrides: Mapping[str, Any]
) -> tuple[CaptionerConfig, dict[str, Tensor]]:
    """Returns configuration and parameters of a released checkpoint of DP-Cap, as `from_vip`.

    Args:
        state: tensors by name, the file's entry `model`.
        size: of `models.config.SIZES`; token ids are those of BERT's vocabulary, which the release
            uses.

    Raises:
        WeightsError, ModelConfigError: as for `from_vip`.
    """
    config = captioner_config(size, **overrides)
    encoder = config.encoder
    decoder = config.decoder
    grid = encoder.grid_size
    encoder_kind = position_kind(
        state, "pos_embed", image_sincos_table, grid, encoder.width, source
    )
    text_kind = position_kind(
        state,
        "text_decoder_pos_embed",
        text_sincos_table,
        config.num_tokens,
        decoder.width,
        source,
    )
    memory_kind = position_kind(
        state, "decoder_pos_embed", image_sincos_table, grid, decoder.width, source
    )
    # A decoder has one kind for image and text: learned, unless both tables are the fixed ones.
    is_fixed = text_kind == memory_kind == "sincos"
    encoder = replace(encoder, position=encoder_kind)
    decoder = replace(decoder, position="sincos" if is_fixed else "learned")
    config = replace(config, encoder=encoder, decoder=decoder)
    causal_masks = [name for name in state if _CAUSAL_MASK.fullmatch(name)]
    unused = [*_UNUSED, _ENCODER_TYPE, *causal_masks]
    parameters = parameters_from(state, config, DPCAP, source, unused=unused)
    if _ENCODER_TYPE in state:
        # The sources of all tokens take in the embedding, because it is added to every token; the
        # positions stay.
        type_11D = state[_ENCODER_TYPE]
        class_token = parameters["encoder.class_token"]
        if type_11D.shape != class_token.shape:
            raise WeightsError(
                f"{source}: {_ENCODER_TYPE} has shape {tuple(type_11D.shape)}, but "
                f"{tuple(class_token.shape)} was expected"
            )
        class_token += type_11D.float()
        parameters["encoder.patch_embedding.bias"] += type_11D.float().flatten()
    return config, parameters
