"""Opens the run's data: tar indexes of exactly the shards that the recipe names.

An index is built once where the recipe names none.
"""

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
from privacy.step.run_folder import RunFolder
from trainer.config.recipe import RunConfig

STAGED = "staged-shards"
"""Private folder in data.staging, which other programs may use too."""
SAMPLE_SIZE = 64
LARGER_SAMPLE_SIZE = 1000
"""How many examples a start decodes before it spends anything: first, and if one is unusable."""
_UNUSABLE_SHARE = 0.01
_MOST_LABELS = 10**9


def training_table(config: RunConfig, folder: RunFolder, root: Path) -> ExampleTable:
    """Returns the private examples. Collective.

    The first call takes long, since it builds an index with hashes of all bytes.

    Raises:
        DataError: no shards, no examples, an index of other shards, or one shard twice, in a run
            with privacy.
        ReadError: remote shards cannot be read.
    """
    pattern = config.data.shards
    shards = first_on_main(lambda: find_shards(pattern, root))
    if config.data.index is None:
        table = _open_table(folder.index, shards, config, make=True)
    else:
        table = _open_table(root / config.data.index, shards, config, make=False)
    if len(table) == 0:
        raise DataError(f"{pattern} holds no examples")
    if config.privacy.enabled:
        table.require_distinct_shards()
    stated_examples = config.data.num_examples
    if stated_examples is not None and stated_examples != len(table):
        raise DataError(
            f"{pattern} holds {len(table):,} examples, but data.num_examples is "
            f"{stated_examples:,}: the recipe's noise multiplier belongs to that number. Set "
            f"data.num_examples={len(table)} and calibrate again (plan.py --recipe)"
        )
    if shards.is_remote and config.data.staging is None:
        say(
            f"warning: examples are read from {shards.root}: whoever serves it or sees the "
            "requests knows who is in every batch, and must be inside the trust boundary "
            "(docs/data.md); with data.staging they see whole shards only"
        )
    return table


