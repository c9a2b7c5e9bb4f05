"""Commands that let a captioner write captions, or choose among them; and what all commands with a captioner share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from evaluation.commands.common import CheckpointOptions, ImageOptions, Seed, cache_of, open_checkpoint
from trainer.config.options import Options, Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from data.examples.tokenizer import CaptionTokenizer
    from evaluation.results import ModelFacts, Results
    from evaluation.sources.records import CaptionedImages
    from models.captioner import Captioner

GRID = 24
SYNTHETIC_SEED = 1 << 40
"""Default of the test pictures, far from seeds that people train with."""
Count = Annotated[int | None, Shown("N"), Field(ge=1, le=10**12)]


class TooLongOptions(Options):
    """What happens to captions of more tokens than the model takes."""

    too_long: Literal["refuse", "skip"] = "refuse"
    """captions of more tokens than the model takes"""


class CaptionedOptions(CheckpointOptions, ImageOptions):
    """Images with captions, and how they are read."""

    data: Annotated[str, Shown("SOURCE")]
    """images:FILE,..., folder:DIR, shards:PATTERN or hf:DIR"""
    max_examples: Count = None
    """the first N only"""
    caption_field: Annotated[str | None, Shown("NAME")] = None
    """of shards: the captions' field of .json"""
    caption_column: Annotated[str, Shown("NAME")] = "caption"
    """of Hugging Face data sets"""


class OpenedCaptioner(NamedTuple):
    """A captioner, its tokenizer, and what is proven of its training."""

    model: "Captioner"
    tokenizer: "CaptionTokenizer"
    facts: "ModelFacts"


def open_captioner(options: CheckpointOptions) -> OpenedCaptioner:
    """
    Raises:
        ConfigError: the checkpoint holds another kind of model.
    """
    from evaluation.results import ModelFacts
    from models.captioner import Captioner

    opened = open_checkpoint(options)
    if not isinstance(opened.model, Captioner):
        raise ConfigError(f"{options.checkpoint} holds a {type(opened.model).__name__}; captions need a captioner")
    tokenizer = opened.task.make_example(train=False).tokenizer  # type: ignore[attr-defined]
    return OpenedCaptioner(opened.model, tokenizer, ModelFacts.of(opened.path, opened.manifest))


def open_captioned(options: CaptionedOptions) -> "CaptionedImages":
    """
    Raises:
        DataError: the data name no images.
    """
    from evaluation.sources.captioned import open_images

    return open_images(
        options.data, cache=cache_of(options), caption_field=options.caption_field, image_column=options.image_column,
        caption_column=options.caption_column,
    )  # fmt: skip


class CaptionsOptions(CaptionedOptions):
    """Options of `captions`."""

    method: Literal["greedy", "beam", "sample"] = "greedy"
    max_tokens: Annotated[int | None, Shown("L"), Field(ge=1, le=2**16)] = None
    """default: as many as the model takes"""
    num_beams: Annotated[int, Shown("K"), Field(ge=1, le=1024)] = 4
    """of beam (default: 4)"""
    length_penalty: Annotated[float, Shown("P"), Field(ge=-100, le=100)] = 1.0
    """of beam: 1 compares means per token"""
    temperature: Annotated[float, Shown("T"), Field(gt=0, le=1e4)] = 1.0
    """of sample"""
    top_p: Annotated[float, Shown("P"), Field(gt=0, le=1)] = 1.0
    """of sample"""
    seed: Seed = 0
    """of sample"""
    metrics: bool = False
    """BLEU, ROUGE-L and CIDEr (an extra; needs Java)"""
    grid: Annotated[Path | None, Shown("PNG")] = Field(
        None, description=f"a picture of the first {GRID} images with captions"
    )


