"""`prepare.py synthetic`: shards of synthetic pictures with captions, or a look at some."""

import argparse
import functools
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from data.errors import DataError
from data.reading.pool import available_cores, worker_pool
from data.synthetic.scene import CONTENTS, FORMATS

_STDERR = Console(stderr=True)


def add_synthetic(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    sub = commands.add_parser("synthetic", help="make synthetic image-caption shards", description=__doc__)
    sub.add_argument("--output", type=Path, metavar="DIR", help="folder for the shards")
    sub.add_argument("--num_examples", type=int, metavar="N", help="how many (default with --preview: 36)")
    sub.add_argument("--image_size", type=int, default=224, metavar="PIXELS", help="side of a picture (default: 224)")
    sub.add_argument("--seed", type=int, default=0, help="of the generator (default: 0)")
    sub.add_argument("--content", choices=CONTENTS, default="all", help="shapes: plain ones only (default: all)")
    sub.add_argument("--format", choices=FORMATS, default="jpg", help="of the pictures (default: jpg)")
    sub.add_argument("--shard_examples", type=int, default=5000, metavar="K", help="examples per shard (default: 5000)")
    cores = available_cores()
    sub.add_argument("--workers", type=int, default=cores, metavar="N", help=f"processes (default: {cores} cores)")
    sub.add_argument("--preview", type=Path, metavar="PNG", help="write a contact sheet with captions")
    sub.set_defaults(run=synthetic)


def synthetic(arguments: argparse.Namespace) -> int:
    """Writes shards, a contact sheet, or both."""
    if arguments.output is None and arguments.preview is None:
        raise DataError("give --output DIR for shards, --preview PNG for a contact sheet, or both")
    if arguments.preview is not None:
        _preview(arguments)
    if arguments.output is not None:
        _shards(arguments)
    return 0


def _preview(arguments: argparse.Namespace) -> None:
    from data.synthetic.generate import SyntheticData
    from data.synthetic.sheet import contact_sheet

    count = min(arguments.num_examples or 36, 120)
    data = SyntheticData(arguments.seed, arguments.image_size, arguments.content)
    examples = [data.example(index) for index in range(max(count, 1))]
    sheet = contact_sheet([e.image_HWC for e in examples], [e.caption for e in examples])
    try:
        sheet.save(arguments.preview, "PNG")
    except OSError as error:
        raise DataError(f"cannot write {arguments.preview}: {error.strerror or error}") from error
    print(f"{len(examples)} examples: {arguments.preview}")


def _shards(arguments: argparse.Namespace) -> None:
    from data.synthetic.write import Settings, write_synthetic

    if arguments.num_examples is None:
        raise DataError("give --num_examples N for the shards in --output")
    settings = Settings(
        arguments.num_examples,
        arguments.image_size,
        arguments.seed,
        arguments.format,
        arguments.shard_examples,
        arguments.content,
    )
    with worker_pool(arguments.workers) as pool:
        if not pool.is_main:
            return
        with Progress(console=_STDERR, transient=True, disable=not _STDERR.is_terminal) as bar:
            task = bar.add_task("drawing", total=settings.num_examples)
            advance = functools.partial(bar.advance, task)
            provenance = write_synthetic(arguments.output, settings, executor=pool.executor, advance=advance)
    print(
        f"{settings.num_examples} examples in {settings.num_shards} shards, {provenance.name} beside: {arguments.output}"
    )
