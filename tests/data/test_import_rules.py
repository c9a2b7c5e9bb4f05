"""Cleaning, hashing, duplicates, owner limits and the held-out share against plain definitions."""

import hashlib
import io
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from data.errors import DecodeError
from data.examples.transforms import encode_image
from data.importers.convert import (
    MAX_CHARACTERS,
    MAX_DISTANCE,
    ROW,
    clean_caption,
    owner_digest,
    perceptual_hash,
    resize_image,
)
from data.importers.pipeline import choose_heldout, is_over_limit, near_duplicates
from tests.data.conftest import ROOT, picture


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  a  dog\n\trunning ", "a dog running"),
        ("<b>Fish &amp; chips</b><br/>", "Fish & chips"),
        ("&amp;lt;i&amp;gt;twice", "twice"),
        ("see https://example.org/a?b=1 my cat", "see my cat"),
        ("write to jane.doe+x@mail.example.com now", "write to now"),
        ("“quoted”", "quoted"),
        ("cafe\u0301", "café"),
        ("zero\u200bwidth\x00and\ufffe", "zero width and"),
        ("2 < 3 is true", "2 < 3 is true"),
        ("12345 !!", None),
        ("", None),
        ("\ud800", None),
        ("猫が座る", "猫が座る"),
        ("seven77 " * 1000, "seven77 " * 124 + "seven77"),
        ("x" * 5000, "x" * MAX_CHARACTERS),
    ],
)
def test_caption_rules(text: str, cleaned: str | None) -> None:
    assert clean_caption(text) == cleaned


@given(st.text(alphabet=st.characters() | st.sampled_from("<>&;\"'@. ab:/"), max_size=200))
def test_cleaning_twice_changes_nothing(text: str) -> None:
    once = clean_caption(text)
    if once is not None:
        assert clean_caption(once) == once
        assert len(once) <= MAX_CHARACTERS and once == " ".join(once.split())
        once.encode("utf-8")


def test_resizing_shrinks_the_shorter_side_and_never_enlarges() -> None:
    assert resize_image(picture(0, width=320, height=200), 50).size == (80, 50)
    assert resize_image(picture(0, width=40, height=30), 50).size == (40, 30)
    for broken in (b"", b"nonsense", picture(1)[:200]):
        with pytest.raises(DecodeError):
            resize_image(broken, 64)


def test_orientation_is_applied_and_metadata_is_gone() -> None:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "secret place"
    Image.new("RGB", (60, 20), (200, 0, 0)).save(buffer, "JPEG", exif=exif)
    image = resize_image(buffer.getvalue(), 256)
    assert image.size == (20, 60)
    for image_format in ("jpg", "webp", "png"):
        data = encode_image(image, image_format)
        assert b"secret" not in data
        with Image.open(io.BytesIO(data)) as again:
            assert again.size == (20, 60) and not dict(again.getexif())


def altered(image: Image.Image, how: int) -> Image.Image:
    """Made smaller, darker or larger, and compressed."""
    buffer = io.BytesIO()
    if how == 1:
        ImageEnhance.Brightness(image).enhance(0.95).save(buffer, "JPEG", quality=85)
    else:
        side = (75, 192)[how // 2]
        image.resize((side, side), Image.Resampling.BICUBIC).save(buffer, "WEBP", quality=60)
    return Image.open(buffer)


def test_perceptual_hash_knows_copies_from_others() -> None:
    with tarfile.open(ROOT / "data/demo/train-00000.tar") as tar:
        bodies = [tar.extractfile(member).read() for member in tar if member.name.endswith(".webp")]  # type: ignore[union-attr]
    originals = [Image.open(io.BytesIO(body)).convert("RGB") for body in bodies[:120]]
    hashes = np.array([perceptual_hash(image) for image in originals], dtype=np.uint64)
    for how in range(3):
        copies = np.array(
            [perceptual_hash(altered(image, how)) for image in originals], dtype=np.uint64
        )
        assert np.mean(np.bitwise_count(hashes ^ copies) <= 4) > 0.7
    distances = np.bitwise_count(hashes[:, None] ^ hashes[None])[np.triu_indices(len(hashes), 1)]
    assert np.mean(distances <= 4) < 3e-4
    assert perceptual_hash(Image.new("RGB", (50, 50), (9, 9, 9))) is None


def greedy(hashes: np.ndarray, distance: int) -> np.ndarray:
    """The definition: in order, drop what is close to something kept."""
    kept: list[int] = []
    dropped = np.zeros(len(hashes), dtype=bool)
    for place, value in enumerate(hashes.tolist()):
        dropped[place] = any((value ^ other).bit_count() <= distance for other in kept)
        if not dropped[place]:
            kept.append(value)
    return dropped


@given(st.integers(0, MAX_DISTANCE), st.integers(0, 2**32), st.integers(1, 120))
def test_near_duplicates_are_those_of_all_pairs(distance: int, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, 2**64, count, dtype=np.uint64)
    for _ in range(count):  # families of close hashes, of every size of difference
        source, target = rng.integers(count, size=2)
        flips = rng.choice(64, size=rng.integers(0, distance + 3), replace=False)
        hashes[target] = hashes[source] ^ np.uint64(sum(1 << int(bit) for bit in flips))
    assert np.array_equal(near_duplicates(hashes, distance), greedy(hashes, distance))


def rows_of(owners: list[str], seed: int = 0) -> np.ndarray:
    """Examples of different content, whose pictures have no features."""
    content = [
        hashlib.sha256(f"{seed} {number}".encode()).digest()[:16] for number in range(len(owners))
    ]
    rows = [
        (one, 0, False, owner_digest(owner), one)
        for one, owner in zip(content, owners, strict=True)
    ]
    return np.array(rows, dtype=ROW)


@given(
    st.lists(st.sampled_from("abcde"), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_owner_limit_keeps_exactly_k_by_content(owners: list[str], limit: int, seed: int) -> None:
    rows = rows_of(owners)
    over = is_over_limit(rows, limit, seed)
    for owner in set(owners):
        mine = np.array([name == owner for name in owners])
        assert (~over[mine]).sum() == min(limit, mine.sum())
        # An owner's choice knows nothing of the others, nor of the order.
        assert np.array_equal(is_over_limit(rows[mine], limit, seed), over[mine])
    order = np.random.default_rng(seed).permutation(len(owners))
    assert np.array_equal(is_over_limit(rows[order], limit, seed), over[order])


def test_share_is_what_was_asked_for_whatever_the_groups_are() -> None:
    count = 20_000
    rows = rows_of([f"{number // 10}" if number < count // 2 else "" for number in range(count)])
    for share in (0.01, 0.1, 0.5):
        chosen = choose_heldout(rows, share, seed=1)
        for half, groups in (
            (chosen[: count // 2], count // 20),
            (chosen[count // 2 :], count // 2),
        ):
            assert abs(half.mean() - share) < 5 * (share * (1 - share) / groups) ** 0.5
