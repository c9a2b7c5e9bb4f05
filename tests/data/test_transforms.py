"""Pictures of every kind, good and bad, as arrays."""

import random
import time

import numpy as np
import pytest
from PIL import Image

from data.errors import DecodeError
from data.examples.transforms import (
    MAX_PIXELS,
    MAX_SCANS,
    denormalize,
    eval_image,
    random_crop_box,
    train_image,
)
from tests.data.conftest import bomb, encode, picture

SIZE = 24


def colour(data: bytes) -> tuple[int, ...]:
    """The middle pixel of a picture after the evaluation transform."""
    return tuple(int(value) for value in denormalize(eval_image(data, SIZE))[SIZE // 2, SIZE // 2])


def test_a_key_decides_everything() -> None:
    before = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    data, other = picture(1), picture(2)
    one = train_image(data, SIZE, 7)
    train_image(other, SIZE, 8)
    assert one.dtype == np.float32 and one.shape == (3, SIZE, SIZE) and one.flags.c_contiguous
    assert np.array_equal(one, train_image(data, SIZE, 7))
    assert not np.array_equal(one, train_image(data, SIZE, 8))
    assert train_image(data, SIZE, 2**64 - 1).shape == one.shape
    after = random.getstate(), np.random.get_state()[1]  # noqa: NPY002
    assert before[0] == after[0] and np.array_equal(before[1], after[1])


def test_crops_have_the_stated_scale_and_ratio_and_half_are_flipped() -> None:
    areas, ratios, inside = [], [], []
    for key in range(2000):
        box = random_crop_box(640, 480, np.random.Generator(np.random.Philox(key=key)))
        areas.append(box.width * box.height / (640 * 480))
        ratios.append(box.width / box.height)
        inside.append(
            0 <= box.left_edge <= 640 - box.width and 0 <= box.top_edge <= 480 - box.height
        )
    assert all(inside)
    assert 0.2 <= min(areas) < 0.25 and 0.9 < max(areas) <= 1.0 and 0.45 < np.mean(areas) < 0.55
    assert 0.75 <= min(ratios) < 0.77 and 1.3 < max(ratios) <= 4 / 3 + 1e-9
    ramp = encode(Image.fromarray(np.tile(np.arange(0, 240, 2, dtype=np.uint8), (120, 1))), "PNG")
    flipped = [
        train_image(ramp, SIZE, key)[0, 0, 0] > train_image(ramp, SIZE, key)[0, 0, -1]
        for key in range(200)
    ]
    assert 70 < sum(flipped) < 130


def test_draft_decoding_changes_next_to_nothing() -> None:
    wave = np.sin(np.linspace(0, 12, 800))[None, :] * np.cos(np.linspace(0, 9, 600))[:, None]
    image = Image.fromarray((127 + 120 * wave).astype(np.uint8)).convert("RGB")
    for turn in (None, 6):
        exif = Image.Exif()
        if turn:
            exif[0x0112] = turn
        jpeg = encode(image, "JPEG", quality=95, exif=exif)
        turned = image.transpose(Image.Transpose.ROTATE_270) if turn else image
        png = encode(turned, "PNG")
        for key in range(4):
            difference = np.abs(train_image(jpeg, SIZE, key) - train_image(png, SIZE, key))
            assert difference.mean() < 0.05


def test_transparency_becomes_white() -> None:
    clear = Image.new("RGBA", (30, 30), (255, 0, 0, 0))
    assert colour(encode(clear, "PNG")) == (255, 255, 255)
    assert colour(encode(clear, "WEBP", lossless=True)) == (255, 255, 255)
    assert colour(encode(Image.new("LA", (30, 30), (0, 0)), "PNG")) == (255, 255, 255)
    palette = Image.new("P", (30, 30), 0)
    palette.putpalette([0, 0, 255] + [0] * 765)
    assert colour(encode(palette, "PNG", transparency=0)) == (255, 255, 255)
    assert colour(encode(palette, "PNG")) == (0, 0, 255)
    assert colour(encode(Image.new("RGB", (30, 30), (9, 9, 9)), "PNG", transparency=(9, 9, 9))) == (
        255,
        255,
        255,
    )


def test_other_modes() -> None:
    """Colour and animation: `tests/data/test_bad_input.py` has CMYK and WebP."""
    sixteen = Image.fromarray(np.full((30, 30), 257 * 100, dtype=np.uint16))
    assert colour(encode(sixteen, "PNG")) == (100, 100, 100)
    assert colour(encode(Image.new("1", (30, 30), 1), "PNG")) == (255, 255, 255)
    assert colour(encode(Image.new("L", (30, 30), 77), "PNG")) == (77, 77, 77)
    frames = [Image.new("RGB", (30, 30), value) for value in ((200, 0, 0), (0, 200, 0))]
    assert colour(encode(frames[0], "GIF", save_all=True, append_images=frames[1:])) == (200, 0, 0)


def test_exif_orientation_and_the_centre() -> None:
    image = Image.new("RGB", (64, 32), (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, 64, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the stored picture is the right side of the upright one
    upright = denormalize(eval_image(encode(image, "PNG", exif=exif), 32))
    assert upright[16, 28, 2] > 200 and upright[16, 4, 0] > 200
    stripes = Image.new("RGB", (90, 30), (0, 0, 0))
    stripes.paste((255, 255, 255), (30, 0, 60, 30))
    assert denormalize(eval_image(encode(stripes, "PNG"), 30))[:, 2:-2].min() > 250


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (3, 2)])
def test_tiny_and_thin_pictures(size: tuple[int, int]) -> None:
    data = encode(Image.new("RGB", size, (10, 200, 30)), "PNG")
    for key in range(5):
        assert np.isfinite(train_image(data, SIZE, key)).all()
    assert colour(data) == (10, 200, 30)


BAD = [
    b"\x00",
    picture(0, fmt="PNG")[:-40],
    picture(0, fmt="WEBP")[:60],
    bomb(8_193, MAX_PIXELS // 8_192),
    bomb(0, 5),
]


@pytest.mark.parametrize("data", BAD)
def test_bad_bytes_are_a_decode_error(data: bytes, recwarn: pytest.WarningsRecorder) -> None:
    for call in (lambda: train_image(data, SIZE, 1), lambda: eval_image(data, SIZE)):
        with pytest.raises(DecodeError):
            call()
    assert not recwarn.list


def test_the_time_of_one_picture_is_bounded() -> None:
    """The slowest picture within the limits takes seconds of a core at most; more scans than any encoder writes are refused."""
    largest = encode(Image.new("RGB", (8_192, MAX_PIXELS // 8_192)), "PNG", compress_level=1)
    start = time.process_time()
    eval_image(largest, SIZE)
    assert time.process_time() - start < 10  # a WebP that is full of noise takes two seconds
    progressive = encode(Image.new("RGB", (64, 64), (9, 99, 199)), "JPEG", progressive=True)
    eval_image(progressive, SIZE)
    at = progressive.rindex(b"\xff\xda")
    scan = progressive[at:-2]
    eval_image(progressive[:at] + scan * 20 + progressive[-2:], SIZE)
    with pytest.raises(DecodeError, match="scans"):
        eval_image(progressive[:at] + scan * (MAX_SCANS + 1) + progressive[-2:], SIZE)


def test_memory_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        eval_image(b"x", SIZE)
