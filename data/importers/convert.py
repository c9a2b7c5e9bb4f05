"""One part of a source -> a file of converted examples, and what the choice among all examples needs to know of them."""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError, DecodeError, ReadError
from data.files import named_when_whole
from data.importers.captions import clean_caption
from data.importers.images import encoded, perceptual_hash, resized
from data.importers.items import Item, Part
from data.importers.owners import DIGEST_BYTES, owner_digest
from data.index.tar_writer import Example, write_shard

SIDES = ("shortest", "longest")
FORMATS = ("jpg", "webp", "png")
_SAMPLES = 3
_ARRAYS = ("digests_ND", "hashes_N", "has_hash_N", "owners_ND")


@dataclass(frozen=True)
class Conversion:
    """How an example is made.

    Attributes:
        size: in pixels, of the side that `side` names; smaller images stay as they are.
        side: shortest or longest.
        min_side: images with a shorter side below this are dropped.
        image_format: one of FORMATS.
        quality: of jpg and webp, 1 to 100.
        needs_owner: examples without an owner are dropped.
    """

    size: int = 256
    side: str = "shortest"
    min_side: int = 16
    image_format: str = "jpg"
    quality: int = 90
    needs_owner: bool = False

    def __post_init__(self) -> None:
        if self.size < 1 or self.min_side < 1 or not 1 <= self.quality <= 100:
            raise DataError("sizes must be at least 1 and the quality from 1 to 100")
        if self.side not in SIDES or self.image_format not in FORMATS:
            raise DataError(f"the side must be one of {', '.join(SIDES)}, the format one of {', '.join(FORMATS)}")


class Converted(NamedTuple):
    """What is known of the examples of one part.

    Attributes:
        digests_ND: uint8, SHA-256 over pixels, caption and label, its first 16 bytes.
        hashes_N: uint64, perceptual.
        has_hash_N: bool, False for featureless pictures.
        owners_ND: uint8.
        dropped: reason -> number of items.
        samples: reason -> a few keys.
        num_items: in the part.
    """

    digests_ND: np.ndarray
    hashes_N: np.ndarray
    has_hash_N: np.ndarray
    owners_ND: np.ndarray
    dropped: dict[str, int]
    samples: dict[str, list[str]]
    num_items: int


def part_path(work: Path, number: int) -> Path:
    """File of a part's examples; beside it, with suffix .npz, is what is known of them."""
    return work / f"part-{number:06d}.tar"


def convert_part(work: Path, number: int, part: Part, conversion: Conversion) -> int:
    """Converts a part, unless that is done; returns its number of items.

    Raises:
        ReadError: an image file or shard cannot be read, though it is there.
        DataError: the source is malformed.
    """
    facts = part_path(work, number).with_suffix(".npz")
    if not facts.exists():
        rows = _Rows()
        write_shard(part_path(work, number), _examples(number, part, conversion, rows))
        with named_when_whole(facts) as temporary, open(temporary, "wb") as file:
            rows.save(file)
    return load_converted(work, number).num_items


def load_converted(work: Path, number: int) -> Converted:
    """What is known of the examples of a part."""
    with np.load(part_path(work, number).with_suffix(".npz"), allow_pickle=False) as saved:
        notes = json.loads(str(saved["notes"]))
        arrays = {name: saved[name] for name in _ARRAYS}
    return Converted(**arrays, **notes)


class _Rows:
    """Grows while a part is converted."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.hashes: list[int | None] = []
        self.owners: list[bytes] = []
        self.dropped: Counter[str] = Counter()
        self.samples: defaultdict[str, list[str]] = defaultdict(list)

    def drop(self, reason: str, key: str) -> None:
        self.dropped[reason] += 1
        if len(self.samples[reason]) < _SAMPLES:
            self.samples[reason].append(key)

    def save(self, file: "os.PathLike[str] | object") -> None:
        notes = {
            "dropped": self.dropped,
            "samples": self.samples,
            "num_items": len(self.digests) + self.dropped.total(),
        }
        np.savez(
            file,  # type: ignore[arg-type]
            digests_ND=np.frombuffer(b"".join(self.digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            hashes_N=np.array([value or 0 for value in self.hashes], dtype=np.uint64),
            has_hash_N=np.array([value is not None for value in self.hashes], dtype=bool),
            owners_ND=np.frombuffer(b"".join(self.owners), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            notes=np.array(json.dumps(notes)),
        )


def _examples(number: int, part: Part, conversion: Conversion, rows: _Rows) -> Iterator[Example]:
    for place, item in enumerate(part.items()):
        reason = item.problem or _unusable(item, conversion)
        if reason is None:
            members = _members(item, conversion, rows)
            if isinstance(members, str):
                reason = members
            else:
                yield f"{number:06d}{place:06d}", members
        if reason is not None:
            rows.drop(reason, item.key)


def _unusable(item: Item, conversion: Conversion) -> str | None:
    if item.image is None:
        return "missing_image"
    return "no_owner" if conversion.needs_owner and item.owner is None else None


def _members(item: Item, conversion: Conversion, rows: _Rows) -> dict[str, bytes] | str:
    """The members of the example, or the reason why there are none."""
    data = _bytes_of(item)
    if data is None:
        return "missing_image"
    captions = list(dict.fromkeys(text for text in map(clean_caption, item.captions) if text is not None))
    try:
        image = resized(data, conversion.size, conversion.side)
    except DecodeError:
        return "undecodable_image"
    if min(image.size) < conversion.min_side:
        return "small_image"
    if not captions and item.label is None:
        return "no_caption"
    digest = hashlib.sha256(f"{image.width} {image.height} ".encode() + image.tobytes())
    digest.update("".join(captions[:1]).encode("utf-8"))
    if item.label is not None:
        digest.update(f" label {item.label}".encode())
    rows.digests.append(digest.digest()[:DIGEST_BYTES])
    rows.hashes.append(perceptual_hash(image))
    rows.owners.append(owner_digest(item.owner or ""))
    payload = encoded(image, conversion.image_format, conversion.quality)
    members = {conversion.image_format: payload}
    if captions:
        members["txt"] = captions[0].encode("utf-8")
    if item.label is not None:
        members["cls"] = str(item.label).encode()
    if len(captions) > 1:
        members["json"] = json.dumps({"captions": captions}, ensure_ascii=False).encode("utf-8")
    return members


def _bytes_of(item: Item) -> bytes | None:
    if isinstance(item.image, bytes):
        return item.image
    assert item.image is not None
    try:
        return item.image.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except OSError as error:  # a broken disk must not look like bad data
        raise ReadError(f"cannot read {item.image}: {error.strerror or error}") from error
