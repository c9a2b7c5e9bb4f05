import os
from pathlib import Path

import pytest

from trainer.run import files
from trainer.run.files import write_durably


def test_replaces(tmp_path: Path) -> None:
    path = tmp_path / "LATEST"
    write_durably(path, "one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["LATEST"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "LATEST"
    write_durably(path, "old")

    def fail(_: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files, "fsync_path", fail)
    with pytest.raises(OSError, match="disk full"):
        write_durably(path, "new and longer")
    assert path.read_text() == "old"


def test_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming first could leave an empty file under the final name after a power cut."""
    order: list[tuple[str, bool]] = []
    path = tmp_path / "LATEST"
    monkeypatch.setattr(files, "fsync_path", lambda p: order.append((p.name, path.exists())))
    write_durably(path, "x")
    assert order == [(".LATEST.tmp", False), (tmp_path.name, True)]
