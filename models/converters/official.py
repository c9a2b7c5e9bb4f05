"""The released weights of ViP and DP-Cap, and vision transformers under the names of timm and ViTDet.

Whoever imports a file names its size, and every shape is compared with it. A size also says what no tensor tells: the numbers of
heads, the epsilons of the norms, the exact GELU of every vision transformer here. Fields of it are replaced as in a recipe.

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
"""What the names of an encoder's tensors, which are timm's, leave open."""


def from_vip(
    state: Mapping[str, Tensor], what: str, size: str, overrides: Mapping[str, Any]
) -> tuple[MaskedAutoencoderConfig | EncoderConfig, dict[str, Tensor]]:
    """Configuration and parameters of a released checkpoint: the whole masked autoencoder, or the encoder where no name of
    the decoder is there.

    Args:
        what: the file, for errors.
        size: of `models.config.MAE_SIZES`; of an encoder alone also a captioner's.
        overrides: fields of the size that are replaced, as in `model.overrides` of a recipe.

    Returns:
        The parameters by our names ("encoder.class_token", ...), in fp32.

    Raises:
        WeightsError: missing or unknown names, or other shapes than those of the size. Or an encoder alone, which may come from
            any project under timm's names, without its heads and epsilon.
        ModelConfigError: an unknown size or field.
    """
    if any(name.startswith(("decoder_", "mask_token")) for name in state):
        config = masked_autoencoder_config(size, **overrides)
        encoder, decoder = config.encoder, config.decoder
        grid = encoder.grid_size
        table = position_kind(state, "pos_embed", image_sincos_table, grid, encoder.width, what)
        decoder_table = position_kind(
            state, "decoder_pos_embed", image_sincos_table, grid, decoder.width, what
        )
        encoder, decoder = (
            replace(encoder, position=table),
            replace(decoder, position=decoder_table),
        )
        config = replace(config, encoder=encoder, decoder=decoder)
        return config, parameters_from(state, config, VIP, what)
    if missing := [name for name in _OF_ANY_PROJECT if name not in overrides]:
        ways = " and ".join(f"--override {name}=..." for name in missing)
        raise WeightsError(
            f"{what} is an encoder alone, of any project: state {ways} as in the code that trained it, which must have the exact "
            "GELU (docs/models.md)"
        )
    alone = with_overrides(EncoderConfig(encoder=named_size(ENCODERS, size)), overrides)
    table = position_kind(
        state, "pos_embed", image_sincos_table, alone.encoder.grid_size, alone.encoder.width, what
    )
    alone = replace(alone, encoder=replace(alone.encoder, position=table))
    return alone, parameters_from(state, alone, TIMM, what)


def from_dpcap(
    state: Mapping[str, Tensor], what: str, size: str, overrides: Mapping[str, Any]
) -> tuple[CaptionerConfig, dict[str, Tensor]]:
    """Configuration and parameters of a released checkpoint, as `from_vip` returns them.

    Args:
        state: tensors by name, what the file holds under `model`.
        size: of `models.config.SIZES`; token ids are those of BERT's vocabulary, which the release uses.

    Raises:
        WeightsError, ModelConfigError: as for `from_vip`.
    """
    config = captioner_config(size, **overrides)
    encoder, decoder = config.encoder, config.decoder
    grid = encoder.grid_size
    table = position_kind(state, "pos_embed", image_sincos_table, grid, encoder.width, what)
    # The tables of image and text have one kind: learned, unless both are the fixed ones.
    kinds = {
        position_kind(
            state,
            "text_decoder_pos_embed",
            text_sincos_table,
            config.num_tokens,
            decoder.width,
            what,
        ),
        position_kind(state, "decoder_pos_embed", image_sincos_table, grid, decoder.width, what),
    }
    decoder = replace(decoder, position="sincos" if kinds == {"sincos"} else "learned")
    config = replace(config, encoder=replace(encoder, position=table), decoder=decoder)
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
