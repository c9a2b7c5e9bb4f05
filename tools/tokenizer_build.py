"""Makes the embedded tokenizers: byte-level BPE on public words and our own caption templates, and BERT's word list.

    python tools/tokenizer_build.py --words /usr/share/dict/words --output data/tokenizer/tokenizer.json
    python tools/tokenizer_build.py --vocab vocab.txt --output data/tokenizer/bert-base-uncased.json

No vocabulary is trained on captions: one learned from private captions would release facts about them without any accounting.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import DataError
from data.examples.tokenizer import from_start_to_end
from trainer.config.cli import Parser, run_command

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TEMPLATE_REPEATS = 20


def _words(text: str) -> list[str]:
    return text.split()


_COLORS = _words("""
red green blue yellow orange purple pink brown black white gray golden silver light dark bright
""")
_THINGS = _words("""
dog cat horse cow sheep pig bird duck chicken fish shark whale dolphin lion tiger bear elephant monkey rabbit mouse
frog snake turtle spider butterfly bee ant insect dinosaur dragon penguin owl eagle man woman boy girl baby child
person people family king queen doctor soldier face head hand foot eye nose mouth heart smile hat shirt shoe dress
glove crown ring tree flower leaf grass plant rose apple banana cherry grape lemon pear strawberry tomato carrot
corn mushroom bread cake cheese egg meat pizza sandwich ice cream cookie candy coffee tea milk water wine beer juice
bottle cup glass plate bowl spoon fork knife table chair bed lamp door window house home building church castle
tower bridge road street city car bus truck train bicycle motorcycle airplane helicopter rocket boat ship sailboat
wheel sun moon star cloud rain snow lightning fire mountain river lake sea ocean beach island forest park garden
field sky flag map globe sign symbol icon arrow button circle square triangle rectangle diamond line dot stripe
pattern border frame picture camera television computer monitor keyboard printer screen phone telephone radio
battery light bulb book paper pen pencil letter envelope folder file box bag basket key lock clock watch scissors
hammer saw screwdriver wrench tool gun sword bomb ball balloon kite doll toy game dice card chess puzzle guitar
piano drum trumpet violin music note money coin gift candle bell cross cup medal trophy skull ghost angel witch
robot alien planet earth rocket umbrella glasses animal mammal reptile food fruit vegetable dessert drink sport
sports music holiday party vehicle transport geography office weather hearts spades clubs diamonds playing
clothing furniture kitchen school nature landscape europe africa asia america north south east west cartoon drawing
illustration photo computer network building plant geometry shape religion science space history warning traffic
""")
_RELATIONS = _words("""
on in under above below beside behind near with next to in front of inside left of right of
""")
_NUMBERS = _words("""
one two three four five six seven eight nine ten many several a pair of a group of
""")
_ACTIONS = _words("""
sitting standing running jumping walking flying swimming eating sleeping playing holding riding
""")


def train_tokenizer(words_file: Path, output: Path) -> int:
    """Trains and writes tokenizer.json.

    Args:
        words_file: one word per line, for example Debian's wamerican.
        output: the file to write.

    Returns:
        The size of the vocabulary.

    Raises:
        DataError: no word list.
    """
    if not words_file.is_file():
        raise DataError(f"there is no word list {words_file}; install Debian's wamerican or name one with --words")
    try:
        words = [word.strip() for word in words_file.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"the word list {words_file} is not UTF-8: {error}") from error
    tokenizer = Tokenizer(models.BPE())
    one_space = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]  # as data/examples/examples.py reads
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), *one_space])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])  # without the prefix space
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Every word once, without possessives; the templates often, so that common words become single tokens.
    corpus = [word for word in words if word and "'" not in word] + _TEMPLATE_REPEATS * list(caption_templates())
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = from_start_to_end(tokenizer, "<bos>", "<eos>")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return tokenizer.get_vocab_size()


def build_word_pieces(vocabulary: Path, output: Path) -> int:
    """Writes tokenizer.json of a BERT word list without capitals: its text is cleaned, lower-cased and cut into word pieces.

    Source: Devlin et al. 2019 (https://arxiv.org/abs/1810.04805) and its release's `vocab.txt`.

    Args:
        vocabulary: one token a line; the line's number, from 0, is the token's id.
        output: the file to write.

    Returns:
        The size of the vocabulary.

    Raises:
        DataError: no such file, or no such word list.
    """
    try:
        words = vocabulary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{vocabulary} cannot be read as a word list: {error}") from error
    missing = [token for token in BERT_TOKENS if token not in words]
    if missing:
        raise DataError(f"{vocabulary} is no word list of BERT: it lacks {' '.join(missing)}")
    if "" in words or len(set(words)) < len(words):
        raise DataError(f"{vocabulary} is no word list of BERT: a line is empty or stands there twice")
    capital = next((word for word in words if word != word.lower() and word[0] != "["), None)
    if capital is not None:
        raise DataError(f"{vocabulary} has capitals ({capital}), but only lists of lower-case words are taken")
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(BERT_TOKENS))
    tokenizer.post_processor = from_start_to_end(tokenizer, "[CLS]", "[SEP]")
    output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output), pretty=False)
    return len(words)


def caption_templates() -> Iterator[str]:
    """Made-up captions over a small public vocabulary."""
    for index, thing in enumerate(_THINGS):
        other = _THINGS[(7 * index + 3) % len(_THINGS)]
        color = _COLORS[index % len(_COLORS)]
        relation = _RELATIONS[index % len(_RELATIONS)]
        yield f"a {color} {thing}, {other}"
        yield f"an image of {_NUMBERS[index % len(_NUMBERS)]} {thing} {relation} the {other}"
        yield f"the {thing} is {_ACTIONS[index % len(_ACTIONS)]} {relation} a {color} {other}"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a bad argument is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = Path("/usr/share/dict/words")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--words", type=Path, default=words, metavar="FILE", help=f"one a line (default: {words})")
    source.add_argument("--vocab", type=Path, metavar="FILE", help="vocab.txt of an uncased BERT, instead of words")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="tokenizer.json to write")
    return parser.parse_args(arguments)


def main() -> None:
    """Makes the tokenizer."""
    arguments = parse_args()
    if arguments.vocab is not None:
        count = build_word_pieces(arguments.vocab, arguments.output)
    else:
        count = train_tokenizer(arguments.words, arguments.output)
    print(f"{count} tokens: {arguments.output}")


if __name__ == "__main__":
    run_command(main)
