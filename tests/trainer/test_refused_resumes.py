"""What is looked at before a start writes: ledgers behind initial weights, and the torn end of a shared ledger."""

import fcntl
from pathlib import Path

import pytest

from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.shared import SharedLedger
from privacy.step.folder import RunFolder
from tests.trainer import test_refused_starts
from tests.trainer.test_chains import run
from tests.trainer.test_refused_starts import LINES, OPTIONS, all_damaged, image, of_another_run, stop_after
from trainer.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_rank")
stopped = test_refused_starts.stopped


def test_a_ledger_behind_the_start_that_is_gone_or_edited_is_missed_before_the_first_write(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)  # held until the process ends
    folder, start = tmp_path / "run", f"init.checkpoint={stopped}"
    stop_after(1, folder, start)
    copy = folder / "behind/ledger-1.jsonl"
    whole = copy.read_bytes()
    (folder / "STOP").touch()
    for damaged in (None, whole.replace(b"0", b"1"), whole[: whole.rfind(b"\n", 0, -1) + 1]):
        copy.unlink()
        if damaged is not None:
            copy.write_bytes(damaged)
        before = image(folder)
        with pytest.raises(PrivacyStateRefused, match=r"ledger-1\.jsonl"):
            run(folder, *OPTIONS, start, steps=4)
        assert image(folder) == before
        copy.write_bytes(whole)
    assert run(folder, *OPTIONS, start, steps=4) == 0


@pytest.mark.full
def test_a_refused_start_leaves_a_torn_shared_ledger_and_its_mirror_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)  # held until the process ends
    owner, mirror, folder = tmp_path / "owner.jsonl", tmp_path / "second.jsonl", tmp_path / "run"
    SharedLedger.create(owner, epsilon=2.0, delta=1e-4, mirror=mirror)
    shared = f"privacy.shared_ledger={owner}"
    stop_after(1, folder, shared)
    with owner.open("ab") as file:
        file.write(b'{"seq":99,"type":"res')
    before = image(tmp_path)
    with pytest.raises(PrivacyConfigError, match="frozen"):
        run(folder, *OPTIONS, shared, "privacy.max_grad_norm=9", steps=4)
    assert image(tmp_path) == before
    of_another_run(folder)  # found after both ledgers are open
    before = image(tmp_path)
    with pytest.raises(PrivacyStateRefused, match=r"checkpoint|rolled back|shorter"):
        run(folder, *OPTIONS, shared, steps=4)
    assert image(tmp_path) == before
    files = owner.read_bytes(), mirror.read_bytes()
    with pytest.raises(PrivacyConfigError, match="never fits"):
        run(tmp_path / "new", *OPTIONS, shared, "privacy.noise_multiplier=1", steps=3000)
    assert (owner.read_bytes(), mirror.read_bytes()) == files
    assert not (tmp_path / "new" / LINES).exists()
    assert run(tmp_path / "fits", *OPTIONS, shared, "privacy.fixed_in_advance=true", steps=4) == 0
    assert owner.read_bytes() == mirror.read_bytes() and owner.read_bytes().count(b" #torn\n") == 1


@pytest.mark.full
def test_a_refused_start_of_a_finished_run_does_not_close_it_in_the_shared_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash came between the two `close`; what is refused afterwards has written nothing, and what is not writes it."""
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)  # held until the process ends
    owner, folder = tmp_path / "owner.jsonl", tmp_path / "run"
    SharedLedger.create(owner, epsilon=2.0, delta=1e-4)
    shared = f"privacy.shared_ledger={owner}"
    assert run(folder, *OPTIONS, shared, steps=2) == 0
    whole = owner.read_bytes()
    *kept, last = whole.splitlines(keepends=True)
    assert b'"type":"close"' in last
    owner.write_bytes(b"".join(kept) + b'{"seq":99,"type":"clo')
    checkpoints = {path: path.read_bytes() for path in (folder / "checkpoints").glob("step-*/rank-*")}
    all_damaged(folder)
    before = image(tmp_path)
    with pytest.raises(ConfigError, match="none of the 2 checkpoints"):
        run(folder, *OPTIONS, shared, steps=2)
    assert image(tmp_path) == before
    for path, content in checkpoints.items():
        path.write_bytes(content)
    assert run(folder, *OPTIONS, shared, steps=2) == 0
    assert SharedLedger(owner).look().closed and owner.read_bytes().count(b" #torn\n") == 1
    closed = image(tmp_path)
    assert run(folder, *OPTIONS, shared, steps=2) == 0 and image(tmp_path) == closed
