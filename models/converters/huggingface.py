"""transformers' ViTModel and ViTMAEForPreTraining: their names, configurations and image processor.

Files are written with the names that transformers has used in files since its version 4; both those and the names of its
version 5 in memory are read. Nothing here needs transformers.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from models.config import EncoderConfig, MaskedAutoencoderConfig, PixelDecoderConfig, VitConfig
from models.converters.names import HUGGINGFACE
from models.converters.native import encoder_as, parameters_from, with_tables
from models.converters.weights import (
    WeightsError,
    mlp_ratio,
    position_kind,
    read_weights,
    rename_back,
)
from models.layers import image_sincos_table
from models.masked_autoencoder import MaskedAutoencoder
from models.vit import VisionTransformer

CONFIG, WEIGHTS, PROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"

_IN_MEMORY = (  # transformers 5 in memory -> in files
    (r"^vit\.", ""),
    (
        r"^decoder\.decoder_encoder\.layer\.",
        "decoder.decoder_layers.",
    ),  # version 5 writes the first for the second
    (r"(?<!\w)layers\.(?=\d)", "encoder.layer."),
    (r"attention\.q_proj", "attention.attention.query"),
    (r"attention\.k_proj", "attention.attention.key"),
    (r"attention\.v_proj", "attention.attention.value"),
    (r"attention\.o_proj", "attention.output.dense"),
    (r"mlp\.fc1", "intermediate.dense"),
    (r"mlp\.fc2", "output.dense"),
)
_FIELDS = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_eps": "layer_norm_eps",
    **{name: name for name in ("image_size", "patch_size", "num_channels")},
}
_FIELDS_OF_DECODER = {name: f"decoder_{_FIELDS[name]}" for name in ("width", "depth", "num_heads")}
"""Fields of our configurations, and their names in config.json."""
_HEADS = (r"pooler\.dense\.(weight|bias)", r"classifier\.(weight|bias)", r"embeddings\.mask_token")
"""Patterns of names that stand on top of a ViTModel and are no part of the encoder."""


def to_vit_model(encoder: VisionTransformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors) of a ViTModel. The positions become a parameter whatever their kind."""
    return _vit_config(encoder.config, "vit", "ViTModel"), encoder_as(HUGGINGFACE, encoder)


def to_vit_mae(model: MaskedAutoencoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors) of a ViTMAEForPreTraining.

    Raises:
        WeightsError: that class has one norm epsilon and one kind of qkv for both parts; these differ here.
    """
    encoder, decoder = model.config.encoder, model.config.decoder
    if not encoder.qkv_bias or encoder.norm_eps != decoder.norm_eps:
        raise WeightsError(
            "transformers' ViTMAEForPreTraining has one layer_norm_eps and one qkv_bias for encoder and decoder; this masked "
            "autoencoder's differ: --format safetensors writes all of it, --format timm its encoder"
        )
    config = {
        **_vit_config(encoder, "vit_mae", "ViTMAEForPreTraining"),
        **{theirs: getattr(decoder, ours) for ours, theirs in _FIELDS_OF_DECODER.items()},
        "decoder_intermediate_size": int(decoder.width * decoder.mlp_ratio),
        "mask_ratio": model.config.mask_ratio,
        "norm_pix_loss": model.config.normalise_pixels,
    }
    tensors = rename_back(with_tables(model), HUGGINGFACE)
    return config, {
        name if name.startswith("decoder.") else f"vit.{name}": value
        for name, value in tensors.items()
    }


def _vit_config(config: VitConfig, model_type: str, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "intermediate_size": int(config.width * config.mlp_ratio),
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "qkv_bias": config.qkv_bias,
    }


def image_processor(
    image_size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Any]:
    """preprocessor_config.json: the largest centred square, to `image_size` (bicubic), normalisation.

    A PerceiverImageProcessor cuts before it resizes; a CLIPImageProcessor resizes first, to whole pixels of the longer side
    too, which moves and stretches pictures that are not square; a ViTImageProcessor squeezes them.
    """
    square = {"height": image_size, "width": image_size}
    return {
        "image_processor_type": "PerceiverImageProcessor",
        "do_convert_rgb": True,
        "do_center_crop": True,
        "crop_size": square,  # equal to `size`: the whole centred square
        "do_resize": True,
        "size": square,
        "resample": 3,  # bicubic
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def from_huggingface(
    folder: Path,
) -> tuple[MaskedAutoencoderConfig | EncoderConfig, dict[str, Tensor]]:
    """Configuration and parameters of a folder that transformers saved: ViTModel (also under a head, which is left out),
    ViTMAEModel or ViTMAEForPreTraining.

    Raises:
        WeightsError: no such folder, another architecture, missing or unknown names.
    """
    try:
        stated = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightsError(
            f"{folder} is no folder that transformers saved: {CONFIG}: {reason}"
        ) from error
    if not isinstance(stated, dict):
        raise WeightsError(f"{folder / CONFIG} is no JSON object")
    state: dict[str, Tensor] = {}
    for name, value in read_weights(folder).items():
        for pattern, replacement in _IN_MEMORY:
            name = re.sub(pattern, replacement, name)
        state[name] = value
    what, kind = str(folder), stated.get("model_type")
    if kind not in ("vit", "vit_mae"):
        raise WeightsError(
            f"{folder}: model_type {kind!r} cannot be imported, only vit and vit_mae"
        )
    act = _told(stated, "hidden_act", str, what)
    if act != "gelu":
        raise WeightsError(f"{what}: hidden_act {act!r} differs from ours, gelu")
    table = "embeddings.position_embeddings"
    own = {
        name: _told(stated, theirs, float if name == "norm_eps" else int, what)
        for name, theirs in _FIELDS.items()
    }
    width, grid = own["width"], own["image_size"] // own["patch_size"]
    encoder = VitConfig(
        **own,
        mlp_ratio=mlp_ratio(_told(stated, "intermediate_size", int, what), width),
        position=position_kind(state, table, image_sincos_table, grid, width, what),
        qkv_bias=bool(stated.get("qkv_bias", True)),
    )
    unused = [name for name in state if any(re.fullmatch(pattern, name) for pattern in _HEADS)]
    if kind == "vit" or not any(name.startswith("decoder.") for name in state):
        alone = EncoderConfig(encoder=encoder)
        return alone, parameters_from(state, alone, HUGGINGFACE, what, unused=unused)
    own = {name: _told(stated, theirs, int, what) for name, theirs in _FIELDS_OF_DECODER.items()}
    decoder = PixelDecoderConfig(
        **own,
        mlp_ratio=mlp_ratio(_told(stated, "decoder_intermediate_size", int, what), own["width"]),
        norm_eps=encoder.norm_eps,
        position=position_kind(
            state, "decoder.decoder_pos_embed", image_sincos_table, grid, own["width"], what
        ),
    )
    config = MaskedAutoencoderConfig(
        encoder=encoder,
        decoder=decoder,
        mask_ratio=_told(stated, "mask_ratio", float, what),
        normalise_pixels=_told(stated, "norm_pix_loss", bool, what),
    )
    return config, parameters_from(state, config, HUGGINGFACE, what)


def _told(stated: Mapping[str, Any], name: str, kind: type, what: str) -> Any:
    """One of the facts in config.json. transformers always writes them; its defaults are no fact about weights that lack one."""
    value = stated.get(name)
    if not isinstance(value, kind) or (isinstance(value, int) and kind is int and value < 1):
        raise WeightsError(
            f"{what}: {CONFIG} states {name} = {value!r}, but a {kind.__name__} is needed, which no tensor tells: add it as in "
            "the code that trained the model"
        )
    return value
