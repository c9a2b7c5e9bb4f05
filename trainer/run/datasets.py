"""Opens the run's data: tar indexes, made once where the recipe names none, of exactly the shards that were asked for."""

import atexit
import os
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError, DecodeError
from data.examples.examples import CaptionExample, LabelledImageExample, MakeExample, read_label
from data.index.build import build_index
from data.index.shards import ShardSet, find_shards
from data.index.tar_index import MANIFEST, ExampleTable
from data.reading.reader import TarReader, json_record
from data.reading.records import RemoteOptions
from data.reading.staging import Staging, is_at_work, open_folder, require_room
from data.reading.workers import copy_shards, worker_context
from privacy.ranks.collectives import first_on_main, rank, refuse_together, say
from privacy.sampling.rows import shares_of_nodes
from privacy.step.folder import RunFolder
from trainer.config.recipe import RunConfig

STAGED = "staged-shards"
"""Folder in data.staging, which may be a place for everybody; it is private."""
LOOKED_AT = 64
LOOKED_AT_AGAIN = 1000
"""The numbers of examples that a start decodes before it spends anything: first, and where one of these cannot be used."""
_UNUSABLE_SHARE = 0.01
_MOST_LABELS = 10**9


def training_table(config: RunConfig, folder: RunFolder, root: Path) -> ExampleTable:
    """The private examples; collective, and slow the first time, since an index is built with hashes of all bytes.

    Raises:
        DataError: no shards, no examples, an index of other shards, or one shard twice, in a run with privacy.
        ReadError: remote shards cannot be read.
    """
    shards, given = first_on_main(lambda: find_shards(config.data.shards, root)), config.data.index
    table = _open_table(
        folder.index if given is None else root / given, shards, config, make=given is None
    )
    if len(table) == 0:
        raise DataError(f"{config.data.shards} holds no examples")
    if config.privacy.enabled:
        table.require_distinct_shards()
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
        atexit.register(
            copying.kill
        )  # It ignores SIGTERM, and multiprocessing would wait for it at the end.
        while copying.is_alive() and not is_at_work(
            folder
        ):  # before any reader could take the work over
            time.sleep(0.05)
    if rank() == 0:
        size, where = (
            sum(shard.size for shard in shards) / 1e9,
            "nodes" if len(numbers) > 1 else "node",
        )
        say(
            f"staging: {len(numbers)} {where}; this one needs {len(shards)} shards, {size:.3g} GB, in {folder}"
        )
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
        raise DataError(
            "heldout.shards contains training shards, so it cannot be declared public (heldout.is_public)"
        )
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


class _Look(NamedTuple):
    """What a look at some examples shows; private.

    Attributes:
        reasons: why examples cannot be used -> how many.
        fields: names of members and of JSON fields -> how many examples have them.
        usable_labels, unusable_labels: labels -> how many examples; of classifiers.
        unknown_and_all: words that the vocabulary does not know, and all words, (2,).
    """

    reasons: Counter[str]
    fields: Counter[str]
    usable_labels: Counter[int]
    unusable_labels: Counter[int]
    unknown_and_all: np.ndarray

    def largest_reason(self) -> int:
        """How many examples cannot be used for one reason; what follows its colon is a detail."""
        kinds = Counter[str]()
        for reason, times in self.reasons.items():
            kinds[reason.partition(":")[0]] += times
        return max(kinds.values(), default=0)

    def lost_label(self) -> bool:
        """Whether the unusable examples are all that have some label, as where labels count from 1."""
        count = self.reasons.total()
        return (
            count > 1
            and [*self.unusable_labels.values()] == [count]
            and not self.unusable_labels & self.usable_labels
        )


def _look_at(table: ExampleTable, make_example: MakeExample, ids: np.ndarray) -> _Look:
    """Reads and decodes these examples.

    Raises:
        ReadError: examples cannot be read.
    """
    look = _Look(Counter(), Counter(), Counter(), Counter(), np.zeros(2, dtype=np.int64))
    reader = TarReader(table)
    for raw in reader.read_all(ids):
        look.fields.update(f".{extension}" for extension in raw.fields)
        look.fields.update(
            f"{name!r} of .json" for name in json_record(raw.fields.get("json", b""))
        )
        labels = look.usable_labels
        try:
            make_example(raw, 0)
        except DecodeError as error:
            look.reasons[str(error)] += 1
            labels = look.unusable_labels
        else:
            if isinstance(make_example, CaptionExample):
                look.unknown_and_all[:] += make_example.count_unknown(raw)
        if isinstance(make_example, LabelledImageExample):
            with suppress(DecodeError):
                labels[read_label(raw, _MOST_LABELS, make_example.label_field)] += 1
    reader.close()
    return look


