"""Builds the embedded demo: about 3,500 small clip-art pictures with captions, as webdataset tar shards.

    python tools/demo_build.py --source /usr/share/openclipart --output data/demo

Deterministic: the same source gives the same members in the same order (order and held-out choice come from hashes of
the file names). Pictures that look alike or read alike stay together on one side of the split.
"""

import argparse
import hashlib
import io
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import DataError
from data.examples.transforms import to_rgb
from data.index.tar_writer import write_shard
from tools.demo_captions import Captioner, read_metadata
from trainer.config.cli import Parser, run_command

IMAGE_SIZE = 96
MAX_IMAGE_BYTES = 1536  # three tar blocks
NUM_TRAIN, NUM_HELDOUT, SHARD_EXAMPLES = 3000, 500, 1000
_THUMB = 16
_MAX_SOURCE_PIXELS = 16_000_000  # a few drawings were rendered at 15,000 pixels a side
_DUPLICATE_SIMILARITY = 0.995
_RELATED_SIMILARITY = 0.96
_MAX_HELDOUT_GROUP = 4
_MAX_SAME_CAPTION = 4
_QUALITIES = (90, 80, 70, 60, 50, 40, 30, 20, 10)


@dataclass(frozen=True)
class Picture:
    """One candidate: its file, caption, encoded image and thumbnail (flat, centred, of length 1)."""

    path: str
    caption: str
    image: bytes
    thumb_D: np.ndarray

    @property
    def order(self) -> bytes:
        """A stable pseudo-random place."""
        return hashlib.sha256(self.path.encode()).digest()

    @property
    def key(self) -> str:
        """Member name without extension: the path in plain letters."""
        return re.sub(r"[^a-z0-9_-]+", "-", self.path.lower()).strip("-")[:80] + "-" + self.order.hex()[:6]


def build_demo(source: Path, words_file: Path, output: Path, report: Callable[[str], None]) -> tuple[int, int]:
    """Reads an installed openclipart (png and svg folders) and writes train-*.tar and heldout-00000.tar.

    Args:
        source: folder with `png/` and `svg/`.
        words_file: English words, one per line (Debian: wamerican).
        output: folder for the shards; its README is not touched.
        report: receives one line per stage.

    Returns:
        (number of training examples, number of held-out examples).

    Raises:
        DataError: nothing usable in the source.
    """
    if not (source / "svg").is_dir() or not (source / "png").is_dir():
        raise DataError(f"{source} has no png and svg folders; install Debian's openclipart-png and openclipart-svg")
    if not words_file.is_file():
        raise DataError(f"there is no word list {words_file}; install Debian's wamerican or name one with --words")
    listed = [read_metadata(path, source / "svg") for path in sorted((source / "svg").rglob("*.svg"))]
    files = [file for file in listed if file is not None and re.search("public.?domain", file.licence, re.IGNORECASE)]
    report(f"{len(listed)} files, {len(files)} of them tagged public domain")
    if not files:
        raise DataError(f"{source}/svg has no files tagged public domain")
    captioner = Captioner(files, frozenset(words_file.read_text(encoding="utf-8").split()))
    jobs = [(str(source / "png" / f"{file.path}.png"), file.path, captioner.caption(file)) for file in files]
    with ProcessPoolExecutor() as pool:
        candidates = list(pool.map(make_picture, *zip(*jobs, strict=True), chunksize=64))
    pictures = sorted((picture for picture in candidates if picture is not None), key=lambda picture: picture.order)
    report(f"{len(pictures)} with a caption and something to see")
    pictures = without_duplicates(pictures)
    report(f"{len(pictures)} without duplicates")
    train, heldout = split(pictures)
    output.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(train), SHARD_EXAMPLES):
        _write_shard(output / f"train-{start // SHARD_EXAMPLES:05d}.tar", train[start : start + SHARD_EXAMPLES])
    _write_shard(output / "heldout-00000.tar", heldout)
    return len(train), len(heldout)


