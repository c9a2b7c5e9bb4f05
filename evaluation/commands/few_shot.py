"""Few-shot classification, not private: K examples per class, mean and 95 % interval over random splits.

    python launch_scripts/evaluate.py few-shot --checkpoint runs/x --train shards:train/ --test shards:val/ --shots 1 2 5 10

`--method probe` is DP-Cap's regression on frozen features; `--method finetune` trains the whole encoder (in one process).
"""

import argparse
import math
from typing import TYPE_CHECKING, Any

from data.options import LEAST_RATE, MOST_RATE, MOST_REPEATS, MOST_SEED, between, number_between
from evaluation.commands.common import device_of
from evaluation.commands.inputs import Inputs, add_inputs, load_inputs
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.few_shot import Shots
    from evaluation.results import Results

NAME = "few-shot"
HELP = "classifier from K examples per class (probe or fine-tuning), not private"
RANKS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_inputs(parser, ["train", "test"])
    group = parser.add_argument_group("few-shot")
    group.add_argument("--method", choices=("probe", "finetune"), default="probe")
    group.add_argument(
        "--shots",
        type=between(1, MOST_REPEATS),
        nargs="+",
        default=[1, 2, 5, 10],
        metavar="K",
        help="examples per class",
    )
    group.add_argument(
        "--num_splits", type=between(1, MOST_REPEATS), default=3, metavar="S", help="random splits for each K"
    )
    group.add_argument("--seed", type=between(0, MOST_SEED), default=0, help="of the first split")
    group.add_argument("--epochs", type=between(1, MOST_REPEATS), default=100, help="of fine-tuning")
    group.add_argument(
        "--base_lr",
        type=number_between(LEAST_RATE, MOST_RATE),
        default=5e-4,
        metavar="R",
        help="of fine-tuning: rate is R * batch / 256",
    )
    group.add_argument("--layer_decay", type=number_between(LEAST_RATE, 1), default=0.65, help="of fine-tuning")


def run(args: argparse.Namespace) -> "Results | None":
    """See `evaluation.commands`."""
    from evaluation.results import Results

    inputs = load_inputs(args, ["train", "test"])
    if inputs is None:
        return None
    found = _probe(args, inputs) if args.method == "probe" else _finetune(args, inputs)
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for shots in found:
        row: dict[str, Any] = {"shots": shots.shots, "test accuracy": shots.mean}
        scalars[f"{args.method}/{shots.shots}-shot/accuracy"] = shots.mean
        if not math.isnan(shots.half_width):
            row["95 % interval"] = f"+- {shots.half_width:.4f}"
            scalars[f"{args.method}/{shots.shots}-shot/interval_half_width"] = shots.half_width
        table.append(row)
    details = {
        "method": args.method, "num_splits": args.num_splits, "seed": args.seed,
        "accuracies": {str(shots.shots): shots.accuracies for shots in found},
    }  # fmt: skip
    return Results(NAME, scalars, inputs.uses(), inputs.model, table, details)


def _probe(args: argparse.Namespace, inputs: Inputs) -> "list[Shots]":
    from evaluation.few_shot import few_shot_probe

    train, test = inputs.usable("train"), inputs.usable("test")
    return few_shot_probe(
        (train.values_ND, train.labels_N), (test.values_ND, test.labels_N), inputs.num_classes(), args.shots,
        num_splits=args.num_splits, seed=args.seed, device=device_of(args),
    )  # fmt: skip


def _finetune(args: argparse.Namespace, inputs: Inputs) -> "list[Shots]":
    """The features that were computed say which images are usable; training sees the images."""
    import numpy as np

    from evaluation.encoder import encoder_of
    from evaluation.few_shot import Shots, split
    from evaluation.fine_tuning import FineTuneOptions, classifier_accuracy, fine_tune, quick

    if inputs.opened is None or len(inputs.sources) < 2:
        raise ConfigError("fine-tuning needs --checkpoint and images for --train and --test, not features")
    encoder, train = encoder_of(inputs.opened.model), inputs.features["train"]
    if args.image_size not in (None, encoder.config.image_size):
        raise ConfigError(
            f"--image_size is for --method probe; fine-tuning is at the model's {encoder.config.image_size}"
        )
    usable = np.flatnonzero(train.is_usable_N)
    options = quick(FineTuneOptions(base_lr=args.base_lr, layer_decay=args.layer_decay), args.epochs)
    found = []
    for shots in args.shots:
        accuracies = []
        for number in range(args.num_splits):
            rows = usable[split(train.labels_N[usable], shots, args.seed + number)]
            model = fine_tune(encoder, inputs.sources["train"], rows, inputs.num_classes(), options)
            score = classifier_accuracy(
                model,
                inputs.sources["test"],
                batch_size=args.batch_size,
                num_workers=args.num_workers,
                resize=args.resize,
            )
            accuracies.append(score)
        found.append(Shots(shots, tuple(accuracies)))
    return found
