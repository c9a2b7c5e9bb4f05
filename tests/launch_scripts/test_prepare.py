"""The prepare command as a user runs it."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from data.errors import DataError
from launch_scripts.prepare import (
    ImportOptions,
    IndexOptions,
    SyntheticOptions,
    VerifyOptions,
    import_pairs,
    index,
    synthetic,
    verify,
)  # fmt: skip
from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]


def prepare(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run_python([ROOT / "launch_scripts" / "prepare.py", *map(str, arguments)], cwd=cwd, timeout=100)


def test_index_and_verify_which_finds_a_changed_byte(tmp_path: Path) -> None:
    shards = ROOT / "data" / "demo" / "train-{00000..00001}.tar"
    done = prepare("index", shards, "--output", tmp_path / "index", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("2000 examples in 2 shards"), done.stderr
    done = prepare("verify", shards, "--index", tmp_path / "index")
    assert done.returncode == 0 and "are what was indexed" in done.stdout
    done = prepare("verify", shards, "--index", tmp_path / "index", "--sample", 20)
    assert done.returncode == 0 and "20 of 2000 examples: 20 usable, 0 without image" in done.stdout
    copy = tmp_path / "copy.tar"
    copy.write_bytes((ROOT / "data" / "demo" / "heldout-00000.tar").read_bytes())
    assert prepare("index", copy, "--output", tmp_path / "other").returncode == 0
    data = bytearray(copy.read_bytes())
    data[700] ^= 1
    copy.write_bytes(data)
    done = prepare("verify", copy, "--index", tmp_path / "other")
    assert done.returncode == 2 and "is not what was indexed" in done.stderr


def test_verify_of_a_sample_that_nobody_can_use_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same rule as at the start of a run: more than half of what was looked at."""
    for share in (0.25, 0.75):
        path, folder = tmp_path / f"{share}.tar", tmp_path / f"index-{share}"
        with tarfile.open(ROOT / "data" / "demo" / "heldout-00000.tar") as source, tarfile.open(path, "w") as target:
            members = source.getmembers()[:40]
            for number, member in enumerate(members):
                member.size = 0 if member.name.endswith("webp") and number < share * len(members) else member.size
                target.addfile(member, source.extractfile(member) if member.size else None)
        index(IndexOptions(shards=str(path), output=folder, workers=1))
        options = VerifyOptions(shards=str(path), index=folder, sample=20, workers=1)
        if share < 0.5:
            verify(options)
        else:
            with pytest.raises(DataError, match=r"15 of 20 examples cannot be used") as caught:
                verify(options)
            assert "\n" not in str(caught.value)
        assert "20 of 20 examples: " in capsys.readouterr().out


def test_a_folder_holds_its_own_index(tmp_path: Path) -> None:
    """Without --output; also under the name that another command gives."""
    shutil.copytree(ROOT / "data" / "demo", tmp_path / "shards")
    done = prepare("index", "shards", "--workers", 1, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.rstrip().endswith(": shards/index"), done.stderr
    assert (tmp_path / "shards" / "index" / "manifest.json").is_file()
    done = prepare("verify", "shards", "--index", "shards/index", "--workers", 1, cwd=tmp_path)
    assert done.returncode == 0 and "are what was indexed" in done.stdout
    # Bad shards are listed there, and the list is what --exclude takes.
    for name in ("train-00001.tar", "heldout-00000.tar"):
        os.truncate(tmp_path / "shards" / name, 20_000)
    done = prepare("index", "shards", "--workers", 1, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "train-00001.tar" in done.stderr and "heldout-00000.tar is cut off" in done.stderr
    [listed] = re.findall(r"(\S*bad-shards\.txt)", done.stderr)
    done = prepare("index", "shards", "--workers", 1, "--exclude", listed, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("2000 examples in 2 shards")
    assert done.stderr == "2 shards are excluded\n"


def test_every_command_is_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook makes pictures, imports, indexes and verifies them without a command line."""
    shards, clean = tmp_path / "shards", tmp_path / "clean"
    synthetic(SyntheticOptions(output=shards, num_examples=12, image_size=24, image_format="png", workers=1))
    with tarfile.open(next(shards.glob("*.tar"))) as tar:
        tar.extractall(tmp_path / "pictures", filter="data")
    report = import_pairs(
        ImportOptions(
            source=str(tmp_path / "pictures"),
            source_format="folder",
            output=clean,
            keep_near_duplicates=True,
            workers=1,
        )
    )
    assert report is not None and report["read"] == 12
    table = index(IndexOptions(shards=str(clean), workers=1))
    assert table is not None and len(table) == report["written"]
    capsys.readouterr()
    verify(VerifyOptions(shards=str(clean), index=clean / "index", sample=5, workers=1))
    assert capsys.readouterr().out.startswith("5 of ")
    with pytest.raises(DataError, match="--output"):
        index(IndexOptions(shards=str(clean / "*.tar"), workers=1))
