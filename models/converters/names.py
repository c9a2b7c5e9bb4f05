"""Names of our models' parameters in other projects: one table each.

An entry names a parameter, or a layer whose weight and bias follow it; `{}` stands for the number
of a block. Where an entry has several names, our parameter is their concatenation along the first
dimension.
"""

import re
from collections.abc import Mapping

Names = Mapping[str, str]
_NUMBER = re.compile(r"(?<=blocks\.)\d+")


def names_in_project(ours: str, names: Names) -> list[str]:
    """Returns the other project's names of one of our parameters; our name without a table."""
    if not names:
        return [ours]
    number = _NUMBER.search(ours)
    entry = _NUMBER.sub("{}", ours)
    if entry in names:
        patterns = names[entry].split()
    else:
        layer, _, kind = entry.rpartition(".")
        patterns = [f"{name}.{kind}" for name in names[layer].split()]
    return [pattern.format(number and number[0]) for pattern in patterns]


def _blocks(ours: str, theirs: str, layers: Names) -> dict[str, str]:
    table = {}
    for layer, names in layers.items():
        their_layers = [f"{theirs}.{{}}.{name}" for name in names.split()]
        table[f"{ours}.{{}}.{layer}"] = " ".join(their_layers)
    return table


_TIMM_BLOCK = {
    "norm1": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "norm2": "norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
TIMM = {
    "encoder.class_token": "cls_token",
    "encoder.position.table": "pos_embed",
    "encoder.patch_embedding": "patch_embed.proj",
    "encoder.norm": "norm",
    **_blocks("encoder.blocks", "blocks", _TIMM_BLOCK),
}
"""Vision transformers of timm and of ViTDet-style codes; encoders of ViP and DP-Cap."""
VIP = {
    **TIMM,
    "decoder.mask_token": "mask_token",
    "decoder.position.table": "decoder_pos_embed",
    "decoder.embedding": "decoder_embed",
    "decoder.norm": "decoder_norm",
    "decoder.head": "decoder_pred",
    **_blocks("decoder.blocks", "decoder_blocks", _TIMM_BLOCK),
}
"""Masked autoencoders of He et al. 2021 (https://arxiv.org/abs/2111.06377), as ViP defines them."""
_DPCAP_BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "norm3": "norm3",
    "self_attention.qkv": "self_attn.c_attn",  # rows of query, key, value in both
    "self_attention.out": "self_attn.c_proj",
    "cross_attention.query": "multihead_attn.q_proj",
    "cross_attention.key_value": "multihead_attn.kv_proj",  # rows of key, value in both
    "cross_attention.out": "multihead_attn.c_proj",
    "mlp.up": "linear1",
    "mlp.down": "linear2",
}
DPCAP = {
    **TIMM,
    "memory.position.table": "decoder_pos_embed",
    "memory.type_embedding": "decoder_image_type_embedding",
    "memory.projection": "decoder_embed",
    "decoder.token_embedding": "text_embedding_layer_SimVLM",
    "decoder.position.table": "text_decoder_pos_embed",
    "decoder.type_embedding": "decoder_text_type_embedding",
    "decoder.head_norm": "decoder_pred_text.0",
    "decoder.head": "decoder_pred_text.1",
    **_blocks("decoder.blocks", "decoder.layers", _DPCAP_BLOCK),
}
_HUGGINGFACE_BLOCK = {
    "norm1": "layernorm_before",
    "attention.qkv": "attention.attention.query attention.attention.key attention.attention.value",
    "attention.out": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
HUGGINGFACE = {
    "encoder.class_token": "embeddings.cls_token",
    "encoder.position.table": "embeddings.position_embeddings",
    "encoder.patch_embedding": "embeddings.patch_embeddings.projection",
    "encoder.norm": "layernorm",
    **_blocks("encoder.blocks", "encoder.layer", _HUGGINGFACE_BLOCK),
    "decoder.mask_token": "decoder.mask_token",
    "decoder.position.table": "decoder.decoder_pos_embed",
    "decoder.embedding": "decoder.decoder_embed",
    "decoder.norm": "decoder.decoder_norm",
    "decoder.head": "decoder.decoder_pred",
    **_blocks("decoder.blocks", "decoder.decoder_layers", _HUGGINGFACE_BLOCK),
}
"""ViTModel of transformers, and ViTMAEForPreTraining without the prefix `vit.` of its encoder.

These are the names in files (see `huggingface`).
"""
