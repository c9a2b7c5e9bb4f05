"""Captions of images: greedy, by beam search, or sampled.

Keys and values are kept, so a caption costs one token at a time (models/search.py).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image

from data.examples.tokenizer import CaptionTokenizer
from data.examples.transforms import denormalize
from data.synthetic.sheet import contact_sheet
from models.captioner import Captioner
from models.search import Generated, beam_captions, sampled_captions
from trainer.errors import ConfigError

Method = Literal["greedy", "beam", "sample"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class CaptionOptions:
    """
    Attributes:
        method: "greedy" takes the likeliest next token, "beam" searches, "sample" draws.
        max_tokens: None is as many as the model takes.
        num_beams, length_penalty: of "beam"; see `models.search.beam_captions`.
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
        """Captions of normalised images; of none for none."""
        if not len(images_BCHW):
            return []
        images = torch.from_numpy(images_BCHW).to(next(self._model.parameters()).device)
        found = self._generate(images)
        texts = [self._tokenizer.decode(row) for row in found.tokens_BL.tolist()]
        return [Caption(text, log_prob) for text, log_prob in zip(texts, found.log_probs_B.tolist(), strict=True)]

    def _generate(self, images: torch.Tensor) -> Generated:
        options = self._options
        if options.method == "sample":
            return sampled_captions(
                self._model, images, max_tokens=self._max_tokens, temperature=options.temperature,
                top_p=options.top_p, generator=self._generator,
            )  # fmt: skip
        beams = options.num_beams if options.method == "beam" else 1
        penalty = options.length_penalty if options.method == "beam" else 0.0
        return beam_captions(self._model, images, max_tokens=self._max_tokens, num_beams=beams, length_penalty=penalty)


def picture_grid(images: list[np.ndarray], lines: list[str], *, columns: int = 6) -> Image.Image:
    """Normalised images (3, S, S) with their captions below."""
    return contact_sheet([denormalize(image) for image in images], lines, columns=columns)
