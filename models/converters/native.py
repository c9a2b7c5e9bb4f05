"""Our own models outside of a run: a folder with config.json and model.safetensors, by our names, that needs only `models/`.

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

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 1
CUSTOM_SIZE = "custom"
"""What a manifest says of shapes that no named size has."""

AnyConfig = CaptionerConfig | MaskedAutoencoderConfig | ClassifierConfig | EncoderConfig

_KINDS: Mapping[str, tuple[Any, type[nn.Module]]] = {
    "captioner": (CaptionerConfig, Captioner),
    "masked_autoencoder": (MaskedAutoencoderConfig, MaskedAutoencoder),
    "classifier": (ClassifierConfig, Classifier),
    "encoder": (EncoderConfig, ImageEncoder),
}
"""Kind -> configuration and model."""


def kind_of(config: AnyConfig) -> str:
    """ "captioner", ..., as in recipes and manifests."""
    return next(kind for kind, (config_class, _) in _KINDS.items() if type(config) is config_class)


def model_facts(config: AnyConfig, size: str) -> dict[str, Any]:
    """What a manifest states under `model`."""
    return {"kind": kind_of(config), "size": size, **asdict(config)}


def config_from_facts(facts: Mapping[str, Any], what: str) -> AnyConfig:
    """The configuration from `model_facts`.

    Raises:
        WeightsError: an unknown kind or field, or one that is not stated: defaults say nothing about weights.
        ModelConfigError: values that do not fit together.
    """
    kind = str(facts.get("kind"))
    if kind not in _KINDS:
        raise WeightsError(f"{what}: unknown kind of model {kind!r}; known are {', '.join(_KINDS)}")
    config_class, _ = _KINDS[kind]
    parts: dict[str, Any] = {
        f.name: f.type for f in dataclasses.fields(config_class) if dataclasses.is_dataclass(f.type)
    }
    for part, part_class in {"": config_class, **parts}.items():
        own = facts.get(part) if part else facts
        missing = sorted({field.name for field in dataclasses.fields(part_class)} - set(own or ()))
        if missing and own is not None:
            raise WeightsError(
                f"{what} does not state {part + ': ' if part else ''}{', '.join(missing)} of its model"
            )
    fields = {name: value for name, value in facts.items() if name not in ("kind", "size")}
    try:
        built: AnyConfig = config_class(
            **{n: parts[n](**v) if n in parts else v for n, v in fields.items()}
        )
    except TypeError as error:
        raise WeightsError(f"{what}: this version cannot build its model: {error}") from error
    return built


def build_empty(config: AnyConfig) -> nn.Module:
    """The model on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        model: nn.Module = _KINDS[kind_of(config)][1](config)
    return model


def parameter_shapes(config: AnyConfig) -> dict[str, torch.Size]:
    """Shapes of all parameters; a shared one has one name."""
    return {name: parameter.shape for name, parameter in build_empty(config).named_parameters()}


def with_tables(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and fixed position tables by name: other projects store the tables."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def encoder_as(names: Names, encoder: nn.Module) -> dict[str, Tensor]:
    """An encoder's tensors under others' names, e.g. `TIMM` for ViTDet-style codes; positions are one whatever their kind."""
    return rename_back(
        {f"encoder.{name}": value for name, value in with_tables(encoder).items()}, names
    )


def parameters_from(
    state: Mapping[str, Tensor],
    config: AnyConfig,
    names: Names,
    what: str,
    *,
    unused: Iterable[str] = (),
) -> dict[str, Tensor]:
    """The parameters of a model of this configuration, from another project's tensors; fixed tables are only checked.

    Args and errors are those of `rename`.
    """
    model = build_empty(config)
    shapes = {name: value.shape for name, value in with_tables(model).items()}
    renamed = rename(state, shapes, names, what, unused=unused)
    fixed = dict(model.named_buffers())
    return {name: value for name, value in renamed.items() if name not in fixed}


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
        about: where the weights come from, for people.
        further: entries of config.json that other programs look for.
    """
    content = {"format": FORMAT, "model": dict(facts), "about": dict(about), **(further or {})}
    (folder / CONFIG).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_weights(folder / WEIGHTS, dict(model.named_parameters()))


def read_folder(folder: Path) -> tuple[AnyConfig, dict[str, Tensor]]:
    """Configuration and parameters of such a folder.

    Raises:
        WeightsError: not one, damaged, or of another structure.
    """
    try:
        content = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder} is no exported model: {CONFIG}: {error}") from error
    facts = content.get("model") if isinstance(content, dict) else None
    if not isinstance(facts, dict) or content.get("format") != FORMAT:
        raise WeightsError(
            f"{folder / CONFIG} is not that of a model exported with --format safetensors"
        )
    config = config_from_facts(facts, str(folder))
    return config, rename(read_weights(folder), parameter_shapes(config), {}, str(folder))


def load_model(folder: Path) -> nn.Module:
    """The model, in evaluation mode; see `read_folder`."""
    config, parameters = read_folder(folder)
    model = _KINDS[kind_of(config)][1](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    return model.eval()


def size_name(config: AnyConfig) -> str:
    """The named size with these shapes, or "custom"."""
    sizes: Mapping[str, Any] = {CaptionerConfig: SIZES, MaskedAutoencoderConfig: MAE_SIZES}.get(
        type(config), {}
    )
    for name, size in sizes.items():
        if (size.encoder, size.decoder) == (config.encoder, config.decoder):  # type: ignore[union-attr]
            return name
    return CUSTOM_SIZE
