"""Which checkpoints stay, which one is resumed from, writing in the background, and the moving average."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from privacy.checkpoints import write as checkpoint_writer
from privacy.checkpoints.read import Checkpoint, checkpoint_name, newest_checkpoint, newest_whole, set_aside_newer
from privacy.checkpoints.write import CheckpointWriteError, CheckpointWriter, Retention
from privacy.step.averaging import WeightAverage, decay_at
from tests.trainer.test_checkpoint import assert_same, flip_a_bit, new_engine, new_model, resume, take_steps
from trainer.engines.local import LocalEngine
from trainer.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def save(writer: CheckpointWriter, engine: LocalEngine, step: int) -> None:
    writer.save(step, engine.state(), engine.shapes, {"ledger": {"seq": step, "hash": str(step)}})


def save_steps(folder: Path, *steps: int, keep: int = 9, keep_every: int | None = None) -> LocalEngine:
    engine = new_engine(new_model())
    writer = CheckpointWriter(folder, Retention(keep, keep_every))
    for previous, step in zip([0, *steps], steps, strict=False):
        take_steps(engine, previous + 1, step)
        save(writer, engine, step)
    return engine


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "LATEST")


def find(folder: Path, positions: list[Mapping[str, Any]] | None = None) -> Checkpoint | None:
    """As a start finds it, which then sets aside what is newer."""
    found = newest_whole(folder, (positions if positions is not None else []).append)
    if found is not None:
        set_aside_newer(folder, found.path.name)
    return found


class TestRetention:
    def test_on_disk(self, folder: Path) -> None:
        save_steps(folder, 1, 2, 3, 4, 5, 6, 7, keep=2, keep_every=3)
        assert names(folder) == [checkpoint_name(step) for step in (3, 6, 7)]

    @given(steps=st.sets(st.integers(1, 60)), keep=st.integers(1, 5), every=st.none() | st.integers(1, 9))
    def test_the_newest_and_every_mth_stay(self, steps: set[int], keep: int, every: int | None) -> None:
        stay = steps - set(Retention(keep, every).superseded(steps))
        assert stay == set(sorted(steps)[-keep:]) | {s for s in steps if every and s % every == 0}


def damage_manifest(path: Path) -> None:
    """Still JSON, still complete, but another step."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"step": manifest["step"] - 1}))


