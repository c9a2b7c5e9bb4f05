"""Builds the embedded pictures of clothes with captions, and a tokenizer of the captions' words.

    python tools/fashion_build.py --source /usr/share/datasets/fashion-mnist

The source is Fashion-MNIST (Xiao et al. 2017, https://arxiv.org/abs/1708.07747) as Debian's package `dataset-fashion-mnist`
installs it. The script is deterministic: the same source gives the same bytes. Training pairs are the first of the data set's
training split; held-out pairs are the first of its test split without those that look like a training picture. The data set
stores negatives, which the script turns back, so that a dark shoe is dark; 32 shades of grey are left of 256, which nobody sees
and which halves the file.
"""

import argparse
import gzip
import io
import lzma
import os
import sys
from pathlib import Path

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.embedded import FASHION_FILE, NUM_SHADES, PARTS
from data.errors import DataError
from data.examples.tokenizer import from_start_to_end
from trainer.config.cli import Parser, run_command

SOURCE = Path("/usr/share/datasets/fashion-mnist")
FASHION_TOKENIZER = Path(__file__).resolve().parents[1] / "data/tokenizer/fashion.json"
CAPTIONS = (
    "a {} t-shirt",
    "a pair of {} trousers",
    "a {} jumper",
    "a {} dress",
    "a {} coat",
    "a {} sandal",
    "a {} shirt",
    "a {} sneaker",
    "a {} bag",
    "a {} ankle boot",
)
"""What the ten classes are called, in the data set's order."""
TONES = ("dark", "light")
_INK = 25
"""A pixel with more of this much darkness than the white ground belongs to the thing."""
_DARK = 165
"""Things with more darkness than this on average, of 255, are called dark; it is about the median of the training pictures."""
_ALIKE = 0.99
"""Correlation above which two pictures count as one."""
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def build_fashion(source: Path, output: Path, tokenizer: Path) -> int:
    """Writes `output` (see `data.embedded`) and `tokenizer`; returns the size of `output` in bytes.

    Raises:
        DataError: a file of the data set is missing or is none.
    """
    num_train = PARTS["train"]
    ink_NHW, caption_N = fashion(source, num_train, sum(PARTS.values()) - num_train)
    captions = captions_of_classes()
    shades_NHW = np.rint((255 - ink_NHW.astype(np.float64)) / 255 * (NUM_SHADES - 1)).astype(np.uint8)
    file = io.BytesIO()
    np.savez(file, shades_NHW=shades_NHW, caption_N=caption_N, captions=np.array(captions))
    output.write_bytes(lzma.compress(file.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    tokenizer.write_text(fashion_tokenizer(captions).to_str(pretty=True) + "\n")
    return output.stat().st_size


def fashion(source: Path, num_train: int, num_heldout: int) -> tuple[np.ndarray, np.ndarray]:
    """Darkness (N, 28, 28) uint8 and numbers of captions (N,) uint8, `len(TONES)` to a class: pictures to train on, then others.

    Raises:
        DataError: a file of the data set is missing or is none.
    """
    train_NHW, train_N = _images(source, "train")[:num_train], _labels(source, "train")[:num_train]
    test_NHW, test_N = _images(source, "t10k"), _labels(source, "t10k")
    new = _unlike(test_NHW[: 2 * num_heldout], train_NHW)[:num_heldout]
    ink_NHW = np.concatenate([train_NHW, test_NHW[new]])
    labels_N = np.concatenate([train_N, test_N[new]])
    if len(ink_NHW) != num_train + num_heldout:
        raise DataError(f"{source} holds too few pictures")
    is_light_N = np.array([ink_HW[ink_HW > _INK].mean() <= _DARK for ink_HW in ink_NHW])
    return ink_NHW, (len(TONES) * labels_N + is_light_N).astype(np.uint8)


def captions_of_classes() -> list[str]:
    """The captions by their numbers."""
    return [caption.format(tone) for caption in CAPTIONS for tone in TONES]


def fashion_tokenizer(captions: list[str]) -> Tokenizer:
    """One token per word of the captions, which the classes' names alone decide; `<unk>` for all others."""
    words = [*_SPECIAL, *sorted({word for caption in captions for word in caption.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.post_processor = from_start_to_end(tokenizer, "<bos>", "<eos>")
    return tokenizer


def _images(source: Path, split: str) -> np.ndarray:
    """(N, 28, 28) uint8 as the data set stores them: 0 is the white ground."""
    return np.frombuffer(_unzipped(source / f"{split}-images-idx3-ubyte.gz"), np.uint8, offset=16).reshape(-1, 28, 28)


def _labels(source: Path, split: str) -> np.ndarray:
    return np.frombuffer(_unzipped(source / f"{split}-labels-idx1-ubyte.gz"), np.uint8, offset=8)


def _unzipped(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error}; install dataset-fashion-mnist, or give its folder as --source"
        ) from error


def _unlike(images_NHW: np.ndarray, others_MHW: np.ndarray) -> np.ndarray:
    """Numbers of the images that correlate with none of the others, nor with an earlier one of their own."""

    def directions(x_NHW: np.ndarray) -> np.ndarray:
        x_NP = x_NHW.reshape(len(x_NHW), -1).astype(np.float64)
        x_NP = x_NP - x_NP.mean(axis=1, keepdims=True)
        return x_NP / np.linalg.norm(x_NP, axis=1, keepdims=True)

    own, others = directions(images_NHW), directions(others_MHW)
    blocks = np.split(own, range(500, len(own), 500))
    like_others = np.concatenate([(block @ others.T).max(axis=1) for block in blocks]) > _ALIKE
    like_earlier = np.tril(own @ own.T, -1).max(axis=1) > _ALIKE
    found: np.ndarray = np.flatnonzero(~like_others & ~like_earlier)
    return found


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a bad argument is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("--output", type=Path, default=FASHION_FILE)
    parser.add_argument("--tokenizer", type=Path, default=FASHION_TOKENIZER)
    return parser.parse_args(arguments)


def main() -> int:
    """Builds both files."""
    options = parse_args()
    size = build_fashion(options.source, options.output, options.tokenizer)
    print(f"{sum(PARTS.values()):,} pairs in {size:,} bytes: {options.output}")
    return 0


if __name__ == "__main__":
    run_command(main)