def captions(options: CaptionsOptions) -> "Results":
    """Captions of images, folders or shards; with --metrics their BLEU, ROUGE-L and CIDEr against those that are there.

        python launch_scripts/evaluate.py captions --checkpoint runs/x --data folder:pictures --method beam --num_beams 4
        python launch_scripts/evaluate.py captions --checkpoint runs/x --data shards:heldout/ --metrics --grid captions.png

    Metrics need an extra (requirements-captions.txt) and Java. The captions are in the record; --grid draws the first 24.
    """
    from data.errors import DataError
    from evaluation.captions import CaptionOptions, CaptionWriter, caption_metrics, picture_grid, require_metrics
    from evaluation.results import DataUse, Results
    from evaluation.sources.captioned import decoded

    if options.metrics:
        require_metrics()
    model, tokenizer, facts = open_captioner(options)
    how = CaptionOptions(
        options.method, options.max_tokens, options.num_beams, options.length_penalty, options.temperature,
        options.top_p, options.seed,
    )  # fmt: skip
    writer = CaptionWriter(model, tokenizer, how)
    source = open_captioned(options)
    rows: list[dict[str, Any]] = []
    shown: list[np.ndarray] = []
    undecodable = 0
    size = model.config.encoder.image_size
    for batch in decoded(source, image_size=size, batch_size=options.batch_size, count=options.max_examples):
        undecodable += batch.num_undecodable
        shown += list(batch.images_BCHW[: max(0, GRID - len(shown))])
        for example, caption in zip(batch.examples, writer(batch.images_BCHW), strict=True):
            row = {"image": example.name, "caption": caption.text, "log_prob": caption.log_prob}
            rows.append(row | ({"references": list(example.captions)} if example.captions else {}))
    if not rows:
        raise DataError(f"{source.name}: none of {undecodable} images can be decoded")
    scalars = {"mean_log_prob": sum(row["log_prob"] for row in rows) / len(rows)}
    if options.metrics:
        with_references = {str(number): row for number, row in enumerate(rows) if "references" in row}
        references = {name: row["references"] for name, row in with_references.items()}
        scalars |= caption_metrics({name: row["caption"] for name, row in with_references.items()}, references)
    if options.grid is not None:
        try:
            picture_grid(shown, [row["caption"] for row in rows[:GRID]]).save(options.grid)
            if not options.results_are_public:
                options.grid.chmod(0o600)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--grid {options.grid}: {error}") from error
    uses = [DataUse("images", source.name, len(rows), undecodable)]
    table = [{"image": row["image"], "caption": row["caption"]} for row in rows[:GRID]]
    notes = [f"{name} {value:.4f}" for name, value in scalars.items()] if options.metrics else []
    return Results("captions", scalars, uses, facts, table, {"captions": rows, "options": vars(how)}, notes=notes)


class RetrievalOptions(TooLongOptions, CaptionedOptions):
    """Options of `retrieval`."""


def retrieval(options: RetrievalOptions) -> "Results":
    """Caption retrieval by likelihood: image to text and text to image, recall at 1, 5 and 10.

        python launch_scripts/evaluate.py retrieval --checkpoint runs/x --data shards:heldout/ --max_examples 1000

    Every distinct caption is scored for every image, so the work grows with the square of the number of images. A caption that
    repeats is one answer, true of all its images, and one query.
    """
    import torch

    from data.errors import DataError
    from evaluation.results import DataUse, Results
    from evaluation.scoring import PrefixTree, distinct_texts, encoded_captions, fits, recalls, tree_log_probs
    from evaluation.sources.captioned import decoded

    model, tokenizer, facts = open_captioner(options)
    source = open_captioned(options)
    size = model.config.encoder.image_size
    images: list[torch.Tensor] = []
    captions, owners, left_out, too_long = [], [], 0, 0
    for batch in decoded(source, image_size=size, batch_size=options.batch_size, count=options.max_examples):
        left_out += batch.num_undecodable
        for image, example in zip(batch.images_BCHW, batch.examples, strict=True):
            texts = [" ".join(caption.split()) for caption in example.captions]
            if options.too_long == "skip":
                kept = [text for text in texts if fits(tokenizer, text, model.config.num_tokens)]
                too_long += len(texts) - len(kept)
                texts = kept
            if not texts:
                left_out += 1
                continue
            captions += texts
            owners += [len(images)] * len(texts)
            images.append(torch.from_numpy(image))
    if len(images) < 2:
        raise DataError(f"{source.name}: retrieval needs at least two images with captions, found {len(images)}")
    texts, true_NC = distinct_texts(captions, owners, len(images))
    tree = PrefixTree.of(encoded_captions(tokenizer, texts, model.config.num_tokens))
    device = next(model.parameters()).device
    parts = torch.stack(images).split(options.batch_size)
    log_probs_NC = torch.cat([tree_log_probs(model, part.to(device), tree) for part in parts])
    by_rule = recalls(log_probs_NC, tree.lengths_C, true_NC)
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for rule, recall in by_rule.items():
        for way, by_rank in (("image_to_text", recall.image_to_text), ("text_to_image", recall.text_to_image)):
            scalars |= {f"{way}_recall{rank}_{rule}": value for rank, value in by_rank.items()}
            table.append({"rule": rule, "way": way, **{f"recall@{rank}": value for rank, value in by_rank.items()}})
    uses = [DataUse("images with captions", source.name, len(images), left_out)]
    details = {
        "num_captions": len(captions), "num_distinct_captions": len(texts), "num_too_long": too_long,
        "num_tree_nodes": tree.num_nodes,
    }  # fmt: skip
    return Results("retrieval", scalars, uses, facts, table, details)
