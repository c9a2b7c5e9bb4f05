"""Our own models outside of a run, in a folder that needs only `models/`.

The folder holds config.json and model.safetensors, by our names.

>>> model = load_model(Path("exported"))  # doctest: +SKIP
>>> loss_B = model(images_BCHW, tokens_BL, token_mask_BL)  # doctest: +SKIP
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.base import ImageEncoder
from models.captioner import Captioner
from models.classifier import Classifier
from models.config import (
    MAE_SIZES,
    SIZES,
    CaptionerConfig,
    ClassifierConfig,
    EncoderConfig,
    MaskedAutoencoderConfig,
)
from models.converters.names import Names
from models.converters.weights import WeightsError, read_weights, rename, rename_back, write_weights
from models.masked_autoencoder import MaskedAutoencoder

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
FORMAT = 1
CUSTOM_SIZE = "custom"
"""The size in the manifest of a model whose shapes no named size has."""

AnyConfig = CaptionerConfig | MaskedAutoencoderConfig | ClassifierConfig | EncoderConfig

_KINDS: Mapping[str, tuple[Any, type[nn.Module]]] = {
    "captioner": (CaptionerConfig, Captioner),
    "masked_autoencoder": (MaskedAutoencoderConfig, MaskedAutoencoder),
    "classifier": (ClassifierConfig, Classifier),
    "encoder": (EncoderConfig, ImageEncoder),
}
"""Kind -> configuration and model."""


def kind_of(config: AnyConfig) -> str:
    """Returns "captioner", "classifier", ..., as in recipes and manifests."""
    return next(kind for kind, (config_class, _) in _KINDS.items() if type(config) is config_class)


def model_facts(config: AnyConfig, size: str) -> dict[str, Any]:
    """Returns what a manifest states under `model`."""
    return {"kind": kind_of(config), "size": size, **asdict(config)}


def config_from_facts(facts: Mapping[str, Any], source: str) -> AnyConfig:
    """Returns the configuration that `model_facts` describes.

    Args:
        source: the file, for errors.

    Raises:
        WeightsError: an unknown kind or field, or a missing one: a default may be wrong for given
            weights.
        ModelConfigError: values that contradict each other.
    """
    kind = str(facts.get("kind"))
    if kind not in _KINDS:
        raise WeightsError(
            f"{source}: unknown kind of model {kind!r}; known are {', '.join(_KINDS)}"
        )
    config_class, _ = _KINDS[kind]
    parts: dict[str, Any] = {
        field.name: field.type
        for field in dataclasses.fields(config_class)
        if dataclasses.is_dataclass(field.type)
    }
    for part, part_class in {"": config_class, **parts}.items():
        stated_fields = facts.get(part) if part else facts
        field_names = {field.name for field in dataclasses.fields(part_class)}
        missing = sorted(field_names - set(stated_fields or ()))
        # A part that is missing as a whole is among the missing fields of the configuration.
        if missing and stated_fields is not None:
            prefix = f"{part}: " if part else ""
            raise WeightsError(f"{source} does not state {prefix}{', '.join(missing)} of its model")
    arguments = {name: value for name, value in facts.items() if name not in ("kind", "size")}
    try:
        for part, part_class in parts.items():
            arguments[part] = part_class(**arguments[part])
        built: AnyConfig = config_class(**arguments)
    except TypeError as error:
        raise WeightsError(f"{source}: this version cannot build its model: {error}") from error
    return built


def build_empty(config: AnyConfig) -> nn.Module:
    """Returns the model on the meta device: names and shapes without memory."""
    _, model_class = _KINDS[kind_of(config)]
    with torch.device("meta"):
        model: nn.Module = model_class(config)
    return model


def parameter_shapes(config: AnyConfig) -> dict[str, torch.Size]:
    """Returns the shapes of all parameters; a shared parameter has one name."""
    return {name: parameter.shape for name, parameter in build_empty(config).named_parameters()}


def parameters_and_tables(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and fixed position tables by name, for projects that store the tables."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def encoder_tensors(names: Names, encoder: nn.Module) -> dict[str, Tensor]:
    """Returns an encoder's tensors under other names, e.g. `TIMM` for ViTDet-style codes.

    Positions of any kind are one tensor.
    """
    ours = {f"encoder.{name}": tensor for name, tensor in parameters_and_tables(encoder).items()}
    return rename_back(ours, names)


def parameters_from(
    state: Mapping[str, Tensor],
    config: AnyConfig,
    names: Names,
    source: str,
    *,
    unused: Iterable[str] = (),
) -> dict[str, Tensor]:
    """Returns a model's parameters from another project's tensors; fixed tables are only checked.

    Args and errors are those of `rename`.
    """
    model = build_empty(config)
    shapes = {name: tensor.shape for name, tensor in parameters_and_tables(model).items()}
    renamed = rename(state, shapes, names, source, unused=unused)
    fixed_tables = dict(model.named_buffers())
    return {name: tensor for name, tensor in renamed.items() if name not in fixed_tables}


def save_model(
    folder: Path,
    model: nn.Module,
    facts: Mapping[str, Any],
    about: Mapping[str, Any],
    further: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and model.safetensors.

    Args:
        facts: `model_facts`.
        about: origin of the weights, for people.
        further: entries of config.json for other programs.
    """
    content = {"format": FORMAT, "model": dict(facts), "about": dict(about), **(further or {})}
    (folder / CONFIG).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_weights(folder / WEIGHTS, dict(model.named_parameters()))


def read_folder(folder: Path) -> tuple[AnyConfig, dict[str, Tensor]]:
    """Returns configuration and parameters of a folder that `save_model` wrote.

    Raises:
        WeightsError: another folder, damaged, or of another structure.
    """
    try:
        content = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder} is not an exported model: {CONFIG}: {error}") from error
    facts = content.get("model") if isinstance(content, dict) else None
    if not isinstance(facts, dict) or content.get("format") != FORMAT:
        raise WeightsError(
            f"{folder / CONFIG} is not that of a model exported with --format safetensors"
        )
    config = config_from_facts(facts, str(folder))
    return config, rename(read_weights(folder), parameter_shapes(config), {}, str(folder))


def load_model(folder: Path) -> nn.Module:
    """Returns the model of a folder in evaluation mode; see `read_folder`."""
    config, parameters = read_folder(folder)
    _, model_class = _KINDS[kind_of(config)]
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    return model.eval()


def size_name(config: AnyConfig) -> str:
    """Returns the named size with these shapes, or "custom"."""
    sizes_of: Mapping[Any, Mapping[str, Any]] = {
        CaptionerConfig: SIZES,
        MaskedAutoencoderConfig: MAE_SIZES,
    }
    for name, size in sizes_of.get(type(config), {}).items():
        has_encoder = size.encoder == config.encoder
        # Captioners and masked autoencoders, which have named sizes, have a decoder.
        if has_encoder and size.decoder == config.decoder:  # type: ignore[union-attr]
            return name
    return CUSTOM_SIZE
