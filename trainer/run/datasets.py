"""Opens the run's data: tar indexes, made once where the recipe names none, of exactly the shards that were asked for."""

import atexit
import os
import socket
import time
from collections import Counter
from pathlib import Path

import numpy as np

from data.errors import DataError, DecodeError
from data.examples.examples import CaptionExample, MakeExample
from data.index.build import build_index
from data.index.shards import ShardSet, find_shards
from data.index.tar_index import MANIFEST, ExampleTable
from data.reading.reader import TarReader, json_record
from data.reading.records import RemoteOptions
from data.reading.staging import Staging, is_at_work, open_folder, require_room
from data.reading.workers import copy_shards, worker_context
from privacy.sampling.rows import shares_of_nodes
from privacy.step.collectives import first_on_main, rank, refuse_together, say
from privacy.step.folder import RunFolder
from trainer.config.recipe import RunConfig

STAGED = "staged-shards"
"""Folder in data.staging, which may be a place for everybody; it is private."""
LOOKED_AT = 64
"""The number of examples that a start decodes before it spends anything."""


def training_table(config: RunConfig, folder: RunFolder, root: Path) -> ExampleTable:
    """The private examples; collective, and slow the first time, since an index is built with hashes of all bytes.

    Raises:
        DataError: no shards, no examples, an index of other shards, or one shard twice, in a run with privacy.
        ReadError: remote shards cannot be read.
    """
    shards, given = first_on_main(lambda: find_shards(config.data.shards, root)), config.data.index
    table = _open_table(folder.index if given is None else root / given, shards, config, make=given is None)
    if len(table) == 0:
        raise DataError(f"{config.data.shards} holds no examples")
    if config.privacy.enabled:
        first: dict[str, str] = {}
        for entry in table.entries:
            if (other := first.setdefault(entry.sha256, entry.name)) != entry.name:
                raise DataError(
                    f"shards {other} and {entry.name} hold the same bytes, so each of their examples would count twice and be "
                    "protected as two are: take one of them away from data.shards"
                )
    stated = config.data.num_examples
    if stated is not None and stated != len(table):
        raise DataError(
            f"{config.data.shards} holds {len(table):,} examples, but data.num_examples is {stated:,}: the recipe's noise "
            f"multiplier belongs to that number. Set data.num_examples={len(table)} and calibrate again (plan.py --recipe)"
        )
    if shards.is_remote and config.data.staging is None:
        say(
            f"warning: examples are read from {shards.root}: whoever serves it or sees the requests knows who is in every "
            "batch, and must be inside the trust boundary (docs/data.md); with data.staging they see whole shards only"
        )
    return table


def stage(table: ExampleTable, config: RunConfig, root: Path) -> tuple[int, ...]:
    """Begins to copy the shards of each node to its own disk, where the recipe says so; collective.

    Ranks that see the same folder share one store, wherever they run. From here on this rank's table reads from its store.

    Returns:
        The node of each rank, numbered in the order of their first ranks; empty without data.staging.

    Raises:
        DataError: the folder cannot be used, or its disk cannot hold the shards of this node.
    """
    if config.data.staging is None:
        return ()
    text = os.path.expandvars(config.data.staging)
    folder = root / Path(text).expanduser() / STAGED

    def open_store() -> str:
        if "$" in text:
            raise DataError(
                f"data.staging: {text} has a variable that is not set on {socket.gethostname()}; set it on every node"
            )
        return open_folder(folder)

    names = refuse_together(open_store)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    nodes = tuple(numbers[name] for name in names)
    share = shares_of_nodes(nodes, len(table))[nodes[rank()]]
    shards, is_first = table.shards_of(share.start, share.stop), share.ranks[0] == rank()

    refuse_together(lambda: require_room(folder, shards) if is_first else None)
    table.staging = Staging(str(folder), share.start, share.stop)
    if is_first:
        copying = worker_context().Process(target=copy_shards, args=(table,), daemon=True)
        copying.start()
        atexit.register(copying.kill)  # It ignores SIGTERM, and multiprocessing would wait for it at the end.
        while copying.is_alive() and not is_at_work(folder):  # before any reader could take the work over
            time.sleep(0.05)
    if rank() == 0:
        size, where = sum(shard.size for shard in shards) / 1e9, "nodes" if len(numbers) > 1 else "node"
        say(f"staging: {len(numbers)} {where}; this one needs {len(shards)} shards, {size:.3g} GB, in {folder}")
    return nodes


