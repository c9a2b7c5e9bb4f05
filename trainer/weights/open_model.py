"""Opens any checkpoint in one process: for evaluation, export, or a look at it.

A manifest states the whole model, so a checkpoint opens without its run folder; a captioner then needs its tokenizer from
somewhere.

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
    """A model with what is known of it.

    Attributes:
        model: in evaluation mode, on one device.
        task: makes examples as the model takes them (`task.make_example(train=False)`), knows the tokenizer.
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
    """Builds the model that a manifest states and sets its weights.

    Args:
        path: a checkpoint's folder, or a run folder, of which the newest whole checkpoint is taken.
        dtype: what parameters and fixed positions are converted to.
        use_average: the moving average of the weights (train.ema_decay).
        tokenizer: the tokenizer of a captioner whose run folder is gone.

    Raises:
        ConfigError: no checkpoint, damaged, no average, weights that are NaN or infinite, or another tokenizer than it was
            trained with.
        ModelConfigError, DataError: a model or tokenizer that this version cannot build.
        PrivacyStateRefused, PrivacyConfigError: the ledger in its run folder is broken, recorded another checkpoint, or
            contradicts its manifest.
    """
    checkpoint = open_checkpoint(path)
    proof_of(checkpoint.path, checkpoint.manifest)
    task = _task(checkpoint, tokenizer)
    model = task.build(torch.Generator().manual_seed(0))
    checkpoint.load_weights(model, average=use_average)
    broken = [
        name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())
    ]
    if broken:
        raise ConfigError(
            f"{checkpoint.path}: {broken[0]} has entries that are NaN or infinite; take an earlier checkpoint"
        )
    return OpenedModel(
        model.to(device=device, dtype=dtype).eval(), task, checkpoint.manifest, checkpoint.path
    )


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run folder around a checkpoint, if it lies in one."""
    folder = checkpoint.resolve().parent
    return (
        folder.parent
        if folder.name == "checkpoints" and (folder.parent / "config.toml").is_file()
        else None
    )


def _task(checkpoint: Checkpoint, tokenizer: Path | None) -> TrainingTask:
    """The task that builds exactly the model that the manifest states. A captioner needs the tokenizer that it was trained with,
    by its SHA-256: the one given, the one in its folder, that of the recipe in the run folder, or the embedded one.

    Raises:
        ConfigError: the manifest states no model, or no tokenizer has these bytes.
    """
    manifest = checkpoint.manifest
    facts, run = manifest.get("model"), run_folder_of(checkpoint.path)
    if not isinstance(facts, dict) or not {"kind", "size"} <= facts.keys():
        raise ConfigError(f"{checkpoint.path}: {MANIFEST} does not state its model")
    config, size = config_from_facts(facts, str(checkpoint.path)), facts["size"]
    data = DataSection(shards="")  # fields of examples; no shards are read by it
    if run is not None:
        path = run / "config.toml"
        data = validate_section(
            DataSection,
            read_toml(path, "recipe", "restore it from a copy").get("data", {}),
            f"{path}: [data]",
        )
    path = EMBEDDED_TOKENIZER
    if isinstance(config, CaptionerConfig):
        candidates = [checkpoint.path / TOKENIZER, ROOT / data.tokenizer, EMBEDDED_TOKENIZER]
        candidates = candidates if tokenizer is None else [tokenizer]
        stated = manifest.get("tokenizer_sha256")
        found = next(
            (path for path in candidates if path.is_file() and file_digest(path) == stated), None
        )
        if found is None:
            raise ConfigError(
                f"{checkpoint.path}: the tokenizer that it was trained with (SHA-256 {str(stated)[:16]}...) is not at "
                f"{', '.join(map(str, candidates))}; put it into the checkpoint's folder as {TOKENIZER}"
            )
        path = found.resolve()
    return TASKS[facts["kind"]](config, size, data, path)