def make_picture(png: str, path: str, caption: str | None) -> Picture | None:
    """The candidate of a file, or None where there is no caption or nearly nothing to see."""
    if caption is None or not Path(png).is_file():
        return None
    try:
        with Image.open(png) as opened:
            if opened.width * opened.height > _MAX_SOURCE_PIXELS:
                return None
            image = to_rgb(opened).copy()
    except Image.DecompressionBombError:
        return None
    # White margins are cut, and the rest is centred on a white square.
    box = ImageChops.difference(image, Image.new("RGB", image.size, (255, 255, 255))).getbbox()
    if box is None:
        return None
    cut = image.crop(box)
    side = round(max(cut.size) * 1.08)
    square = Image.new("RGB", (side, side), (255, 255, 255))
    square.paste(cut, ((side - cut.width) // 2, (side - cut.height) // 2))
    square = square.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)
    values_D = np.asarray(square.resize((_THUMB, _THUMB), Image.Resampling.BOX), dtype=np.float32).ravel()
    values_D = values_D - values_D.mean()
    norm = float(np.linalg.norm(values_D))
    if norm < 150:  # nearly one colour
        return None
    return Picture(path, caption, _encode(square), values_D / norm)


def _encode(image: Image.Image) -> bytes:
    """WebP, the best quality that fits three blocks; smaller in the rare case that none does."""
    for size in (IMAGE_SIZE, IMAGE_SIZE * 2 // 3, IMAGE_SIZE // 2):
        resized = image if size == IMAGE_SIZE else image.resize((size, size), Image.Resampling.LANCZOS)
        for quality in _QUALITIES if size < IMAGE_SIZE else _QUALITIES[:-2]:
            buffer = io.BytesIO()
            resized.save(buffer, "WEBP", quality=quality, method=6)
            if buffer.tell() <= MAX_IMAGE_BYTES:
                return buffer.getvalue()
    raise AssertionError("a 48 x 48 picture at quality 10 fits")


def without_duplicates(pictures: Sequence[Picture]) -> list[Picture]:
    """Keeps the first of pictures that look the same, and at most four with one caption."""
    thumbs_ND = np.stack([picture.thumb_D for picture in pictures])
    kept: list[int] = []
    same_caption: Counter[str] = Counter()
    for index, picture in enumerate(pictures):
        if same_caption[picture.caption] >= _MAX_SAME_CAPTION:
            continue
        if kept and float((thumbs_ND[kept] @ picture.thumb_D).max()) > _DUPLICATE_SIMILARITY:
            continue
        kept.append(index)
        same_caption[picture.caption] += 1
    return [pictures[index] for index in kept]


def split(pictures: Sequence[Picture]) -> tuple[list[Picture], list[Picture]]:
    """Held-out pictures are whole small groups of related ones; theme icons, the plainest, only fill up the rest.

    Related are pictures that are alike in looks, in caption, or in file name up to digits, and those related to them.
    """
    parent = list(range(len(pictures)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    thumbs_ND = np.stack([picture.thumb_D for picture in pictures])
    for index in range(len(pictures)):
        for other in np.flatnonzero(thumbs_ND[:index] @ thumbs_ND[index] > _RELATED_SIMILARITY):
            parent[find(index)] = find(int(other))
    first: dict[str, int] = {}
    for index, picture in enumerate(pictures):
        series = re.sub(r"[\d_-]+", "", picture.path)
        for label in (picture.caption.partition(",")[0], series):
            parent[find(index)] = find(first.setdefault(label, index))
    groups: defaultdict[int, list[Picture]] = defaultdict(list)
    for index, picture in enumerate(pictures):
        groups[find(index)].append(picture)
    heldout: list[Picture] = []
    for members in sorted(groups.values(), key=lambda members: min(picture.order for picture in members)):
        icons = sum(_is_theme_icon(picture) for picture in members)
        if len(members) <= _MAX_HELDOUT_GROUP and not icons and len(heldout) + len(members) <= NUM_HELDOUT:
            heldout += members
    heldout_paths = {picture.path for picture in heldout}
    rest = sorted((p for p in pictures if p.path not in heldout_paths), key=lambda p: (_is_theme_icon(p), p.order))
    return sorted(rest[:NUM_TRAIN], key=lambda p: p.order), sorted(heldout, key=lambda p: p.order)


def _is_theme_icon(picture: Picture) -> bool:
    return re.search(r"computer/icons/.*-theme", picture.path) is not None


def _write_shard(path: Path, pictures: Iterable[Picture]) -> None:
    write_shard(path, ((picture.key, {"webp": picture.image, "txt": picture.caption.encode()}) for picture in pictures))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a bad argument is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source, words = Path("/usr/share/openclipart"), Path("/usr/share/dict/words")
    parser.add_argument("--source", type=Path, default=source, metavar="DIR", help=f"png/ and svg/ (default: {source})")
    parser.add_argument("--words", type=Path, default=words, metavar="FILE", help=f"one a line (default: {words})")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the shards")
    return parser.parse_args(arguments)


def main() -> None:
    """Builds the demo."""
    arguments = parse_args()
    num_train, num_heldout = build_demo(
        arguments.source, arguments.words, arguments.output, lambda line: print(line, file=sys.stderr)
    )
    print(f"{num_train} training and {num_heldout} held-out examples: {arguments.output}")


if __name__ == "__main__":
    run_command(main)
