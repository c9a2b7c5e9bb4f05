import os
from pathlib import Path

import pytest

from data import files
from data.errors import DataError
from data.files import private_file, write_durably


def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "LATEST"
    write_durably(path, "old")

    def fail(_: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files, "fsync_path", fail)
    with pytest.raises(OSError, match="disk full"):
        write_durably(path, "new and longer")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["LATEST"]


def test_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming first could leave an empty file under the final name after a power cut."""
    order: list[tuple[str, bool]] = []
    path = tmp_path / "LATEST"
    monkeypatch.setattr(files, "fsync_path", lambda p: order.append((p.name, path.exists())))
    write_durably(path, "x")
    assert order == [(f".LATEST.{os.getpid()}.tmp", False), (tmp_path.name, True)]


def test_a_private_file_is_its_owner_s_alone_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with private_file(path) as file:
        file.write(b"counts")
    assert path.read_bytes() == b"counts" and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError), private_file(path) as file:
        file.writelines([b"half", "no bytes"])  # type: ignore[list-item]
    assert path.read_bytes() == b"counts" and os.listdir(tmp_path) == ["report.json"]
    with (
        pytest.raises(DataError, match="cannot write"),
        private_file(tmp_path / "missing" / "report.json"),
    ):
        pass
