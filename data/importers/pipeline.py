"""The whole import: convert in parallel, choose over everything, write shards, provenance and a private report.

What is converted waits in `.import` inside of the output folder, so that a killed import goes on where it was; the folder
goes when all is written. The result does not depend on the number of workers or on how often the import was stopped.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from data.files import private_file, write_durably
from data.importers.convert import Conversion, Converted, convert_part, load_converted, part_path
from data.importers.duplicates import MAX_DISTANCE, exact_duplicates, near_duplicates
from data.importers.items import REASONS, Source
from data.importers.owners import over_limit
from data.importers.provenance import PROVENANCE, provenance
from data.index.shard import walk_shard
from data.index.tar_writer import Example, write_shard
from data.reading.pool import run_all
from data.reading.reader import parse_example

IMPORTER_VERSION = 1
REPORT = "import-report.json"
_WORK = ".import"
Advance = Callable[[str, int, int], None]
"""Told (stage, done now, total)."""


@dataclass(frozen=True)
class Settings:
    """What the output is a function of, beside the source.

    Attributes:
        source_format: for the provenance.
        conversion: how examples are made.
        duplicate_distance: near copies within so many bits are removed; None keeps them.
        owner_field: where the source says whose an example is.
        max_per_owner: at most so many examples of one owner.
        seed: of the choice among an owner's examples.
        shard_examples: per shard.
        prefix: of the shards' names.
    """

    source_format: str
    conversion: Conversion = field(default_factory=Conversion)
    duplicate_distance: int | None = 4
    owner_field: str | None = None
    max_per_owner: int | None = None
    seed: int = 0
    shard_examples: int = 5000
    prefix: str = "train"

    def __post_init__(self) -> None:
        if self.duplicate_distance is not None and not 0 <= self.duplicate_distance <= MAX_DISTANCE:
            raise DataError(f"the duplicate distance is {self.duplicate_distance}; it must be 0 to {MAX_DISTANCE}")
        if self.max_per_owner is not None and self.max_per_owner < 1:
            raise DataError(f"max_per_owner is {self.max_per_owner}; it must be at least 1")
        if (self.owner_field is None) != (self.max_per_owner is None):
            raise DataError("give both --owner_field and --max_per_owner, or neither")
        if self.shard_examples < 1:
            raise DataError("shards must hold at least 1 example")
        if not self.prefix or not all(c.isalnum() or c in "-_" for c in self.prefix):
            raise DataError("the prefix of shards may have letters, digits, - and _ only")


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
        DataError: nothing is left, the folder holds something else, or the source is malformed.
        ReadError: something that is there cannot be read.
    """
    work = output / _WORK
    claim = {"version": IMPORTER_VERSION, "settings": asdict(settings), "source": _sha256(source.fingerprint)}
    try:
        if _is_finished(output, work, claim):
            return dict(json.loads((output / REPORT).read_text()))
        jobs = [(work, number, part, settings.conversion) for number, part in enumerate(source.parts)]
        for _ in run_all(executor, convert_part, jobs):
            advance("converting", 1, len(jobs))
        parts = [load_converted(work, number) for number in range(len(jobs))]
        kept, dropped = _choose(parts, settings)
        shards = _layout(parts, kept, settings)
        for _ in run_all(executor, _write, [(output, work, name, members) for name, members in shards]):
            advance("writing", 1, len(shards))
        report = _report(parts, dropped, int(kept.sum()), claim)
        _finish(output, work, settings, report)
    except OSError as error:
        if hasattr(error, "exit_code"):
            raise
        raise DataError(f"cannot write to {output}: {error.strerror or error}") from error
    return report


def _is_finished(output: Path, work: Path, claim: dict[str, Any]) -> bool:
    """Claims the folder for this import; True when this very import is done already."""
    mine = work / "claim.json"
    if (output / REPORT).is_file() and not work.exists():
        if json.loads((output / REPORT).read_text()).get("claim") != claim:
            raise DataError(f"{output} holds another import; choose an empty folder")
        return True
    if mine.is_file():
        if json.loads(mine.read_text()) != claim:
            raise DataError(f"{output} holds another unfinished import, or its source changed; choose an empty folder")
        return False
    if output.is_dir() and any(path.name != _WORK for path in output.iterdir()):
        raise DataError(f"{output} is not empty; choose an empty folder")
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    with private_file(mine) as file:
        file.write(json.dumps(claim).encode())
    return False


