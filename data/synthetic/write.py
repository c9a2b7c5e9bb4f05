"""Writes synthetic tar shards in several processes, with their provenance in the same folder.

A shard is a function of its settings and its number, so that any number of processes writes the
same bytes, and an interrupted run continues with the missing shards.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

from data.errors import DataError, ReadError
from data.examples.transforms import encode_image
from data.files import write_durably
from data.index.tar_writer import Example, write_shard
from data.reading.pool import run_all
from data.synthetic.generate import GENERATOR_VERSION, SyntheticData

PROVENANCE = "provenance.json"
_STATEMENT = (
    "Pictures and captions were computed from a seed by programs of this project. No photograph, "
    "no person and no other data set was used, so training on them costs no privacy."
)
_OF_SCENES = (
    "Pictures and captions were computed from a seed by programs of this project, from photographs "
    "of clothes (Fashion-MNIST) and printed letters that are public."
)


@dataclass(frozen=True)
class Settings:
    """The settings that determine the shards.

    Attributes:
        num_examples: of all shards together.
        image_size: side in pixels.
        seed: of the generator.
        image_format: jpg, webp or png.
        shard_examples: examples per shard.
        content: one of CONTENTS.
    """

    num_examples: int
    image_size: int
    seed: int
    image_format: str = "jpg"
    shard_examples: int = 5000
    content: str = "all"

    @property
    def num_shards(self) -> int:
        return -(-self.num_examples // self.shard_examples)

    def data(self) -> SyntheticData:
        """Returns the generator of these examples; refuses bad settings with a DataError."""
        return SyntheticData(self.seed, self.image_size, self.content)

    def shard_name(self, shard: int) -> str:
        return f"synthetic-{shard:05d}.tar"

    def indices(self, shard: int) -> range:
        """Returns the example indices of a shard."""
        start = shard * self.shard_examples
        return range(start, min(start + self.shard_examples, self.num_examples))


def write_synthetic(
    output: Path,
    settings: Settings,
    *,
    executor: Executor | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Path:
    """Writes all missing shards, and `provenance.json`.

    Args:
        output: folder of the shards; a folder with other content is refused.
        settings: they determine the shards.
        executor: workers of `pool.worker_pool`; None works in this process.
        advance: called with the number of examples of each finished shard.

    Returns:
        The path of the provenance.

    Raises:
        DataError: a setting is out of range, or the folder has other content or cannot be written.
    """
    # Bad settings are refused before the folder is made.
    settings.data()
    record = {
        "kind": "synthetic",
        "generator_version": GENERATOR_VERSION,
        **asdict(settings),
        "libraries": f"numpy {np.__version__}, Pillow {PIL.__version__}",
        "statement": _OF_SCENES if settings.content == "scenes" else _STATEMENT,
    }
    try:
        path = output / PROVENANCE
        output.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # The folder must have a part of exactly these examples.
            try:
                folder_record = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{path} is damaged ({error}); choose an empty folder") from error
            if not isinstance(folder_record, dict):
                folder_record = {}
            differing_keys = [key for key in record if folder_record.get(key) != record[key]]
            if differing_keys:
                raise DataError(
                    f"{output} holds other data (it differs in {', '.join(differing_keys)}); "
                    "choose an empty folder"
                )
        elif any(output.glob("*.tar")):
            raise DataError(f"{output} holds shards without {PROVENANCE}; choose an empty folder")
        else:
            write_durably(path, json.dumps(record, indent=1) + "\n")
        missing = [
            shard
            for shard in range(settings.num_shards)
            if not (output / settings.shard_name(shard)).exists()
        ]
        num_missing = sum(len(settings.indices(shard)) for shard in missing)
        advance(settings.num_examples - num_missing)
        jobs = [(output, settings, shard) for shard in missing]
        for count in run_all(executor, write_one, jobs):
            advance(count)
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        raise DataError(f"cannot write to {output}: {error.strerror or error}") from error
    return path


def write_one(output: Path, settings: Settings, shard: int) -> int:
    """Writes a shard, as one job, and returns its number of examples."""
    image_format = settings.image_format
    indices = settings.indices(shard)
    # Without subsampling thin coloured lines keep their colour in a JPEG.
    encoder_settings = {"jpg": {"subsampling": 0}, "webp": {"method": 2}}.get(image_format, {})

    def examples() -> Iterator[Example]:
        for index, example in zip(indices, settings.data().examples(indices), strict=True):
            image = Image.fromarray(example.image_HWC)
            image_bytes = encode_image(image, image_format, **encoder_settings)
            yield f"{index:012d}", {image_format: image_bytes, "txt": example.caption.encode()}

    return write_shard(output / settings.shard_name(shard), examples())
