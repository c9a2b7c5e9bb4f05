"""Captions -> token ids of fixed length, by any Hugging Face `tokenizer.json`.

The embedded tokenizer was trained on public words (data/tokenizer/README.md). A tokenizer trained
on the private captions would itself be an unaccounted release.
"""

import functools
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

# Worker processes are the parallelism, and the library's threads break forks.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer

from data.errors import DataError

EMBEDDED_TOKENIZER = Path(__file__).parents[1] / "tokenizer" / "tokenizer.json"

_BOS_NAMES = (
    "<bos>",
    "[BOS]",
    "[CLS]",
    "<s>",
    "<|startoftext|>",
    "<|begin_of_text|>",
    "<|endoftext|>",
)
_EOS_NAMES = ("<eos>", "[EOS]", "[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>")
_PAD_NAMES = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|finetune_right_pad_id|>",
    "<unk>",
    "<|endoftext|>",
    "</s>",
)
_UNKNOWN_NAMES = ("<unk>", "[UNK]", "<|unk|>")
_MAX_CHARACTERS_PER_TOKEN = 64


class CaptionTokenizer:
    """Encodes captions as bos, words, eos, padding.

    Attributes:
        vocab_size: one more than the largest id.
        bos_id: starts every caption.
        eos_id: ends every caption.
        pad_id: fills the rest; may equal eos_id, since the mask tells them apart.
    """

    def __init__(self, tokenizer: Tokenizer, name: str):
        """Use `from_file`."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_id = self._find(_BOS_NAMES, "start", name)
        self.eos_id = self._find(_EOS_NAMES, "end", name)
        self.pad_id = self._find(_PAD_NAMES, "padding", name)
        self._special_ids = frozenset((self.bos_id, self.eos_id, self.pad_id))

    @classmethod
    def from_file(cls, path: Path | str) -> "CaptionTokenizer":
        """Loads a Hugging Face `tokenizer.json`.

        Raises:
            DataError: the file is missing, not a tokenizer, or without start, end and padding
                tokens of a usual name.
        """
        if not Path(path).is_file():
            raise DataError(f"there is no tokenizer file {path}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        # The library raises a bare Exception.
        except Exception as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{path} is not a Hugging Face tokenizer.json: {first_line}") from error
        return cls(tokenizer, str(path))

    def encode(self, caption: str, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Encodes one caption; cuts off the words that do not fit, but never the end token.

        Args:
            caption: any text. Names of special tokens in it are dropped.
            num_tokens: L, at least 2.

        Returns:
            (tokens_L int64, mask_L bool): the mask is True for start, words and end.

        Raises:
            DataError: num_tokens is below 2.
        """
        if num_tokens < 2:
            raise DataError(
                f"num_tokens is {num_tokens}; a caption needs at least 2 (start and end)"
            )
        start = caption[: _MAX_CHARACTERS_PER_TOKEN * num_tokens]
        text = start.encode("utf-8", "replace").decode("utf-8")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        words = [token for token in ids if token not in self._special_ids][: num_tokens - 2]
        tokens_L = np.full(num_tokens, self.pad_id, dtype=np.int64)
        tokens_L[: len(words) + 2] = [self.bos_id, *words, self.eos_id]
        return tokens_L, np.arange(num_tokens) < len(words) + 2

    def count_unknown(self, caption: str) -> tuple[int, int]:
        """Returns (words that the vocabulary lacks, all words) of the caption.

        Parts of words count as words. Tokenizers that fall back to bytes or characters know every
        word.
        """
        text = caption[: 1 << 16].encode("utf-8", "replace").decode("utf-8")
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        # Some tokenizers leave out unknown words.
        if not ids:
            num_words = len(text.split())
            return num_words, num_words
        unknown_ids = {self._tokenizer.token_to_id(name) for name in _UNKNOWN_NAMES} - {None}
        return sum(token in unknown_ids for token in ids), len(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids up to the first end token, without special tokens."""
        words: list[int] = []
        for position, token in enumerate(int(token) for token in ids):
            if position == 0 and token == self.bos_id:
                continue
            if token == self.eos_id:
                break
            if token not in self._special_ids:
                words.append(token)
        return str(self._tokenizer.decode(words, skip_special_tokens=True)).strip()

    def _find(self, names: Iterable[str], role: str, file: str) -> int:
        for name in names:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return int(token)
        raise DataError(f"{file} has no {role} token; it needs one of {' '.join(names)}")


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str) -> CaptionTokenizer:
    """Returns `CaptionTokenizer.from_file`, which runs once per process and path."""
    return CaptionTokenizer.from_file(path)
