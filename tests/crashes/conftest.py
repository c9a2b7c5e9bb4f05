"""Where disks are explored."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory, where there is one."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        yield tmp_path_factory.mktemp("disk")
        return
    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder)
