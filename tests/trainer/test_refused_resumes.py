"""What is looked at before a start writes, and what the next start ends or refuses."""

import fcntl
import shutil
from pathlib import Path

import pytest
import torch

from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.step.folder import RunFolder
from tests.distributed.ranks import ROOT
from tests.privacy.loop.own import make
from tests.trainer import test_refused_starts
from tests.trainer.test_chains import run
from tests.trainer.test_refused_starts import OPTIONS, image, stop_after
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.ranks.discovery import Ranks
from trainer.run.start import TrainerStart, train

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


def test_the_checks_alone_write_nothing_and_a_start_refused_at_last_leaves_no_ledger(
    stopped: Path, tmp_path: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, new = load_machine_settings(ROOT / "ds_configs/zero1.json"), tmp_path / "new"
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)  # held until the process ends

    def refuse(*_: object) -> None:
        raise PrivacyConfigError("refused at last")

    config = load_config(
        ROOT / "recipes/tiny.toml", ["heldout.num_captions=0", f"privacy.ledger_mirror={tmp_path}/mirror"]
    )
    arguments = (config, settings, "local", RunFolder(new), ROOT, Ranks(), one_rank, None)
    for check in TrainerStart(*arguments, may_restart=False).checks():  # type: ignore[arg-type]
        check()
        assert check.__doc__, "a check says why it is there"
    monkeypatch.setattr("trainer.run.start.require_neighbours_apart", refuse)
    with pytest.raises(PrivacyConfigError, match="refused at last"):
        train(config, settings, "local", new, ROOT, Ranks(), one_rank)
    assert not (new / "ledger.jsonl").exists() and not (tmp_path / "mirror").exists()
    assert not list((new / "private").glob("*.key*"))


def test_a_loop_that_was_killed_before_its_end_is_ended_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "own"
    with monkeypatch.context() as patch:
        patch.setattr("privacy.run.ledger.RunLedger.close_run", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt), make(run) as loop:
            for _ in loop:
                pass
    with make(run) as loop:
        assert loop.steps_done == 6 and b'"type":"close"' in (run / "ledger.jsonl").read_bytes()


def test_a_new_run_beside_a_checkpoint_that_was_set_aside_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "own"
    with make(run, save_every=1) as loop:
        loop.step()
    for path in (run / "checkpoints").glob("step-*"):
        path.rename(path.with_name(f"set-aside-{path.name}"))
    (run / "ledger.jsonl").unlink()
    shutil.rmtree(run / "private")
    with pytest.raises(PrivacyStateRefused, match=r"is gone, and a checkpoint of step 1 remembers it"):
        make(run)
    assert not (run / "ledger.jsonl").exists()
