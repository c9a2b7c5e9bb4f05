"""Finds examples whose members lie in different shards, among the keys of a whole data set.

A writer that cuts at a size, or that puts pictures and captions into shards of their own, leaves one key in two shards with
other extensions, at their borders or anywhere in them. Each part would count, and be protected, as an example.

Keys may also repeat from shard to shard because each shard counts its own examples. Their extensions then have some in common,
or, where examples lack members, another shard has the key with all of them. Only what neither explains is taken for parts.

Keys are compared by 64 bits of their hash, as many at a time as fit into memory: those of a part of all hashes, which are read
from the disk once for each part. Where no two examples of the data set have disjoint extensions, nothing is compared at all.
"""

import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data.index.tar_format import IMAGE_EXTENSIONS, TEXTS, shown

KEY = np.dtype([("hash", "<u8"), ("extensions", "<u4")])
"""An example: hash of its key, and the number of the set of its extensions."""
MOST_KEYS = 1 << 23
"""Keys that are compared at a time, in about 500 MB."""
_FOUND = np.dtype([*KEY.descr, ("id", "<i8")])
Tables = Callable[[], Iterator[np.ndarray]]
"""The keys of each shard, KEY (count,), in order; called again for every pass."""


class Split(NamedTuple):
    """Parts of one example in different shards.

    Attributes:
        ids: of the first two parts that were found, in the order of the data set.
        sets: their extensions.
        shards: numbers of all shards that hold such parts of any example.
    """

    ids: tuple[int, int]
    sets: tuple[frozenset[str], frozenset[str]]
    shards: list[int]


def key_rows(keys: Sequence[bytes], sets: Sequence[frozenset[str]]) -> tuple[np.ndarray, list[frozenset[str]]]:
    """The keys of one shard, KEY (count,), and the sets that their numbers stand for."""
    numbers = number_sets(sets)
    rows_K = np.empty(len(keys), dtype=KEY)
    rows_K["hash"] = np.frombuffer(b"".join(map(_digest, keys)), dtype="<u8")
    rows_K["extensions"] = [numbers[one] for one in sets]
    return rows_K, list(numbers)


def key_hash(key: bytes) -> int:
    """64 bits."""
    return int.from_bytes(_digest(key), "little")


def merged_pairs(where: str, key: bytes, extensions: Collection[str]) -> str | None:
    """Says why the members of a key are several pairs: two pictures, each with a text of the same name.

    Args:
        where: what the message begins with.
        key: which key.
        extensions: of all its members.
    """
    split = [(extension, *extension.rpartition(".")[::2]) for extension in extensions]
    texts = next((found for kind in TEXTS if (found := {stem for _, stem, last in split if last == kind})), set())
    texts |= {text.rpartition(".")[0] for text in texts if "." in text}  # a.1.0.txt and a.1.jpg.txt are of a.1.jpg
    paired = {stem for name, stem, last in split if last in IMAGE_EXTENSIONS and not texts.isdisjoint((name, stem))}
    if len(paired) < 2:
        return None
    return (
        f"{where}: the key {shown(key)} joins {len(paired)} pairs of picture and text, because a key ends at the first dot of a "
        f"name; make them examples of their own by prepare.py repack SHARDS --output DIR --key_until_last_dot"
    )


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=8).digest()


def number_sets(sets: Iterable[frozenset[str]]) -> dict[frozenset[str], int]:
    """Numbers in an order that depends on the sets alone."""
    return {one: number for number, one in enumerate(sorted(set(sets), key=sorted))}


