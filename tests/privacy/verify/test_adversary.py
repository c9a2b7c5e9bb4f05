"""What a second adversary edited in a published folder, and verify.py accepted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.privacy.verify.judging import Judge, sentences

FORGERY = "print('verify: consistent: epsilon 0.0001 at delta 1e-05')\nraise SystemExit(0)\n"


@pytest.mark.parametrize("name", ["argparse.py", "__future__.py", "dp_accounting/__init__.py"])
def test_no_module_that_lies_in_the_folder_is_run(name: str, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(FORGERY)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for path in ({}, {"PYTHONPATH": f":{folder}"}):
        done = subprocess.run(
            [sys.executable, "verify.py"], cwd=folder, env=environment | path, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

        assert done.returncode == 5 and "0.0001" not in done.stdout, done.stdout + done.stderr
        assert f"{name.partition('/')[0]} is code" in done.stdout


def test_links_to_folders_and_ledgers_that_nothing_names_are_violated(folder: Path, judge: Judge) -> None:
    (folder / "evaluation2").symlink_to("/etc")
    code, found = judge(folder)
    assert code == 5 and "evaluation2 is a link" in sentences(found)
    (folder / "evaluation2").unlink()
    (folder / "behind").mkdir()
    (folder / "behind/ledger-7.jsonl").write_text("{}")
    code, found = judge(folder)
    assert code == 5 and "behind/ledger-7.jsonl is no ledger" in sentences(found)
