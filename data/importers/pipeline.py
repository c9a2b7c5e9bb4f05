"""Imports a source: converts in parallel, chooses over all examples, writes shards and reports.

Converted parts wait in `.import` in the output folder, which is removed at the end. The output does
not depend on the number of workers. Of copies one stays, and of an owner's examples at most k,
which are the owner's whole contribution. The choice among them follows a keyed hash of each
example's content: no order of files can steer it, and other owners' examples do not change it.
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
"""Folder in the output, so that the pattern OUTPUT names the training shards alone."""
_WORK = ".import"
BITS = 64
ALIKE_BITS = 8
"""Bits in which the hashes of pictures on one side of the held-out split may differ.

They are more than for the removal of copies: a held-out picture should not look like a training
picture.
"""
_MAX_PASSES = 100
Advance = Callable[[str, int, int], None]
"""A progress callback; its arguments are (stage, number done since the last call, total)."""


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
        The report: numbers of examples read, written and dropped by reason. It is computed from the
        data without noise, so it is private.

    Raises:
        DataError: all examples are dropped, the folder is not empty, or the source is malformed.
        ReadError: an existing file cannot be read.
    """
    work = output / _WORK
    try:
        if output.is_dir() and any(output.iterdir()):
            raise DataError(f"{output} is not empty; choose an empty folder")
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
        work.mkdir(mode=0o700)
        jobs = [(work, number, part, settings) for number, part in enumerate(source.parts)]
        converted = {}
        for number, part in run_all(executor, convert_part, jobs):
            converted[number] = part
            advance("converting", 1, len(jobs))
        parts = [converted[number] for number in range(len(jobs))]
        rows_N = np.concatenate([np.empty(0, ROW), *(part.rows_N for part in parts)])
        counts = sum((part.dropped for part in parts), Counter[str]())
        stays_N = np.ones(len(rows_N), dtype=bool)

        def drop(rows: np.ndarray, reason: str) -> None:
            stays_N[rows] = False
            counts[reason] += len(rows)

        _, first_rows = np.unique(rows_N["digest"], return_index=True)
        drop(np.setdiff1d(np.arange(len(rows_N)), first_rows), "exact_duplicate")
        if settings.duplicate_distance is not None:
            rows = np.flatnonzero(stays_N & rows_N["has_hash"])
            _, first_places = np.unique(rows_N["pixels"][rows], return_index=True)
            has_earlier_pixels = np.isin(np.arange(len(rows)), first_places, invert=True)
            is_near = near_duplicates(rows_N["hash"][rows], settings.duplicate_distance)
            drop(rows[is_near & has_earlier_pixels], "same_picture")
            drop(rows[is_near & ~has_earlier_pixels], "near_duplicate")
        if settings.max_per_owner is not None:
            rows = np.flatnonzero(stays_N)
            is_over = is_over_limit(rows_N[rows], settings.max_per_owner, settings.seed)
            drop(rows[is_over], "owner_limit")
        if not stays_N.any():
            reasons = [f"{count} {REASONS[reason]}" for reason, count in counts.items() if count]
            raise DataError(
                f"no example is left ({', '.join(reasons) or 'the source is empty'}); each needs a "
                "readable picture with a caption (.txt) or label (.cls) of the same name, or the "
                "column that --caption_column or --label_column names"
            )
        is_heldout_N = stays_N & choose_heldout(rows_N, settings.heldout_share, settings.seed)
        sizes = [len(part.rows_N) for part in parts]
        part_N = np.repeat(np.arange(len(parts)), sizes)
        place_N = np.concatenate([np.arange(size) for size in sizes])
        places_N2 = np.stack([part_N, place_N], 1)
        shards = []
        for is_chosen_N, folder, prefix in (
            (stays_N & ~is_heldout_N, output, "train"),
            (is_heldout_N, output / HELDOUT, HELDOUT),
        ):
            chosen_K2 = places_N2[is_chosen_N]
            if len(chosen_K2):
                folder.mkdir(mode=0o700, exist_ok=True)
            starts = range(0, len(chosen_K2), settings.shard_examples)
            for number, start in enumerate(starts):
                path = folder / f"{prefix}-{number:05d}.tar"
                shards.append((work, path, chosen_K2[start : start + settings.shard_examples]))
        for _ in run_all(executor, write_chosen, shards):
            advance("writing", 1, len(shards))
        samples = {}
        for reason in REASONS:
            keys = [key for part in parts for key in part.samples.get(reason, [])]
            if keys:
                samples[reason] = keys[:10]
        report = {
            "private": "Counts of private data without noise: do not publish.",
            "read": len(rows_N) + sum(part.dropped.total() for part in parts),
            "written": int(stays_N.sum()),
            "held_out": int(is_heldout_N.sum()),
            "joined_records": sum(part.num_joined for part in parts),
            "other_files": dict(sorted(source.other_files.items())),
            "other_folders": [*source.other_folders],
            "dropped": {reason: counts[reason] for reason in REASONS if counts[reason]},
            "reasons": {reason: text for reason, text in REASONS.items() if counts[reason]},
            "samples": samples,
        }
        public_text = json.dumps(provenance(settings), indent=1, ensure_ascii=False)
        write_durably(output / PROVENANCE, public_text + "\n")
        with private_file(output / REPORT) as file:
            file.write(json.dumps(report, indent=1).encode())
        shutil.rmtree(work)
    except OSError as error:
        if hasattr(error, "exit_code"):
            raise
        raise DataError(f"cannot write to {output}: {error.strerror or error}") from error
    return report


