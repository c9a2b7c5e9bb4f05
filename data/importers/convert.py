"""One part of a source -> a file of converted examples, and what the choice among all examples needs to know of them.

Captions are cleaned by fixed rules that look at one caption alone, in this order: HTML entities are resolved and tags removed;
Unicode is brought to NFC; web and e-mail addresses are removed; control, format and unassigned characters become spaces; runs of
white space become one space; surrounding quotes are removed; more than MAX_CHARACTERS are cut at the last whole word. Repeated
until nothing changes. What has no letter left is no caption. Images are decoded, resized and encoded again, which drops all
metadata (places, cameras, names).
"""

import hashlib
import html
import io
import json
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageOps
from scipy.fft import dctn

from data.errors import DataError, DecodeError, PixelsError, ReadError
from data.examples.transforms import MAX_PIXELS, decode, to_rgb
from data.files import named_when_whole
from data.importers.items import Item, Part
from data.index.tar_writer import Example, write_shard

SIDES = ("shortest", "longest")
FORMATS = ("jpg", "webp", "png")
DIGEST_BYTES = 16
MAX_CHARACTERS = 1000
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,500}>")
_ADDRESS = re.compile(r"(?:https?://|www\.)\S+|[\w.+-]+@[\w-]+\.[\w.-]+", re.IGNORECASE)
_NO_TEXT = ("Cc", "Cf", "Cs", "Co", "Cn")
_QUOTES = "\"'“”‘’«»„`"
_HASH_SIDE = 8
_THUMB = 32
_FLAT = 2.0  # standard deviation of gray values below which a picture has no structure to compare
_SAMPLES = 3
_ARRAYS = ("digests_ND", "hashes_N", "has_hash_N", "owners_ND")


@dataclass(frozen=True)
class Conversion:
    """How an example is made.

    Attributes:
        size: pixels of the side that `side` names; smaller images stay as they are.
        side: shortest or longest.
        min_side: images with a shorter side below this are dropped.
        image_format: one of FORMATS.
        quality: 1 to 100, where the format is jpg or webp.
        needs_owner: examples without an owner are dropped.
        max_megapixels: images that are decoded to more millions of pixels are dropped.
    """

    size: int = 256
    side: str = "shortest"
    min_side: int = 16
    image_format: str = "jpg"
    quality: int = 90
    needs_owner: bool = False
    max_megapixels: int = 34

    def __post_init__(self) -> None:
        if self.size < 1 or self.min_side < 1 or self.max_megapixels < 1 or not 1 <= self.quality <= 100:
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
        num_items: how many items the part has.
    """

    digests_ND: np.ndarray
    hashes_N: np.ndarray
    has_hash_N: np.ndarray
    owners_ND: np.ndarray
    dropped: dict[str, int]
    samples: dict[str, list[str]]
    num_items: int


def part_path(work: Path, number: int) -> Path:
    """File of a part's examples; the file of the same name with suffix .npz holds what is known of them."""
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
        write_shard(part_path(work, number), rows.examples(number, part, conversion))
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
    """What is known of the examples of a part; it grows while the part is converted."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.hashes: list[int | None] = []
        self.owners: list[bytes] = []
        self.dropped: Counter[str] = Counter()
        self.samples: defaultdict[str, list[str]] = defaultdict(list)

    def examples(self, number: int, part: Part, conversion: Conversion) -> Iterator[Example]:
        """The examples of the part; what is dropped is noted."""
        for place, item in enumerate(part.items()):
            members = item.problem or self.members(item, conversion)
            if isinstance(members, str):
                self.dropped[members] += 1
                if len(self.samples[members]) < _SAMPLES:
                    self.samples[members].append(item.key)
            else:
                yield f"{number:06d}{place:06d}", members

    def members(self, item: Item, conversion: Conversion) -> dict[str, bytes] | str:
        """The members of an example, which is noted, or the reason why there are none."""
        if item.image is None:
            return "missing_image"
        if conversion.needs_owner and item.owner is None:
            return "no_owner"
        stored = item.image
        try:
            data = stored.read_bytes() if isinstance(stored, Path) else stored
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return "missing_image"
        except OSError as error:  # a broken disk must not look like bad data
            raise ReadError(f"cannot read {stored!s}: {error.strerror or error}") from error
        captions = list(dict.fromkeys(text for text in map(clean_caption, item.captions) if text is not None))
        try:
            image = resized(data, conversion.size, conversion.side, conversion.max_megapixels * 10**6)
        except PixelsError:
            return "large_image"
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
        self.digests.append(digest.digest()[:DIGEST_BYTES])
        self.hashes.append(perceptual_hash(image))
        self.owners.append(owner_digest(item.owner or ""))
        members = {conversion.image_format: encoded(image, conversion.image_format, conversion.quality)}
        if captions:
            members["txt"] = captions[0].encode("utf-8")
        if item.label is not None:
            members["cls"] = str(item.label).encode()
        if len(captions) > 1:
            members["json"] = json.dumps({"captions": captions}, ensure_ascii=False).encode("utf-8")
        return members

    def save(self, file: BinaryIO) -> None:
        notes = {
            "dropped": self.dropped,
            "samples": self.samples,
            "num_items": len(self.digests) + self.dropped.total(),
        }
        np.savez(
            file,
            digests_ND=np.frombuffer(b"".join(self.digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            hashes_N=np.array([value or 0 for value in self.hashes], dtype=np.uint64),
            has_hash_N=np.array([value is not None for value in self.hashes], dtype=bool),
            owners_ND=np.frombuffer(b"".join(self.owners), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            notes=np.array(json.dumps(notes)),
        )


def owner_digest(owner: str) -> bytes:
    """What an import keeps of an owner's name."""
    return hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"owner").digest()


