"""Image bytes -> normalised float32 arrays, with Pillow.

Bytes are untrusted: every defect ends in a DecodeError, decided from these bytes alone. Randomness
comes from the example's own key alone, so that no example's augmentation depends on another
example, on the worker or on the step's order.
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
"""34 million: an image costs a worker at most two seconds of one core (WebP) and 0.1 GB."""
MAX_SCANS = 64
"""Limit of the scans of a JPEG. A progressive JPEG has about ten.

Each costs a pass over all pixels, and may have few bytes.
"""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
CROP_SCALE = (0.2, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)

_ORIENTATION_TAG = 0x0112
_MEAN_C = np.array(IMAGENET_MEAN, dtype=np.float32)
_STD_C = np.array(IMAGENET_STD, dtype=np.float32)
_SHADES_256 = np.arange(256, dtype=np.float32) / 255
_TABLE_C256 = ((_SHADES_256 - _MEAN_C[:, None]) / _STD_C[:, None]).astype(np.float32)


class CropBox(NamedTuple):
    """A part of the upright image in its original pixels; edges need not be whole."""

    left_edge: float
    top_edge: float
    width: float
    height: float


def train_image(image_bytes: bytes, image_size: int, key: int) -> np.ndarray:
    """Returns a random resized crop, flipped horizontally with probability 1/2.

    The crop has scale 0.2 to 1 and ratio 3/4 to 4/3, and is resized by bicubic filtering.

    Args:
        image_bytes: an encoded image.
        image_size: side of the crop in pixels.
        key: this example's random key, 0 <= key < 2**64; the same key gives the same crop.

    Returns:
        images_CHW, float32, C = 3, normalised by ImageNet's mean and standard deviation.

    Raises:
        DecodeError: the bytes are not a usable image.
    """
    rng = np.random.Generator(np.random.Philox(key=int(key)))

    def random_crop(image: Image.Image) -> Image.Image:
        is_turned = image.getexif().get(_ORIENTATION_TAG, 1) in (5, 6, 7, 8)
        width, height = (image.height, image.width) if is_turned else image.size
        box = random_crop_box(width, height, rng)
        if image.format == "JPEG":
            # The decoder halves the size while the crop has at least image_size pixels a side.
            shrink = image_size / min(box.width, box.height)
            draft_size = (math.ceil(image.width * shrink), math.ceil(image.height * shrink))
            image.draft(None, draft_size)
        rgb = to_rgb(ImageOps.exif_transpose(image))
        scale_x = rgb.width / width
        scale_y = rgb.height / height
        left_edge = max(0.0, box.left_edge * scale_x)
        top_edge = max(0.0, box.top_edge * scale_y)
        right_edge = min(float(rgb.width), (box.left_edge + box.width) * scale_x)
        bottom_edge = min(float(rgb.height), (box.top_edge + box.height) * scale_y)
        edges = (left_edge, top_edge, right_edge, bottom_edge)
        crop = rgb.resize((image_size, image_size), Image.Resampling.BICUBIC, box=edges)
        if rng.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return crop

    return _normalize(decode(image_bytes, random_crop))


def eval_image(image_bytes: bytes, image_size: int) -> np.ndarray:
    """Returns the largest centred square of whole pixels, resized by bicubic filtering.

    Args:
        image_bytes: an encoded image.
        image_size: side of the square in pixels.

    Returns:
        images_CHW, float32, C = 3, normalised by ImageNet's mean and standard deviation.

    Raises:
        DecodeError: the bytes are not a usable image.
    """

    def centre_square(image: Image.Image) -> Image.Image:
        rgb = to_rgb(ImageOps.exif_transpose(image))
        side = min(rgb.size)
        left_edge = (rgb.width - side) // 2
        top_edge = (rgb.height - side) // 2
        square = rgb.crop((left_edge, top_edge, left_edge + side, top_edge + side))
        return square.resize((image_size, image_size), Image.Resampling.BICUBIC)

    return _normalize(decode(image_bytes, centre_square))


def denormalize(images_CHW: np.ndarray) -> np.ndarray:
    """Returns the picture of normalised values, to show it: uint8 (H, W, C)."""
    shades_HWC = images_CHW.transpose(1, 2, 0).astype(np.float32) * _STD_C + _MEAN_C
    return np.clip(np.rint(shades_HWC * 255), 0, 255).astype(np.uint8)


def random_crop_box(width: int, height: int, rng: np.random.Generator) -> CropBox:
    """Draws a crop as torchvision's RandomResizedCrop does.

    After ten crops that do not fit it takes the largest centred crop.

    Args:
        width: of the image, in pixels.
        height: of the image, in pixels.
        rng: the example's own generator.
    """
    log_low = math.log(CROP_RATIO[0])
    log_high = math.log(CROP_RATIO[1])
    for _ in range(10):
        area = width * height * rng.uniform(*CROP_SCALE)
        ratio = math.exp(rng.uniform(log_low, log_high))
        crop_width = math.sqrt(area * ratio)
        crop_height = math.sqrt(area / ratio)
        # Each attempt draws four numbers, whether its crop fits or not.
        x_share = rng.uniform()
        y_share = rng.uniform()
        if crop_width <= width and crop_height <= height:
            x = x_share * (width - crop_width)
            y = y_share * (height - crop_height)
            return CropBox(x, y, crop_width, crop_height)
    crop_width = min(width, height * CROP_RATIO[1])
    crop_height = min(height, width / CROP_RATIO[0])
    return CropBox((width - crop_width) / 2, (height - crop_height) / 2, crop_width, crop_height)


def decode(
    image_bytes: bytes, work: Callable[[Image.Image], Image.Image], max_pixels: float = MAX_PIXELS
) -> Image.Image:
    """Opens an image and returns the result of the work on it.

    It turns Pillow's many exceptions into DecodeError.

    Raises:
        DecodeError: the bytes are not a usable image, or it has more than `max_pixels` or
            MAX_SCANS.
    """
    if not image_bytes:
        raise DecodeError("the image has no bytes")
    if image_bytes.startswith(b"\xff\xd8") and image_bytes.count(b"\xff\xda") > MAX_SCANS:
        raise DecodeError(f"the JPEG has more than {MAX_SCANS} scans")
    try:
        with warnings.catch_warnings():
            # Pillow's warnings describe single private images.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(image_bytes), formats=FORMATS) as image:
                if image.width * image.height > max_pixels:
                    raise DecodeError(f"the image has more than {max_pixels:,} pixels")
                return work(image)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:
        raise DecodeError(f"the image cannot be decoded: {type(error).__name__}") from error


def encode_image(image: Image.Image, image_format: str, **settings: int) -> bytes:
    """Returns the image as jpg or webp of quality 90, or as png, without metadata.

    Args:
        settings: options of Pillow's encoder of this format.
    """
    buffer = io.BytesIO()
    image.info.clear()
    pillow_format = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}[image_format]
    image.save(buffer, pillow_format, quality=90, **settings)
    return buffer.getvalue()


def to_rgb(image: Image.Image) -> Image.Image:
    """Returns an image of any Pillow mode as 8-bit RGB.

    Transparent parts become white, and an animation is its first frame.
    """
    if image.mode in ("I;16", "I;16B", "I;16L", "I;16N", "I", "F"):
        # Pillow clips these modes to 8 bits; 16-bit files have 0 to 65535 in each of them.
        grey_HW = np.clip(np.asarray(image, dtype=np.float32) / 257.0, 0, 255)
        grey = Image.fromarray(np.rint(grey_HW).astype(np.uint8))
        return grey.convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info or image.mode == "PA":
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _normalize(image: Image.Image) -> np.ndarray:
    """Returns images_CHW, looked up channel by channel in a table of the 256 shades.

    The table is three times as fast as arithmetic on (H, W, C).
    """
    shades_HWC = np.asarray(image)
    normalized_CHW = np.empty((3, image.height, image.width), dtype=np.float32)
    for channel in range(3):
        table_256 = _TABLE_C256[channel]
        shades_HW = shades_HWC[:, :, channel]
        np.take(table_256, shades_HW, out=normalized_CHW[channel], mode="clip")
    return normalized_CHW
