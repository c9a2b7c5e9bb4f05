"""Decoding, resizing and encoding again; a perceptual hash. Encoding again drops all metadata (places, cameras, names)."""

import io
import math

import numpy as np
from PIL import Image, ImageOps
from scipy.fft import dctn

from data.examples.transforms import decode, to_rgb

HASH_SIDE = 8
_THUMB = 32
_FLAT = 2.0  # standard deviation of gray values below which a picture has no structure to compare


def resized(data: bytes, size: int, side: str) -> Image.Image:
    """RGB, upright, its shorter or longer side at most `size` pixels; never enlarged.

    Args:
        data: an encoded image.
        size: in pixels.
        side: "shortest" or "longest".

    Raises:
        DecodeError: the bytes are no usable image.
    """
    return decode(data, lambda image: _shrunk(image, size, side))


def _shrunk(image: Image.Image, size: int, side: str) -> Image.Image:
    reference = (min if side == "shortest" else max)(image.size)
    scale = min(1.0, size / reference)
    if image.format == "JPEG" and scale < 0.5:
        image.draft(None, (math.ceil(image.width * scale * 2), math.ceil(image.height * scale * 2)))
    rgb = to_rgb(ImageOps.exif_transpose(image))
    reference = (min if side == "shortest" else max)(rgb.size)
    scale = min(1.0, size / reference)
    if scale == 1.0:
        return rgb.copy()
    shape = (max(1, round(rgb.width * scale)), max(1, round(rgb.height * scale)))
    return rgb.resize(shape, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, image_format: str, quality: int) -> bytes:
    """As jpg, webp or png, without metadata."""
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
    low = dctn(values, norm="ortho")[:HASH_SIDE, :HASH_SIDE].ravel()
    low[0] = 0.0  # the mean brightness
    bits = low > np.median(low[1:])
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