def require_usable(
    table: ExampleTable,
    make_example: MakeExample,
    config: RunConfig,
    *,
    key: str,
    count: int | None = None,
) -> None:
    """Looks at examples spread over the data, says how many of them cannot be used, and refuses data of which many cannot.

    Such a run would spend its budget on zero gradients, or learn to write that it knows no word. Where one of a few training
    examples cannot be used, more of them are looked at. What is found depends on single private examples, so it is a line for the
    console of whoever runs the job, and written nowhere (docs/guarantee.md).

    Args:
        key: the recipe's key that names the data.
        count: how many examples, from the first, will be used; None means all.

    Raises:
        DataError: most of the examples cannot be used; says why, and which fields they have. Of training data: more than
            data.max_unusable_share cannot be used for one reason, or all of one label. Or the vocabulary does not know most
            words of their captions.
        ReadError: examples cannot be read.
    """
    used = min(len(table), count or len(table))
    if table.staging is not None:  # the first shard, which comes first anyway
        used = min(used, table.shards_of(0, 1)[0].count)
    is_training = key == "data.shards"
    ids = np.unique(np.linspace(0, used - 1, min(used, LOOKED_AT)).astype(np.int64))
    look = _look_at(table, make_example, ids)
    if is_training and look.reasons and used > LOOKED_AT:
        ids = np.unique(np.linspace(0, used - 1, min(used, LOOKED_AT_AGAIN)).astype(np.int64))
        look = _look_at(table, make_example, ids)
    unusable = look.reasons.total()
    why = ", ".join(
        f"{times} time{'s' if times > 1 else ''}: {reason[:200]}"
        for reason, times in look.reasons.most_common(3)
    )
    if 2 * unusable > len(ids):
        asked = {"captioner": "caption_field", "classifier": "label_field"}.get(config.model.kind)
        field = getattr(config.data, asked) if asked else None
        named = f"; data.{asked} is {'not set' if field is None else repr(field)}" if asked else ""
        # A name that one example has alone may be a value.
        there = (
            ", ".join(name[:80] for name, times in look.fields.most_common(20) if times > 1)
            or "none in common"
        )
        raise DataError(
            f"{key}: {unusable} of {len(ids)} examples that were looked at cannot be used ({why}){named}; the fields that "
            f"are there: {there}"
        )
    if is_training and config.privacy.enabled:
        share = config.data.max_unusable_share
        is_label, most = (
            look.lost_label() and share is None,
            _UNUSABLE_SHARE if share is None else share,
        )
        if is_label or look.largest_reason() > max(1, most * len(ids)):
            whose = "all that have one label, " if is_label else ""
            raise DataError(
                f"{key}: {unusable} of {len(ids)} examples that were looked at, {whose}cannot be used and would count as zero "
                f"({why}); correct them, or, if they are meant to be there, allow them: data.max_unusable_share=0.5"
            )
    if (
        isinstance(make_example, CaptionExample)
        and 2 * look.unknown_and_all[0] > look.unknown_and_all[1]
    ):
        raise DataError(
            f"{key}: the vocabulary {make_example.tokenizer_path} ({make_example.tokenizer.vocab_size} tokens) does not know "
            f"{look.unknown_and_all[0]:,} of {look.unknown_and_all[1]:,} words in the captions that were looked at: choose "
            "another with data.tokenizer, e.g. data.tokenizer=data/tokenizer/tokenizer.json"
        )
    if look.reasons or is_training:
        fate = "count as zero" if is_training else "are left out"
        result = f"{unusable} cannot be used and {fate} ({why})" if look.reasons else "all usable"
        say(f"{'warning: ' if look.reasons else ''}{key}: a look at {len(ids)} examples: {result}")


def _open_table(index: Path, shards: ShardSet, config: RunConfig, *, make: bool) -> ExampleTable:
    """The index of exactly these shards. Rank 0 looks at every shard; every read is checked by itself. Collective.

    Args:
        make: builds the index where there is none; shards that an interrupted start has finished are kept.
    """
    remote = RemoteOptions(**config.data.remote.model_dump())

    def open_table() -> ExampleTable:
        if rank() == 0:
            for line in shards.remarks():
                say(f"{shards.root}: {line}")
        if make and rank() == 0 and not (index / MANIFEST).exists():
            for line in build_index(shards, index, remote=remote, progress=True).remarks():
                say(f"{shards.root}: {line}")
        table = ExampleTable.open(index, shards.root, remote=remote, check_shards=False)
        table.require_shards(shards)
        if rank() == 0:
            table.check_shards()
        return table

    return first_on_main(open_table)
