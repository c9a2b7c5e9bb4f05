"""Prepares data: the tar index and its check, imports, and synthetic shards.

python launch_scripts/prepare.py index 'shards/train-{000..127}.tar' --output index/
mpirun -n 16 python launch_scripts/prepare.py index 'https://host/{000..127}.tar' --output index/
python launch_scripts/prepare.py verify 'shards/train-{000..127}.tar' --index index/
python launch_scripts/prepare.py import --from coco captions_train2017.json \
    --image_root train2017/ --output coco/
python launch_scripts/prepare.py synthetic --output synthetic/ --num_examples 1000000

Each command is a function of its options, which a notebook can call:
index(IndexOptions(shards="shards/")).
"""

import argparse
import dataclasses
import functools
import inspect
import shlex
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import require_packages

require_packages()

from pydantic import ConfigDict, Field, model_validator
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from data.errors import DataError
from data.index.build import build_index, verify_hashes
from data.index.shards import find_shards
from data.index.tar_index import ExampleTable
from data.reading.pool import available_cores, worker_pool
from data.reading.records import RemoteOptions
from privacy.errors import printable, say
from trainer.config.cli import Parser, run_command
from trainer.config.options import Options, Shown, add_options, parse_options

_STDERR = Console(stderr=True)
_PREVIEW = 36
_MAX_PREVIEW = 120


class PrepareOptions(Options):
    """Options of every command."""

    model_config = ConfigDict(validate_by_name=True)

    workers: Annotated[int, Shown("N")] = Field(default_factory=available_cores)
    """processes (default: one per core)"""


class ShardOptions(PrepareOptions):
    """Options of commands that read shards."""

    shards: Annotated[str, Shown("SHARDS", is_positional=True)]
    """comma list of tar files, globs, folders, ranges: train-{000..127}.tar, or of URLs with
    ranges"""
    allow_plain_http: bool = False
    """see data.remote.allow_plain_http"""


class IndexOptions(ShardOptions):
    """Options of `index`."""

    output: Annotated[Path | None, Shown("DIR")] = None
    """folder for the index, private (default: SHARDS/index of a folder)"""


class VerifyOptions(ShardOptions):
    """Options of `verify`."""

    index: Annotated[Path, Shown("DIR")]
    """folder that `index` wrote"""


class WriterOptions(PrepareOptions):
    """Options of commands that write shards of pictures."""

    seed: int = 0
    """seed of whatever is drawn: pictures, or the choice among an owner's examples (default: 0)"""
    image_format: Annotated[Literal["jpg", "webp", "png"], Field(alias="format")] = "jpg"
    """format of the pictures (default: jpg)"""
    shard_examples: Annotated[int, Shown("K"), Field(ge=1)] = 5000
    """examples per shard (default: 5000)"""


class ImportOptions(WriterOptions):
    """Options of `import`."""

    source: Annotated[str, Shown("SRC", is_positional=True)]
    """a folder or a file"""
    source_format: Annotated[Literal["folder", "csv", "coco", "parquet"], Field(alias="from")]
    """what SRC is"""
    output: Annotated[Path, Shown("DIR")]
    """an empty folder for the shards (private)"""
    image_column: Annotated[str, Shown("NAME")] = "image"
    """column of paths or bytes (default: image)"""
    caption_column: Annotated[str, Shown("NAME")] = "caption"
    """column or field (default: caption)"""
    label_column: Annotated[str | None, Shown("NAME")] = None
    """column or field of whole numbers; default: the file .cls next to an image"""
    image_root: Annotated[Path | None, Shown("DIR")] = None
    """folder that image paths start from (default: that of SRC)"""
    size: Annotated[int, Shown("PIXELS"), Field(ge=1)] = 256
    """the shorter side to which larger images are shrunk (default: 256)"""
    duplicate_distance: Annotated[int, Shown("BITS"), Field(ge=0, le=10)] = 4
    """near copies differ in at most this many bits, 0 to 10 (default: 4)"""
    keep_near_duplicates: bool = False
    """remove exact copies only"""
    owner_field: Annotated[str | None, Shown("NAME")] = None
    """column or field that says whose an example is"""
    max_per_owner: Annotated[int | None, Shown("K"), Field(ge=1)] = None
    """keep at most K examples of an owner"""
    text_holds: Literal["caption", "captions"] = "caption"
    """content of a .txt next to an image: one caption, or one in each line (default: caption)"""
    heldout_share: Annotated[float, Shown("S"), Field(ge=0, le=0.5)] = 0.0
    """share of the examples, about, that goes to DIR/heldout, near copies and an owner's examples
    together (default: 0)"""

    @model_validator(mode="after")
    def _owners_have_a_limit(self) -> "ImportOptions":
        if (self.owner_field is None) != (self.max_per_owner is None):
            raise ValueError("give both --owner_field and --max_per_owner, or neither")
        return self


