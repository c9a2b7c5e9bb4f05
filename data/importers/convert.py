"""Converts one part of a source to a file of examples, and the facts of them for the choice.

Images are decoded, resized and encoded again, which drops all metadata (places, cameras, names).
`clean_caption` lists the rules for captions, which look at one caption alone.
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
from data.examples.transforms import decode, encode_image, to_rgb
from data.importers.sources import SourceExample
from data.index.tar_writer import Example, write_shard

_DIGEST_BYTES = 16
MAX_DISTANCE = 10
"""Limit of the bits in which perceptual hashes of near copies differ."""
MAX_PIXELS = 34 * 10**6
"""Limit of an image's decoded pixels.

Cameras have fewer, or write JPEGs, which are decoded at a part of their size.
"""
MIN_SIDE = 16
MAX_CHARACTERS = 1000
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,500}>")
_ADDRESS = re.compile(r"(?:https?://|www\.)\S+|[\w.+-]+@[\w-]+\.[\w.-]+", re.IGNORECASE)
_NO_TEXT = ("Cc", "Cf", "Cs", "Co", "Cn")
_QUOTES = "\"'“”‘’«»„`"
_FLAT = 2.0
"""Standard deviation of grey values below which a picture has no structure to compare."""
_SAMPLES = 3


@dataclass(frozen=True)
class Settings:
    """The settings of an import, which determine the output together with the source.

    Attributes:
        source_format: name of the source in the provenance.
        size: pixels of the shorter side; smaller images are not enlarged.
        image_format: jpg, webp or png.
        duplicate_distance: near copies that differ in at most this number of bits, up to
            MAX_DISTANCE, are removed; None keeps them.
        owner_field: the source's column of owners; examples without an owner are dropped.
        max_per_owner: the largest number of examples of one owner.
        seed: the key of the choice among an owner's examples.
        shard_examples: examples per shard.
        heldout_share: the approximate share of examples in the folder HELDOUT of the output.
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
"""Facts of one example for the choice.

They are the first bytes of a SHA-256 over pixels, caption and label; the perceptual hash, which
featureless pictures lack; the digest of the owner; and the digest of the pixels alone.
"""


class ConvertedPart(NamedTuple):
    """Facts of the examples of one part.

    Attributes:
        rows_N: of ROW.
        dropped: reason -> number of examples.
        samples: reason -> a few keys.
        num_joined: records of a picture that an earlier record named.
    """

    rows_N: np.ndarray
    dropped: Counter[str]
    samples: Mapping[str, list[str]]
    num_joined: int


def part_path(work: Path, number: int) -> Path:
    """Returns the path of a part's converted examples."""
    return work / f"part-{number:06d}.tar"


def convert_part(
    work: Path, number: int, part: Iterable[SourceExample], settings: Settings
) -> tuple[int, ConvertedPart]:
    """Converts a part; returns its number and the facts of its examples.

    Raises:
        ReadError: an image file exists but cannot be read.
        DataError: the source is malformed.
    """
    rows: list[tuple[bytes, int, bool, bytes, bytes]] = []
    num_joined = 0
    dropped: Counter[str] = Counter()
    samples: defaultdict[str, list[str]] = defaultdict(list)

    def examples() -> Iterator[Example]:
        nonlocal num_joined
        for place, source_example in enumerate(part):
            num_joined += source_example.records - 1
            converted = source_example.problem or convert_example(source_example, settings)
            if isinstance(converted, str):
                reason = converted
                dropped[reason] += 1
                if len(samples[reason]) < _SAMPLES:
                    samples[reason].append(source_example.key)
                continue
            digest, pixels, perceptual, members = converted
            has_hash = perceptual is not None
            owner = owner_digest(source_example.owner or "")
            rows.append((digest, perceptual or 0, has_hash, owner, pixels))
            yield f"{number:06d}{place:06d}", members

    write_shard(part_path(work, number), examples())
    return number, ConvertedPart(np.array(rows, dtype=ROW), dropped, samples, num_joined)


