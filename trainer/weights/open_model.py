"""Opens any checkpoint in one process: for evaluation, export, or a look at it.

A manifest states the whole model, so a checkpoint opens without its run folder; a captioner then needs its tokenizer from
somewhere (`find_tokenizer`).

    >>> opened = open_model(Path("runs/quickstart"))
    >>> loss_B = opened.model(**opened.task.synthetic_inputs(2))
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import nn

from data.examples.tokenizer import EMBEDDED_TOKENIZER
from models.converters.native import CUSTOM_SIZE, config_from_facts
from models.image_encoder import EncoderConfig
from trainer.checkpoints.read import MANIFEST, Checkpoint, file_digest, usable_names
from trainer.config.recipe import RunConfig
from trainer.errors import ConfigError
from trainer.tasks import TrainingTask, make_task
from trainer.tasks.encoding import EncodingTask

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = "tokenizer.json"
"""Beside a manifest: the tokenizer of an imported captioner."""

_SHORT_NAMES = ("image_size", "patch_size")
_ANY_SIZE = {"captioner": "dpcap_base", "masked_autoencoder": "vip_base", "classifier": "vip_base"}
"""A size to override every field of, for shapes of no named size."""
_WITHOUT_A_RECIPE: Mapping[str, Any] = {
    "data": {"shards": "none"},
    "privacy": {"enabled": False, "expected_batch_size": 1},
    "optimizer": {"peak_lr": 1.0},
    "train": {"num_steps": 1, "micro_batch_size": 1},
}
"""What a recipe must state and no model depends on."""


class OpenedModel(NamedTuple):
    """
    Attributes:
        model: in evaluation mode, on one device.
        task: makes examples as the model takes them (`task.make_example(train=False)`), knows the tokenizer.
        manifest: of the checkpoint: step, model, guarantee, provenance.
        path: the checkpoint's folder.
    """

    model: nn.Module
    task: TrainingTask
    manifest: dict[str, Any]
    path: Path


def open_model(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    use_average: bool = False,
    tokenizer: Path | None = None,
) -> OpenedModel:
    """Builds the model that a manifest states and sets its weights.

    Args:
        path: a checkpoint's folder, or a run folder, of which the newest whole checkpoint is taken.
        dtype: of parameters and fixed positions.
        use_average: the moving average of the weights (train.ema_decay).
        tokenizer: of a captioner whose run folder is gone.

    Raises:
        ConfigError: no checkpoint, damaged, no average, weights that are NaN or infinite, or another tokenizer than it was
            trained with.
        ModelConfigError, DataError: a model or tokenizer that this version cannot build.
    """
    checkpoint = open_checkpoint(path)
    task = _task(checkpoint, tokenizer)
    model = task.build(torch.Generator().manual_seed(0))
    checkpoint.load_weights(model, average=use_average)
    broken = [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]
    if broken:
        raise ConfigError(
            f"{checkpoint.path}: {broken[0]} has entries that are NaN or infinite; take an earlier checkpoint"
        )
    return OpenedModel(model.to(device=device, dtype=dtype).eval(), task, checkpoint.manifest, checkpoint.path)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in this folder, or the newest whole one of this run folder; changes nothing on the disk.

    Raises:
        ConfigError: there is none, or none is whole.
    """
    if (path / MANIFEST).is_file():
        return Checkpoint(path)
    folder = path / "checkpoints"
    names = usable_names(folder)
    if not names:
        raise ConfigError(f"{path} is neither a checkpoint nor a run folder with one")
    failure = None
    for name in names:
        try:
            return Checkpoint(folder / name)
        except ConfigError as error:
            failure = failure or error
    raise ConfigError(f"none of the {len(names)} checkpoints in {folder} is whole ({failure}); restore one from a copy")


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run folder around a checkpoint, if it lies in one."""
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" and (folder.parent / "config.toml").is_file() else None


def find_tokenizer(checkpoint: Path, manifest: Mapping[str, Any], given: Path | None = None) -> Path:
    """The tokenizer that a captioner was trained with, by its SHA-256: the one given, beside the manifest, of the recipe in
    the run folder, or the embedded one.

    Raises:
        ConfigError: none of them has these bytes.
    """
    wanted = manifest.get("tokenizer_sha256")
    candidates = [given] if given is not None else list(_tokenizers(checkpoint))
    for path in candidates:
        if path.is_file() and file_digest(path) == wanted:
            return path
    looked_at = ", ".join(str(path) for path in candidates)
    raise ConfigError(
        f"{checkpoint}: the tokenizer that it was trained with (SHA-256 {str(wanted)[:16]}...) is not at {looked_at}; "
        f"put it beside the manifest as {TOKENIZER}"
    )


def _tokenizers(checkpoint: Path) -> Iterator[Path]:
    yield checkpoint / TOKENIZER
    stated = _run_recipe(checkpoint).get("data", {}).get("tokenizer")
    if isinstance(stated, str):
        yield ROOT / stated
    yield EMBEDDED_TOKENIZER


def _run_recipe(checkpoint: Path) -> dict[str, Any]:
    """config.toml of the run folder around a checkpoint; empty without one."""
    run = run_folder_of(checkpoint)
    if run is None:
        return {}
    try:
        return tomllib.loads((run / "config.toml").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run / 'config.toml'} cannot be read: {error}") from error


def _task(checkpoint: Checkpoint, tokenizer: Path | None) -> TrainingTask:
    """The task that builds exactly the model that the manifest states."""
    stated = checkpoint.manifest.get("model")
    if not isinstance(stated, dict) or not {"kind", "size"} <= stated.keys():
        raise ConfigError(f"{checkpoint.path}: {MANIFEST} does not state its model")
    if stated["kind"] == EncodingTask.kind:
        config = config_from_facts(stated, str(checkpoint.path))
        assert isinstance(config, EncoderConfig)
        return EncodingTask(config, stated["size"])
    task = make_task(_recipe(checkpoint, stated, tokenizer), ROOT)
    differing = _first_difference(stated, task.facts()["model"])
    if differing is not None:
        raise ConfigError(f"{checkpoint.path}: this version cannot build its model: {differing} would be another")
    return task


def _first_difference(stated: Mapping[str, Any], built: Mapping[str, Any]) -> str | None:
    """A field whose value is not the one stated; fields that were added since have their defaults."""
    for name, value in stated.items():
        if isinstance(value, dict):
            inner = _first_difference(value, built.get(name, {}))
            if inner is not None:
                return f"{name}.{inner}"
        elif name != "size" and built.get(name) != value:
            return name
    return None


def _recipe(checkpoint: Checkpoint, stated: Mapping[str, Any], tokenizer: Path | None) -> RunConfig:
    """A recipe of the model that the manifest states; beside that, the run's own one where it is still there."""
    path, manifest = checkpoint.path, checkpoint.manifest
    tree = {**_WITHOUT_A_RECIPE, **_run_recipe(path)}
    data = {**tree["data"], "image_size": stated.get("encoder", {}).get("image_size")}
    if "tokenizer_sha256" in manifest:
        found = find_tokenizer(path, manifest, tokenizer)
        data |= {"num_tokens": stated.get("num_tokens"), "tokenizer": str(found.resolve())}
    tree |= {"name": tree.get("name", "opened"), "model": _model_section(stated), "data": data}
    tree.pop("init", None)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: this version cannot build its model: {where}: {first['msg']}") from error


def _model_section(stated: Mapping[str, Any]) -> dict[str, Any]:
    """[model] whose overrides set every field, so that a size that has changed since changes nothing."""
    overrides: dict[str, Any] = {}
    for name, value in stated.items():
        if name in ("kind", "size"):
            continue
        if not isinstance(value, dict):
            overrides[name] = value
            continue
        for field, inner in value.items():
            short = name == "encoder" and field in _SHORT_NAMES
            overrides[field if short else f"{name}_{field}"] = inner
    size = _ANY_SIZE.get(stated["kind"]) if stated["size"] == CUSTOM_SIZE else stated["size"]
    return {"kind": stated["kind"], "size": size, "overrides": overrides}
