"""Zero-shot classification by caption likelihood.

    python launch_scripts/evaluate.py zero-shot --checkpoint runs/x --data folder:imagenet/val --classes names.txt
    python launch_scripts/evaluate.py zero-shot --checkpoint runs/x --synthetic_shapes 1000

Rules: `sum`, `mean` (per token, the published one) and `prior` (minus the log of the name's mean probability over calibration
images); see evaluation/zero_shot.py.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.options import MOST, MOST_AT_ONCE, MOST_REPEATS, MOST_SEED, between
from evaluation.commands.common import add_checkpoint
from evaluation.commands.inputs import add_columns, cache_of
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from evaluation.results import Results
    from evaluation.sources.records import LabelledImage, LabelledImages
    from models.captioner import Captioner
    from trainer.weights.open_model import OpenedModel

NAME = "zero-shot"
HELP = "classification by the likelihood of captions that name the class"
SYNTHETIC_SEED = 1 << 40
"""Default of the test pictures, far from seeds that people train with."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_checkpoint(parser)
    add_data(parser, "zero-shot")
    parser.add_argument(
        "--classes", type=Path, metavar="FILE", help="class names, one per line; default: the data's own"
    )
    parser.add_argument(
        "--template", action="append", metavar="TEXT",
help="with {} for the name or {a} for it with a/an; may be repeated (default: evaluation/zero_shot.py)",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", metavar="SOURCE", help="images for the prior; default: the images to classify, without labels"
    )


