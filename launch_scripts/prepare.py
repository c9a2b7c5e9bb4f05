"""Prepares data: the tar index and its check, imports, and synthetic shards.

python launch_scripts/prepare.py index 'shards/train-{000..127}.tar' --output index/
mpirun -n 16 python launch_scripts/prepare.py index 'https://host/train-{000..127}.tar' --output index/
python launch_scripts/prepare.py verify 'shards/train-{000..127}.tar' --index index/ --sample 1000
python launch_scripts/prepare.py import --from coco captions_train2017.json --image_root train2017/ --output coco/
python launch_scripts/prepare.py synthetic --output synthetic/ --num_examples 1000000
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import track

from data.errors import DataError
from data.importers.command import add_import
from data.index.build import build_index
from data.index.shards import find_shards, read_shard_list
from data.index.tar_index import ExampleTable
from data.index.verify import STATES, verify_hashes, verify_sample
from data.reading.pool import available_cores, worker_pool
from data.reading.records import RemoteOptions
from data.synthetic.command import add_synthetic
from trainer.config.cli import Parser, run_command

_STDERR = Console(stderr=True)


def index(arguments: argparse.Namespace) -> int:
    """Builds the index of a set of shards, or brings it up to date: shards that it knows are not read again.

    A build that was stopped goes on where it was. Under `mpirun -n N` the other ranks are the workers. Bad shards are listed
    in DIR/bad-shards.txt, which --exclude takes.
    """
    folder = Path(arguments.shards).expanduser()
    output = arguments.output or folder / "index"
    if arguments.output is None and not folder.is_dir():
        raise DataError(
            f"--output is missing; only where SHARDS is one folder, which {arguments.shards} is not, has it a default"
        )
    with worker_pool(arguments.workers) as pool:
        if not pool.is_main:
            return 0
        shards = find_shards(arguments.shards, Path.cwd())
        start = time.perf_counter()
        table = build_index(
            shards,
            output,
            exclude=read_shard_list(arguments.exclude, shards) if arguments.exclude else (),
            remote=_remote(arguments),
            executor=pool.executor,
            progress=_STDERR.is_terminal,
        )
        seconds = time.perf_counter() - start
    print(f"{len(table)} examples in {len(table.entries)} shards, {len(table) / seconds:.0f} examples/s: {output}")
    if table.excluded:
        print(f"{len(table.excluded)} shards are excluded", file=sys.stderr)
    repeated, skipped = (sum(getattr(entry, what) for entry in table.entries) for what in ("repeated_keys", "skipped"))
    if repeated or skipped:
        print(
            f"{repeated} examples repeat a key of their shard; {skipped} members belong to no example", file=sys.stderr
        )
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Hashes all shards again and notes their present times, or decodes a sample of the examples."""
    with worker_pool(arguments.workers) as pool:
        if not pool.is_main:
            return 0
        shards = find_shards(arguments.shards, Path.cwd())
        table = ExampleTable.open(arguments.index, shards.root, remote=_remote(arguments), check_shards=False)
        table.require_shards(shards)
        if arguments.sample is None:
            verify_hashes(table, pool.executor, _bar("hashing", len(table.entries)))
            print(f"{len(table.entries)} shards with {len(table)} examples are what was indexed")
            return 0
        size = min(arguments.sample, len(table))
        counts = verify_sample(table, size, arguments.caption_field, _bar("decoding", size), arguments.label_field)
        print(f"{size} of {len(table)} examples: " + ", ".join(f"{counts[state]} {state}" for state in STATES))
    return 0


def _bar(what: str, total: int) -> Callable[[Iterable], Iterable]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not _STDERR.is_terminal:
        return lambda items: items
    return lambda items: track(items, what, total=total, console=_STDERR, transient=True)


def _remote(arguments: argparse.Namespace) -> RemoteOptions:
    return RemoteOptions(allow_plain_http=arguments.allow_plain_http)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    cores = available_cores()
    parser.add_argument("--workers", type=int, default=cores, metavar="N", help=f"processes (default: {cores} cores)")
    parser.add_argument("--allow_plain_http", action="store_true", help="see data.remote.allow_plain_http")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a bad argument is a ConfigError (exit 2)."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = Parser(prog="prepare.py", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shards_help = "comma list of tar files, globs, folders, ranges: train-{000..127}.tar, or of URLs with ranges"

    sub = commands.add_parser("index", help="index tar shards for random access", description=index.__doc__)
    sub.add_argument("shards", metavar="SHARDS", help=shards_help)
    sub.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for the index, private (default: SHARDS/index of a folder)"
    )
    sub.add_argument("--exclude", type=Path, metavar="FILE", help="shards that stay out of the index, one per line")
    _add_reading(sub)
    sub.set_defaults(run=index)

    sub = commands.add_parser("verify", help="check shards against their index", description=verify.__doc__)
    sub.add_argument("shards", metavar="SHARDS", help=shards_help)
    sub.add_argument("--index", type=Path, required=True, metavar="DIR", help="what `index` wrote")
    sub.add_argument("--sample", type=int, metavar="N", help="decode N random examples instead of hashing everything")
    sub.add_argument("--caption_field", metavar="NAME", help="data.caption_field of the recipe, for --sample")
    sub.add_argument("--label_field", metavar="NAME", help="data.label_field of the recipe, for --sample")
    _add_reading(sub)
    sub.set_defaults(run=verify)

    add_import(commands)
    add_synthetic(commands)
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the chosen command."""
    arguments = parse_args()
    result: int = arguments.run(arguments)
    return result


if __name__ == "__main__":
    run_command(main)
