"""Image bytes -> normalised float32 arrays, with Pillow.

Bytes are untrusted: whatever is wrong with them ends in a DecodeError, decided from these bytes alone. Randomness comes
from the example's own key and from nothing else, so that no example's augmentation depends on another's, on the worker
or on the step's order.
"""

import io
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from data.errors import DecodeError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MAX_PIXELS = 1 << 25
"""34 million. One image then costs a worker at most two seconds of one core (WebP is the slowest), and 0.1 GB."""
MAX_SCANS = 64
"""The most scans of a JPEG. A progressive one has about ten; each costs a pass over all pixels, and may have few bytes."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
CROP_SCALE = (0.2, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)

_ORIENTATION_TAG = 0x0112
_MEAN_C = np.array(IMAGENET_MEAN, dtype=np.float32)
_STD_C = np.array(IMAGENET_STD, dtype=np.float32)
_TABLE_C256 = (
    (np.arange(256, dtype=np.float32) / 255 - _MEAN_C[:, None]) / _STD_C[:, None]
).astype(np.float32)


class CropBox(NamedTuple):
    """A part of the upright image in its original pixels; edges need not be whole."""

    left: float
    top: float
    width: float
    height: float


def train_image(data: bytes, image_size: int, key: int) -> np.ndarray:
    """Random resized crop (scale 0.2 to 1, ratio 3/4 to 4/3, bicubic) and horizontal flip with probability 1/2.

    Args:
        data: an encoded image.
        image_size: side of the result in pixels.
        key: this example's random key, 0 <= key < 2**64; the same key gives the same result.

    Returns:
        images_CHW, float32, C = 3, normalised by ImageNet's mean and standard deviation.

    Raises:
        DecodeError: the bytes are no usable image.
    """
    rng = np.random.Generator(np.random.Philox(key=int(key)))

    def random_crop(image: Image.Image) -> Image.Image:
        is_turned = image.getexif().get(_ORIENTATION_TAG, 1) in (5, 6, 7, 8)
        width, height = (image.height, image.width) if is_turned else image.size
        box = random_crop_box(width, height, rng)
        if image.format == "JPEG":
            # The decoder halves the size as long as the crop keeps at least image_size pixels on both sides.
            shrink = image_size / min(box.width, box.height)
            image.draft(None, (math.ceil(image.width * shrink), math.ceil(image.height * shrink)))
        rgb = to_rgb(ImageOps.exif_transpose(image))
        scale_x, scale_y = rgb.width / width, rgb.height / height
        left, top = max(0.0, box.left * scale_x), max(0.0, box.top * scale_y)
        right = min(float(rgb.width), (box.left + box.width) * scale_x)
        bottom = min(float(rgb.height), (box.top + box.height) * scale_y)
        cropped = rgb.resize(
            (image_size, image_size), Image.Resampling.BICUBIC, box=(left, top, right, bottom)
        )
        return cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else cropped

    return _normalize(decode(data, random_crop))


def eval_image(data: bytes, image_size: int) -> np.ndarray:
    """The largest centred square of whole pixels, then resized (bicubic).

    These are the steps of transformers' PerceiverImageProcessor, by which exported models read pictures, so JPEGs are decoded
    at their full size.

    Args:
        data: an encoded image.
        image_size: side of the result in pixels.

    Returns:
        images_CHW, float32, C = 3, normalised by ImageNet's mean and standard deviation.

    Raises:
        DecodeError: the bytes are no usable image.
    """

    def centre_square(image: Image.Image) -> Image.Image:
        rgb = to_rgb(ImageOps.exif_transpose(image))
        side = min(rgb.size)
        left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
        return rgb.crop((left, top, left + side, top + side)).resize(
            (image_size, image_size), Image.Resampling.BICUBIC
        )

    return _normalize(decode(data, centre_square))


def denormalize(images_CHW: np.ndarray) -> np.ndarray:
    """Inverse of the normalisation, for showing pictures: uint8 (H, W, C)."""
    values_HWC = images_CHW.transpose(1, 2, 0).astype(np.float32) * _STD_C + _MEAN_C
    return np.clip(np.rint(values_HWC * 255), 0, 255).astype(np.uint8)


def random_crop_box(width: int, height: int, rng: np.random.Generator) -> CropBox:
    """Draws a crop as torchvision's RandomResizedCrop does: up to ten attempts, then the largest centred crop.

    Args:
        width: the image's, in pixels.
        height: the image's, in pixels.
        rng: the example's own generator.
    """
    log_low, log_high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    for _ in range(10):
        area = width * height * rng.uniform(*CROP_SCALE)
        ratio = math.exp(rng.uniform(log_low, log_high))
        crop_width, crop_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        left, top = rng.uniform(), rng.uniform()
        if crop_width <= width and crop_height <= height:
            return CropBox(
                left * (width - crop_width), top * (height - crop_height), crop_width, crop_height
            )
    crop_width, crop_height = min(width, height * CROP_RATIO[1]), min(height, width / CROP_RATIO[0])
    return CropBox((width - crop_width) / 2, (height - crop_height) / 2, crop_width, crop_height)


def decode(
    data: bytes, work: Callable[[Image.Image], Image.Image], max_pixels: float = MAX_PIXELS
) -> Image.Image:
    """Opens an image and works on it. The one place where Pillow's many exceptions become DecodeError.

    Raises:
        DecodeError: the bytes are no usable image, or have more than `max_pixels` or MAX_SCANS.
    """
    if not data:
        raise DecodeError("the image has no bytes")
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > MAX_SCANS:
        raise DecodeError(f"the JPEG has more than {MAX_SCANS} scans")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Pillow warns about the content of single private images
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > max_pixels:
                    raise DecodeError(f"the image has more than {max_pixels:,} pixels")
                return work(image)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:
        raise DecodeError(f"the image cannot be decoded: {type(error).__name__}") from error


def encoded(image: Image.Image, image_format: str, **more: int) -> bytes:
    """The image as jpg or webp of quality 90, or as png, without metadata; `more` for those encoders that know it."""
    buffer = io.BytesIO()
    image.info.clear()
    image.save(
        buffer, {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}[image_format], quality=90, **more
    )
    return buffer.getvalue()


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as 8-bit RGB; transparent parts become white, the first frame stands for an animation."""
    if image.mode in ("I;16", "I;16B", "I;16L", "I;16N", "I", "F"):
        # Pillow clips these to 8 bits instead of scaling; 16-bit files use 0 to 65535 in each of them.
        values_HW = np.clip(np.asarray(image, dtype=np.float32) / 257.0, 0, 255)
        return Image.fromarray(np.rint(values_HW).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info or image.mode == "PA":
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _normalize(image: Image.Image) -> np.ndarray:
    """Channel by channel through a table of the 256 values: three times as fast as arithmetic on (H, W, C)."""
    values_HWC = np.asarray(image)
    normalized_CHW = np.empty((3, image.height, image.width), dtype=np.float32)
    for channel in range(3):
        np.take(
            _TABLE_C256[channel],
            values_HWC[:, :, channel],
            out=normalized_CHW[channel],
            mode="clip",
        )
    return normalized_CHW
