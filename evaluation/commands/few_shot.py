"""Few-shot classification, not private: K examples per class, mean and 95 % interval over random splits.

    python launch_scripts/evaluate.py few-shot --checkpoint runs/x --train shards:train/ --test shards:val/ --shots 1 2 5 10

`--method probe` is DP-Cap's regression on frozen features; `--method finetune` trains the whole encoder (in one process).
"""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from evaluation.commands.common import Seed, device_of
from evaluation.commands.inputs import Inputs, TrainTestOptions, load_inputs
from trainer.config.options import Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.few_shot import Shots
    from evaluation.results import Results


class FewShotOptions(TrainTestOptions):
    """Options of `few_shot`."""

    GROUP = "few-shot"

    method: Literal["probe", "finetune"] = "probe"
    shots: Annotated[tuple[Annotated[int, Field(ge=1, le=100_000)], ...], Shown("K"), Field(min_length=1)] = (
        1,
        2,
        5,
        10,
    )
    """examples per class"""
    num_splits: Annotated[int, Shown("S"), Field(ge=1, le=100_000)] = 3
    """random splits for each K"""
    seed: Seed = 0
    """of the first split"""
    epochs: int = Field(100, ge=1, le=100_000)
    """of fine-tuning"""
    base_lr: Annotated[float, Shown("R"), Field(gt=0, le=1e4)] = 5e-4
    """of fine-tuning: rate is R * batch / 256"""
    layer_decay: float = Field(0.65, gt=0, le=1)
    """of fine-tuning"""


def few_shot(options: FewShotOptions) -> "Results | None":
    """Trains and tests a classifier per K and split; None on other ranks than 0."""
    from evaluation.few_shot import few_shot_probe
    from evaluation.results import Results

    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    if options.method == "finetune":
        measured = _fine_tuned(options, inputs)
    else:
        measured = few_shot_probe(
            inputs.usable("train"), inputs.usable("test"), inputs.num_classes(), options.shots,
            num_splits=options.num_splits, seed=options.seed, device=device_of(options),
        )  # fmt: skip
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for shots in measured:
        row: dict[str, Any] = {"shots": shots.shots, "test accuracy": shots.mean}
        scalars[f"{options.method}/{shots.shots}-shot/accuracy"] = shots.mean
        if not math.isnan(shots.half_width):
            row["95 % interval"] = f"+- {shots.half_width:.4f}"
            scalars[f"{options.method}/{shots.shots}-shot/interval_half_width"] = shots.half_width
        table.append(row)
    details = {
        "method": options.method, "num_splits": options.num_splits, "seed": options.seed,
        "accuracies": {str(shots.shots): shots.accuracies for shots in measured},
    }  # fmt: skip
    return Results("few-shot", scalars, inputs.uses(), inputs.model, table, details)


def _fine_tuned(options: FewShotOptions, inputs: Inputs) -> "list[Shots]":
    """The features that were computed say which images are usable; training sees the images."""
    import numpy as np

    from evaluation.encoder import encoder_of
    from evaluation.few_shot import Shots, split
    from evaluation.fine_tuning import FineTuneOptions, classifier_accuracy, fine_tune, quick

    if inputs.opened is None or len(inputs.sources) < 2:
        raise ConfigError("fine-tuning needs --checkpoint and images for --train and --test, not features")
    encoder, train = encoder_of(inputs.opened.model), inputs.features["train"]
    if options.image_size not in (None, encoder.config.image_size):
        raise ConfigError(
            f"--image_size is for --method probe; fine-tuning is at the model's {encoder.config.image_size}"
        )
    usable = np.flatnonzero(train.is_usable_N)
    how = quick(FineTuneOptions(base_lr=options.base_lr, layer_decay=options.layer_decay), options.epochs)
    measured = []
    for shots in options.shots:
        accuracies = []
        for number in range(options.num_splits):
            rows = usable[split(train.labels_N[usable], shots, options.seed + number)]
            model = fine_tune(encoder, inputs.sources["train"], rows, inputs.num_classes(), how)
            accuracy = classifier_accuracy(
                model, inputs.sources["test"], batch_size=options.batch_size, num_workers=options.num_workers,
                resize=options.resize,
            )  # fmt: skip
            accuracies.append(accuracy)
        measured.append(Shots(shots, tuple(accuracies)))
    return measured
