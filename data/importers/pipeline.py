"""The whole import: convert in parallel, choose over everything, write shards, provenance and a private report.

What is converted waits in `.import` inside of the output folder, which goes when all is written. The result does not depend on
the number of workers.

No copies stay, and at most k examples of one owner. Exact copies have equal digests. Near copies have perceptual hashes within a
Hamming distance; they are found without comparing all pairs, and none is missed: when two hashes differ in at most d of 64 bits
and the bits are cut into b bands, at least b - d bands are equal. So for each choice of b - d bands the hashes are sorted by
these bits, and only hashes that agree on all of them are compared. More examples take more bands, so that few agree by chance.

An owner's whole contribution is a group of at most k examples. The choice among an owner's examples follows a keyed hash of each
example's content: no order of files can steer it, and an owner's choice depends on that owner's examples alone.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict
from itertools import combinations, groupby, pairwise
from math import comb
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data.errors import DataError
from data.files import private_file, write_durably
from data.importers.convert import ROW, Settings, convert_part, owner_digest, part_path
from data.importers.sources import REASONS, Source
from data.index.tar_writer import Example, write_shard
from data.reading.pool import run_all
from data.reading.reader import read_in_order

IMPORTER_VERSION = 2
PROVENANCE = "provenance.json"
REPORT = "import-report.json"
HELDOUT = "heldout"
"""Folder inside of the output, so that the pattern OUTPUT names the training shards alone."""
_WORK = ".import"
BITS = 64
ALIKE = 8
"""A split separates more than the removal of copies removes: a held-out picture should not look like a training picture."""
_MAX_PASSES = 100
Advance = Callable[[str, int, int], None]
"""It is called with (stage, done now, total)."""


def import_examples(
    source: Source,
    output: Path,
    settings: Settings,
    *,
    executor: Executor | None = None,
    advance: Advance = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Imports a source into `output`.

    Returns:
        The report: read, written, dropped by reason. It is derived from the data without noise, so it is private.

    Raises:
        DataError: nothing is left, the folder is not empty, or the source is malformed.
        ReadError: something that is there cannot be read.
    """
    work = output / _WORK
    try:
        if output.is_dir() and any(output.iterdir()):
            raise DataError(f"{output} is not empty; choose an empty folder")
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
        work.mkdir(mode=0o700)
        jobs = [(work, number, part, settings) for number, part in enumerate(source.parts)]
        converted = {}
        for number, known in run_all(executor, convert_part, jobs):
            converted[number] = known
            advance("converting", 1, len(jobs))
        parts = [converted[number] for number in range(len(jobs))]
        rows_N = np.concatenate([np.empty(0, ROW), *(part.rows_N for part in parts)])
        counts, kept = (
            sum((part.dropped for part in parts), Counter[str]()),
            np.ones(len(rows_N), dtype=bool),
        )

        def drop(rows: np.ndarray, reason: str) -> None:
            kept[rows] = False
            counts[reason] += len(rows)

        drop(
            np.setdiff1d(np.arange(len(rows_N)), np.unique(rows_N["digest"], return_index=True)[1]),
            "exact_duplicate",
        )
        if settings.duplicate_distance is not None:
            rows = np.flatnonzero(kept & rows_N["has_hash"])
            first = np.unique(rows_N["pixels"][rows], return_index=True)[1]
            is_again = np.isin(np.arange(len(rows)), first, invert=True)
            is_near = near_duplicates(rows_N["hash"][rows], settings.duplicate_distance)
            drop(rows[is_near & is_again], "same_picture")
            drop(rows[is_near & ~is_again], "near_duplicate")
        if settings.max_per_owner is not None:
            rows = np.flatnonzero(kept)
            drop(
                rows[over_limit(rows_N[rows], settings.max_per_owner, settings.seed)], "owner_limit"
            )
        if not kept.any():
            reasons = ", ".join(
                f"{count} {REASONS[reason]}" for reason, count in counts.items() if count
            )
            raise DataError(
                f"no example is left ({reasons or 'the source is empty'}); each needs a readable picture with a caption (.txt) "
                "or label (.cls) of the same name, or the column that --caption_column or --label_column names"
            )
        kept_out = kept & held_out(rows_N, settings.heldout_share, settings.seed)
        sizes = [len(part.rows_N) for part in parts]
        places_N2 = np.stack(
            [np.repeat(np.arange(len(parts)), sizes), np.concatenate(list(map(np.arange, sizes)))],
            1,
        )
        shards = []
        for chosen, folder, prefix in (
            (kept & ~kept_out, output, "train"),
            (kept_out, output / HELDOUT, HELDOUT),
        ):
            mine = places_N2[chosen]
            if len(mine):
                folder.mkdir(mode=0o700, exist_ok=True)
            for number, start in enumerate(range(0, len(mine), settings.shard_examples)):
                path = folder / f"{prefix}-{number:05d}.tar"
                shards.append((work, path, mine[start : start + settings.shard_examples]))
        for _ in run_all(executor, write_kept, shards):
            advance("writing", 1, len(shards))
        samples = {
            reason: [key for part in parts for key in part.samples.get(reason, [])][:10]
            for reason in REASONS
        }
        report = {
            "private": "Counts of private data without noise: do not publish.",
            "read": len(rows_N) + sum(part.dropped.total() for part in parts),
            "written": int(kept.sum()),
            "held_out": int(kept_out.sum()),
            "joined_records": sum(part.num_joined for part in parts),
            "other_files": dict(sorted(source.other_files.items())),
            "other_folders": [*source.other_folders],
            "dropped": {reason: counts[reason] for reason in REASONS if counts[reason]},
            "reasons": {reason: text for reason, text in REASONS.items() if counts[reason]},
            "samples": {reason: keys for reason, keys in samples.items() if keys},
        }
        write_durably(
            output / PROVENANCE,
            json.dumps(provenance(settings), indent=1, ensure_ascii=False) + "\n",
        )
        with private_file(output / REPORT) as file:
            file.write(json.dumps(report, indent=1).encode())
        shutil.rmtree(work)
    except OSError as error:
        if hasattr(error, "exit_code"):
            raise
        raise DataError(f"cannot write to {output}: {error.strerror or error}") from error
    return report


