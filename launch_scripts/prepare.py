"""Prepares data: the tar index and its check, the embedded demo and the embedded tokenizer.

python launch_scripts/prepare.py index 'shards/train-{000..127}.tar' --output index/
python launch_scripts/prepare.py verify 'shards/train-{000..127}.tar' --index index/ --sample 1000
python launch_scripts/prepare.py demo --source /usr/share/openclipart --output data/demo
python launch_scripts/prepare.py tokenizer --words /usr/share/dict/words --output data/tokenizer/tokenizer.json
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import track

from data.errors import DataError, DecodeError
from data.reader import RawExample, TarReader
from data.shards import common_root, expand_shards
from data.tar_index import ExampleTable, build_index, hash_shard
from data.transforms import eval_image
from trainer.cli import run_command

_STDERR = Console(stderr=True)


def index(arguments: argparse.Namespace) -> int:
    """Builds the index of a set of shards."""
    shards = expand_shards(arguments.shards, Path.cwd())
    start = time.perf_counter()
    table = build_index(shards, arguments.output, progress=_STDERR.is_terminal)
    seconds = time.perf_counter() - start
    print(f"{len(table)} examples in {len(shards)} shards, {len(table) / seconds:.0f} examples/s: {arguments.output}")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Hashes all shards again, or decodes a sample of the examples."""
    if arguments.sample is not None and arguments.sample < 1:
        raise DataError(f"--sample is {arguments.sample}; it must be at least 1")
    shards = expand_shards(arguments.shards, Path.cwd())
    root = common_root(shards)
    table = ExampleTable.open(arguments.index, root)
    listed = {path.absolute().relative_to(root).as_posix() for path in shards}
    indexed = {entry.name for entry in table.entries}
    if listed != indexed:
        raise DataError(f"{len(listed ^ indexed)} shards are only in one of SHARDS and index; index them again")
    if arguments.sample is None:
        _verify_hashes(table)
    else:
        _verify_sample(table, arguments.sample)
    return 0


def _verify_hashes(table: ExampleTable) -> None:
    for ordinal in _track(range(len(table.entries)), "hashing"):
        if hash_shard(table.shard_path(ordinal)) != table.entries[ordinal].sha256:
            raise DataError(f"{table.shard_path(ordinal)} is not what was indexed; restore it or index again")
    print(f"{len(table.entries)} shards with {len(table)} examples are what was indexed")


def _verify_sample(table: ExampleTable, size: int) -> None:
    reader = TarReader(table)
    ids = np.random.default_rng().choice(len(table), min(size, len(table)), replace=False)
    counts = {"usable": 0, "without image": 0, "undecodable image": 0, "without caption": 0}
    for example_id in _track(np.sort(ids), "decoding"):
        counts[_state(reader.read(int(example_id)))] += 1
    print(f"{len(ids)} of {len(table)} examples: " + ", ".join(f"{count} {what}" for what, count in counts.items()))


def _state(raw: RawExample) -> str:
    if raw.image is None:
        return "without image"
    try:
        eval_image(raw.image, 32)
    except DecodeError:
        return "undecodable image"
    return "usable" if raw.caption and raw.caption.strip() else "without caption"


def _track(items: "range | np.ndarray", what: str) -> "range | np.ndarray":
    """A progress bar on a terminal, nothing elsewhere."""
    return track(items, what, console=_STDERR, transient=True) if _STDERR.is_terminal else items  # type: ignore[return-value]


def demo(arguments: argparse.Namespace) -> int:
    """Builds the embedded demo from Debian's openclipart."""
    from data.demo_build import build_demo

    num_train, num_heldout = build_demo(
        arguments.source, arguments.words, arguments.output, lambda line: print(line, file=sys.stderr)
    )
    print(f"{num_train} training and {num_heldout} held-out examples: {arguments.output}")
    return 0


def tokenizer(arguments: argparse.Namespace) -> int:
    """Trains the embedded tokenizer on public words."""
    from data.tokenizer_build import train_tokenizer

    print(f"{train_tokenizer(arguments.words, arguments.output)} tokens: {arguments.output}")
    return 0


def _add_words(parser: argparse.ArgumentParser, what: str) -> None:
    default = Path("/usr/share/dict/words")
    parser.add_argument("--words", type=Path, default=default, metavar="FILE", help=f"{what} (default: {default})")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="prepare.py", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shards_help = "comma list of tar files, globs, folders or ranges: train-{000..127}.tar"

    sub = commands.add_parser("index", help="index tar shards for random access", description=index.__doc__)
    sub.add_argument("shards", metavar="SHARDS", help=shards_help)
    sub.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the index (private)")
    sub.set_defaults(run=index)

    sub = commands.add_parser("verify", help="check shards against their index", description=verify.__doc__)
    sub.add_argument("shards", metavar="SHARDS", help=shards_help)
    sub.add_argument("--index", type=Path, required=True, metavar="DIR", help="what `index` wrote")
    sub.add_argument("--sample", type=int, metavar="N", help="decode N random examples instead of hashing everything")
    sub.set_defaults(run=verify)

    sub = commands.add_parser("demo", help="build the embedded demo shards", description=demo.__doc__)
    sub.add_argument("--source", type=Path, default=Path("/usr/share/openclipart"), metavar="DIR", help="png/ and svg/")
    _add_words(sub, "English words, one per line")
    sub.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the shards")
    sub.set_defaults(run=demo)

    sub = commands.add_parser("tokenizer", help="train the embedded tokenizer", description=tokenizer.__doc__)
    _add_words(sub, "public words, one per line")
    sub.add_argument("--output", type=Path, required=True, metavar="FILE", help="tokenizer.json to write")
    sub.set_defaults(run=tokenizer)
    return parser.parse_args()


def main() -> int:
    """Runs the chosen command."""
    arguments = parse_arguments()
    result: int = arguments.run(arguments)
    return result


if __name__ == "__main__":
    run_command(main)
