"""Weights of the released DP-Cap code as weights of our captioner.

Source: Sander et al. 2024 (https://arxiv.org/abs/2403.02506) and the model definition of its release, of which names, shapes
and the order of operations are used here. Where a parameter goes that has no counterpart of its own:

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
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from models.config import SIZES, CaptionerConfig, DecoderConfig, PositionKind, VitConfig
from models.converters.native import parameters_from
from models.converters.vip import (
    POSITION_TOLERANCE,
    encoder_renamings,
    encoder_shape,
    position_kind,
    published,
)
from models.converters.weights import Renaming, Unstated, WeightsError, count_blocks, mlp_ratio, shape_of
from models.layers import text_sincos_table

_ENCODER_TYPE = "encoder_image_type_embedding"
_UNUSED = ("text_pos_embed", "mask_token", "mask_token_text", "encoder_text_type_embedding")
_CAUSAL_MASK = re.compile(r"decoder\.layers\.\d+\.self_attn\.bias")

_RAW = {
    "memory.position.table": "decoder_pos_embed",
    "memory.type_embedding": "decoder_image_type_embedding",
    "decoder.token_embedding.weight": "text_embedding_layer_SimVLM.weight",
    "decoder.position.table": "text_decoder_pos_embed",
    "decoder.type_embedding": "decoder_text_type_embedding",
}
_WITH_BIAS = {
    "memory.projection": "decoder_embed",
    "decoder.head_norm": "decoder_pred_text.0",
    "decoder.head": "decoder_pred_text.1",
}
_BLOCK_NORMS = ("norm1", "norm2", "norm3")
_BLOCK = {
    "self_attention.qkv": "self_attn.c_attn",  # rows of query, key, value in both
    "self_attention.out": "self_attn.c_proj",
    "cross_attention.query": "multihead_attn.q_proj",
    "cross_attention.key_value": "multihead_attn.kv_proj",  # rows of key, value in both
    "cross_attention.out": "multihead_attn.c_proj",
    "mlp.up": "linear1",
    "mlp.down": "linear2",
}


def from_dpcap(
    state: Mapping[str, Tensor],
    what: str = "DP-Cap checkpoint",
    unstated: Unstated = Unstated(),  # noqa: B008  (immutable)
) -> tuple[CaptionerConfig, dict[str, Tensor]]:
    """Configuration and parameters of a released checkpoint.

    Args:
        state: tensors by name, what the file holds under `model`.
        what: the file, for errors.
        unstated: heads, the activations of both parts, and the epsilon of the encoder's norms (the decoder's is 1e-5 in all of
            the release). A captioner with the shapes and biases of one of DP-Cap's sizes has that one's.

    Returns:
        The parameters by our names ("encoder.class_token", ...), in fp32. Token ids are those of BERT's vocabulary, which the
        release uses.

    Raises:
        WeightsError: missing or unknown names, shapes that do not fit together, or something is not stated.
    """
    config = _config(state, what, unstated)
    unused = [*_UNUSED, _ENCODER_TYPE, *(name for name in state if _CAUSAL_MASK.fullmatch(name))]
    renamed = parameters_from(state, config, _renamings(config), what, unused=unused)
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


def _renamings(config: CaptionerConfig) -> Iterator[Renaming]:
    yield from encoder_renamings(config.encoder)
    for ours, theirs in _RAW.items():
        yield Renaming(ours, (theirs,))
    for ours, theirs in _WITH_BIAS.items():
        yield from _layer(ours, theirs, has_bias=True)
    for i in range(config.decoder.depth):
        for norm in _BLOCK_NORMS:
            yield from _layer(f"decoder.blocks.{i}.{norm}", f"decoder.layers.{i}.{norm}", has_bias=True)
        for ours, theirs in _BLOCK.items():
            yield from _layer(f"decoder.blocks.{i}.{ours}", f"decoder.layers.{i}.{theirs}", config.decoder.bias)


def _layer(ours: str, theirs: str, has_bias: bool) -> Iterator[Renaming]:
    for tensor in ("weight", "bias") if has_bias else ("weight",):
        yield Renaming(f"{ours}.{tensor}", (f"{theirs}.{tensor}",))


def _config(state: Mapping[str, Tensor], what: str, unstated: Unstated) -> CaptionerConfig:
    vocab_size, width = shape_of(state, "text_embedding_layer_SimVLM.weight", 2, what)
    hidden, _ = shape_of(state, "decoder.layers.0.linear1.weight", 2, what)
    _, num_tokens, _ = shape_of(state, "text_decoder_pos_embed", 3, what)
    image = {**encoder_shape(state, what), "qkv_bias": "blocks.0.attn.qkv.bias" in state}
    text: dict[str, Any] = {
        "width": width,
        "depth": count_blocks(state, "decoder.layers.", what),
        "mlp_ratio": mlp_ratio(hidden, width),
        "bias": "decoder.layers.0.linear1.bias" in state,
    }
    size: CaptionerConfig | None = published(SIZES, "dpcap_", image, text)
    known = (
        None
        if size is None
        else Unstated(
            num_heads=size.encoder.num_heads,
            decoder_heads=size.decoder.num_heads,
            decoder_activation=size.decoder.activation,
            norm_eps=size.encoder.norm_eps,
            activation="gelu",
        )
    )
    asked = ("num_heads", "decoder_heads", "decoder_activation", "norm_eps", "activation")
    decided = unstated.decided(asked, known, what)
    encoder = VitConfig(**image, num_heads=decided["num_heads"], norm_eps=decided["norm_eps"])
    # The tables of image and text have one kind: learned, unless both are the fixed ones. `rename` reports a wrong shape.
    position: PositionKind = "learned"
    table = state["text_decoder_pos_embed"]
    if width % 4 == 0 and tuple(table.shape) == (1, num_tokens, width):
        difference = (table[0].double() - text_sincos_table(num_tokens, width)).abs().max()
        if not bool(difference > POSITION_TOLERANCE):
            position = position_kind(state, "decoder_pos_embed", encoder.grid_size, width, what)
    decoder = DecoderConfig(
        **text,
        num_heads=decided["decoder_heads"],
        activation=decided["decoder_activation"],
        norm_position="post",
        position=position,
        norm_eps=1e-5,
    )
    return CaptionerConfig(encoder=encoder, decoder=decoder, vocab_size=vocab_size, num_tokens=num_tokens)
