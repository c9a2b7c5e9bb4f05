"""Captions of images, greedy or by beam search; and their BLEU, ROUGE-L and CIDEr.

Keys and values are kept, so a caption costs one token at a time (models/generation.py). Metrics
come from pycocoevalcap, an extra, by which the field reports them:

    pip install '.[captions]'        # and a Java runtime for its tokenizer

The tokenizer is Stanford's PTBTokenizer, as in the COCO caption challenge (Chen et al. 2015,
https://arxiv.org/abs/1504.00325). METEOR and SPICE are left out: their jars have licences of their
own, and SPICE fetches models.
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
from evaluation.command_options import GRID, CaptionsOptions, CheckpointOptions, ImageOptions
from evaluation.features import open_checkpoint
from evaluation.results import DataUse, ModelFacts, Results
from evaluation.sources import Example, Source, decoded_batches, open_source
from models.captioner import Captioner
from models.generation import beam_captions
from trainer.errors import ConfigError

METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr")


def require_metrics() -> None:
    """Refuses metrics whose programs are missing, before captions are written, which takes longer.

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
            "caption metrics need a Java runtime, which pycocoevalcap's tokenizer is written in, "
            "and there is no `java` on the PATH: apt-get install default-jre-headless"
        )


def caption_metrics(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Returns scores of one caption per image against its references.

    BLEU and ROUGE-L are from 0 to 1, CIDEr from 0 to 10.

    Args:
        captions, references: by the same names of images. CIDEr weighs words by how many images'
            references have them: with few images it means little.

    Raises:
        ConfigError: the package or Java is missing; an image without reference.
    """
    require_metrics()
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    if not captions:
        raise ConfigError("there are no captions to score")
    # The tokenizer takes one caption per line, and would drop an empty one from its output.
    candidates: dict[str, list[dict[str, str]]] = {}
    true: dict[str, list[dict[str, str]]] = {}
    for name, caption in captions.items():
        if not references.get(name):
            raise ConfigError(f"{name} has no reference caption")
        candidates[name] = [{"caption": " ".join(caption.split()) or "."}]
        true[name] = [{"caption": " ".join(text.split()) or "."} for text in references[name]]
    # The package prints.
    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer = PTBTokenizer()
        tokens = tokenizer.tokenize(candidates)
        true_tokens = tokenizer.tokenize(true)
        bleu = Bleu(4).compute_score(true_tokens, tokens)[0]
        rouge = Rouge().compute_score(true_tokens, tokens)[0]
        cider = Cider().compute_score(true_tokens, tokens)[0]
    scores = [*bleu, rouge, cider]
    return {name: float(score) for name, score in zip(METRICS, scores, strict=True)}


def open_captioner(options: CheckpointOptions) -> tuple[Captioner, CaptionTokenizer, ModelFacts]:
    """Returns a captioner, its tokenizer, and the proven facts about its training.

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
    """Yields usable images on the model's device, their examples, and the number of unusable ones.

    Args:
        count: takes the first so many images; None takes all.
    """
    device = next(model.parameters()).device
    num_images = min(len(source), count or len(source))
    batches = decoded_batches(
        source,
        range(num_images),
        batch_size=options.batch_size,
        image_size=model.config.encoder.image_size,
        num_workers=options.num_workers,
    )
    for batch in batches:
        rows = np.flatnonzero(batch.is_usable_B)
        examples = [batch.examples[row] for row in rows]
        num_unusable = len(batch.examples) - len(rows)
        yield batch.images_BCHW[rows].to(device), examples, num_unusable


def captions(options: CaptionsOptions) -> Results:
    """Runs the command `captions`; see its options."""
    if options.metrics:
        require_metrics()
    model, tokenizer, facts = open_captioner(options)
    limit = model.config.num_tokens - 1  # the start token takes one place
    search: dict[str, Any] = options.model_dump(
        include={"max_tokens", "num_beams", "length_penalty"}
    )
    search["max_tokens"] = limit if options.max_tokens is None else options.max_tokens
    if search["max_tokens"] > limit:
        raise ConfigError(f"--max_tokens must be between 1 and {limit}, got {options.max_tokens}")
    source = open_source(options.data, options)
    rows: list[dict[str, Any]] = []
    pictures: list[np.ndarray] = []
    undecodable = 0
    batches = usable_batches(model, source, options, options.max_examples)
    for images_BCHW, examples, num_unusable in batches:
        undecodable += num_unusable
        missing = max(0, GRID - len(pictures))
        pictures += list(images_BCHW[:missing].cpu().numpy())
        if not examples:
            continue
        written = beam_captions(model, images_BCHW, **search)
        tokens_of_captions = written.tokens_BL.tolist()
        log_probs = written.log_probs_B.tolist()
        for example, tokens, log_prob in zip(examples, tokens_of_captions, log_probs, strict=True):
            row = {"image": example.name, "caption": tokenizer.decode(tokens), "log_prob": log_prob}
            if example.captions:
                row["references"] = list(example.captions)
            rows.append(row)
    if not rows:
        raise DataError(f"{source.name}: none of {undecodable} images can be decoded")
    scalars = {"mean_log_prob": sum(row["log_prob"] for row in rows) / len(rows)}
    if options.metrics:
        candidates: dict[str, str] = {}
        references: dict[str, list[str]] = {}
        for number, row in enumerate(rows):
            if "references" in row:
                candidates[str(number)] = row["caption"]
                references[str(number)] = row["references"]
        scalars |= caption_metrics(candidates, references)
    if options.grid is not None:
        try:
            lines = []
            for row in rows[:GRID]:
                line = row["caption"]
                truth = row.get("references", [""])[0]
                if truth:
                    is_right = equal_words(row["caption"], truth)
                    line += " (right)" if is_right else f" (truth: {truth})"
                lines.append(line)
            contact_sheet([denormalize(image) for image in pictures], lines).save(options.grid)
            if not options.results_are_public:
                options.grid.chmod(0o600)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--grid {options.grid}: {error}") from error
    uses = [DataUse("images", source.name, len(rows), undecodable)]
    table = [{"image": row["image"], "caption": row["caption"]} for row in rows[:GRID]]
    details = {"captions": rows, "options": search}
    notes = []
    if options.metrics:
        notes = [f"{name} {scalar:.4f}" for name, scalar in scalars.items()]
    return Results("captions", scalars, uses, facts, table, details, notes=notes)


def equal_words(caption: str, truth: str) -> bool:
    """Returns whether two captions have the same words in the same order, in any case."""
    return caption.lower().split() == truth.lower().split()