def convert_example(
    source_example: SourceExample, settings: Settings
) -> tuple[bytes, bytes, int | None, dict[str, bytes]] | str:
    """Converts one example.

    Returns:
        (digest of its content, digest of its pixels, perceptual hash, members), or the reason to
        drop it.
    """
    image_source = source_example.image
    if image_source is None:
        return "missing_image"
    if settings.owner_field is not None and source_example.owner is None:
        return "no_owner"
    try:
        if isinstance(image_source, Path):
            # A read of a pipe would never end.
            if not stat.S_ISREG(image_source.stat().st_mode):
                return "missing_image"
            image_bytes = image_source.read_bytes()
        else:
            image_bytes = image_source
    except (FileNotFoundError, NotADirectoryError):
        return "missing_image"
    # A broken disk must not look like bad data.
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "unsafe_path"
        reason = error.strerror or type(error).__name__
        raise ReadError(f"cannot read the picture of {source_example.key}: {reason}") from error
    clean_captions = map(clean_caption, source_example.captions)
    captions = list(dict.fromkeys(text for text in clean_captions if text is not None))
    try:
        image = resize_image(image_bytes, settings.size)
    except DecodeError:
        return "undecodable_image"
    if min(image.size) < MIN_SIDE:
        return "small_image"
    if not captions and source_example.label is None:
        return "no_caption"
    image_size = f"{image.width} {image.height} "
    digest = hashlib.sha256(image_size.encode() + image.tobytes())
    pixels = digest.digest()[:_DIGEST_BYTES]
    digest.update("".join(captions[:1]).encode("utf-8"))
    perceptual = perceptual_hash(image)
    members = {settings.image_format: encode_image(image, settings.image_format)}
    if captions:
        members["txt"] = captions[0].encode("utf-8")
    if source_example.label is not None:
        digest.update(f" label {source_example.label}".encode())
        members["cls"] = str(source_example.label).encode()
    if len(captions) > 1:
        record = json.dumps({"captions": captions}, ensure_ascii=False)
        members["json"] = record.encode("utf-8")
    return digest.digest()[:_DIGEST_BYTES], pixels, perceptual, members


def owner_digest(owner: str) -> bytes:
    """Returns the digest that an import stores in place of an owner's name."""
    name = owner.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=_DIGEST_BYTES, person=b"owner").digest()


def clean_caption(text: str) -> str | None:
    """Returns the cleaned caption, or None if it has no letter left.

    The rules, in this order: HTML entities are resolved and tags removed; Unicode is brought to
    NFC; web and e-mail addresses are removed; control, format and unassigned characters become
    spaces; runs of white space become one space; surrounding quotes are removed; text above
    MAX_CHARACTERS is cut at the last whole word. They repeat until nothing changes, so cleaning
    twice equals cleaning once.
    """
    text = text[: 20 * MAX_CHARACTERS]
    last_text: str | None = None
    # A rule may uncover text that an earlier rule removes.
    while text != last_text:
        last_text = text
        text = _TAG.sub(" ", html.unescape(text))
        text = unicodedata.normalize("NFC", text)
        text = _ADDRESS.sub(" ", text)
        text = "".join(" " if unicodedata.category(c) in _NO_TEXT else c for c in text)
        text = " ".join(text.split()).strip(_QUOTES + " ")
        if len(text) > MAX_CHARACTERS:
            start = text[:MAX_CHARACTERS]
            text = start.rpartition(" ")[0] or start
    return text if any(c.isalpha() for c in text) else None


def resize_image(image_bytes: bytes, size: int) -> Image.Image:
    """Returns an upright RGB image whose shorter side has at most `size` pixels; never enlarges.

    Raises:
        DecodeError: the bytes are not a usable image, or more than MAX_PIXELS would have to be
            decoded; a JPEG is decoded at a part of its size if twice `size` is enough.
    """

    def shrunk(image: Image.Image) -> Image.Image:
        scale = min(1.0, size / min(image.size))
        # Phones write MPO: a JPEG with other JPEGs behind it.
        if image.format in ("JPEG", "MPO") and scale < 0.5:
            draft_width = math.ceil(image.width * scale * 2)
            draft_height = math.ceil(image.height * scale * 2)
            image.draft(None, (draft_width, draft_height))
        if image.width * image.height > MAX_PIXELS:
            raise DecodeError("the image has too many pixels")
        rgb = to_rgb(ImageOps.exif_transpose(image))
        scale = min(1.0, size / min(rgb.size))
        if scale == 1.0:
            return rgb.copy()
        width = max(1, round(rgb.width * scale))
        height = max(1, round(rgb.height * scale))
        return rgb.resize((width, height), Image.Resampling.BICUBIC)

    # Pillow's own limit counts the pixels before the draft.
    pillow_limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        return decode(image_bytes, shrunk, math.inf)
    finally:
        Image.MAX_IMAGE_PIXELS = pillow_limit


def perceptual_hash(image: Image.Image) -> int | None:
    """Returns 64 bits that change little when a picture is scaled, compressed or brightened.

    They are the signs of the 8 x 8 lowest frequencies of a 32 x 32 grey thumbnail around their
    median (pHash, Zauner 2010). A featureless picture has None.
    """
    thumbnail = image.convert("L").resize((32, 32), Image.Resampling.BOX)
    grey_HW = np.asarray(thumbnail, dtype=np.float64)
    if grey_HW.std() < _FLAT:
        return None
    frequencies = dctn(grey_HW, norm="ortho")[:8, :8].ravel()
    # The first frequency is the mean brightness.
    frequencies[0] = 0.0
    bits = frequencies > np.median(frequencies[1:])
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