def pieces(path: Path) -> Path:
    return path / "rank-00000-of-00001.safetensors"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: flip_a_bit(pieces(path)),
    "a truncated file": lambda path: pieces(path).write_bytes(pieces(path).read_bytes()[:-4]),
    "a truncated header": lambda path: pieces(path).write_bytes(pieces(path).read_bytes()[:12]),
    "a missing file": lambda path: pieces(path).unlink(),
    "a missing manifest": lambda path: (path / "manifest.json").unlink(),
    "a truncated manifest": lambda path: (path / "manifest.json").write_text("{"),
    "a changed manifest": damage_manifest,
    "a missing folder": lambda path: path.rename(path.with_name("elsewhere")),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_the_one_before_is_used(self, folder: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
        save_steps(folder, 2, 4)
        DAMAGES[damage](folder / checkpoint_name(4))
        found = find(folder)
        assert found is not None and found.step == 2
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 1 and "step-00000004" in said[0] and "resuming from step-00000002" in said[0]
        assert newest_checkpoint(folder) == folder / checkpoint_name(2)
        # A second start finds the same without a word, and what is saved next is the newest.
        again = find(folder)
        assert again is not None and again.step == 2 and capsys.readouterr().out == ""
        engine = resume(folder / checkpoint_name(2))
        take_steps(engine, 3, 3)
        save(CheckpointWriter(folder, Retention(1)), engine, 3)
        last = find(folder)
        assert last is not None and last.step == 3
        assert_same(resume(last.path), engine)

    def test_none_is_whole(self, folder: Path) -> None:
        save_steps(folder, 1, 2)
        for step in (1, 2):
            flip_a_bit(pieces(folder / checkpoint_name(step)))
        with pytest.raises(ConfigError, match=r"none of the 2 checkpoints .* is whole"):
            find(folder)
        assert names(folder) == [checkpoint_name(1), checkpoint_name(2)], "nothing is renamed"

    def test_the_ledger_must_know_what_a_damaged_one_remembers(self, folder: Path) -> None:
        """Otherwise damaging a checkpoint would hide that the ledger was rolled back."""
        save_steps(folder, 2, 4)
        flip_a_bit(pieces(folder / checkpoint_name(4)))
        positions: list[Mapping[str, Any]] = []
        find(folder, positions)
        assert [position["seq"] for position in positions] == [4, 2]

    def test_the_ledger_must_know_what_newer_ones_and_those_set_aside_remember(self, folder: Path) -> None:
        """Pointing LATEST at an older one, or renaming newer ones, hides no rollback either."""
        save_steps(folder, 2, 4, 6)
        (folder / checkpoint_name(6)).rename(folder / f"set-aside-{checkpoint_name(6)}")
        (folder / "LATEST").write_text("step-00000002\n")
        positions: list[Mapping[str, Any]] = []
        find(folder, positions)
        assert sorted(position["seq"] for position in positions) == [2, 4, 6]


class TestRollback:
    def test_newer_ones_never_come_back(self, folder: Path) -> None:
        """A user points LATEST at an older one; the abandoned future must not be met when a newer one is damaged."""
        save_steps(folder, 2, 4, 6)
        (folder / "LATEST").write_text("step-00000002\n")
        found = find(folder)
        assert found is not None and found.step == 2
        assert names(folder) == ["set-aside-step-00000004", "set-aside-step-00000006", "step-00000002"]
        engine = resume(found.path)
        take_steps(engine, 3, 4)
        save(CheckpointWriter(folder, Retention(5)), engine, 4)
        (folder / "LATEST").unlink()
        last = find(folder)
        assert last is not None and last.step == 4
        assert_same(resume(last.path), engine)

    @pytest.mark.parametrize("content", [None, "", "step-00000009", "garbage"])
    def test_latest_is_lost(self, folder: Path, content: str | None) -> None:
        save_steps(folder, 2, 4)
        (folder / "LATEST").unlink()
        if content is not None:
            (folder / "LATEST").write_text(content)
        found = find(folder)
        assert found is not None and found.step == 4


class TestInBackground:
    @pytest.fixture
    def slow_disk(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Writing waits until the event is set."""
        go, write = threading.Event(), checkpoint_writer.save_file

        def waiting(tensors: dict[str, Tensor], path: Path) -> None:
            assert go.wait(30)
            write(tensors, path)

        monkeypatch.setattr(checkpoint_writer, "save_file", waiting)
        return go

    def test_training_goes_on_and_the_snapshot_is_of_its_step(self, folder: Path, slow_disk: threading.Event) -> None:
        told: list[int] = []
        writer = CheckpointWriter(
            folder, Retention(3), in_background=True, published=lambda step, name, digest: told.append(step)
        )
        engine, reference = new_engine(new_model()), new_engine(new_model())
        take_steps(engine, 1, 2)
        take_steps(reference, 1, 2)
        save(writer, engine, 2)
        take_steps(engine, 3, 5)  # changes the very tensors that are being written
        assert told == [] and newest_checkpoint(folder) is None, "not whole yet, so it is not there"
        slow_disk.set()
        writer.finish()
        assert told == [2]
        assert_same(resume(folder / checkpoint_name(2)), reference)

    def test_a_failure_is_an_error_at_the_next_boundary(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = save_steps(folder, 1)

        def full(tensors: dict[str, Tensor], path: Path) -> None:
            raise OSError(28, "No space left on device")

        writer = CheckpointWriter(folder, Retention(3), in_background=True)
        monkeypatch.setattr(checkpoint_writer, "save_file", full)
        save(writer, engine, 2)
        with pytest.raises(
            CheckpointWriteError, match=r"step-00000002 could not be written: .*No space left"
        ) as caught:
            writer.finish()
        assert caught.value.exit_code == 1
        assert names(folder) == [".step-00000002.tmp", checkpoint_name(1)]
        found = find(folder)
        assert found is not None and found.step == 1


class TestAverage:
    DECAY = 0.5

    def averaged(self, folder: Path, stops: tuple[int, ...], num_steps: int = 6) -> Checkpoint:
        """The last checkpoint of a run that was resumed at `stops`."""
        engine, resumed = new_engine(new_model()), None
        average = WeightAverage(self.DECAY).start(engine, None)
        writer = CheckpointWriter(folder, Retention(9))
        for step in range(1, num_steps + 1):
            take_steps(engine, step, step)
            average.update(step)
            if step in (*stops, num_steps):
                writer.save(step, average.states(), engine.shapes, {})
                resumed = Checkpoint(folder / checkpoint_name(step))
                engine = resume(resumed.path)
                average = WeightAverage(self.DECAY).start(engine, resumed)
        assert resumed is not None
        return resumed

    def test_against_the_definition(self, folder: Path) -> None:
        engine = new_engine(new_model())
        expected = {n: p.detach().double().clone() for n, p in engine.module.named_parameters()}
        for step in range(1, 7):
            take_steps(engine, step, step)
            d = decay_at(step, self.DECAY)
            for n, p in engine.module.named_parameters():
                expected[n] = d * expected[n] + (1 - d) * p.detach().double()
        found, model = self.averaged(folder, ()), new_model(seed=5)
        found.load_weights(model, average=True)
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.detach().double(), expected[n], rtol=1e-6, atol=1e-6)

    def test_resumed_equals_uninterrupted(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        one, other = self.averaged(tmp_path / "a", ()), self.averaged(tmp_path / "b", (1, 4))
        for name in one.shapes:
            for kind in ("param", "average"):
                assert torch.equal(one.full(kind, name), other.full(kind, name))

    def test_in_use_for_evaluation(self, folder: Path) -> None:
        engine = new_engine(new_model())
        average = WeightAverage(self.DECAY).start(engine, None)
        for step in (1, 2):
            take_steps(engine, step, step)
            average.update(step)
        CheckpointWriter(folder, Retention(1)).save(2, average.states(), engine.shapes, {})
        averaged, before = new_model(seed=5), {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        Checkpoint(folder / checkpoint_name(2)).load_weights(averaged, average=True)
        inputs = torch.randn(3, 5)
        with average.in_use():
            assert torch.equal(engine.module(inputs), averaged(inputs))
        assert all(torch.equal(p, before[n]) for n, p in engine.module.named_parameters())
