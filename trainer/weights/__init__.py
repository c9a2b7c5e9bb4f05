"""Weights of other projects, in and out, and the provenance of the data behind weights.

Argument parsers import this file, so it imports nothing heavy.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from data.files import fsync_path
from trainer.errors import ConfigError

Format = Literal["hf", "peft", "safetensors", "timm"]
Provenance = Literal["private", "public", "synthetic"]


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill, renamed to `path` at the end; an error removes it.

    Raises:
        ConfigError: `path` exists and is not an empty folder, or cannot be made.
    """
    require_new(path)
    temporary = path.resolve().with_name(f".{path.resolve().name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror or error}") from error
    try:
        yield temporary
        for file in temporary.rglob("*"):
            fsync_path(file)
        temporary.replace(path)
        fsync_path(path.resolve().parent)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_new(path: Path) -> None:
    """Refuses a path where an export would overwrite files.

    Raises:
        ConfigError: `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{path} exists and is not empty: nothing is overwritten; give another folder"
        )
