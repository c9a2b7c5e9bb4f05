"""Captions of images, greedy or by beam search; and their BLEU, ROUGE-L and CIDEr.

Keys and values are kept, so a caption costs one token at a time (models/generation.py).

Metrics are computed by the code that the field reports them with: pycocoevalcap, an extra.

    pip install '.[captions]'        # and a Java runtime, which its tokenizer is written in

The tokenizer is Stanford's PTBTokenizer, as in the COCO caption challenge (Chen et al. 2015, https://arxiv.org/abs/1504.00325).
METEOR and SPICE are left out: their jars have licences of their own, and SPICE fetches models.
"""

import contextlib
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from data.errors import DataError
from data.examples.tokenizer import CaptionTokenizer
from data.examples.transforms import denormalize
from data.synthetic.render import contact_sheet
from evaluation.features import open_checkpoint
from evaluation.options import GRID, CaptionsOptions, CheckpointOptions, ImageOptions
from evaluation.results import DataUse, ModelFacts, Results
from evaluation.sources import Example, Source, decoded_batches, open_source
from models.captioner import Captioner
from models.generation import beam_captions
from trainer.errors import ConfigError

METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr")


def require_metrics() -> None:
    """Refuses what lacks its programs, before captions are written, which takes longer.

    Raises:
        ConfigError: the package or Java is missing.
    """
    try:
        import pycocoevalcap  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "caption metrics need the package pycocoevalcap: pip install '.[captions]'"
        ) from error
    if shutil.which("java") is None:
        raise ConfigError(
            "caption metrics need a Java runtime, which pycocoevalcap's tokenizer is written in, and there is no `java` "
            "on the PATH: apt-get install default-jre-headless"
        )


def caption_metrics(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Scores of one caption per image against its references; BLEU and ROUGE-L from 0 to 1, CIDEr from 0 to 10.

    Args:
        captions, references: by the same names of images. CIDEr weighs words by how many images' references have them: with
            few images it means little.

    Raises:
        ConfigError: the package or Java is missing; an image without reference.
    """
    require_metrics()
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    missing = [name for name in captions if not references.get(name)]
    if missing or not captions:
        raise ConfigError(
            f"{missing[0]} has no reference caption"
            if missing
            else "there are no captions to score"
        )
    # The tokenizer tells captions apart by lines; an empty one would vanish from its output.
    candidates = {
        name: [{"caption": " ".join(text.split()) or "."}] for name, text in captions.items()
    }
    true = {
        name: [{"caption": " ".join(text.split()) or "."} for text in references[name]]
        for name in captions
    }
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints
        tokenizer = PTBTokenizer()
        tokens, true_tokens = tokenizer.tokenize(candidates), tokenizer.tokenize(true)
        bleu = Bleu(4).compute_score(true_tokens, tokens)[0]
        rouge = Rouge().compute_score(true_tokens, tokens)[0]
        cider = Cider().compute_score(true_tokens, tokens)[0]
    return {name: float(value) for name, value in zip(METRICS, [*bleu, rouge, cider], strict=True)}


def open_captioner(options: CheckpointOptions) -> tuple[Captioner, CaptionTokenizer, ModelFacts]:
    """A captioner, its tokenizer, and what is proven of its training.

    Raises:
        ConfigError: the checkpoint holds another kind of model.
    """
    opened = open_checkpoint(options)
    if not isinstance(opened.model, Captioner):
        raise ConfigError(
            f"{options.checkpoint} holds a {type(opened.model).__name__}; captions need a captioner"
        )
    tokenizer = opened.task.make_example(train=False).tokenizer  # type: ignore[attr-defined]
    return opened.model, tokenizer, ModelFacts.of(opened.path, opened.manifest)


def usable_batches(
    model: Captioner, source: Source, options: ImageOptions, count: int | None = None
) -> Iterator[tuple[Tensor, list[Example], int]]:
    """Images that are of use, on the model's device, their examples, and how many others there were.

    Args:
        count: the first so many; None for all.
    """
    device = next(model.parameters()).device
    for batch in decoded_batches(
        source,
        range(min(len(source), count or len(source))),
        batch_size=options.batch_size,
        image_size=model.config.encoder.image_size,
        num_workers=options.num_workers,
    ):
        usable = np.flatnonzero(batch.is_usable_B)
        examples = [batch.examples[row] for row in usable]
        yield batch.images_BCHW[usable].to(device), examples, len(batch.examples) - len(usable)


def captions(options: CaptionsOptions) -> Results:
    """The command; see its options."""
    if options.metrics:
        require_metrics()
    model, tokenizer, facts = open_captioner(options)
    limit = model.config.num_tokens - 1  # the start token takes one place
    how: dict[str, Any] = options.model_dump(include={"max_tokens", "num_beams", "length_penalty"})
    how["max_tokens"] = limit if options.max_tokens is None else options.max_tokens
    if how["max_tokens"] > limit:
        raise ConfigError(f"--max_tokens must be between 1 and {limit}, got {options.max_tokens}")
    source = open_source(options.data, options)
    rows: list[dict[str, Any]] = []
    shown: list[np.ndarray] = []
    undecodable = 0
    for images_BCHW, examples, left_out in usable_batches(
        model, source, options, options.max_examples
    ):
        undecodable += left_out
        shown += list(images_BCHW[: max(0, GRID - len(shown))].cpu().numpy())
        if not examples:
            continue
        written = beam_captions(model, images_BCHW, **how)
        said = zip(examples, written.tokens_BL.tolist(), written.log_probs_B.tolist(), strict=True)
        for example, tokens, log_prob in said:
            row = {"image": example.name, "caption": tokenizer.decode(tokens), "log_prob": log_prob}
            rows.append(row | ({"references": list(example.captions)} if example.captions else {}))
    if not rows:
        raise DataError(f"{source.name}: none of {undecodable} images can be decoded")
    scalars = {"mean_log_prob": sum(row["log_prob"] for row in rows) / len(rows)}
    if options.metrics:
        with_references = {
            str(number): row for number, row in enumerate(rows) if "references" in row
        }
        references = {name: row["references"] for name, row in with_references.items()}
        scalars |= caption_metrics(
            {name: row["caption"] for name, row in with_references.items()}, references
        )
    if options.grid is not None:
        try:
            lines = []
            for row in rows[:GRID]:  # a caption, and whether that is right
                truth = row.get("references", [""])[0]
                verdict = (
                    f" ({'right' if says(row['caption'], truth) else f'truth: {truth}'})"
                    if truth
                    else ""
                )
                lines.append(f"{row['caption']}{verdict}")
            contact_sheet([denormalize(image) for image in shown], lines).save(options.grid)
            if not options.results_are_public:
                options.grid.chmod(0o600)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--grid {options.grid}: {error}") from error
    uses = [DataUse("images", source.name, len(rows), undecodable)]
    table = [{"image": row["image"], "caption": row["caption"]} for row in rows[:GRID]]
    notes = [f"{name} {value:.4f}" for name, value in scalars.items()] if options.metrics else []
    return Results(
        "captions", scalars, uses, facts, table, {"captions": rows, "options": how}, notes=notes
    )


def says(caption: str, truth: str) -> bool:
    """Whether a caption has the words of the truth in their order, whatever their case."""
    return caption.lower().split() == truth.lower().split()