def heldout_table(config: RunConfig, folder: RunFolder, root: Path) -> ExampleTable | None:
    """The held-out examples, if the recipe names any; collective.

    Raises:
        DataError: no shards, or training shards that are declared public.
        ReadError: remote shards cannot be read.
    """
    if config.heldout is None:
        return None
    pattern = config.heldout.shards
    shards = first_on_main(lambda: find_shards(pattern, root))
    private = first_on_main(lambda: find_shards(config.data.shards, root)).locations()
    if config.heldout.is_public and not set(private).isdisjoint(shards.locations()):
        raise DataError("heldout.shards contains training shards, so it cannot be declared public (heldout.is_public)")
    return _open_table(folder.private / "heldout-index", shards, config, make=True)


def require_other_bytes(heldout: ExampleTable, table: ExampleTable) -> None:
    """Refuses public held-out shards that are training shards under another name.

    Raises:
        DataError: one of them is.
    """
    private = {entry.sha256 for entry in table.entries}
    for entry in heldout.entries:
        if entry.sha256 in private:
            raise DataError(
                f"held-out shard {entry.name} has the bytes of a training shard, so it cannot be declared public "
                "(heldout.is_public)"
            )


def require_usable(
    table: ExampleTable, make_example: MakeExample, config: RunConfig, *, key: str, count: int | None = None
) -> None:
    """Looks at examples spread over the data, says how many of them cannot be used, and refuses data of which most cannot.

    Such a run would spend its budget on zero gradients, or learn to write that it knows no word. What is found depends on single
    private examples, so it is a line for the console of whoever runs the job, and written nowhere (docs/guarantee.md).

    Args:
        key: the recipe's key that names the data.
        count: how many examples, from the first, will be used; None means all.

    Raises:
        DataError: most of the examples cannot be used; says why, and which fields they have. Or the vocabulary does not know
            most words of their captions.
        ReadError: examples cannot be read.
    """
    used = min(len(table), count or len(table))
    if table.staging is not None:  # the first shard, which comes first anyway
        used = min(used, table.shards_of(0, 1)[0].count)
    ids = np.unique(np.linspace(0, used - 1, min(used, LOOKED_AT)).astype(np.int64))
    reader, reasons, fields = TarReader(table), Counter[str](), Counter[str]()
    unknown_and_all = np.zeros(2, dtype=np.int64)
    for raw in reader.read_all(ids):
        fields.update(f".{extension}" for extension in raw.fields)
        fields.update(f"{name!r} of .json" for name in json_record(raw.fields.get("json", b"")))
        try:
            make_example(raw, 0)
        except DecodeError as error:
            reasons[str(error)] += 1
        else:
            if isinstance(make_example, CaptionExample):
                unknown_and_all += make_example.count_unknown(raw)
    reader.close()
    why = ", ".join(
        f"{count} time{'s' if count > 1 else ''}: {reason[:200]}" for reason, count in reasons.most_common(3)
    )
    if 2 * reasons.total() > len(ids):
        asked = {"captioner": "caption_field", "classifier": "label_field"}.get(config.model.kind)
        field = getattr(config.data, asked) if asked else None
        named = f"; data.{asked} is {'not set' if field is None else repr(field)}" if asked else ""
        there = ", ".join(name[:80] for name, _ in fields.most_common(20)) or "none"
        raise DataError(
            f"{key}: {reasons.total()} of {len(ids)} examples that were looked at cannot be used ({why}){named}; the fields that "
            f"are there: {there}"
        )
    if isinstance(make_example, CaptionExample) and 2 * unknown_and_all[0] > unknown_and_all[1]:
        raise DataError(
            f"{key}: the vocabulary {make_example.tokenizer_path} ({make_example.tokenizer.vocab_size} tokens) does not know "
            f"{unknown_and_all[0]:,} of {unknown_and_all[1]:,} words in the captions that were looked at: choose another with "
            "data.tokenizer, e.g. data.tokenizer=data/tokenizer/tokenizer.json"
        )
    if reasons or key == "data.shards":
        fate = "count as zero" if key == "data.shards" else "are left out"
        found = f"{reasons.total()} cannot be used and {fate} ({why})" if reasons else "all usable"
        say(f"{'warning: ' if reasons else ''}{key}: a look at {len(ids)} examples: {found}")


def _open_table(index: Path, shards: ShardSet, config: RunConfig, *, make: bool) -> ExampleTable:
    """The index of exactly these shards. Rank 0 looks at every shard; every read is checked by itself. Collective.

    Args:
        make: builds the index where there is none; shards that an interrupted start has finished are kept.
    """
    remote = RemoteOptions(**config.data.remote.model_dump())

    def open_table() -> ExampleTable:
        if make and rank() == 0 and not (index / MANIFEST).exists():
            for line in build_index(shards, index, remote=remote, progress=True).remarks():
                say(f"{shards.root}: {line}")
        table = ExampleTable.open(index, shards.root, remote=remote, check_shards=False)
        table.require_shards(shards)
        if rank() == 0:
            table.check_shards()
        return table

    return first_on_main(open_table)