def stage(table: ExampleTable, config: RunConfig, root: Path) -> tuple[int, ...]:
    """Begins to copy the shards of each node to its own disk, where the recipe says so. Collective.

    Ranks that see the same folder share one store, on whatever hosts they run. From here on this
    rank's table reads from its store.

    Returns:
        The node of each rank, numbered in the order of their first ranks; empty without
        data.staging.

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
                f"data.staging: {text} has a variable that is not set on {socket.gethostname()}; "
                "set it on every node"
            )
        return open_folder(folder)

    stores = refuse_together(open_store)
    numbers = {store: number for number, store in enumerate(dict.fromkeys(stores))}
    nodes = tuple(numbers[store] for store in stores)
    share = shares_of_nodes(nodes, len(table))[nodes[rank()]]
    shards = table.shards_of(share.start, share.stop)
    is_first = share.ranks[0] == rank()

    refuse_together(lambda: require_room(folder, shards) if is_first else None)
    table.staging = Staging(str(folder), share.start, share.stop)
    if is_first:
        copying = worker_context().Process(target=copy_shards, args=(table,), daemon=True)
        copying.start()
        # It ignores SIGTERM, and multiprocessing would wait for it at the end.
        atexit.register(copying.kill)
        # Waits until it has begun, or a reader could take the work over.
        while copying.is_alive() and not is_at_work(folder):
            time.sleep(0.05)
    if rank() == 0:
        gigabytes = sum(shard.size for shard in shards) / 1e9
        unit = "nodes" if len(numbers) > 1 else "node"
        say(
            f"staging: {len(numbers)} {unit}; this one needs {len(shards)} shards, "
            f"{gigabytes:.3g} GB, in {folder}"
        )
    return nodes


def heldout_table(config: RunConfig, folder: RunFolder, root: Path) -> ExampleTable | None:
    """Returns the held-out examples, or None if the recipe names none. Collective.

    Raises:
        DataError: no shards, or training shards that are declared public.
        ReadError: remote shards cannot be read.
    """
    if config.heldout is None:
        return None
    pattern = config.heldout.shards
    shards = first_on_main(lambda: find_shards(pattern, root))
    training_shards = first_on_main(lambda: find_shards(config.data.shards, root))
    shared_locations = set(training_shards.locations()).intersection(shards.locations())
    if config.heldout.is_public and shared_locations:
        raise DataError(
            "heldout.shards contains training shards, so it cannot be declared public "
            "(heldout.is_public)"
        )
    return _open_table(folder.private / "heldout-index", shards, config, make=True)


def require_other_bytes(heldout: ExampleTable, table: ExampleTable) -> None:
    """Refuses public held-out shards that are training shards under another name.

    Raises:
        DataError: a held-out shard has the bytes of a training shard.
    """
    training_hashes = {entry.sha256 for entry in table.entries}
    for entry in heldout.entries:
        if entry.sha256 in training_hashes:
            raise DataError(
                f"held-out shard {entry.name} has the bytes of a training shard, so it cannot be "
                "declared public (heldout.is_public)"
            )


class _Look(NamedTuple):
    """Counts what some examples contain; private.

    Attributes:
        num_examples: how many examples were decoded.
        reasons: why examples cannot be used -> how many.
        fields: names of members and of JSON fields -> how many examples have them.
        usable_labels, unusable_labels: labels -> how many examples; of classifiers.
        unknown_and_all: words that the vocabulary does not know, and all words, (2,).
    """

    num_examples: int
    reasons: Counter[str]
    fields: Counter[str]
    usable_labels: Counter[int]
    unusable_labels: Counter[int]
    unknown_and_all: np.ndarray

    def largest_reason(self) -> int:
        """Returns how many examples the most frequent kind of reason makes unusable.

        Reasons are of one kind if they agree up to the colon, which a detail follows.
        """
        kinds = Counter[str]()
        for reason, times in self.reasons.items():
            kinds[reason.partition(":")[0]] += times
        return max(kinds.values(), default=0)

    def lost_label(self) -> bool:
        """Returns whether the unusable examples are all that have some label.

        So it is where labels count from 1.
        """
        count = self.reasons.total()
        is_one_label = [*self.unusable_labels.values()] == [count]
        return count > 1 and is_one_label and not self.unusable_labels & self.usable_labels


def _look_at(table: ExampleTable, make_example: MakeExample, num_used: int, limit: int) -> _Look:
    """Reads and decodes at most `limit` examples, spread evenly over the first `num_used`.

    Raises:
        ReadError: examples cannot be read.
    """
    ids = np.unique(np.linspace(0, num_used - 1, min(num_used, limit)).astype(np.int64))
    unknown_and_all = np.zeros(2, dtype=np.int64)
    look = _Look(len(ids), Counter(), Counter(), Counter(), Counter(), unknown_and_all)
    reader = TarReader(table)
    for raw in reader.read_all(ids):
        look.fields.update(f".{extension}" for extension in raw.fields)
        json_fields = json_record(raw.fields.get("json", b""))
        look.fields.update(f"{name!r} of .json" for name in json_fields)
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
    """Refuses data of which many examples cannot be used, and prints how many of a sample cannot.

    Such a run would spend its budget on zero gradients, or learn to write unknown words. Where one
    of a few training examples cannot be used, more of them are decoded. The counts depend on single
    private examples, so they go to the console of whoever runs the job, and are written nowhere
    (docs/guarantee.md).

    Args:
        key: the recipe's key that names the data.
        count: how many examples, from the first, will be used; None means all.

    Raises:
        DataError: most of the examples cannot be used; says why, and which fields they have. Of
            training data: more than data.max_unusable_share cannot be used for one reason, or all
            of one label. Or the vocabulary does not know most words of their captions.
        ReadError: examples cannot be read.
    """
    num_used = min(len(table), count or len(table))
    if table.staging is not None:
        # Only of the first shard, which staging copies first anyway.
        num_used = min(num_used, table.shards_of(0, 1)[0].count)
    is_training = key == "data.shards"
    look = _look_at(table, make_example, num_used, SAMPLE_SIZE)
    if is_training and look.reasons and num_used > SAMPLE_SIZE:
        look = _look_at(table, make_example, num_used, LARGER_SAMPLE_SIZE)
    num_unusable = look.reasons.total()
    frequent_reasons = []
    for reason, times in look.reasons.most_common(3):
        frequent_reasons.append(f"{times} time{'s' if times > 1 else ''}: {reason[:200]}")
    reasons = ", ".join(frequent_reasons)
    if 2 * num_unusable > look.num_examples:
        field_keys = {"captioner": "caption_field", "classifier": "label_field"}
        field_key = field_keys.get(config.model.kind)
        setting = ""
        if field_key is not None:
            field = getattr(config.data, field_key)
            setting = f"; data.{field_key} is {'not set' if field is None else repr(field)}"
        # A name that a single example has may be a value.
        fields = [name[:80] for name, times in look.fields.most_common(20) if times > 1]
        raise DataError(
            f"{key}: {num_unusable} of {look.num_examples} examples that were looked at cannot be "
            f"used ({reasons}){setting}; the fields that are there: "
            f"{', '.join(fields) or 'none in common'}"
        )
    if is_training and config.privacy.enabled:
        share = config.data.max_unusable_share
        is_label = look.lost_label() and share is None
        allowed = (_UNUSABLE_SHARE if share is None else share) * look.num_examples
        if is_label or look.largest_reason() > max(1, allowed):
            label = "all that have one label, " if is_label else ""
            raise DataError(
                f"{key}: {num_unusable} of {look.num_examples} examples that were looked at, "
                f"{label}cannot be used and would count as zero ({reasons}); correct them, or, if "
                "they are meant to be there, allow them: data.max_unusable_share=0.5"
            )
    num_unknown, num_words = look.unknown_and_all
    if isinstance(make_example, CaptionExample) and 2 * num_unknown > num_words:
        vocab_size = make_example.tokenizer.vocab_size
        raise DataError(
            f"{key}: the vocabulary {make_example.tokenizer_path} ({vocab_size} tokens) does not "
            f"know {num_unknown:,} of {num_words:,} words in the captions that were looked at: "
            "choose another with data.tokenizer, e.g. "
            "data.tokenizer=data/tokenizer/tokenizer.json"
        )
    look_line = f"{key}: a look at {look.num_examples} examples"
    if look.reasons:
        fate = "count as zero" if is_training else "are left out"
        say(f"warning: {look_line}: {num_unusable} cannot be used and {fate} ({reasons})")
    elif is_training:
        say(f"{look_line}: all usable")


def _open_table(index: Path, shards: ShardSet, config: RunConfig, *, make: bool) -> ExampleTable:
    """Returns the examples of exactly these shards, by their index. Collective.

    Rank 0 checks every shard here; every read checks its example by itself.

    Args:
        make: builds the index where there is none; shards that an interrupted start has finished
            are not indexed again.
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
