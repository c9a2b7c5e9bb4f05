"""Captions of images: greedy, by beam search, or sampled; and their BLEU, ROUGE-L and CIDEr.

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
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
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
from models.generation import beam_captions, sampled_captions
from trainer.errors import ConfigError

Method = Literal["greedy", "beam", "sample"]
METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr")


class Caption(NamedTuple):
    """
    Attributes:
        text: without special tokens.
        log_prob: of its tokens as the model has it, nats.
    """

    text: str
    log_prob: float


class CaptionWriter:
    """Captions batch after batch; samples of later batches go on with the same random numbers."""

    def __init__(
        self,
        model: Captioner,
        tokenizer: CaptionTokenizer,
        *,
        method: Method = "greedy",
        max_tokens: int | None = None,
        num_beams: int = 4,
        length_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            method: "greedy" takes the likeliest next token, "beam" searches, "sample" draws.
            max_tokens: None is as many as the model takes.
            num_beams, length_penalty: of "beam"; see `models.generation.beam_captions`.
            temperature, top_p, seed: of "sample".

        Raises:
            ConfigError: more tokens than the model takes.
        """
        limit = model.config.num_tokens - 1
        max_tokens = limit if max_tokens is None else max_tokens
        if not 1 <= max_tokens <= limit:
            raise ConfigError(f"max_tokens must be between 1 and {limit}, got {max_tokens}")
        self._model, self._tokenizer = model, tokenizer
        if method == "sample":
            generator = torch.Generator().manual_seed(seed)
            self._generate = partial(
                sampled_captions, max_tokens=max_tokens, temperature=temperature, top_p=top_p, generator=generator
            )
        elif method == "beam":
            self._generate = partial(
                beam_captions, max_tokens=max_tokens, num_beams=num_beams, length_penalty=length_penalty
            )
        else:
            self._generate = partial(beam_captions, max_tokens=max_tokens)

    def __call__(self, images_BCHW: np.ndarray | Tensor) -> list[Caption]:
        """One caption for each normalised image."""
        if not len(images_BCHW):
            return []
        generated = self._generate(self._model, torch.as_tensor(images_BCHW).to(next(self._model.parameters()).device))
        texts = [self._tokenizer.decode(row) for row in generated.tokens_BL.tolist()]
        return [Caption(text, log_prob) for text, log_prob in zip(texts, generated.log_probs_B.tolist(), strict=True)]


def picture_grid(images: Sequence[np.ndarray], lines: Sequence[str], *, columns: int = 6) -> Image.Image:
    """Normalised images (3, S, S) with their captions below."""
    return contact_sheet([denormalize(image) for image in images], lines, columns=columns)


def require_metrics() -> None:
    """Refuses what lacks its programs, before captions are written, which takes longer.

    Raises:
        ConfigError: the package or Java is missing.
    """
    try:
        import pycocoevalcap  # noqa: F401
    except ImportError as error:
        raise ConfigError("caption metrics need the package pycocoevalcap: pip install '.[captions]'") from error
    if shutil.which("java") is None:
        raise ConfigError(
            "caption metrics need a Java runtime, which pycocoevalcap's tokenizer is written in, and there is no `java` "
            "on the PATH: apt-get install default-jre-headless"
        )


def caption_metrics(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
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
        raise ConfigError(f"{missing[0]} has no reference caption" if missing else "there are no captions to score")
    # The tokenizer tells captions apart by lines; an empty one would vanish from its output.
    candidates = {name: [{"caption": " ".join(text.split()) or "."}] for name, text in captions.items()}
    true = {name: [{"caption": " ".join(text.split()) or "."} for text in references[name]] for name in captions}
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints
        tokenizer = PTBTokenizer()
        tokens, true_tokens = tokenizer.tokenize(candidates), tokenizer.tokenize(true)
        bleu = Bleu(4).compute_score(true_tokens, tokens)[0]
        rouge = Rouge().compute_score(true_tokens, tokens)[0]
        cider = Cider().compute_score(true_tokens, tokens)[0]
    return {name: float(value) for name, value in zip(METRICS, [*bleu, rouge, cider], strict=True)}


class OpenedCaptioner(NamedTuple):
    """A captioner, its tokenizer, and what is proven of its training."""

    model: Captioner
    tokenizer: CaptionTokenizer
    facts: ModelFacts


def open_captioner(options: CheckpointOptions) -> OpenedCaptioner:
    """
    Raises:
        ConfigError: the checkpoint holds another kind of model.
    """
    opened = open_checkpoint(options)
    if not isinstance(opened.model, Captioner):
        raise ConfigError(f"{options.checkpoint} holds a {type(opened.model).__name__}; captions need a captioner")
    tokenizer = opened.task.make_example(train=False).tokenizer  # type: ignore[attr-defined]
    return OpenedCaptioner(opened.model, tokenizer, ModelFacts.of(opened.path, opened.manifest))


def usable_batches(
    model: Captioner, source: Source, options: ImageOptions, count: int | None = None
) -> Iterator[tuple[Tensor, list[Example], int]]:
    """Images that are of use, on the model's device, their examples, and how many others there were.

    Args:
        count: the first so many; None for all.
    """
    device = next(model.parameters()).device
    for batch in decoded_batches(
        source, range(min(len(source), count or len(source))), batch_size=options.batch_size,
        image_size=model.config.encoder.image_size, num_workers=options.num_workers,
    ):  # fmt: skip
        usable = np.flatnonzero(batch.is_usable_B)
        examples = [batch.examples[row] for row in usable]
        yield batch.images_BCHW[usable].to(device), examples, len(batch.examples) - len(usable)


def captions(options: CaptionsOptions) -> Results:
    """The command; see its options."""
    if options.metrics:
        require_metrics()
    model, tokenizer, facts = open_captioner(options)
    how: dict[str, Any] = options.model_dump(
        include={"method", "max_tokens", "num_beams", "length_penalty", "temperature", "top_p", "seed"}
    )
    writer, source = CaptionWriter(model, tokenizer, **how), open_source(options.data, options)
    rows: list[dict[str, Any]] = []
    shown: list[np.ndarray] = []
    undecodable = 0
    for images_BCHW, examples, left_out in usable_batches(model, source, options, options.max_examples):
        undecodable += left_out
        shown += list(images_BCHW[: max(0, GRID - len(shown))].cpu().numpy())
        for example, caption in zip(examples, writer(images_BCHW), strict=True):
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
    return Results("captions", scalars, uses, facts, table, {"captions": rows, "options": how}, notes=notes)
