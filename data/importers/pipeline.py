"""The whole import: convert in parallel, choose over everything, write shards, provenance and a private report.

What is converted waits in `.import` inside of the output folder, so that a killed import goes on where it was; the folder
goes when all is written. The result does not depend on the number of workers or on how often the import was stopped.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DataError
from data.files import private_file, write_durably
from data.importers.convert import Settings, convert_part, load_converted, part_path
from data.importers.selection import ALIKE, choose, held_out
from data.importers.sources import REASONS, Source
from data.index.shard import walk_shard
from data.index.tar_writer import Example, write_shard
from data.reading.pool import run_all
from data.reading.reader import parse_example

IMPORTER_VERSION = 2
PROVENANCE = "provenance.json"
REPORT = "import-report.json"
HELDOUT = "heldout"
"""Folder inside of the output, so that the pattern OUTPUT names the training shards alone."""
_WORK = ".import"
Advance = Callable[[str, int, int], None]
"""It is called with (stage, done now, total)."""
Members = list[tuple[int, list[int]]]
"""Numbers of parts, and places in them."""


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
    source_digest = hashlib.sha256(source.fingerprint.encode("utf-8", "surrogatepass")).hexdigest()
    claim = {"version": IMPORTER_VERSION, "settings": asdict(settings), "source": source_digest}
    try:
        if _is_finished(output, work, claim):
            return dict(json.loads((output / REPORT).read_text()))
        jobs = [(work, number, part, settings) for number, part in enumerate(source.parts)]
        for _ in run_all(executor, convert_part, jobs):
            advance("converting", 1, len(jobs))
        parts = [load_converted(work, number) for number in range(len(jobs))]
        kept, dropped = choose(parts, settings.duplicate_distance, settings.max_per_owner, settings.seed)
        kept_out = kept & held_out(parts, settings.heldout_share, settings.seed)
        sizes = [len(part.digests_ND) for part in parts]
        part_of = np.repeat(np.arange(len(parts)), sizes)
        place_of = np.concatenate([np.arange(size) for size in sizes])
        shards = []
        for chosen, folder, prefix in ((kept & ~kept_out, output, "train"), (kept_out, output / HELDOUT, HELDOUT)):
            rows_chosen = np.flatnonzero(chosen)
            if len(rows_chosen):
                folder.mkdir(mode=0o700, exist_ok=True)
            for number, start in enumerate(range(0, len(rows_chosen), settings.shard_examples)):
                rows = rows_chosen[start : start + settings.shard_examples]
                members = [(int(n), place_of[rows][part_of[rows] == n].tolist()) for n in np.unique(part_of[rows])]
                shards.append((work, folder / f"{prefix}-{number:05d}.tar", members))
        for _ in run_all(executor, write_kept, shards):
            advance("writing", 1, len(shards))
        counts = dropped + sum((Counter(part.dropped) for part in parts), Counter[str]())
        samples = {reason: [key for part in parts for key in part.samples.get(reason, [])][:10] for reason in REASONS}
        report = {
            "private": "Counts of private data without noise: do not publish.",
            "read": sum(part.num_items for part in parts),
            "written": int(kept.sum()),
            "held_out": int(kept_out.sum()),
            "other_files": dict(sorted(source.other_files.items())),
            "dropped": {reason: counts[reason] for reason in REASONS if counts[reason]},
            "reasons": {reason: text for reason, text in REASONS.items() if counts[reason]},
            "samples": {reason: keys for reason, keys in samples.items() if keys},
            "claim": claim,
        }
        # Provenance first, the report, then the work folder goes: only then is the import done.
        write_durably(output / PROVENANCE, json.dumps(provenance(settings), indent=1, ensure_ascii=False) + "\n")
        with private_file(output / REPORT) as file:
            file.write(json.dumps(report, indent=1).encode())
        for folder in (output, output / HELDOUT):
            for left in folder.glob(".*.tmp"):  # by a killed import
                left.unlink()
        shutil.rmtree(work)
    except OSError as error:
        if hasattr(error, "exit_code"):
            raise
        raise DataError(f"cannot write to {output}: {error.strerror or error}") from error
    return report


def _is_finished(output: Path, work: Path, claim: dict[str, Any]) -> bool:
    """Claims the folder for this import; True when this very import is done already."""
    claim_file = work / "claim.json"
    if (output / REPORT).is_file() and not work.exists():
        if json.loads((output / REPORT).read_text()).get("claim") != claim:
            raise DataError(f"{output} holds another import; choose an empty folder")
        return True
    if claim_file.is_file():
        if json.loads(claim_file.read_text()) != claim:
            raise DataError(f"{output} holds another unfinished import, or its source changed; choose an empty folder")
        return False
    if output.is_dir() and any(path.name != _WORK for path in output.iterdir()):
        raise DataError(f"{output} is not empty; choose an empty folder")
    output.mkdir(parents=True, exist_ok=True, mode=0o700)
    work.mkdir(exist_ok=True, mode=0o700)
    with private_file(claim_file) as file:
        file.write(json.dumps(claim).encode())
    return False


def write_kept(work: Path, path: Path, members: Members) -> None:
    """One job: writes a shard of what was converted and stays, unless that is done."""

    def examples() -> Iterator[Example]:
        for number, places in members:
            part = part_path(work, number)
            extents = walk_shard(part, str(part))
            with open(part, "rb") as file:
                for place in places:
                    start, end = extents.bounds_K2[place].tolist()
                    yield (
                        extents.keys[place].decode(),
                        parse_example(os.pread(file.fileno(), end - start, start)).fields,
                    )

    if not path.exists():
        write_shard(path, examples(), mode=0o600)


def provenance(settings: Settings) -> dict[str, Any]:
    """What an import says of itself, for everybody to read: its rules, and no count or name from the data.

    `deduplication` is written for the privacy card (recipe key data.deduplication).
    """
    limit, distance = settings.max_per_owner, settings.duplicate_distance
    near = (
        "Near copies were kept."
        if distance is None
        else f"So were near copies: pictures whose 64-bit perceptual hashes differ in at most {distance} bits."
    )
    owners = (
        f"At most {limit} examples of one owner were kept, chosen by a keyed hash of their content; examples without an owner "
        "were dropped. The guarantee of an owner is the group epsilon of that size; removal of copies came before and is "
        "outside of it."
    )
    split = (
        f"About {settings.heldout_share:g} of the examples, chosen by a keyed hash of their content, are not in the training "
        f"shards; pictures whose hashes differ in at most {ALIKE} bits, and an owner's examples, are on one side. The choice "
        "looks across examples and is outside of the guarantee."
    )
    return {
        "kind": "import",
        "importer_version": IMPORTER_VERSION,
        "settings": asdict(settings),
        "deduplication": (
            f"Exact copies (SHA-256 of pixels, caption and label) were removed before training. {near} Copies that remain act "
            "as a group and multiply the privacy loss. The removal itself looks across examples: it is not part of the "
            "guarantee (Debenedetti et al. 2024, Privacy side channels in machine learning systems)."
        ),
        "held_out": split if settings.heldout_share else None,
        "owners": None if limit is None else owners,
    }
