"""Checks shards against their index: all bytes, or a sample of the examples as training would read them."""

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

import numpy as np

from data.errors import DataError, DecodeError, ReadError
from data.examples.examples import read_label
from data.examples.transforms import eval_image
from data.index.shard import hash_file
from data.index.tar_index import ExampleTable
from data.reading.pool import run_all
from data.reading.reader import MAX_EXAMPLE_BYTES, RawExample, TarReader
from data.reading.records import RemoteOptions
from data.reading.storage import local_copy, open_storage, require_present

STATES = (
    "usable", "without image", "undecodable image", "labelled without caption", "without caption or label", "too large",
)  # fmt: skip
"""Usable are images with captions; a label (the member cls, or a field) is enough for a classifier or an autoencoder."""
_MOST_CLASSES = 10**9
Track = Callable[[Iterable], Iterable]


def verify_hashes(table: ExampleTable, executor: Executor | None, track: Track) -> None:
    """Hashes every shard again. If all are what was indexed, their present times or ETags are noted in the index.

    Raises:
        DataError: a shard is missing or its bytes are not those that were indexed.
        ReadError: remote shards cannot be read.
    """
    storage = table.storage()
    names = [entry.name for entry in table.entries]
    before = list(require_present(storage.status(names)))
    jobs = [(table.shard_root, entry.name, table.remote) for entry in table.entries]
    expected = {entry.name: entry.sha256 for entry in table.entries}
    for name, sha256 in track(run_all(executor, hash_one, jobs)):
        if sha256 != expected[name]:
            raise DataError(f"{table.shard_root}/{name} is not what was indexed; restore it or index again")
    if list(storage.status(names)) != before:
        raise DataError("shards changed while they were hashed; verify again when their writer is done")
    storage.close()
    table.accept(before)


def hash_one(root: str, name: str, remote: RemoteOptions) -> tuple[str, str]:
    """One job: (name, SHA-256 in hex)."""
    storage = open_storage(root, remote)
    try:
        with local_copy(storage, name) as path:
            return name, hash_file(path)
    except ReadError:
        raise
    except OSError as error:
        raise DataError(f"cannot read the shard {root}/{name}: {error.strerror or error}") from error
    finally:
        storage.close()


def verify_sample(
    table: ExampleTable, size: int, caption_field: str | None, track: Track, label_field: str | None = None
) -> Counter[str]:
    """Reads and decodes random examples, all if `size` is at least as many; counts `STATES`.

    Raises:
        DataError: `size` is below 1.
        ReadError: bytes cannot be read or are not what was indexed.
    """
    if size < 1:
        raise DataError(f"--sample is {size}; it must be at least 1")
    ids = np.sort(np.random.default_rng().choice(len(table), min(size, len(table)), replace=False))
    too_large = table.extents(ids).lengths > MAX_EXAMPLE_BYTES
    reader = TarReader(table)
    counts: Counter[str] = Counter({"too large": int(too_large.sum())})
    for raw in track(reader.read_all(ids[~too_large])):
        counts[_state(raw, caption_field, label_field)] += 1
    reader.close()
    return counts


def _state(raw: RawExample, caption_field: str | None, label_field: str | None) -> str:
    if raw.image is None:
        return "without image"
    try:
        eval_image(raw.image, 32)
    except DecodeError:
        return "undecodable image"
    if any(caption.strip() for caption in raw.captions(caption_field)):
        return "usable"
    try:
        read_label(raw, _MOST_CLASSES, label_field)
    except DecodeError:
        return "without caption or label"
    return "labelled without caption"
