"""Captions of images, folders or shards; with --metrics their BLEU, ROUGE-L and CIDEr against the captions that are there.

    python launch_scripts/evaluate.py captions --checkpoint runs/x --data folder:pictures --method beam --num_beams 4
    python launch_scripts/evaluate.py captions --checkpoint runs/x --data shards:heldout/ --metrics --grid captions.png

Metrics need an extra (requirements-captions.txt) and Java. The captions are in the record; --grid draws the first 24.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.options import LEAST_RATE, MOST, MOST_AT_ONCE, MOST_PROCESSES, MOST_RATE, MOST_SEED, between, number_between
from evaluation.commands.common import add_checkpoint
from evaluation.commands.inputs import cache_of
from evaluation.commands.zero_shot import open_captioner
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from evaluation.results import Results
    from evaluation.sources.records import CaptionedImages

NAME = "captions"
HELP = "captions of images, and their BLEU, ROUGE-L and CIDEr"
GRID = 24
SOURCE = "images:FILE,..., folder:DIR, shards:PATTERN or hf:DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_checkpoint(parser)
    add_captioned(parser)
    parser.add_argument("--method", choices=("greedy", "beam", "sample"), default="greedy")
    parser.add_argument("--max_tokens", type=between(1, 2**16), metavar="L", help="default: as many as the model takes")
    parser.add_argument(
        "--num_beams", type=between(1, MOST_PROCESSES), default=4, metavar="K", help="of beam (default: 4)"
    )
    parser.add_argument(
        "--length_penalty",
        type=number_between(-100, 100),
        default=1.0,
        metavar="P",
        help="of beam: 1 compares means per token",
    )
    parser.add_argument(
        "--temperature", type=number_between(LEAST_RATE, MOST_RATE), default=1.0, metavar="T", help="of sample"
    )
    parser.add_argument("--top_p", type=number_between(LEAST_RATE, 1), default=1.0, metavar="P", help="of sample")
    parser.add_argument("--seed", type=between(0, MOST_SEED), default=0, help="of sample")
    parser.add_argument("--metrics", action="store_true", help="BLEU, ROUGE-L and CIDEr (an extra; needs Java)")
    parser.add_argument("--grid", type=Path, metavar="PNG", help=f"a picture of the first {GRID} images with captions")


def add_captioned(parser: argparse.ArgumentParser) -> None:
    """Images with captions, and how they are read."""
    parser.add_argument("--data", required=True, metavar="SOURCE", help=SOURCE)
    parser.add_argument("--max_examples", type=between(1, MOST), metavar="N", help="the first N only")
    parser.add_argument("--caption_field", metavar="NAME", help="of shards: the captions' field of .json")
    parser.add_argument("--image_column", default="image", metavar="NAME", help="of Hugging Face data sets")
    parser.add_argument("--caption_column", default="caption", metavar="NAME", help="of Hugging Face data sets")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="for indexes of shards; default: the run's private part"
    )
    parser.add_argument("--batch_size", type=between(1, MOST_AT_ONCE), default=64, metavar="B", help="images at once")


def open_captioned(args: argparse.Namespace) -> "CaptionedImages":
    """What `add_captioned` names."""
    from evaluation.sources.captioned import open_images

    return open_images(
        args.data,
        cache=cache_of(args),
        caption_field=args.caption_field,
        image_column=args.image_column,
        caption_column=args.caption_column,
    )


def run(args: argparse.Namespace) -> "Results":
    """See `evaluation.commands`."""
    from data.errors import DataError
    from evaluation.caption_metrics import caption_metrics, require_metrics
    from evaluation.captions import CaptionOptions, CaptionWriter, picture_grid
    from evaluation.results import DataUse, ModelFacts, Results
    from evaluation.sources.captioned import decoded

    if args.metrics:
        require_metrics()
    opened, model = open_captioner(args)
    tokenizer = opened.task.make_example(train=False).tokenizer  # type: ignore[attr-defined]
    options = CaptionOptions(
        args.method, args.max_tokens, args.num_beams, args.length_penalty, args.temperature, args.top_p, args.seed
    )
    writer = CaptionWriter(model, tokenizer, options)
    source = open_captioned(args)
    rows: list[dict[str, Any]] = []
    shown: list[np.ndarray] = []
    undecodable = 0
    size = model.config.encoder.image_size
    for batch in decoded(source, image_size=size, batch_size=args.batch_size, count=args.max_examples):
        undecodable += batch.num_undecodable
        shown += list(batch.images_BCHW[: max(0, GRID - len(shown))])
        for example, caption in zip(batch.examples, writer(batch.images_BCHW), strict=True):
            row = {"image": example.name, "caption": caption.text, "log_prob": caption.log_prob}
            rows.append(row | ({"references": list(example.captions)} if example.captions else {}))
    if not rows:
        raise DataError(f"{source.name}: none of {undecodable} images can be decoded")
    scalars = {"mean_log_prob": sum(row["log_prob"] for row in rows) / len(rows)}
    if args.metrics:
        names = {str(number): row for number, row in enumerate(rows) if "references" in row}
        references = {name: row["references"] for name, row in names.items()}
        scalars |= caption_metrics({name: row["caption"] for name, row in names.items()}, references)
    if args.grid is not None:
        try:
            picture_grid(shown, [row["caption"] for row in rows[:GRID]]).save(args.grid)
            if not args.data_is_public:
                args.grid.chmod(0o600)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--grid {args.grid}: {error}") from error
    uses = [DataUse("images", source.name, len(rows), undecodable)]
    table = [{"image": row["image"], "caption": row["caption"]} for row in rows[:GRID]]
    notes = [f"{name} {value:.4f}" for name, value in scalars.items()] if args.metrics else []
    details = {"captions": rows, "options": vars(options)}
    return Results(NAME, scalars, uses, ModelFacts.of(opened.path, opened.manifest), table, details, notes=notes)