def add_data(parser: argparse.ArgumentParser, what: str) -> None:
    """--data or --synthetic_shapes, and how images are read."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="SOURCE", help="shards:PATTERN, folder:DIR, hf:DIR or arrays:FILE.npz")
    source.add_argument(
        "--synthetic_shapes", type=between(1, MOST_REPEATS), metavar="N", help=f"{what} on N pictures of plain shapes"
    )
    parser.add_argument(
        "--synthetic_seed", type=between(0, MOST_SEED), default=SYNTHETIC_SEED, help="of these pictures"
    )
    parser.add_argument("--max_examples", type=between(1, MOST), metavar="N", help="the first N only")
    add_columns(parser)
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="for indexes of shards; default: the run's private part"
    )
    parser.add_argument("--batch_size", type=between(1, MOST_AT_ONCE), default=64, metavar="B", help="images at once")


def run(args: argparse.Namespace) -> "Results":
    """See `evaluation.commands`."""
    import numpy as np
    import torch

    from evaluation.results import DataUse, ModelFacts, Results
    from evaluation.zero_shot import TEMPLATES, Prompts, accuracy, log_probs_of

    args.data_is_public |= args.data is None and args.calibration is None  # computed from a seed
    opened, model = open_captioner(args)
    source = _source(args, args.data)
    names = _names(args, source)
    tokenizer = opened.task.make_example(train=False).tokenizer  # type: ignore[attr-defined]
    prompts = Prompts.of(names, args.template or _templates(args, TEMPLATES), tokenizer, model.config.num_tokens)
    labels, unusable = [], 0

    def images(of: "LabelledImages", *, keep_labels: bool) -> "Iterator[Tensor]":
        nonlocal unusable
        for images_BCHW, labels_B, usable_B in _batches(args, of, model.config.encoder.image_size):
            if keep_labels:
                labels.append(labels_B[usable_B])
                unusable += int((~usable_B).sum())
            if usable_B.any():
                yield images_BCHW[torch.from_numpy(usable_B)]

    log_probs_NC = log_probs_of(model, prompts, images(source, keep_labels=True))
    uses = [DataUse("images", source.name, len(log_probs_NC), unusable)]
    calibration_MC = None
    if args.calibration is not None:
        other = _source(args, args.calibration)
        calibration_MC = log_probs_of(model, prompts, images(other, keep_labels=False))
        uses.append(DataUse("calibration", other.name, len(calibration_MC)))
    labels_N = np.concatenate(labels)
    found = {rule: accuracy(s, labels_N) for rule, s in prompts.by_rule(log_probs_NC, calibration_MC).items()}
    scalars = {f"accuracy_{rule}": one.top1 for rule, one in found.items()}
    scalars |= {f"top5_{rule}": one.top5 for rule, one in found.items() if one.top5 is not None}
    scalars["chance"] = 1 / len(names)
    table = [
        {"rule": rule, "top 1": one.top1, "top 5": one.top5, "chance": 1 / len(names)} for rule, one in found.items()
    ]
    details = {
        "templates": args.template or list(_templates(args, TEMPLATES)),
        "num_classes": len(names),
        "num_prompts": len(prompts.captions),
        "num_tree_nodes": prompts.tree.num_nodes,
        "per_class": {rule: dict(zip(names, one.per_class_K.tolist(), strict=True)) for rule, one in found.items()},
    }
    return Results(NAME, scalars, uses, ModelFacts.of(opened.path, opened.manifest), table, details)


def add_too_long(parser: argparse.ArgumentParser) -> None:
    """What to do with captions of more tokens than the model takes."""
    parser.add_argument(
        "--too_long", choices=("refuse", "skip"), default="refuse", help="captions of more tokens than the model takes"
    )


def open_captioner(args: argparse.Namespace) -> "tuple[OpenedModel, Captioner]":
    """
    Raises:
        ConfigError: the checkpoint holds another kind of model.
    """
    from evaluation.commands.common import open_checkpoint
    from models.captioner import Captioner

    opened = open_checkpoint(args)
    if not isinstance(opened.model, Captioner):
        raise ConfigError(f"{args.checkpoint} holds a {type(opened.model).__name__}; captions need a captioner")
    return opened, opened.model


def _source(args: argparse.Namespace, text: str | None) -> "LabelledImages":
    from evaluation.sources.labelled import ReadingOptions, open_source

    if text is None:
        return _SyntheticShapes(args.synthetic_shapes, args.synthetic_seed)
    options = ReadingOptions(args.label_field, args.image_column, args.label_column, cache_of(args))
    return open_source(text, options)


class _SyntheticShapes:
    """Pictures of single shapes as a source."""

    def __init__(self, count: int, seed: int) -> None:
        from data.synthetic.generate import SyntheticData
        from evaluation.synthetic_tests import SHAPE_CLASSES, shape_images

        self.name = f"{count} synthetic shapes, seed {seed}"
        self.class_names: tuple[str, ...] = SHAPE_CLASSES
        self._images, self._labels_N = shape_images(SyntheticData(seed, 64, "shapes"), count)

    def identity(self) -> str:
        return self.name

    def __len__(self) -> int:
        return len(self._images)

    def read(self, ids: Sequence[int]) -> "list[LabelledImage]":
        from evaluation.sources.records import LabelledImage

        return [LabelledImage(self._images[i], int(self._labels_N[i])) for i in ids]


def _templates(args: argparse.Namespace, default: Sequence[str]) -> Sequence[str]:
    """Captions of synthetic shapes have no introduction."""
    return ("{a}",) if args.data is None else default


def _names(args: argparse.Namespace, source: "LabelledImages") -> Sequence[str]:
    if args.classes is None:
        if not source.class_names:
            raise ConfigError(f"{source.name} does not name its classes: give --classes FILE, one name per line")
        return source.class_names
    try:
        lines = args.classes.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--classes {args.classes}: {error}") from error
    return [line for line in lines if line.strip()]


def _batches(
    args: argparse.Namespace, source: "LabelledImages", image_size: int
) -> "Iterator[tuple[Tensor, np.ndarray, np.ndarray]]":
    from evaluation.features import decoded_batches

    rows = range(min(len(source), args.max_examples or len(source)))
    yield from decoded_batches(
        source, rows, batch_size=args.batch_size, image_size=image_size, num_workers=args.num_workers
    )