def find_split(tables: Tables, sets: Sequence[frozenset[str]]) -> Split | None:
    """Looks for a key that two shards have with disjoint extensions.

    Such examples are parts if one ends its shard and the other begins the next, or if no shard has the key with all of their
    extensions.

    Args:
        tables: numbers of extensions are places in `sets`.
    """
    has_counterpart = _have_counterparts(sets)
    if not has_counterpart.any():
        return None

    @functools.cache
    def parts(numbers: frozenset[int]) -> tuple[int, int] | None:
        """Two of these sets that are parts of one example, where all of them belong to one key."""
        for one, two in itertools.combinations(sorted(numbers), 2):
            both = sets[one] | sets[two]
            if not sets[one] & sets[two] and not any(both <= sets[number] for number in numbers):
                return one, two
        return None

    found: list[tuple[int, int, int, int]] = []  # two ids and the numbers of their sets: the first of every pass
    affected = [np.empty(0, dtype=np.int64)]  # ids
    counts: list[int] = []
    total = num_before = 0
    last = np.empty(0, dtype=KEY)  # of the shard before
    for keys_K in tables():
        first = keys_K[:1]
        if len(first) and len(last) and first["hash"] == last["hash"]:
            one_set, two_set = int(last["extensions"][0]), int(first["extensions"][0])
            if not sets[one_set] & sets[two_set]:
                found.append((num_before - 1, num_before, one_set, two_set))
                affected.append(np.array(found[-1][:2]))
        last = keys_K[-1:] if len(keys_K) else last
        counts.append(len(keys_K))
        num_before += len(keys_K)
        total += int(has_counterpart[keys_K["extensions"]].sum())
    for number in range(num_passes := -(-total // MOST_KEYS)):
        candidates_K = _distinct(tables, _of_pass(has_counterpart, number, num_passes))
        suspects = [group["hash"][0] for group, numbers in _with_many_sets(candidates_K) if parts(numbers)]
        # Another shard may have the key with all extensions, and such a set may have no counterpart.
        every_K = _distinct(tables, _with_hashes(np.array(suspects, dtype=np.uint64))) if suspects else candidates_K[:0]
        of_pass = []
        for group, numbers in _with_many_sets(every_K):
            if pair := parts(numbers):
                (one, one_set), (two, two_set) = sorted(
                    (int(group["id"][group["extensions"] == n][0]), n) for n in pair
                )
                of_pass.append((one, two, one_set, two_set))
                affected.append(group["id"])
        found += [min(of_pass)] if of_pass else []
    if not found:
        return None
    one, two, one_set, two_set = min(found)
    shards = np.unique(np.searchsorted(np.cumsum(counts), np.concatenate(affected), side="right"))
    return Split((one, two), (sets[one_set], sets[two_set]), shards.tolist())


def _of_pass(has_counterpart: np.ndarray, number: int, num_passes: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda keys_K: has_counterpart[keys_K["extensions"]] & (keys_K["hash"] % num_passes == number)


def _with_hashes(hashes_S: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda keys_K: np.isin(keys_K["hash"], hashes_S)


def _have_counterparts(sets: Sequence[frozenset[str]]) -> np.ndarray:
    """Whether another set has no extension in common with this one, bool (len(sets),)."""
    holders: dict[str, int] = {}  # bits of the sets that have an extension
    for number, one in enumerate(sets):
        for extension in one:
            holders[extension] = holders.get(extension, 0) | 1 << number
    everyone = (1 << len(sets)) - 1
    reached = (functools.reduce(operator.or_, (holders[extension] for extension in one), 0) for one in sets)
    return np.array([bits != everyone for bits in reached], dtype=bool)


def _distinct(tables: Tables, is_wanted: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The first example of each wanted key and set, _FOUND, sorted by the hash of the key."""
    kept = [np.empty(0, dtype=_FOUND)]
    first, num_kept, most = 0, 0, 2 * MOST_KEYS
    for keys_K in tables():
        at = np.flatnonzero(is_wanted(keys_K))
        more = np.empty(len(at), dtype=_FOUND)
        more["hash"], more["extensions"], more["id"] = keys_K["hash"][at], keys_K["extensions"][at], first + at
        kept.append(more)
        first, num_kept = first + len(keys_K), num_kept + len(more)
        if num_kept > most:  # a key that every shard has is kept once
            kept = [_first_of_each(np.concatenate(kept))]
            num_kept = len(kept[0])
            most = max(most, 2 * num_kept)
    return _first_of_each(np.concatenate(kept))


def _first_of_each(found_K: np.ndarray) -> np.ndarray:
    found_K = found_K[np.lexsort((found_K["id"], found_K["extensions"], found_K["hash"]))]
    is_new = np.ones(len(found_K), dtype=bool)
    is_new[1:] = np.diff(found_K["hash"]).astype(bool) | np.diff(found_K["extensions"]).astype(bool)
    return found_K[is_new]


def _with_many_sets(found_K: np.ndarray) -> Iterator[tuple[np.ndarray, frozenset[int]]]:
    """The examples of each key that has several sets, with the numbers of these."""
    _, starts, counts = np.unique(found_K["hash"], return_index=True, return_counts=True)
    for start, count in zip(starts[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        group = found_K[start : start + count]
        yield group, frozenset(group["extensions"].tolist())
