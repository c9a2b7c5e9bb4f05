"""`prepare.py import`: image-text pairs from elsewhere as clean, deduplicated tar shards.

Copies multiply the privacy loss, so they are removed; the report says what was dropped and why. The report is private: it
counts private data without noise.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from data.errors import DataError
from data.reading.pool import available_cores, worker_pool

if TYPE_CHECKING:
    from data.importers.items import Source
    from data.importers.pipeline import Settings

SOURCES = ("folder", "csv", "jsonl", "coco", "parquet", "webdataset")
_STDERR = Console(stderr=True)


def add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    formatter = argparse.RawDescriptionHelpFormatter
    sub = commands.add_parser("import", help="import image-text pairs", description=__doc__, formatter_class=formatter)
    sub.add_argument("source", metavar="SRC", help="a folder, a file, or for webdataset a pattern of shards")
    sub.add_argument("--from", dest="source_format", choices=SOURCES, required=True, help="what SRC is")
    sub.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="an empty folder for the shards (private)"
    )
    sub.add_argument(
        "--image_column", default="image", metavar="NAME", help="column of paths or bytes (default: image)"
    )
    sub.add_argument("--caption_column", default="caption", metavar="NAME", help="column or field (default: caption)")
    sub.add_argument(
        "--label_column", metavar="NAME",
        help="column or field of whole numbers; default: the member cls of shards, .cls beside images",
    )  # fmt: skip
    sub.add_argument(
        "--image_root", type=Path, metavar="DIR", help="what image paths are relative to (default: beside SRC)"
    )
    sub.add_argument("--size", type=int, default=256, metavar="PIXELS", help="images are shrunk to this (default: 256)")
    sub.add_argument(
        "--side", choices=("shortest", "longest"), default="shortest", help="which side (default: shortest)"
    )
    sub.add_argument("--min_side", type=int, default=16, metavar="PIXELS", help="drop smaller images (default: 16)")
    sub.add_argument("--format", choices=("jpg", "webp", "png"), default="jpg", help="of the images (default: jpg)")
    sub.add_argument("--quality", type=int, default=90, help="of jpg and webp (default: 90)")
    sub.add_argument(
        "--duplicate_distance", type=int, default=4, metavar="BITS", help="near copies, 0 to 10 (default: 4)"
    )
    sub.add_argument("--keep_near_duplicates", action="store_true", help="remove exact copies only")
    sub.add_argument("--owner_field", metavar="NAME", help="column or field that says whose an example is")
    sub.add_argument("--max_per_owner", type=int, metavar="K", help="keep at most K examples of an owner")
    sub.add_argument("--seed", type=int, default=0, help="of the choice among an owner's examples (default: 0)")
    sub.add_argument("--shard_examples", type=int, default=5000, metavar="K", help="examples per shard (default: 5000)")
    sub.add_argument("--prefix", default="train", help="of the shards' names (default: train)")
    cores = available_cores()
    sub.add_argument("--workers", type=int, default=cores, metavar="N", help=f"processes (default: {cores} cores)")
    sub.set_defaults(run=import_command)


def import_command(arguments: argparse.Namespace) -> int:
    """Imports; the same command again goes on after a kill."""
    from data.importers.pipeline import REPORT, import_examples

    settings = _settings(arguments)
    with worker_pool(arguments.workers) as pool:
        if not pool.is_main:
            return 0
        source = _source(arguments)
        with Progress(console=_STDERR, transient=True, disable=not _STDERR.is_terminal) as bar:
            tasks: dict[str, TaskID] = {}

            def advance(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage, total=total)
                bar.advance(tasks[stage], done)

            report = import_examples(source, arguments.output, settings, executor=pool.executor, advance=advance)
    _print(report)
    print(f"{report['written']} of {report['read']} items: {arguments.output}; {REPORT} there is private")
    return 0


def _settings(arguments: argparse.Namespace) -> "Settings":
    from data.importers.convert import Conversion
    from data.importers.pipeline import Settings

    conversion = Conversion(
        size=arguments.size,
        side=arguments.side,
        min_side=arguments.min_side,
        image_format=arguments.format,
        quality=arguments.quality,
        needs_owner=arguments.owner_field is not None,
    )
    return Settings(
        source_format=arguments.source_format,
        conversion=conversion,
        duplicate_distance=None if arguments.keep_near_duplicates else arguments.duplicate_distance,
        owner_field=arguments.owner_field,
        max_per_owner=arguments.max_per_owner,
        seed=arguments.seed,
        shard_examples=arguments.shard_examples,
        prefix=arguments.prefix,
    )


def _source(arguments: argparse.Namespace) -> "Source":
    from data.importers.coco import coco_source
    from data.importers.folders import folder_source
    from data.importers.parquet import parquet_source
    from data.importers.shards import shard_source
    from data.importers.tables import Columns, table_source

    columns = Columns(arguments.image_column, arguments.caption_column, arguments.owner_field, arguments.label_column)
    path, root = Path(arguments.source), arguments.image_root
    if root is not None and not root.is_dir():
        raise DataError(f"there is no folder {root}")
    if arguments.source_format == "webdataset":
        field = None if arguments.caption_column == "caption" else arguments.caption_column
        return shard_source(arguments.source, columns, field)
    if not path.exists():
        raise DataError(f"there is no {path}")
    if arguments.source_format == "folder":
        return folder_source(path, columns)
    if arguments.source_format == "parquet":
        return parquet_source(path, columns, root)
    if arguments.source_format == "coco":
        return coco_source(path, columns, root)
    suffixes = {"csv": (".csv", ".tsv"), "jsonl": (".jsonl", ".ndjson")}[arguments.source_format]
    if path.suffix.lower() not in suffixes:
        raise DataError(f"{path} does not end in {' or '.join(suffixes)}")
    return table_source(path, columns, root)


def _print(report: dict[str, Any]) -> None:
    table = Table(title="Import (private: counts without noise)")
    table.add_column("what")
    table.add_column("items", justify="right")
    table.add_column("for example", style="dim")
    table.add_row("read", f"{report['read']:,}", "")
    for reason, count in report["dropped"].items():
        samples = ", ".join(report["samples"].get(reason, [])[:2])
        table.add_row(f"dropped: {report['reasons'][reason]}", f"{count:,}", escape(samples))
    table.add_row("written", f"{report['written']:,}", "")
    Console().print(table)