def _choose(parts: Sequence[Converted], settings: Settings) -> tuple[np.ndarray, Counter[str]]:
    """Which examples stay, bool over all parts in order; and how many go for what reason."""
    digests, hashes, has_hash, owners = (np.concatenate([part[k] for part in parts]) for k in range(4))
    kept, dropped = np.ones(len(digests), dtype=bool), Counter[str]()

    def drop(rows: np.ndarray, reason: str) -> None:
        kept[rows] = False
        dropped[reason] += len(rows)

    drop(np.flatnonzero(exact_duplicates(digests)), "exact_duplicate")
    if settings.duplicate_distance is not None:
        rows = np.flatnonzero(kept & has_hash)
        drop(rows[near_duplicates(hashes[rows], settings.duplicate_distance)], "near_duplicate")
    if settings.max_per_owner is not None:
        rows = np.flatnonzero(kept)
        drop(rows[over_limit(owners[rows], digests[rows], settings.max_per_owner, settings.seed)], "owner_limit")
    if not kept.any():
        counts = dropped + sum((Counter(part.dropped) for part in parts), Counter[str]())
        what = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        raise DataError(f"no example is left ({what or 'the source is empty'})")
    return kept, dropped


Members = list[tuple[int, list[int]]]
"""Numbers of parts, and places in them."""


def _layout(parts: Sequence[Converted], kept: np.ndarray, settings: Settings) -> list[tuple[str, Members]]:
    """Names of the shards and what goes into each."""
    sizes = [len(part.digests_ND) for part in parts]
    part_of = np.repeat(np.arange(len(parts)), sizes)[kept]
    place_of = np.concatenate([np.arange(size) for size in sizes])[kept]
    shards = []
    for number, start in enumerate(range(0, len(part_of), settings.shard_examples)):
        rows = slice(start, start + settings.shard_examples)
        numbers = np.unique(part_of[rows])
        members = [(int(n), place_of[rows][part_of[rows] == n].tolist()) for n in numbers]
        shards.append((f"{settings.prefix}-{number:05d}.tar", members))
    return shards


def _write(output: Path, work: Path, name: str, members: Members) -> int:
    if (output / name).exists():
        return 0
    return write_shard(output / name, _kept_examples(work, members))


def _kept_examples(work: Path, members: Members) -> Iterator[Example]:
    for number, places in members:
        path = part_path(work, number)
        extents = walk_shard(path, str(path))
        with open(path, "rb") as file:
            for place in places:
                start, end = extents.bounds_K2[place].tolist()
                yield extents.keys[place].decode(), parse_example(os.pread(file.fileno(), end - start, start)).fields


def _report(parts: Sequence[Converted], dropped: Counter[str], written: int, claim: dict[str, Any]) -> dict[str, Any]:
    counts = dropped + sum((Counter(part.dropped) for part in parts), Counter[str]())
    samples = {reason: [key for part in parts for key in part.samples.get(reason, [])][:10] for reason in REASONS}
    return {
        "private": "Counts of private data without noise: do not publish.",
        "read": sum(part.num_items for part in parts),
        "written": written,
        "dropped": {reason: counts[reason] for reason in REASONS if counts[reason]},
        "reasons": {reason: text for reason, text in REASONS.items() if counts[reason]},
        "samples": {reason: keys for reason, keys in samples.items() if keys},
        "claim": claim,
    }


def _finish(output: Path, work: Path, settings: Settings, report: dict[str, Any]) -> None:
    """Provenance first, the report, then the work folder goes: only then is the import done."""
    facts = provenance(IMPORTER_VERSION, asdict(settings))
    write_durably(output / PROVENANCE, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    with private_file(output / REPORT) as file:
        file.write(json.dumps(report, indent=1).encode())
    shutil.rmtree(work)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
