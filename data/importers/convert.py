"""One part of a source -> a file of converted examples, and what the choice among all examples needs to know of them.

Captions are cleaned by fixed rules that look at one caption alone, in this order: HTML entities are resolved and tags removed;
Unicode is brought to NFC; web and e-mail addresses are removed; control, format and unassigned characters become spaces; runs of
white space become one space; surrounding quotes are removed; more than MAX_CHARACTERS are cut at the last whole word. Repeated
until nothing changes. What has no letter left is no caption. Images are decoded, resized and encoded again, which drops all
metadata (places, cameras, names).
"""

import errno
import hashlib
import html
import json
import math
import re
import stat
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps
from scipy.fft import dctn

from data.errors import DecodeError, ReadError
from data.examples.transforms import decode, encoded, to_rgb
from data.importers.sources import Item
from data.index.tar_writer import Example, write_shard

_DIGEST_BYTES = 16
MAX_DISTANCE = 10
"""Bits of a perceptual hash up to which near copies are looked for."""
MAX_PIXELS = 34 * 10**6
"""An image that is decoded to more is dropped: cameras have fewer, or write JPEGs, which are decoded at a part of their size."""
MIN_SIDE = 16
MAX_CHARACTERS = 1000
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,500}>")
_ADDRESS = re.compile(r"(?:https?://|www\.)\S+|[\w.+-]+@[\w-]+\.[\w.-]+", re.IGNORECASE)
_NO_TEXT = ("Cc", "Cf", "Cs", "Co", "Cn")
_QUOTES = "\"'“”‘’«»„`"
_FLAT = 2.0  # standard deviation of gray values below which a picture has no structure to compare
_SAMPLES = 3


@dataclass(frozen=True)
class Settings:
    """What the output is a function of, together with the source.

    Attributes:
        source_format: what the provenance calls the source.
        size: pixels of the shorter side; smaller images stay as they are.
        image_format: jpg, webp or png.
        duplicate_distance: near copies that differ in at most this number of bits, up to MAX_DISTANCE, are removed; None keeps
            them.
        owner_field: where the source says whose an example is; examples without an owner are dropped.
        max_per_owner: the largest number of examples of one owner.
        seed: the key of the choice among an owner's examples.
        shard_examples: examples per shard.
        heldout_share: the share of examples, about, that goes to the folder HELDOUT of the output instead.
    """

    source_format: str
    size: int = 256
    image_format: str = "jpg"
    duplicate_distance: int | None = 4
    owner_field: str | None = None
    max_per_owner: int | None = None
    seed: int = 0
    shard_examples: int = 5000
    heldout_share: float = 0.0


ROW = np.dtype(
    [("digest", "V16"), ("hash", "u8"), ("has_hash", "?"), ("owner", "V16"), ("pixels", "V16")]
)
"""What the choice looks at: the first bytes of SHA-256 over pixels, caption and label; the perceptual hash, which featureless
pictures lack; the digest of the owner; that of the pixels alone."""


class Converted(NamedTuple):
    """What is known of the examples of one part: `rows_N` of ROW.

    Attributes:
        dropped: reason -> number of items.
        samples: reason -> a few keys.
        num_joined: records of a picture that an earlier one named.
    """

    rows_N: np.ndarray
    dropped: Counter[str]
    samples: Mapping[str, list[str]]
    num_joined: int


def part_path(work: Path, number: int) -> Path:
    """File of a part's converted examples."""
    return work / f"part-{number:06d}.tar"


def convert_part(
    work: Path, number: int, part: Iterable[Item], settings: Settings
) -> tuple[int, Converted]:
    """Converts a part; returns its number and what is known of its examples.

    Raises:
        ReadError: an image file cannot be read, though it is there.
        DataError: the source is malformed.
    """
    rows: list[tuple[bytes, int, bool, bytes, bytes]] = []
    num_joined = 0
    dropped: Counter[str] = Counter()
    samples: defaultdict[str, list[str]] = defaultdict(list)

    def examples() -> Iterator[Example]:
        nonlocal num_joined
        for place, item in enumerate(part):
            num_joined += item.records - 1
            made = item.problem or convert_item(item, settings)
            if isinstance(made, str):
                dropped[made] += 1
                samples[made] += [item.key] * (len(samples[made]) < _SAMPLES)
                continue
            digest, pixels, perceptual, members = made
            rows.append(
                (
                    digest,
                    perceptual or 0,
                    perceptual is not None,
                    owner_digest(item.owner or ""),
                    pixels,
                )
            )
            yield f"{number:06d}{place:06d}", members

    write_shard(part_path(work, number), examples())
    return number, Converted(np.array(rows, dtype=ROW), dropped, samples, num_joined)


