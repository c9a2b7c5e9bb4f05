"""Shards of synthetic examples: reproducible, resumable, with provenance; the command."""

import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from data.errors import DataError
from data.examples.transforms import denormalize, eval_image
from data.reading.pool import worker_pool
from data.synthetic.generate import GENERATOR_VERSION, SyntheticData
from data.synthetic.write import PROVENANCE, Settings, write_synthetic
from tests.processes import run_python

SETTINGS = Settings(num_examples=25, image_size=32, seed=5, shard_examples=10)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    counts: list[int] = []
    write_synthetic(tmp_path / "one", SETTINGS, advance=counts.append)
    assert sum(counts) == 25
    with worker_pool(2) as pool:
        write_synthetic(tmp_path / "two", SETTINGS, executor=pool.executor)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sorted(contents(tmp_path / "one")) == [PROVENANCE, *(f"synthetic-0000{k}.tar" for k in range(3))]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    write_synthetic(tmp_path, SETTINGS)
    whole = contents(tmp_path)
    (tmp_path / "synthetic-00001.tar").unlink()
    untouched = (tmp_path / "synthetic-00000.tar").stat().st_mtime_ns
    counts: list[int] = []
    write_synthetic(tmp_path, SETTINGS, advance=counts.append)
    assert contents(tmp_path) == whole and counts == [15, 10]
    assert (tmp_path / "synthetic-00000.tar").stat().st_mtime_ns == untouched


def test_shards_hold_the_examples(tmp_path: Path) -> None:
    write_synthetic(tmp_path, SETTINGS)
    with tarfile.open(tmp_path / "synthetic-00002.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert list(members)[:2] == ["000000000020.jpg", "000000000020.txt"] and len(members) == 10
    example = SyntheticData(5, 32).example(20)
    assert members["000000000020.txt"].decode() == example.caption
    decoded = denormalize(eval_image(members["000000000020.jpg"], 32))
    assert np.abs(decoded.astype(int) - example.image_HWC).mean() < 6


def test_provenance_says_where_they_come_from(tmp_path: Path) -> None:
    record = json.loads(write_synthetic(tmp_path, SETTINGS).read_text())
    assert (record["seed"], record["image_size"], record["generator_version"]) == (5, 32, GENERATOR_VERSION)
    assert record["libraries"] == f"numpy {np.__version__}, Pillow {PIL.__version__}"
    assert "No photograph" in record["statement"]


@pytest.mark.parametrize("change", [{"seed": 6}, {"num_examples": 26}, {"image_format": "webp"}])
def test_a_folder_with_other_examples_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write_synthetic(tmp_path, SETTINGS)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=f"differs in {next(iter(change))}"):
        write_synthetic(tmp_path, Settings(**(vars(SETTINGS) | change)))  # type: ignore[arg-type]
    assert contents(tmp_path) == before


def test_a_folder_with_foreign_or_damaged_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.tar").write_bytes(b"x")
    with pytest.raises(DataError, match=r"without provenance\.json"):
        write_synthetic(tmp_path, SETTINGS)
    (tmp_path / PROVENANCE).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        write_synthetic(tmp_path, SETTINGS)


def prepare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_python(["launch_scripts/prepare.py", *arguments], timeout=120)


def test_command_writes_shards_that_can_be_indexed(tmp_path: Path) -> None:
    shards = ("synthetic", "--output", tmp_path / "s", "--num_examples", "12", "--image_size", "24", "--workers", "1")
    done = prepare(*shards, "--preview", tmp_path / "sheet.png")
    assert done.returncode == 0, done.stderr
    assert "12 examples in 1 shards" in done.stdout
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 1000
    done = prepare("index", tmp_path / "s", "--output", tmp_path / "index", "--workers", "1")
    assert done.returncode == 0 and done.stdout.startswith("12 examples in 1 shards"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--output"),
        (("--output", "x"), "--num_examples"),
        (("--output", "x", "--num_examples", "0"), "at least 1"),
        (("--output", "/proc/x", "--num_examples", "1", "--workers", "1"), "cannot write"),
        (("--preview", "/proc/x.png"), "cannot write"),
        (("--preview", "x.png", "--image_size", "5"), "16 to 4096"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    done = prepare("synthetic", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
