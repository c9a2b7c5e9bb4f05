"""Captions of images, folders or shards; with --metrics their BLEU, ROUGE-L and CIDEr against the captions that are there.

    python launch_scripts/evaluate.py captions --checkpoint runs/x --data folder:pictures --method beam --num_beams 4
    python launch_scripts/evaluate.py captions --checkpoint runs/x --data shards:heldout/ --metrics --grid captions.png

Metrics need an extra (requirements-captions.txt) and Java. The captions are in the record; --grid draws the first 24.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from evaluation.commands.captioner import CaptionedOptions, open_captioned, open_captioner
from evaluation.commands.common import Seed
from trainer.config.options import Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from evaluation.results import Results

GRID = 24


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
    """Writes the captions, and measures them where that is asked for."""
    from data.errors import DataError
    from evaluation.caption_metrics import caption_metrics, require_metrics
    from evaluation.captions import CaptionOptions, CaptionWriter, picture_grid
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
