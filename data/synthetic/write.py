"""Synthetic tar shards, written by several processes, with their provenance in the same folder.

A shard is a function of its settings and its number, so that any number of processes writes the same bytes, and an
interrupted run goes on with the shards that are missing.
"""

import json
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

from data.errors import DataError, ReadError
from data.examples.transforms import encoded
from data.files import write_durably
from data.index.tar_writer import write_shard
from data.reading.pool import run_all
from data.synthetic.generate import GENERATOR_VERSION, SyntheticData

PROVENANCE = "provenance.json"
_STATEMENT = (
    "Pictures and captions were computed from a seed by programs of this project. No photograph, no person and no other "
    "data set was used, so training on them costs no privacy."
)
_OF_SCENES = (
    "Pictures and captions were computed from a seed by programs of this project, from photographs of clothes (Fashion-MNIST) "
    "and printed letters that are public."
)


@dataclass(frozen=True)
class Settings:
    """What the shards are a function of.

    Attributes:
        num_examples: how many all shards hold together.
        image_size: side in pixels.
        seed: the generator's.
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
        """The generator of these examples; bad settings are a DataError."""
        return SyntheticData(self.seed, self.image_size, self.content)

    def shard_name(self, shard: int) -> str:
        return f"synthetic-{shard:05d}.tar"

    def indices(self, shard: int) -> range:
        """Example indices of a shard."""
        start = shard * self.shard_examples
        return range(start, min(start + self.shard_examples, self.num_examples))


def write_synthetic(
    output: Path,
    settings: Settings,
    *,
    executor: Executor | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Path:
    """Writes all shards that are not there yet, and `provenance.json`.

    Args:
        output: folder of the shards; a folder with other content is refused.
        settings: what the shards are a function of.
        executor: workers of `pool.worker_pool`; None works in this process.
        advance: called with the number of examples of every shard that is done.

    Returns:
        The path of the provenance.

    Raises:
        DataError: a setting is out of range, or the folder holds something else or cannot be written.
    """
    settings.data()  # Bad settings are refused before the folder is made.
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
        if path.exists():  # the folder has to hold a part of exactly these examples
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{path} is damaged ({error}); choose an empty folder") from error
            known = before if isinstance(before, dict) else {}
            if differing := [key for key in record if known.get(key) != record[key]]:
                raise DataError(
                    f"{output} holds other data (it differs in {', '.join(differing)}); choose an empty folder"
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
        advance(settings.num_examples - sum(len(settings.indices(shard)) for shard in missing))
        jobs = [(output, settings, shard) for shard in missing]
        for count in run_all(executor, write_one, jobs):
            advance(count)
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        raise DataError(f"cannot write to {output}: {error.strerror or error}") from error
    return path


def write_one(output: Path, settings: Settings, shard: int) -> int:
    """One job: writes a shard, and returns its number of examples."""
    kind, indices = settings.image_format, settings.indices(shard)
    # Thin coloured lines keep their colour in a JPEG.
    how = {"jpg": {"subsampling": 0}, "webp": {"method": 2}}.get(kind, {})
    examples = (
        (
            f"{index:012d}",
            {
                kind: encoded(Image.fromarray(made.image_HWC), kind, **how),
                "txt": made.caption.encode(),
            },
        )
        for index, made in zip(indices, settings.data().examples(indices), strict=True)
    )
    return write_shard(output / settings.shard_name(shard), examples)
