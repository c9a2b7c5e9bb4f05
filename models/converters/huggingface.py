"""transformers' ViTModel and ViTMAEForPreTraining: their names, configurations and image processor.

Files are written with the names that transformers has used in files since its version 4; both those
and the names of its version 5 in memory are read. The code does not import transformers.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from models.config import EncoderConfig, MaskedAutoencoderConfig, PixelDecoderConfig, VitConfig
from models.converters.names import HUGGINGFACE
from models.converters.native import encoder_tensors, parameters_and_tables, parameters_from
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

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PROCESSOR = "preprocessor_config.json"

# Names of transformers 5 in memory -> names in files.
_IN_MEMORY = (
    (r"^vit\.", ""),
    # Version 5 writes the first for the second.
    (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
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
"""Patterns of the names of heads on a ViTModel, which are not imported."""


def to_vit_model(encoder: VisionTransformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (config.json, tensors) of a ViTModel; positions of any kind become a parameter."""
    return _vit_config(encoder.config, "vit", "ViTModel"), encoder_tensors(HUGGINGFACE, encoder)


def to_vit_mae(model: MaskedAutoencoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (config.json, tensors) of a ViTMAEForPreTraining.

    Raises:
        WeightsError: encoder and decoder differ in norm epsilon or qkv bias, of which that class
            has one.
    """
    encoder = model.config.encoder
    decoder = model.config.decoder
    if not encoder.qkv_bias or encoder.norm_eps != decoder.norm_eps:
        raise WeightsError(
            "transformers' ViTMAEForPreTraining has one layer_norm_eps and one qkv_bias for "
            "encoder and decoder; this masked autoencoder's differ: --format safetensors writes "
            "all of it, --format timm its encoder"
        )
    config = {
        **_vit_config(encoder, "vit_mae", "ViTMAEForPreTraining"),
        **{theirs: getattr(decoder, ours) for ours, theirs in _FIELDS_OF_DECODER.items()},
        "decoder_intermediate_size": int(decoder.width * decoder.mlp_ratio),
        "mask_ratio": model.config.mask_ratio,
        "norm_pix_loss": model.config.normalise_pixels,
    }
    state: dict[str, Tensor] = {}
    for name, tensor in rename_back(parameters_and_tables(model), HUGGINGFACE).items():
        state[name if name.startswith("decoder.") else f"vit.{name}"] = tensor
    return config, state


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
    """Returns preprocessor_config.json: the centred square, resized (bicubic) and normalised.

    A PerceiverImageProcessor cuts before it resizes; a CLIPImageProcessor resizes first, to whole
    pixels of the longer side too, which moves and stretches pictures that are not square; a
    ViTImageProcessor squeezes them.
    """
    square = {"height": image_size, "width": image_size}
    # Equal to `size`, so the largest centred square is cut.
    return {
        "image_processor_type": "PerceiverImageProcessor",
        "do_convert_rgb": True,
        "do_center_crop": True,
        "crop_size": square,
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
    """Returns configuration and parameters of a folder that transformers saved.

    It holds a ViTModel (also under a head, which is left out), a ViTMAEModel or a
    ViTMAEForPreTraining.

    Raises:
        WeightsError: no such folder, another architecture, missing or unknown names.
    """
    try:
        facts = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightsError(
            f"{folder} is not a folder that transformers saved: {CONFIG}: {reason}"
        ) from error
    if not isinstance(facts, dict):
        raise WeightsError(f"{folder / CONFIG} is not a JSON object")
    state: dict[str, Tensor] = {}
    for name, tensor in read_weights(folder).items():
        for pattern, replacement in _IN_MEMORY:
            name = re.sub(pattern, replacement, name)
        state[name] = tensor
    folder_name = str(folder)
    model_type = facts.get("model_type")
    if model_type not in ("vit", "vit_mae"):
        raise WeightsError(
            f"{folder}: model_type {model_type!r} cannot be imported, only vit and vit_mae"
        )
    activation = _fact(facts, "hidden_act", str, folder_name)
    if activation != "gelu":
        raise WeightsError(f"{folder}: hidden_act {activation!r} differs from ours, gelu")
    shape: dict[str, Any] = {}
    for name, their_name in _FIELDS.items():
        kind = float if name == "norm_eps" else int
        shape[name] = _fact(facts, their_name, kind, folder_name)
    width = shape["width"]
    grid = shape["image_size"] // shape["patch_size"]
    hidden_width = _fact(facts, "intermediate_size", int, folder_name)
    table = "embeddings.position_embeddings"
    encoder = VitConfig(
        **shape,
        mlp_ratio=mlp_ratio(hidden_width, width),
        position=position_kind(state, table, image_sincos_table, grid, width, folder_name),
        qkv_bias=bool(facts.get("qkv_bias", True)),
    )
    if model_type == "vit" or not any(name.startswith("decoder.") for name in state):
        encoder_config = EncoderConfig(encoder=encoder)
        heads = re.compile("|".join(_HEADS))
        unused = [name for name in state if heads.fullmatch(name)]
        parameters = parameters_from(state, encoder_config, HUGGINGFACE, folder_name, unused=unused)
        return encoder_config, parameters
    shape = {
        name: _fact(facts, their_name, int, folder_name)
        for name, their_name in _FIELDS_OF_DECODER.items()
    }
    width = shape["width"]
    hidden_width = _fact(facts, "decoder_intermediate_size", int, folder_name)
    table = "decoder.decoder_pos_embed"
    decoder = PixelDecoderConfig(
        **shape,
        mlp_ratio=mlp_ratio(hidden_width, width),
        norm_eps=encoder.norm_eps,
        position=position_kind(state, table, image_sincos_table, grid, width, folder_name),
    )
    config = MaskedAutoencoderConfig(
        encoder=encoder,
        decoder=decoder,
        mask_ratio=_fact(facts, "mask_ratio", float, folder_name),
        normalise_pixels=_fact(facts, "norm_pix_loss", bool, folder_name),
    )
    return config, parameters_from(state, config, HUGGINGFACE, folder_name)


def _fact(facts: Mapping[str, Any], name: str, kind: type, folder_name: str) -> Any:
    """Returns an entry of config.json.

    transformers always writes its entries; the defaults of a newer version may be wrong for weights
    without them.

    Raises:
        WeightsError: the entry is missing, of another type, or a count below 1.
    """
    value = facts.get(name)
    if not isinstance(value, kind) or (isinstance(value, int) and kind is int and value < 1):
        raise WeightsError(
            f"{folder_name}: {CONFIG} states {name} = {value!r}, but a {kind.__name__} is needed, "
            "which no tensor tells: add it as in the code that trained the model"
        )
    return value