def write_kept(work: Path, path: Path, members_K2: np.ndarray) -> None:
    """One job: writes a shard of the examples with these numbers of parts and places in them."""

    def examples() -> Iterator[Example]:
        for number, places in groupby(members_K2.tolist(), key=itemgetter(0)):
            wanted = {place for _, place in places}
            for place, (key, raw) in enumerate(read_in_order(part_path(work, number))):
                if place in wanted:
                    yield key.decode(), raw.fields

    write_shard(path, examples(), mode=0o600)


def held_out(rows_N: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Which examples are held out: about `share` of them, by a keyed hash, with everything that is alike on one side.

    Equal examples, examples whose pictures' hashes differ in at most `ALIKE` bits, and those of the same known owner are in one
    group, also through others. A group goes by the smallest keyed hash of its contents.

    Returns:
        bool (N,).
    """
    count = len(rows_N)
    if share == 0:
        return np.zeros(count, dtype=bool)
    edges = []
    is_owned = rows_N["owner"] != np.void(owner_digest(""))
    for field, is_known in (
        ("digest", np.ones(count, dtype=bool)),
        ("owner", is_owned),
        ("hash", rows_N["has_hash"]),
    ):
        places = np.flatnonzero(is_known)
        values, first, inverse = np.unique(
            rows_N[field][places], return_index=True, return_inverse=True
        )
        edges.append(np.stack([places, places[first][inverse]], axis=1))
    edges.append(places[first][near_pairs(values, ALIKE)])  # of the hashes, which came last
    ends = np.concatenate(edges)
    graph = coo_array(
        (np.ones(len(ends), dtype=bool), (ends[:, 0], ends[:, 1])), shape=(count, count)
    )
    _, group_N = connected_components(graph, directed=False)
    ranks_N = keyed_ranks(rows_N["digest"], seed, b"held out")
    smallest = np.full(group_N.max() + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(smallest, group_N, ranks_N)
    # The smallest of k hashes is below the share more often than one hash is, so a group takes a hash of its smallest.
    again = keyed_ranks(smallest, seed, b"group")
    return (again < np.uint64(share * 2**64))[group_N]


def near_duplicates(hashes_N: np.ndarray, distance: int) -> np.ndarray:
    """True, in bool (N,), for each hash (uint64) within `distance` bits of an earlier one which itself is kept."""
    first_U = np.sort(np.unique(hashes_N, return_index=True)[1])
    pairs = near_pairs(hashes_N[first_U], distance)
    dropped_U = np.zeros(len(first_U), dtype=bool)
    # They are sorted by the later one, so that the earlier one's fate is known.
    for earlier, later in pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]:
        if not dropped_U[earlier]:
            dropped_U[later] = True
    dropped = np.ones(len(hashes_N), dtype=bool)  # copies are
    dropped[first_U] = dropped_U
    return dropped


def near_pairs(hashes_U: np.ndarray, distance: int) -> np.ndarray:
    """Places (earlier, later) of all pairs of different hashes within `distance` bits, each once, int64 (P, 2)."""
    if distance == 0 or len(hashes_U) < 2:
        return np.zeros((0, 2), dtype=np.int64)
    bands = distance + 1
    while (
        BITS * (bands - distance) / bands < np.log2(len(hashes_U))
        and comb(bands + 1, distance) <= _MAX_PASSES
    ):
        bands += 1
    edges = [round(BITS * band / bands) for band in range(bands + 1)]
    masks = [((1 << (high - low)) - 1) << low for low, high in pairwise(edges)]
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for chosen in combinations(masks, bands - distance):
        keys = hashes_U & np.uint64(sum(chosen))
        order = np.argsort(keys, kind="stable")
        keys, sorted_hashes, places = keys[order], hashes_U[order], np.arange(len(keys))
        for step in range(1, len(keys)):
            # Places whose key is also that of the one `step` further; they only become fewer.
            places = places[places + step < len(keys)]
            places = places[keys[places] == keys[places + step]]
            if not len(places):
                break
            close = places[
                np.bitwise_count(sorted_hashes[places] ^ sorted_hashes[places + step]) <= distance
            ]
            pairs.append(np.sort(np.stack([order[close], order[close + step]], axis=1), axis=1))
    return np.unique(np.concatenate(pairs), axis=0)


def over_limit(rows_N: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """True, in bool (N,), for examples beyond the first `limit` of their owner, in the order of the keyed hash."""
    ranks_N = keyed_ranks(rows_N["digest"], seed, b"")
    _, owner_N = np.unique(rows_N["owner"], return_inverse=True)
    order = np.lexsort((np.arange(len(ranks_N)), ranks_N, owner_N))
    starts = np.flatnonzero(np.diff(owner_N[order], prepend=-1))
    place_in_owner = np.arange(len(order)) - np.repeat(
        starts, np.diff(np.append(starts, len(order)))
    )
    over = np.empty(len(order), dtype=bool)
    over[order] = place_in_owner >= limit
    return over


def keyed_ranks(values_N: np.ndarray, seed: int, purpose: bytes) -> np.ndarray:
    """A hash of each value, uint64 (N,): uniform, and independent between seeds and purposes."""
    key = seed.to_bytes(8, "little", signed=True)
    ranks = [
        hashlib.blake2b(value.tobytes(), key=key, person=purpose, digest_size=8).digest()
        for value in values_N
    ]
    return np.frombuffer(b"".join(ranks), dtype=">u8").astype(np.uint64)


def provenance(settings: Settings) -> dict[str, Any]:
    """What an import says of itself, for everybody to read: its rules, and no count or name from the data.

    `deduplication` is written for the privacy card (recipe key data.deduplication).
    """
    limit, distance = settings.max_per_owner, settings.duplicate_distance
    near = "Near copies were kept."
    if distance is not None:
        near = f"So were near copies: pictures whose 64-bit perceptual hashes differ in at most {distance} bits."
    owners = (
        f"At most {limit} examples of one owner were kept, chosen by a keyed hash of their content; examples without an owner "
        "were dropped. The guarantee of an owner is the group epsilon of that size; removal of copies came before and is "
        "outside of it."
    )
    return {
        "kind": "import",
        "importer_version": IMPORTER_VERSION,
        "settings": asdict(settings),
        "deduplication": (
            f"Exact copies (SHA-256 of pixels, caption and label) were removed before training. {near} Copies that remain act "
            "as a group and multiply the privacy loss. The removal itself, like the choice of held-out examples, looks across "
            "examples: it is not part of the guarantee (Debenedetti et al. 2024, Privacy side channels in machine learning "
            "systems)."
        ),
        "owners": None if limit is None else owners,
    }
