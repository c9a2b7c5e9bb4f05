"""Opens any checkpoint in one process: for evaluation, export, or a look at it.

A manifest states the whole model, so a checkpoint opens without its run folder; a captioner then
needs its tokenizer from another place.

    >>> opened = open_model(Path("runs/quickstart"))  # doctest: +SKIP
    >>> loss_B = opened.model(**opened.task.synthetic_inputs(2))  # doctest: +SKIP
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from data.examples.tokenizer import EMBEDDED_TOKENIZER
from models.config import CaptionerConfig
from models.converters.native import config_from_facts
from privacy.checkpoints.read import MANIFEST, Checkpoint, file_digest, open_checkpoint
from privacy.files.toml_text import read_toml
from trainer.config.recipe import DataSection, validate_section
from trainer.errors import ConfigError
from trainer.tasks import TASKS, TrainingTask
from trainer.weights.provenance import proof_of

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = "tokenizer.json"
"""Name of an imported captioner's tokenizer, in the folder of its manifest."""


class OpenedModel(NamedTuple):
    """A model in memory, with its task and its checkpoint.

    Attributes:
        model: in evaluation mode, on one device.
        task: makes the model's examples (`task.make_example(train=False)`), and has the tokenizer.
        manifest: the checkpoint's: step, model, guarantee, provenance.
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
    """Builds the model of a manifest and sets its weights.

    Args:
        path: a checkpoint's folder, or a run folder, whose newest whole checkpoint is opened.
        dtype: of parameters and fixed positions.
        use_average: the moving average of the weights (train.ema_decay).
        tokenizer: the tokenizer of a captioner whose run folder is gone.

    Raises:
        ConfigError: no checkpoint, damaged, no average, weights that are NaN or infinite, or
            another tokenizer than that of training.
        ModelConfigError, DataError: a model or tokenizer that this version cannot build.
        PrivacyStateRefused, PrivacyConfigError: the ledger in its run folder is broken, recorded
            another checkpoint, or contradicts its manifest.
    """
    checkpoint = open_checkpoint(path)
    proof_of(checkpoint.path, checkpoint.manifest)
    task = _task(checkpoint, tokenizer)
    model = task.build(torch.Generator().manual_seed(0))
    checkpoint.load_weights(model, average=use_average)
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ConfigError(
                f"{checkpoint.path}: {name} has entries that are NaN or infinite; take an earlier "
                "checkpoint"
            )
    model = model.to(device=device, dtype=dtype).eval()
    return OpenedModel(model, task, checkpoint.manifest, checkpoint.path)


def run_folder_of(checkpoint: Path) -> Path | None:
    """Returns the run folder around a checkpoint, or None outside of a run folder."""
    folder = checkpoint.resolve().parent
    run_dir = folder.parent
    if folder.name == "checkpoints" and (run_dir / "config.toml").is_file():
        return run_dir
    return None


def _task(checkpoint: Checkpoint, tokenizer: Path | None) -> TrainingTask:
    """Returns the task that builds exactly the manifest's model.

    A captioner needs the tokenizer that it was trained with, by its SHA-256: the one given, the one
    in its folder, that of the recipe in the run folder, or the embedded one.

    Raises:
        ConfigError: the manifest states no model, or no tokenizer has these bytes.
    """
    manifest = checkpoint.manifest
    facts = manifest.get("model")
    run_dir = run_folder_of(checkpoint.path)
    if not isinstance(facts, dict) or not {"kind", "size"} <= facts.keys():
        raise ConfigError(f"{checkpoint.path}: {MANIFEST} does not state its model")
    config = config_from_facts(facts, str(checkpoint.path))
    # The section states how examples are made; its shards are not read.
    data = DataSection(shards="")
    if run_dir is not None:
        recipe_path = run_dir / "config.toml"
        recipe = read_toml(recipe_path, "recipe", "restore it from a copy")
        data = validate_section(DataSection, recipe.get("data", {}), f"{recipe_path}: [data]")
    tokenizer_path = EMBEDDED_TOKENIZER
    if isinstance(config, CaptionerConfig):
        candidates = [checkpoint.path / TOKENIZER, ROOT / data.tokenizer, EMBEDDED_TOKENIZER]
        if tokenizer is not None:
            candidates = [tokenizer]
        digest = manifest.get("tokenizer_sha256")
        for candidate in candidates:
            if candidate.is_file() and file_digest(candidate) == digest:
                tokenizer_path = candidate.resolve()
                break
        else:
            raise ConfigError(
                f"{checkpoint.path}: the tokenizer that it was trained with (SHA-256 "
                f"{str(digest)[:16]}...) is not at {', '.join(map(str, candidates))}; put it into "
                f"the checkpoint's folder as {TOKENIZER}"
            )
    return TASKS[facts["kind"]](config, facts["size"], data, tokenizer_path)