class SyntheticOptions(WriterOptions):
    """Options of `synthetic`."""

    output: Annotated[Path | None, Shown("DIR")] = None
    """folder for the shards"""
    num_examples: Annotated[int | None, Shown("N"), Field(ge=1)] = None
    """how many (default with --preview: 36)"""
    image_size: Annotated[int, Shown("PIXELS")] = 224
    """side of a picture (default: 224)"""
    content: Literal["all", "shapes", "scenes"] = "all"
    """shapes: plain ones only; scenes: clothes and letters in clutter (default: all)"""
    preview: Annotated[Path | None, Shown("PNG")] = None
    """write a contact sheet with captions"""


def index(options: IndexOptions) -> ExampleTable | None:
    """Builds the index of a set of shards, or updates it without reading indexed shards again.

    A build that was stopped goes on where it was. Under `mpirun -n N` the other ranks are the
    workers, and get None.
    """
    folder = Path(options.shards).expanduser()
    if options.output is None and not folder.is_dir():
        raise DataError(
            f"--output is required unless SHARDS is a single folder (got {options.shards})"
        )
    output = options.output or folder / "index"
    with worker_pool(options.workers) as pool:
        if not pool.is_main:
            return None
        shards = find_shards(options.shards, Path.cwd())
        start = time.perf_counter()
        table = build_index(
            shards,
            output,
            remote=RemoteOptions(allow_plain_http=options.allow_plain_http),
            executor=pool.executor,
            progress=_STDERR.is_terminal,
        )
        seconds = time.perf_counter() - start
    sizes = f"{len(table)} examples in {len(table.entries)} shards"
    say(f"{sizes}, {len(table) / seconds:.0f} examples/s: {output}")
    for line in (*shards.remarks(), *table.remarks()):
        say(line, file=sys.stderr)
    return table


def verify(options: VerifyOptions) -> None:
    """Hashes all shards again and records their present times."""
    with worker_pool(options.workers) as pool:
        if not pool.is_main:
            return
        shards = find_shards(options.shards, Path.cwd())
        remote = RemoteOptions(allow_plain_http=options.allow_plain_http)
        table = ExampleTable.open(options.index, shards.root, remote=remote, check_shards=False)
        table.require_shards(shards)
        for line in (*shards.remarks(), *table.remarks()):
            say(line, file=sys.stderr)
        with _progress() as bar:
            track = functools.partial(bar.track, total=len(table.entries), description="hashing")
            verify_hashes(table, pool.executor, track)
    say(f"{len(table.entries)} shards with {len(table)} examples are what was indexed")


