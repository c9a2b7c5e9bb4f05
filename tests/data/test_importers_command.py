"""`prepare.py import` as a user runs it."""

import os
import shlex
import time
from pathlib import Path

import numpy as np
import pytest

from data.index.build import build_index
from data.index.shards import find_shards
from launch_scripts.prepare import main
from tests.data.test_importers_pipeline import pictures, rows_of, write_csv
from tests.processes import Forked, kill_group, run_python


def command(*arguments: str | Path) -> list[str]:
    return ["launch_scripts/prepare.py", "import", *map(str, arguments)]


def test_command_prints_what_was_dropped(tmp_path: Path) -> None:
    pictures(tmp_path / "in", 4)
    write_csv(tmp_path / "in" / "t.csv", rows_of(["000.jpg", "001.jpg", "gone.jpg"]))
    arguments = ("--from", "csv", tmp_path / "in" / "t.csv", "--output", tmp_path / "out", "--workers", "1")
    done = run_python(command(*arguments), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 of 3 items" in done.stdout and "no such file" in done.stdout and "private" in done.stdout


def test_the_next_command_is_said_with_the_number_of_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "in", tmp_path / "my pictures"
    for row in rows_of(pictures(folder, 30)):
        (folder / row["image"]).with_suffix(".txt").write_text(row["caption"])
    (folder / "copy.jpg").write_bytes((folder / "000.jpg").read_bytes())
    (folder / "copy.txt").write_text("looks like another")
    options = ["--heldout_share", "0.3", "--workers", "1", "--output", str(out)]
    assert main(["import", "--from", "folder", str(folder), *options]) == 0
    said = capsys.readouterr().out
    pairs = len(build_index(find_shards(str(out), tmp_path), tmp_path / "index"))
    assert 5 < pairs < 30 and said.splitlines()[-1].startswith(
        f"{pairs} training pairs; next: python launch_scripts/plan.py "
    )
    assert {f"data.shards={out}", f"data.num_examples={pairs}"} < set(shlex.split(said.splitlines()[-1]))
    assert "--keep_near_duplicates" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "csv", "missing.csv"), "there is no missing.csv"),
        (("--from", "csv", "README.md"), "does not end in"),
        (("--from", "folder", "README.md"), "no folder"),
        (("--from", "folder", "docs", "--max_per_owner", "2"), "or neither"),
        (("--from", "folder", "docs", "--duplicate_distance", "40"), "0 to 10"),
        (("--from", "folder", "docs", "--prefix", "../x"), "prefix"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    line = command(*arguments, "--output", tmp_path / "out", "--workers", "1")
    done = run_python(line, timeout=120)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_killed_import_goes_on(tmp_path: Path) -> None:
    """SIGKILL of the whole process group at several moments; the end is that of an undisturbed import."""
    folder = tmp_path / "in"
    names = pictures(folder, 40)
    write_csv(folder / "t.csv", rows_of(names * 75))  # six parts
    arguments = (
        "--from",
        "csv",
        folder / "t.csv",
        "--size",
        "64",
        "--shard_examples",
        "10",
        "--workers",
        "2",
        "--output",
    )
    assert run_python(command(*arguments, tmp_path / "plain"), timeout=300).returncode == 0
    kills = 0
    for seconds in np.linspace(1.0, 8.0, 8):
        process = Forked(command(*arguments, tmp_path / "killed"), stdout=Path(os.devnull))
        time.sleep(float(seconds))
        kills += process.poll() is None
        kill_group(process)
    assert run_python(command(*arguments, tmp_path / "killed"), timeout=300).returncode == 0
    assert kills >= 2
    found = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("plain", "killed")]
    assert found[0] == found[1]