def clean_caption(text: str) -> str | None:
    """The caption, or None where nothing readable is left; cleaning twice changes nothing more."""
    text = text[: 20 * MAX_CHARACTERS]
    before: str | None = None
    while text != before:  # What one rule uncovers, an earlier one may have to remove.
        before = text
        text = unicodedata.normalize("NFC", _TAG.sub(" ", html.unescape(text)))
        text = _ADDRESS.sub(" ", text)
        text = "".join(" " if unicodedata.category(c) in _NO_TEXT else c for c in text)
        text = " ".join(text.split()).strip(_QUOTES + " ")
        if len(text) > MAX_CHARACTERS:
            text = text[:MAX_CHARACTERS].rpartition(" ")[0] or text[:MAX_CHARACTERS]
    return text if any(c.isalpha() for c in text) else None


def resized(data: bytes, size: int, side: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """RGB, upright, its shorter or longer side at most `size` pixels; never enlarged.

    Args:
        data: an encoded image.
        size: in pixels.
        side: "shortest" or "longest".
        max_pixels: the most that are decoded; of a JPEG these are fewer than it has, where twice the size is enough.

    Raises:
        PixelsError: more of them.
        DecodeError: the bytes are no usable image.
    """
    reference = min if side == "shortest" else max

    def shrunk(image: Image.Image) -> Image.Image:
        scale = min(1.0, size / reference(image.size))
        if image.format in ("JPEG", "MPO") and scale < 0.5:  # phones write MPO: a JPEG with others behind it
            image.draft(None, (math.ceil(image.width * scale * 2), math.ceil(image.height * scale * 2)))
        if image.width * image.height > max_pixels:
            raise PixelsError
        rgb = to_rgb(ImageOps.exif_transpose(image))
        scale = min(1.0, size / reference(rgb.size))
        if scale == 1.0:
            return rgb.copy()
        shape = (max(1, round(rgb.width * scale)), max(1, round(rgb.height * scale)))
        return rgb.resize(shape, Image.Resampling.BICUBIC)

    pillows, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # it counts the pixels before the draft
    try:
        return decode(data, shrunk, math.inf)
    finally:
        Image.MAX_IMAGE_PIXELS = pillows


def encoded(image: Image.Image, image_format: str, quality: int) -> bytes:
    """The image as jpg, webp or png, without metadata."""
    buffer = io.BytesIO()
    image.info.clear()
    if image_format == "png":
        image.save(buffer, "PNG")
    else:
        image.save(buffer, {"jpg": "JPEG", "webp": "WEBP"}[image_format], quality=quality)
    return buffer.getvalue()


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits that change little when a picture is scaled, compressed or brightened; None for a featureless picture.

    Signs of the 8 x 8 lowest frequencies of a 32 x 32 gray thumbnail around their median (pHash, Zauner 2010).
    """
    gray = image.convert("L").resize((_THUMB, _THUMB), Image.Resampling.BOX)
    values = np.asarray(gray, dtype=np.float64)
    if values.std() < _FLAT:
        return None
    low = dctn(values, norm="ortho")[:_HASH_SIDE, :_HASH_SIDE].ravel()
    low[0] = 0.0  # the mean brightness
    bits = low > np.median(low[1:])
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