def import_pairs(options: ImportOptions) -> dict[str, Any] | None:
    """Imports image-text pairs from elsewhere as clean, deduplicated tar shards.

    Copies multiply the privacy loss, so they are removed; the report states what was dropped and
    why. The report is private: it counts private data without noise.
    """
    from data.importers.convert import Settings
    from data.importers.pipeline import REPORT, import_examples
    from data.importers.sources import Columns, open_source

    distance = None if options.keep_near_duplicates else options.duplicate_distance
    names = [field.name for field in dataclasses.fields(Settings)]
    choices = {name: getattr(options, name) for name in names}
    choices["duplicate_distance"] = distance
    settings = Settings(**choices)
    with worker_pool(options.workers) as pool:
        if not pool.is_main:
            return None
        columns = Columns(
            options.image_column, options.caption_column, options.owner_field, options.label_column
        )
        source = open_source(
            options.source,
            options.source_format,
            columns,
            options.image_root,
            lines_are_captions=options.text_holds == "captions",
        )
        with _progress() as bar:
            tasks: dict[str, TaskID] = {}

            def advance(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage, total=total)
                bar.advance(tasks[stage], done)

            report = import_examples(
                source, options.output, settings, executor=pool.executor, advance=advance
            )
    table = Table(title="Import (private: counts without noise)")
    table.add_column("what")
    table.add_column("items", justify="right")
    table.add_column("for example", style="dim")
    for suffix, count in report["other_files"].items():
        table.add_row(escape(printable(f"not read: files with suffix {suffix}")), f"{count:,}", "")
    folders = report["other_folders"]
    if folders:
        title = "folders, not entered"
        if options.source_format == "folder":
            title = "linked folders, not followed"
        table.add_row(title, f"{len(folders):,}", escape(printable("; ".join(folders[:2]))))
    if report["joined_records"]:
        table.add_row(
            "joined: records of a picture that came before", f"{report['joined_records']:,}", ""
        )
    table.add_row("read", f"{report['read']:,}", "")
    for reason, count in report["dropped"].items():
        title = f"dropped: {report['reasons'][reason]}"
        samples = "; ".join(report["samples"].get(reason, [])[:2])
        table.add_row(title, f"{count:,}", escape(printable(samples)))
    table.add_row("written", f"{report['written']:,}", "")
    if options.heldout_share:
        table.add_row("held out of these", f"{report['held_out']:,}", "")
    Console().print(table)
    num_pairs = report["written"] - report["held_out"]
    has_captions = True
    # There is no training shard if all examples are held out.
    for path in sorted(options.output.glob("train-*.tar"))[:1]:
        with tarfile.open(path) as shard:
            has_captions = any(name.endswith(".txt") for name in shard.getnames())
    if has_captions:
        shards = shlex.quote(f"data.shards={options.output}")
        command = "python launch_scripts/plan.py --recipe recipes/own_pictures.toml"
        overrides = f"{shards} data.num_examples={num_pairs}"
        advice = f"{num_pairs:,} training pairs; next: {command} {overrides} --choose"
    else:
        page = "docs/own_pictures.md, 'A few thousand pictures'"
        advice = f"{num_pairs:,} labelled training pictures; next: {page}"
    sizes = f"{report['written']} of {report['read']} items"
    say(f"{sizes}: {options.output}; {REPORT} there is private", advice)
    return report


def synthetic(options: SyntheticOptions) -> None:
    """Writes shards of synthetic pictures with captions, a contact sheet of some, or both."""
    from data.synthetic.generate import SyntheticData
    from data.synthetic.render import contact_sheet
    from data.synthetic.write import Settings, write_synthetic

    if options.output is None and options.preview is None:
        raise DataError("give --output DIR for shards, --preview PNG for a contact sheet, or both")
    if options.preview is not None:
        generator = SyntheticData(options.seed, options.image_size, options.content)
        count = max(min(options.num_examples or _PREVIEW, _MAX_PREVIEW), 1)
        examples = [generator.example(number) for number in range(count)]
        images = [example.image_HWC for example in examples]
        sheet = contact_sheet(images, [example.caption for example in examples])
        try:
            sheet.save(options.preview, "PNG")
        except OSError as error:
            raise DataError(f"cannot write {options.preview}: {error.strerror or error}") from error
        print(f"{count} examples: {options.preview}")
    if options.output is None:
        return
    if options.num_examples is None:
        raise DataError("give --num_examples N for the shards in --output")
    settings = Settings(
        options.num_examples,
        options.image_size,
        options.seed,
        options.image_format,
        options.shard_examples,
        options.content,
    )
    with worker_pool(options.workers) as pool:
        if not pool.is_main:
            return
        with _progress() as bar:
            drawing = bar.add_task("drawing", total=settings.num_examples)
            provenance = write_synthetic(
                options.output,
                settings,
                executor=pool.executor,
                advance=functools.partial(bar.advance, drawing),
            )
    sizes = f"{settings.num_examples} examples in {settings.num_shards} shards"
    print(f"{sizes}, with {provenance.name}: {options.output}")


def _progress() -> Progress:
    """Returns progress bars that show on a terminal only."""
    return Progress(console=_STDERR, transient=True, disable=not _STDERR.is_terminal)


COMMANDS: dict[str, tuple[type[Options], Callable[[Any], object]]] = {
    "index": (IndexOptions, index),
    "verify": (VerifyOptions, verify),
    "import": (ImportOptions, import_pairs),
    "synthetic": (SyntheticOptions, synthetic),
}
"""Options and function of each command; the first line of the function's docstring is its help."""


def parse_args(arguments: list[str] | None = None) -> Options:
    """Returns the options of the chosen command; a bad argument is a ConfigError (exit 2)."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="prepare.py", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (model, function) in COMMANDS.items():
        text = inspect.getdoc(function) or ""
        sub = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=formatter
        )
        add_options(sub, model)
    return parse_options(parser, arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen command; by default that of the process."""
    options = parse_args(arguments)
    for model, function in COMMANDS.values():
        if model is type(options):
            function(options)
    return 0


if __name__ == "__main__":
    run_command(main)
