"""The embedded tokenizers and foreign ones."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from data.errors import DataError
from data.examples.tokenizer import EMBEDDED_TOKENIZER, CaptionTokenizer

WORDS = ["a", "dog", "cat", "red", "on", "the", "mat", "##s"]


def word_piece(path: Path, special: tuple[str, ...]) -> Path:
    """A tiny tokenizer.json as BERT has it, with truncation and padding switched on."""
    vocabulary = {token: index for index, token in enumerate([*special, "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return path


def test_embedded_round_trip() -> None:
    tokenizer = CaptionTokenizer.from_file(EMBEDDED_TOKENIZER)
    assert tokenizer.vocab_size == 4096
    assert len({tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}) == 3
    for caption in ("a red apple, fruit, food", "Café 龍 🍎", "x", ""):
        tokens_L, mask_L = tokenizer.encode(caption, 40)
        assert (
            tokens_L.shape == mask_L.shape == (40,)
            and tokens_L.dtype == np.int64
            and mask_L.dtype == bool
        )
        length = int(mask_L.sum())
        assert mask_L[:length].all() and (tokens_L[length:] == tokenizer.pad_id).all()
        assert tokens_L[0] == tokenizer.bos_id and tokens_L[length - 1] == tokenizer.eos_id
        assert tokenizer.decode(tokens_L) == caption.lower()
    tokens_L, mask_L = tokenizer.encode(
        "red <eos> apple <pad><bos>", 20
    )  # names of special tokens in a caption are dropped
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(
        tokens_L[mask_L][1:-1].tolist()
    )


def test_every_byte_has_a_token_and_length_is_bounded() -> None:
    tokenizer = CaptionTokenizer.from_file(EMBEDDED_TOKENIZER)
    odd = "".join(chr(code) for code in range(0x20, 0x3000, 37))
    tokens_L, _ = tokenizer.encode(odd, 4000)
    assert tokens_L.max() < tokenizer.vocab_size
    tokens_L, mask_L = tokenizer.encode("word " * 1_000_000, 16)
    assert mask_L.all() and tokens_L[-1] == tokenizer.eos_id
    assert tokenizer.encode("\ud800 lone surrogate", 16)[1].any()
    tokens_L, mask_L = tokenizer.encode("", 2)
    assert tokens_L.tolist() == [tokenizer.bos_id, tokenizer.eos_id] and mask_L.all()
    with pytest.raises(DataError, match="at least 2"):
        tokenizer.encode("x", 1)


BERT = EMBEDDED_TOKENIZER.with_name("bert-base-uncased.json")
RELEASED = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
"""SHA-256 of vocab.txt in Google's release."""


def bert_words(folder: Path) -> Path:
    """vocab.txt again, from the embedded file."""
    words = Tokenizer.from_file(str(BERT)).get_vocab()
    (folder / "vocab.txt").write_text(
        "".join(f"{word}\n" for word in sorted(words, key=lambda word: words[word]))
    )
    return folder / "vocab.txt"


def test_berts_words_are_those_of_the_release(tmp_path: Path) -> None:
    tokenizer = CaptionTokenizer.from_file(BERT)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (
        30_522,
        0,
        101,
        102,
    )
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert [Tokenizer.from_file(str(BERT)).token_to_id(name) for name in names] == [
        0,
        100,
        101,
        102,
        103,
    ]
    words = bert_words(tmp_path)
    assert hashlib.sha256(words.read_bytes()).hexdigest() == RELEASED


def test_berts_words_cut_as_transformers_cuts_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    bert_words(tmp_path)
    theirs, ours = (
        transformers.BertTokenizer.from_pretrained(tmp_path),
        CaptionTokenizer.from_file(BERT),
    )
    rng = np.random.default_rng(0)
    letters = [
        "\u00e9",
        "\u00df",
        "\u9f8d",
        "\u0301",
        "\t",
        "\U0001f34e",
        "unaffable",
        " photo of ",
    ]
    alphabet = [*"abcdefgABCDEFG  ,.-'!", *letters]
    texts = [
        "A photo of TWO dogs, unaffordably caf\u00e9-like.",
        *("".join(rng.choice(alphabet, 30)) for _ in range(300)),
    ]
    for text in texts:
        tokens_L, mask_L = ours.encode(text, 60)
        assert tokens_L[mask_L].tolist() == theirs(text)["input_ids"], text


@pytest.mark.parametrize(
    "special",
    [
        ("[PAD]", "[CLS]", "[SEP]"),
        ("<pad>", "<s>", "</s>"),
        ("<|startoftext|>", "<|endoftext|>"),
        ("<|endoftext|>",),
    ],
)
def test_foreign_tokenizers(special: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = CaptionTokenizer.from_file(word_piece(tmp_path / "tokenizer.json", special))
    tokens_L, mask_L = tokenizer.encode("A red dog on the mat", 10)
    assert tokenizer.decode(tokens_L) == "a red dog on the mat"
    assert mask_L.sum() == 8 and tokenizer.vocab_size == len(special) + 1 + len(WORDS)
    assert tokenizer.decode(tokenizer.encode("a red dog on the mat", 5)[0]) == "a red dog"


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer file"):
        CaptionTokenizer.from_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="not a Hugging Face tokenizer") as caught:
        CaptionTokenizer.from_file(tmp_path / "bad.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="has no start token"):
        CaptionTokenizer.from_file(word_piece(tmp_path / "nameless.json", ("[START]",)))
