"""`make quickstart` as a newcomer runs it; in short it is also the launch of DeepSpeed's launcher and engine."""

import functools
import json
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.embedded import unpack_fashion
from launch_scripts.quickstart import _link_latest
from tests.docs.commands import check
from tests.docs.pages import Block, Command
from tests.e2e.launch import ledger_lines
from tests.processes import ROOT, quiet_environment, run_python

KEYS = {"captions_right", "heldout_loss", "blind_loss", "shuffled_loss", "epsilon", "seconds"}
MOST_FREQUENT = 0.093
"""The share of the test pictures whose caption is the most frequent one."""


def quickstart(
    start: Callable[..., subprocess.CompletedProcess[str]], run_dir: Path, *overrides: str
) -> tuple[dict, str]:
    command = ["launch_scripts/quickstart.py", "--run_dir", str(run_dir), *overrides]
    result = start(command, env=quiet_environment())
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    said = json.loads(result.stdout.strip().splitlines()[-1])
    assert set(said) == KEYS
    assert 0 < said["epsilon"] <= 8
    card = json.loads((run_dir / "report" / "privacy_card.json").read_text())
    assert (
        card["formal_guarantee"] is True
        and card["delta"] == 1e-5
        and card["epsilon"] == said["epsilon"]
    )
    sheet = np.asarray(Image.open(run_dir / "evaluation" / "answers.png"))
    assert sheet.shape[1] > 1000 and sheet.std() > 20
    assert "answers.png" in result.stdout and "privacy_card.html" in result.stdout
    verdict = re.compile(
        r"^verify: consistent: epsilon \S+ at delta 1e-05; no page was read: believe this line$",
        re.M,
    )
    assert verdict.search(result.stdout)
    # Lines of progress come every half minute: a slow machine has more of them.
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    others = [line for line in lines if not line.startswith(("step ", "computing "))]
    assert len(others) <= 38, "\n".join(others)
    # A path, a command, the verdict and the JSON object are whole.
    whole = [
        line
        for line in lines
        if str(run_dir.parent) in line or line.startswith("{") or verdict.match(line)
    ]
    long = [line for line in lines if len(line) > 80 and line not in whole]
    assert not long, "\n".join(long)
    assert "terminate called" not in result.stdout + result.stderr, "a crash at exit"
    return said, result.stdout


def test_quickstart_in_short(tmp_path: Path) -> None:
    """Few steps change the loss, and everything is said. Noise and clipping mode are given: to find them takes most of it.

    Only the command itself is forked: what it starts, launcher, ranks, report and verifier, is as a newcomer has it.
    """
    run_dir, recipe = tmp_path / "run", tmp_path / "quickstart.toml"
    fashion = unpack_fashion(tmp_path)
    text = (
        (ROOT / "recipes/quickstart.toml")
        .read_text()
        .replace("target_epsilon = 8.0", "noise_multiplier = 2.0")
    )
    with (
        tarfile.open(fashion / "test-00000.tar") as whole,
        tarfile.open(tmp_path / "test.tar", "w") as few,
    ):
        for member in whole.getmembers()[
            : 2 * 64
        ]:  # of all of them captions would take longer than the run
            few.addfile(member, whole.extractfile(member))
    text = text.replace("runs/fashion/test-*.tar", str(tmp_path / "test.tar"))
    recipe.write_text(text.replace("runs/fashion", str(fashion)))
    small = (
        "privacy.expected_batch_size=100",
        "heldout.num_captions=1",
        "privacy.clipping_mode=bookkeeping",
    )
    short = ("--recipe", str(recipe), "train.num_steps=2", "heldout.every_steps=2")
    said, stdout = quickstart(run_python, run_dir, *short, *small)
    lines = [
        json.loads(line)
        for line in (run_dir / "evaluation" / "heldout.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [0, 2]
    assert lines[-1]["loss"] == said["heldout_loss"] < lines[0]["loss"]
    assert lines[0]["blind_loss"] == lines[-1]["blind_loss"] == said["blind_loss"]
    assert said["shuffled_loss"] == lines[-1]["shuffled_loss"] > 0
    kinds = [line["type"] for line in ledger_lines(run_dir)]
    assert kinds == ["open", "session", *["intent", "done"] * 2, "checkpoint", "close"]
    assert "without looking: " in stdout and "not yet below that of fixed guesses" in stdout
    commands = [line for line in stdout.splitlines() if re.match(r"\S*python ", line)]
    assert len(commands) == 3 and all(str(run_dir) in line for line in commands)
    for number, line in enumerate(commands, start=1):  # test_quickstart_whole runs them
        words = ["python", *shlex.split(line)[1:]]
        check(Command(Block("stdout", number, "bash", line), tuple(words), line))
        assert all((ROOT / word).exists() for word in words if str(run_dir) in word)


def test_latest_leads_to_the_newest_run(tmp_path: Path) -> None:
    for name in ("quickstart-1", "quickstart-2"):
        (tmp_path / name).mkdir()
        _link_latest(tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "quickstart-1",
        "quickstart-2",
    ]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    _link_latest(tmp_path / "quickstart-1")  # a folder of that name stays
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "quickstart-1",
        "quickstart-2",
    ]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_quickstart_whole(tmp_path: Path) -> None:
    """Five times what saying the most frequent caption gets, at less than 0.6 of the blind loss; other pictures hurt."""
    ask = functools.partial(
        subprocess.run, cwd=ROOT, env=quiet_environment(), capture_output=True, text=True
    )
    said, stdout = quickstart(
        lambda arguments, **_: ask([sys.executable, *arguments]), tmp_path / "run"
    )
    assert 0.6 < said["blind_loss"] < 0.8, "twenty captions, of five tokens on average"
    assert said["captions_right"] >= 5 * MOST_FREQUENT
    assert said["heldout_loss"] <= 0.6 * said["blind_loss"]
    assert said["shuffled_loss"] >= 1.2 * said["heldout_loss"]
    assert said["seconds"] <= 360
    for line in (
        line for line in stdout.splitlines() if re.match(r"\S*python ", line)
    ):  # as printed
        done = ask(line, shell=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert "the model knows more" in stdout and "the model looks at its pictures" in stdout