def write_chosen(work: Path, path: Path, members_K2: np.ndarray) -> None:
    """Writes a shard of chosen examples, as one job.

    Args:
        members_K2: the number of each example's part, and its place in that part.
    """

    def examples() -> Iterator[Example]:
        for number, members in groupby(members_K2.tolist(), key=itemgetter(0)):
            chosen_places = {place for _, place in members}
            for place, (key, raw) in enumerate(read_in_order(part_path(work, number))):
                if place in chosen_places:
                    yield key.decode(), raw.fields

    write_shard(path, examples(), mode=0o600)


def choose_heldout(rows_N: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Chooses about `share` of the examples by a keyed hash, with alike examples on one side.

    Equal examples, examples whose pictures' hashes differ in at most `ALIKE_BITS` bits, and those
    of the same owner are in one group, also through other examples. The smallest keyed hash of a
    group's contents decides about the group.

    Returns:
        bool (N,), True for held-out examples.
    """
    count = len(rows_N)
    if share == 0:
        return np.zeros(count, dtype=bool)
    edges = []
    has_digest = np.ones(count, dtype=bool)
    has_owner = rows_N["owner"] != np.void(owner_digest(""))
    # The hashes come last: near pairs are searched among them.
    for field, has_field in (
        ("digest", has_digest),
        ("owner", has_owner),
        ("hash", rows_N["has_hash"]),
    ):
        places = np.flatnonzero(has_field)
        unique_fields, first, inverse = np.unique(
            rows_N[field][places], return_index=True, return_inverse=True
        )
        edges.append(np.stack([places, places[first][inverse]], axis=1))
    edges.append(places[first][near_pairs(unique_fields, ALIKE_BITS)])
    edges_E2 = np.concatenate(edges)
    is_edge_E = np.ones(len(edges_E2), dtype=bool)
    graph = coo_array((is_edge_E, (edges_E2[:, 0], edges_E2[:, 1])), shape=(count, count))
    _, group_N = connected_components(graph, directed=False)
    ranks_N = keyed_ranks(rows_N["digest"], seed, b"held out")
    smallest_G = np.full(group_N.max() + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(smallest_G, group_N, ranks_N)
    # The smallest of k hashes is below the share more often than one hash is, so a hash of the
    # smallest decides.
    group_ranks_G = keyed_ranks(smallest_G, seed, b"group")
    return (group_ranks_G < np.uint64(share * 2**64))[group_N]


def near_duplicates(hashes_N: np.ndarray, distance: int) -> np.ndarray:
    """Finds each hash (uint64) within `distance` bits of an earlier hash that is not found itself.

    Returns:
        bool (N,), True for these hashes.
    """
    _, first = np.unique(hashes_N, return_index=True)
    first_U = np.sort(first)
    pairs = near_pairs(hashes_N[first_U], distance)
    dropped_U = np.zeros(len(first_U), dtype=bool)
    # Sorted by the later hash, so that the earlier hash is decided before it is compared.
    for earlier, later in pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]:
        if not dropped_U[earlier]:
            dropped_U[later] = True
    # Hashes that equal an earlier hash stay True.
    dropped_N = np.ones(len(hashes_N), dtype=bool)
    dropped_N[first_U] = dropped_U
    return dropped_N


def near_pairs(hashes_U: np.ndarray, distance: int) -> np.ndarray:
    """Returns all pairs of different hashes within `distance` bits, each pair once.

    Two hashes that differ in at most d of 64 bits, which are cut into b bands, agree in at least
    b - d bands. So for each choice of b - d bands only the hashes that agree on all of them are
    compared, and no pair is missed. More hashes take more bands, so that few agree by chance.

    Returns:
        places (earlier, later), int64 (P, 2).
    """
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
    for chosen_masks in combinations(masks, bands - distance):
        keys = hashes_U & np.uint64(sum(chosen_masks))
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        sorted_hashes = hashes_U[order]
        places = np.arange(len(keys))
        for step in range(1, len(keys)):
            # Places with the key of the place `step` further; each step leaves fewer of them.
            places = places[places + step < len(keys)]
            places = places[keys[places] == keys[places + step]]
            if not len(places):
                break
            differences = sorted_hashes[places] ^ sorted_hashes[places + step]
            near_places = places[np.bitwise_count(differences) <= distance]
            near = np.stack([order[near_places], order[near_places + step]], axis=1)
            pairs.append(np.sort(near, axis=1))
    return np.unique(np.concatenate(pairs), axis=0)


def is_over_limit(rows_N: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """Returns bool (N,): True for examples behind the first `limit` of their owner.

    The keyed hash of their content orders an owner's examples.
    """
    ranks_N = keyed_ranks(rows_N["digest"], seed, b"")
    _, owner_N = np.unique(rows_N["owner"], return_inverse=True)
    order = np.lexsort((np.arange(len(ranks_N)), ranks_N, owner_N))
    starts = np.flatnonzero(np.diff(owner_N[order], prepend=-1))
    num_of_owner = np.diff(np.append(starts, len(order)))
    place_in_owner = np.arange(len(order)) - np.repeat(starts, num_of_owner)
    is_over_N = np.empty(len(order), dtype=bool)
    is_over_N[order] = place_in_owner >= limit
    return is_over_N


def keyed_ranks(digests_N: np.ndarray, seed: int, purpose: bytes) -> np.ndarray:
    """Returns a hash of each digest, uint64 (N,), uniform and independent per seed and purpose."""
    key = seed.to_bytes(8, "little", signed=True)
    ranks = [
        hashlib.blake2b(digest.tobytes(), key=key, person=purpose, digest_size=8).digest()
        for digest in digests_N
    ]
    return np.frombuffer(b"".join(ranks), dtype=">u8").astype(np.uint64)


def provenance(settings: Settings) -> dict[str, Any]:
    """Returns the public description of an import: its rules, without a count or name of the data.

    `deduplication` is written for the privacy card (recipe key data.deduplication).
    """
    limit = settings.max_per_owner
    distance = settings.duplicate_distance
    near_copies = "Near copies were kept."
    if distance is not None:
        near_copies = (
            "So were near copies: pictures whose 64-bit perceptual hashes differ in at most "
            f"{distance} bits."
        )
    owners = (
        f"At most {limit} examples of one owner were kept, chosen by a keyed hash of their "
        "content; examples without an owner were dropped. The guarantee of an owner is the group "
        "epsilon of that size; removal of copies came before and is outside of it."
    )
    deduplication = (
        "Exact copies (SHA-256 of pixels, caption and label) were removed before training. "
        f"{near_copies} Copies that remain act as a group and multiply the privacy loss. The "
        "removal itself, like the choice of held-out examples, looks across examples: it is not "
        "part of the guarantee (Debenedetti et al. 2024, Privacy side channels in machine learning "
        "systems)."
    )
    return {
        "kind": "import",
        "importer_version": IMPORTER_VERSION,
        "settings": asdict(settings),
        "deduplication": deduplication,
        "owners": None if limit is None else owners,
    }
