"""The prepare command as a user runs it."""

import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError
from launch_scripts.prepare import (
    ImportOptions,
    IndexOptions,
    SyntheticOptions,
    VerifyOptions,
    import_pairs,
    index,
    main,
    synthetic,
    verify,
)
from trainer.config.cli import run_command

ROOT = Path(__file__).resolve().parents[2]
Prepare = Callable[..., tuple[int, str, str]]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Prepare:
    """Runs prepare.py in this process: its exit code and what it printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments), "--workers", "1"])
        with pytest.raises(SystemExit) as ended:
            run_command(main)
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_index_and_verify_which_finds_a_changed_byte(tmp_path: Path, prepare: Prepare) -> None:
    shards = ROOT / "data" / "demo" / "train-{00000..00001}.tar"
    code, out, err = prepare("index", shards, "--output", tmp_path / "index")
    assert code == 0 and out.startswith("2000 examples in 2 shards"), err
    code, out, _ = prepare("verify", shards, "--index", tmp_path / "index")
    assert code == 0 and "are what was indexed" in out
    copy = tmp_path / "copy.tar"
    copy.write_bytes((ROOT / "data" / "demo" / "heldout-00000.tar").read_bytes())
    assert prepare("index", copy, "--output", tmp_path / "other")[0] == 0
    data = bytearray(copy.read_bytes())
    data[700] ^= 1
    copy.write_bytes(data)
    code, _, err = prepare("verify", copy, "--index", tmp_path / "other")
    assert code == 2 and "is not what was indexed" in err


def test_a_folder_holds_its_own_index(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --output; bad shards are named together."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "data" / "demo", tmp_path / "shards")
    code, out, err = prepare("index", "shards")
    assert code == 0 and out.rstrip().endswith(": shards/index"), err
    assert (tmp_path / "shards" / "index" / "manifest.json").is_file()
    for name in ("train-00001.tar", "heldout-00000.tar"):
        os.truncate(tmp_path / "shards" / name, 20_000)
    code, out, err = prepare("index", "shards")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "train-00001.tar" in err and "heldout-00000.tar is cut off" in err


def test_every_command_is_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook makes pictures, imports, indexes and verifies them without a command line."""
    shards, clean = tmp_path / "shards", tmp_path / "clean"
    synthetic(
        SyntheticOptions(
            output=shards, num_examples=12, image_size=24, image_format="png", workers=1
        )
    )
    with tarfile.open(next(shards.glob("*.tar"))) as tar:
        tar.extractall(tmp_path / "pictures", filter="data")
    pictures: dict[str, Any] = {"source": str(tmp_path / "pictures"), "source_format": "folder"}
    report = import_pairs(
        ImportOptions(**pictures, output=clean, keep_near_duplicates=True, workers=1)
    )
    assert report is not None and report["read"] == 12
    table = index(IndexOptions(shards=str(clean), workers=1))
    assert table is not None and len(table) == report["written"]
    capsys.readouterr()
    verify(VerifyOptions(shards=str(clean), index=clean / "index", workers=1))
    assert capsys.readouterr().out == "1 shards with 12 examples are what was indexed\n"
    with pytest.raises(DataError, match="--output"):
        index(IndexOptions(shards=str(clean / "*.tar"), workers=1))
