"""Segmentation or detection by a small head on token maps of the frozen encoder, not private.

    python launch_scripts/evaluate.py dense --task segmentation --checkpoint runs/x --train ade20k:ADE/training \\
        --test ade20k:ADE/validation --image_size 512
    python launch_scripts/evaluate.py dense --task detection --checkpoint runs/x --train synthetic:1:400 --test synthetic:2:100

Whole pictures are squeezed to a square of --image_size pixels. Masks are scored at their own resolution.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from evaluation.commands.common import CheckpointOptions, open_checkpoint
from trainer.config.options import Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.results import Results


class DenseCommandOptions(CheckpointOptions):
    """Options of `dense`."""

    task: Literal["segmentation", "detection"]
    train: Annotated[str, Shown("SOURCE")]
    """synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"""
    test: Annotated[str, Shown("SOURCE")]
    """synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"""
    image_size: Annotated[int | None, Shown("PIXELS"), Field(ge=1, le=8192)] = None
    """default: the model's; positions are interpolated"""
    head: Literal["linear", "conv"] = "conv"
    epochs: int = Field(30, ge=1, le=100_000)
    lr: float = Field(2e-3, gt=0, le=1e4)
    """of AdamW, in one cycle"""


def dense(options: DenseCommandOptions) -> "Results":
    """Trains the head and scores it."""
    from evaluation.dense.heads import DenseOptions, detection_scores, prepare, segmentation_scores
    from evaluation.dense.sources import open_dense
    from evaluation.encoder import encoder_of
    from evaluation.results import DataUse, ModelFacts, Results

    opened = open_checkpoint(options)
    how = DenseOptions(options.image_size, options.head, options.epochs, lr=options.lr)
    side = options.image_size or encoder_of(opened.model).config.image_size
    sources = {"train": open_dense(options.train, side), "test": open_dense(options.test, side)}
    classes = sources["train"]
    if classes.mask_classes != sources["test"].mask_classes:
        raise ConfigError("--train and --test have other classes")
    if options.task == "detection" and not classes.object_classes:
        raise ConfigError(f"detection needs boxes, and {classes.name} has masks only")
    train, test = (prepare(opened.model, source, how) for source in sources.values())
    if options.task == "segmentation":
        scores = segmentation_scores(train, test, len(classes.mask_classes), how)
    else:
        scores = detection_scores(train, test, len(classes.object_classes), how)
    uses = [DataUse(role, source.name, len(source)) for role, source in sources.items()]
    scalars = {f"{options.task}/{name}": value for name, value in scores.items()}
    facts = ModelFacts.of(opened.path, opened.manifest)
    return Results("dense", scalars, uses, facts, details={"head": options.head})