def convert_item(
    item: Item, settings: Settings
) -> tuple[bytes, bytes, int | None, dict[str, bytes]] | str:
    """(digest of its content, of its pixels, perceptual hash, members) of an example, or the reason why there is none."""
    if item.image is None:
        return "missing_image"
    if settings.owner_field is not None and item.owner is None:
        return "no_owner"
    stored = item.image
    try:
        if isinstance(stored, Path) and not stat.S_ISREG(
            stored.stat().st_mode
        ):  # a pipe would never end
            return "missing_image"
        data = stored.read_bytes() if isinstance(stored, Path) else stored
    except (FileNotFoundError, NotADirectoryError):
        return "missing_image"
    except OSError as error:  # a broken disk must not look like bad data
        if error.errno == errno.ELOOP:
            return "unsafe_path"
        raise ReadError(
            f"cannot read the picture of {item.key}: {error.strerror or type(error).__name__}"
        ) from error
    captions = list(
        dict.fromkeys(text for text in map(clean_caption, item.captions) if text is not None)
    )
    try:
        image = resized(data, settings.size)
    except DecodeError:
        return "undecodable_image"
    if min(image.size) < MIN_SIDE:
        return "small_image"
    if not captions and item.label is None:
        return "no_caption"
    digest = hashlib.sha256(f"{image.width} {image.height} ".encode() + image.tobytes())
    pixels = digest.digest()[:_DIGEST_BYTES]
    digest.update("".join(captions[:1]).encode("utf-8"))
    perceptual = perceptual_hash(image)
    members = {settings.image_format: encoded(image, settings.image_format)}
    if captions:
        members["txt"] = captions[0].encode("utf-8")
    if item.label is not None:
        digest.update(f" label {item.label}".encode())
        members["cls"] = str(item.label).encode()
    if len(captions) > 1:
        members["json"] = json.dumps({"captions": captions}, ensure_ascii=False).encode("utf-8")
    return digest.digest()[:_DIGEST_BYTES], pixels, perceptual, members


def owner_digest(owner: str) -> bytes:
    """What an import keeps of an owner's name."""
    return hashlib.blake2b(
        owner.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=b"owner"
    ).digest()


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


def resized(data: bytes, size: int) -> Image.Image:
    """RGB, upright, its shorter side at most `size` pixels; never enlarged.

    Raises:
        DecodeError: the bytes are no usable image, or more than MAX_PIXELS would have to be decoded; of a JPEG these are fewer
            than it has, where twice the size is enough.
    """

    def shrunk(image: Image.Image) -> Image.Image:
        scale = min(1.0, size / min(image.size))
        if (
            image.format in ("JPEG", "MPO") and scale < 0.5
        ):  # phones write MPO: a JPEG with others behind it
            image.draft(
                None, (math.ceil(image.width * scale * 2), math.ceil(image.height * scale * 2))
            )
        if image.width * image.height > MAX_PIXELS:
            raise DecodeError("the image has too many pixels")
        rgb = to_rgb(ImageOps.exif_transpose(image))
        scale = min(1.0, size / min(rgb.size))
        if scale == 1.0:
            return rgb.copy()
        shape = (max(1, round(rgb.width * scale)), max(1, round(rgb.height * scale)))
        return rgb.resize(shape, Image.Resampling.BICUBIC)

    pillows, Image.MAX_IMAGE_PIXELS = (
        Image.MAX_IMAGE_PIXELS,
        None,
    )  # it counts the pixels before the draft
    try:
        return decode(data, shrunk, math.inf)
    finally:
        Image.MAX_IMAGE_PIXELS = pillows


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits that change little when a picture is scaled, compressed or brightened; None for a featureless picture.

    Signs of the 8 x 8 lowest frequencies of a 32 x 32 gray thumbnail around their median (pHash, Zauner 2010).
    """
    gray = image.convert("L").resize((32, 32), Image.Resampling.BOX)
    values = np.asarray(gray, dtype=np.float64)
    if values.std() < _FLAT:
        return None
    low = dctn(values, norm="ortho")[:8, :8].ravel()
    low[0] = 0.0  # the mean brightness
    bits = low > np.median(low[1:])
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
