"""Captions of images: greedy, by beam search, or sampled; and their BLEU, ROUGE-L and CIDEr.

Keys and values are kept, so a caption costs one token at a time (models/generation.py).

Metrics are computed by the code that the field reports them with: pycocoevalcap, an extra.

    pip install -r requirements-captions.txt        # and a Java runtime, which its tokenizer is written in

The tokenizer is Stanford's PTBTokenizer, as in the COCO caption challenge (Chen et al. 2015, https://arxiv.org/abs/1504.00325).
METEOR and SPICE are left out: their jars have licences of their own, and SPICE fetches models.
"""

import contextlib
import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from data.examples.tokenizer import CaptionTokenizer
from data.examples.transforms import denormalize
from data.synthetic.render import contact_sheet
from models.captioner import Captioner
from models.generation import beam_captions, sampled_captions
from trainer.errors import ConfigError

Method = Literal["greedy", "beam", "sample"]
METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr")


@dataclass(frozen=True)
class CaptionOptions:
    """
    Attributes:
        method: "greedy" takes the likeliest next token, "beam" searches, "sample" draws.
        max_tokens: None is as many as the model takes.
        num_beams, length_penalty: of "beam"; see `models.generation.beam_captions`.
        temperature, top_p, seed: of "sample".
    """

    method: Method = "greedy"
    max_tokens: int | None = None
    num_beams: int = 4
    length_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


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

    def __init__(self, model: Captioner, tokenizer: CaptionTokenizer, options: CaptionOptions) -> None:
        """
        Raises:
            ConfigError: a number out of range.
        """
        limit = model.config.num_tokens - 1
        max_tokens = limit if options.max_tokens is None else options.max_tokens
        if not 1 <= max_tokens <= limit:
            raise ConfigError(f"max_tokens must be between 1 and {limit}, got {max_tokens}")
        if options.num_beams < 1:
            raise ConfigError(f"num_beams must be at least 1, got {options.num_beams}")
        if not (options.temperature > 0 and 0 < options.top_p <= 1):
            raise ConfigError(
                f"temperature must be above 0, top_p in (0, 1], got {options.temperature}, {options.top_p}"
            )
        self._model, self._tokenizer, self._options, self._max_tokens = model, tokenizer, options, max_tokens
        self._generator = torch.Generator().manual_seed(options.seed)

    def __call__(self, images_BCHW: np.ndarray) -> list[Caption]:
        """One caption for each normalised image."""
        if not len(images_BCHW):
            return []
        images, options = torch.from_numpy(images_BCHW).to(next(self._model.parameters()).device), self._options
        if options.method == "sample":
            generated = sampled_captions(
                self._model, images, max_tokens=self._max_tokens, temperature=options.temperature,
                top_p=options.top_p, generator=self._generator,
            )  # fmt: skip
        else:
            generated = beam_captions(
                self._model, images, max_tokens=self._max_tokens,
                num_beams=options.num_beams if options.method == "beam" else 1,
                length_penalty=options.length_penalty if options.method == "beam" else 0.0,
            )  # fmt: skip
        texts = [self._tokenizer.decode(row) for row in generated.tokens_BL.tolist()]
        return [Caption(text, log_prob) for text, log_prob in zip(texts, generated.log_probs_B.tolist(), strict=True)]


def picture_grid(images: list[np.ndarray], lines: list[str], *, columns: int = 6) -> Image.Image:
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
        raise ConfigError(
            "caption metrics need the package pycocoevalcap: pip install -r requirements-captions.txt"
        ) from error
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
