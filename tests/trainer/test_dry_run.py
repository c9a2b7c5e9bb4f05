"""`train.py --dry_run`: what it says, what it refuses as a start does, and that nothing is left behind.

Starts in a folder that holds a run are in tests/trainer/test_refused_starts.py.
"""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from privacy.ledger.shared import SharedLedger
from privacy.step.run_folder import RunFolder
from tests.e2e.launch import train_arguments, train_together
from tests.trainer.test_chains import run
from tests.trainer.test_refused_starts import OPTIONS, image, stop_after

pytestmark = pytest.mark.usefixtures("trusted_models")

SHARED = "privacy.shared_ledger={here}/shared.jsonl"
MIRROR = "privacy.ledger_mirror={here}/mirror.jsonl"


def an_owner(epsilon: float) -> Callable[[Path], None]:
    return lambda here: SharedLedger.create(here / "shared.jsonl", epsilon=epsilon, delta=1e-5)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no shards": (lambda here: None, "data.shards=data/nothing-*.tar"),
    "a mirror that is there": (lambda here: (here / "mirror.jsonl").write_text("{}\n"), MIRROR),
    "a mirror inside": (lambda here: None, "privacy.ledger_mirror={here}/runs/one/mirror.jsonl"),
    "attempts, and no ledger": (
        lambda here: [
            (here / "runs/one/private").mkdir(parents=True, mode=0o700),
            (here / "runs/one/private/members.jsonl").write_text('{"seq":1}\n'),
        ],
        "privacy.target_delta=1e-5",
    ),
    "a checkpoint, and no ledger": (
        lambda here: (here / "runs/one/checkpoints/step-00000001").mkdir(parents=True),
        MIRROR,
    ),
    "a file as run folder": (
        lambda here: [(here / "runs").mkdir(), (here / "runs/one").touch()],
        MIRROR,
    ),
    "an owner without room": (an_owner(1e-4), SHARED),
    "two sizes": (lambda here: None, "model.overrides.decoder_width=31"),
}


SLOW = ("a mirror that is there", "attempts, and no ledger")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in SLOW)) for n in REFUSED]
)
def test_a_new_run_is_refused_as_without_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    damage, change = REFUSED[name]
    damage(tmp_path)
    before = image(tmp_path)
    with pytest.raises(Exception) as dry:
        run(tmp_path / "runs/one", *OPTIONS, change.format(here=tmp_path), steps=4, is_dry=True)
    assert image(tmp_path) == before, dry.value
    with pytest.raises(Exception) as refusal:
        run(tmp_path / "runs/one", *OPTIONS, change.format(here=tmp_path), steps=4)
    assert (type(dry.value), str(dry.value)) == (type(refusal.value), str(refusal.value))


def require_dealt_step(said: str) -> None:
    """The step of tests' recipe: a batch of 24 with its cap of rows, in micro-batches of 16, from the four shards of the demo."""
    found = re.search(
        r"one step is dealt: (\d+) examples in (\d+) rows, [\d.]+% of them padding; (\d+) micro-batches of 16 a rank",
        said,
    )
    assert found, said
    examples, rows, micro_batches = map(int, found.groups())
    assert 0 < examples <= 24 + 8 * 24**0.5 and rows == 16 * micro_batches >= 24 + 24**0.5
    assert re.search(r"sums take (6|8) bytes a coordinate \((int32\+int16|int64)\)", said)
    assert re.search(r"the step reads [\d.e-]+ GB from \d of \d shards", said)


@pytest.mark.usefixtures("one_rank")
def test_what_a_new_run_and_a_resumed_one_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words of the start itself, steps and epsilon of the whole run; shared ledger, mirror and run folder as they were."""
    an_owner(8)(tmp_path)
    options = [change.format(here=tmp_path) for change in (SHARED, MIRROR)]
    before = image(tmp_path)
    assert run(tmp_path / "runs/one", *OPTIONS, *options, steps=4, is_dry=True) == 0
    assert image(tmp_path) == before
    said = capsys.readouterr().out
    planned = next(line for line in said.splitlines() if line.startswith("epsilon planned"))
    said_once = " ".join(said.split())
    assert (
        "would take 4 steps from step 1, each of" in said_once
        and "seconds of computing (ranks: 1)" in said_once
    )
    require_dealt_step(said_once)
    stop_after(2, tmp_path / "runs/one", *options)
    assert planned in capsys.readouterr().out, "the run promises another epsilon than the dry run"
    status = json.loads((tmp_path / "runs/one/private/status.json").read_text())
    assert (status["state"], status["step"], status["last_checkpoint"]) == (
        "stopped",
        2,
        2,
    ) and status["epsilon"] > 0
    copy, options = (
        tmp_path / "copy",
        [change.format(here=tmp_path / "copy") for change in (SHARED, MIRROR)],
    )
    shutil.copytree(tmp_path / "runs", copy / "runs")  # this process has the ledgers open
    for name in ("shared.jsonl", "mirror.jsonl"):
        shutil.copy(tmp_path / name, copy)
    before = image(copy)
    assert run(copy / "runs/one", *OPTIONS, *options, steps=4, is_dry=True) == 0
    assert image(copy) == before
    said = capsys.readouterr().out
    assert (
        "resuming after step 2; 2 attempts are charged" in said
        and "would take 2 steps from step 3" in said
    )


@pytest.mark.full
def test_two_ranks_agree_and_leave_nothing(tmp_path: Path) -> None:
    said = train_together(train_arguments(tmp_path / "runs/two", "--dry_run"), tmp_path / "log")
    assert "a dry run on 2 ranks" in said and "without --dry_run it starts" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]


@pytest.mark.full
@pytest.mark.usefixtures("one_rank")
def test_what_a_killed_dry_run_left_goes_with_the_next(tmp_path: Path) -> None:
    """But not what one that still runs has, nor another program's folder."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f".one.dry-{socket.gethostname()}-"
    kept = [tmp_path / f"{name}{os.getppid()}", tmp_path / f"{name}notes"]
    for folder in (*kept, tmp_path / f"{name}{ended.pid}"):
        (folder / "private").mkdir(parents=True)
    assert run(tmp_path / "one", *OPTIONS, steps=4, is_dry=True) == 0
    assert sorted(tmp_path.iterdir()) == sorted(kept)
