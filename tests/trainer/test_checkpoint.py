"""Checkpoints: bit-equal back, whatever the number of pieces; whole or refused; which stay, and which one is resumed from."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from privacy.checkpoints import read as checkpoint
from privacy.checkpoints import write as checkpoint_writer
from privacy.checkpoints.read import (
    Checkpoint,
    checkpoint_name,
    file_digest,
    newest_whole,
    set_aside_newer,
)
from privacy.checkpoints.write import CheckpointWriteError, CheckpointWriter, Retention
from privacy.errors import WeightsNotFinite
from privacy.ranks.engine import GradShard, Piece, even_layout
from privacy.step.averaging import WeightAverage, decay_at
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import OptimizerSection
from trainer.engines.local import LocalEngine
from trainer.errors import ConfigError
from trainer.optimizers import moments
from trainer.run.start import frozen_weights

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = OptimizerSection(peak_lr=1e-2, weight_decay=0.1)
KINDS = ("exp_avg", "exp_avg_sq", "param")

pytestmark = pytest.mark.usefixtures("one_rank")


def new_model(seed: int = 0, width: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, 3))


def new_engine(model: nn.Module, dtype: str = "") -> LocalEngine:
    machine = load_machine_settings(ROOT / "ds_configs" / f"zero1{dtype}.json")
    return LocalEngine(model, OPTIMIZER, machine, torch.device("cpu"))


def take_steps(engine: LocalEngine, first: int, last: int) -> None:
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        shards = [
            GradShard(
                p.name, p.offset, torch.randn(p.length, generator=generator, dtype=torch.float64)
            )
            for p in engine.layout.owned_by(0)
        ]
        engine.step(shards, lr=1e-2)


def save(
    into: Path | CheckpointWriter, engine: LocalEngine, step: int, *retention: int | None
) -> None:
    writer = (
        CheckpointWriter(into, Retention(*retention or (9,))) if isinstance(into, Path) else into
    )  # type: ignore[arg-type]
    writer.save(step, engine.state(), engine.shapes, {"ledger": {"seq": step, "hash": str(step)}})


def contents(engine: LocalEngine) -> dict[tuple[str, Piece], Tensor]:
    return {(kind, s.piece): v.clone() for s in engine.state() for kind, v in s.tensors.items()}


def assert_same(a: LocalEngine, b: LocalEngine) -> None:
    left, right = contents(a), contents(b)
    assert left.keys() == right.keys() and len(left) == 3 * len(a.shapes)
    for key in left:
        assert torch.equal(left[key], right[key]), key
    for name, weight in a.module.state_dict().items():
        assert torch.equal(weight, b.module.state_dict()[name]), name


def resume(path: Path, dtype: str = "") -> LocalEngine:
    """As a start does it: weights before the engine is built, the rest after."""
    found = Checkpoint(path)
    model = new_model(seed=99)
    found.load_weights(model)
    engine = new_engine(model, dtype)
    found.restore(engine, moments(OPTIMIZER))
    return engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


@pytest.mark.parametrize("dtype", ["", "_bf16"])
def test_resumed_equals_uninterrupted_to_the_bit(folder: Path, dtype: str) -> None:
    engine = new_engine(new_model(), dtype)
    take_steps(engine, 1, 3)
    save(folder, engine, 3)
    resumed = resume(folder / checkpoint_name(3), dtype)
    assert_same(resumed, engine)
    take_steps(engine, 4, 6)
    take_steps(resumed, 4, 6)
    assert_same(resumed, engine)


@pytest.mark.parametrize("world_size", [3, 8])
def test_pieces_of_other_world_sizes(folder: Path, world_size: int) -> None:
    engine = new_engine(new_model())
    take_steps(engine, 1, 3)
    whole = {s.piece.name: s.tensors for s in engine.state()}
    temporary, path, files = folder / ".split.tmp", folder / checkpoint_name(3), {}
    temporary.mkdir()
    for rank, pieces in enumerate(
        even_layout(engine.shapes, world_size).pieces
    ):  # as so many ranks would have written it
        file = temporary / f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
        tensors = {
            f"{kind}|{p.name}|{p.offset}": values[p.offset : p.offset + p.length].clone()
            for p in pieces
            for kind, values in whole[p.name].items()
        }
        save_file(tensors, file)
        files[file.name] = file_digest(file)
    shapes = {name: list(shape) for name, shape in engine.shapes.items()}
    manifest = {"format": checkpoint.FORMAT, "step": 3, "parameters": shapes, "files": files}
    checkpoint_writer._publish(temporary, path, manifest, Retention(1))
    assert len(list(path.glob("rank-*"))) == world_size
    assert_same(resume(path), engine)
    found, weight = Checkpoint(path), dict(engine.module.named_parameters())["0.weight"].detach()
    assert torch.equal(found.full("param", "0.weight"), weight)
    for offset in range(0, weight.numel(), 4):  # across the borders of pieces
        piece = Piece("0.weight", offset, min(9, weight.numel() - offset))
        assert torch.equal(
            found.part("param", piece), weight.view(-1)[offset : offset + piece.length]
        )


def test_no_pickle(folder: Path) -> None:
    """Loading a pickle runs code. safetensors: 8 bytes of header length, then a JSON header, then raw numbers."""
    save_steps(folder, 3)
    for file in folder.glob("step-*/*.safetensors"):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        assert {key.split("|")[0] for key in header} == set(KINDS)
        assert all(entry["dtype"] == "F32" for entry in header.values())
        assert 8 + size + max(entry["data_offsets"][1] for entry in header.values()) == len(content)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_frozen_parameters_are_part_of_the_model(folder: Path) -> None:
    """They are written next to the engine's states and set with the rest; a checkpoint that lacks them is no whole model."""
    model = new_model()
    model[0].weight.requires_grad_(False)
    (frozen, shapes_of_frozen), engine = frozen_weights(model), new_engine(model)
    take_steps(engine, 1, 1)
    save(folder, engine, 1)
    other = new_model(seed=5)
    other[0].weight.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"does not fit the model; the first difference is 0\.weight"
    ):
        Checkpoint(folder / checkpoint_name(1)).load_weights(other)
    states, shapes = [*engine.state(), *frozen], {**engine.shapes, **shapes_of_frozen}
    CheckpointWriter(folder, Retention(1)).save(
        2, states, shapes, {"frozen": list(shapes_of_frozen)}
    )
    found = Checkpoint(folder / checkpoint_name(2))
    found.load_weights(other)
    assert found.frozen == {"0.weight"} and all(
        torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True)
    )
    found.restore(new_engine(other), moments(OPTIMIZER))


def test_weights_that_are_not_finite_are_named_and_not_saved() -> None:
    engine = new_engine(new_model())
    checkpoint_writer.require_finite(engine, 1)
    engine.step(
        [
            GradShard(p.name, p.offset, torch.full((p.length,), torch.nan))
            for p in engine.layout.owned_by(0)
        ],
        lr=1,
    )
    with pytest.raises(WeightsNotFinite, match="after step 2 the weights hold NaN"):
        checkpoint_writer.require_finite(engine, 2)


def save_steps(
    folder: Path, *steps: int, keep: int = 9, keep_every: int | None = None
) -> LocalEngine:
    engine = new_engine(new_model())
    for previous, step in zip([0, *steps], steps, strict=False):
        take_steps(engine, previous + 1, step)
        save(folder, engine, step, keep, keep_every)
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

    @given(
        steps=st.sets(st.integers(1, 60)),
        keep=st.integers(1, 5),
        every=st.none() | st.integers(1, 9),
    )
    def test_the_newest_and_every_mth_stay(
        self, steps: set[int], keep: int, every: int | None
    ) -> None:
        stay = steps - set(Retention(keep, every).superseded(steps))
        assert stay == set(sorted(steps)[-keep:]) | {s for s in steps if every and s % every == 0}


def pieces(path: Path) -> Path:
    return path / "rank-00000-of-00001.safetensors"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: flip_a_bit(pieces(path)),
    "a truncated file": lambda path: pieces(path).write_bytes(pieces(path).read_bytes()[:-4]),
    "a truncated header": lambda path: pieces(path).write_bytes(pieces(path).read_bytes()[:12]),
    "a missing file": lambda path: pieces(path).unlink(),
    "a missing manifest": lambda path: (path / "manifest.json").unlink(),
    "a truncated manifest": lambda path: (path / "manifest.json").write_text("{"),
    "a changed manifest": lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('"step": 4', '"step": 3')
    ),
    "a missing folder": lambda path: path.rename(path.with_name("elsewhere")),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_the_one_before_is_used(
        self, folder: Path, damage: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_steps(folder, 2, 4)
        DAMAGES[damage](folder / checkpoint_name(4))
        found = find(folder)
        assert found is not None and found.step == 2
        said = capsys.readouterr().out.replace("\n  ", " ").splitlines()
        assert (
            len(said) == 1
            and "step-00000004" in said[0]
            and "resuming from step-00000002" in said[0]
        )
        assert (folder / "LATEST").read_text().strip() == checkpoint_name(2)
        # A second start finds the same without a word, and what is saved next is the newest.
        again = find(folder)
        assert again is not None and again.step == 2 and capsys.readouterr().out == ""
        engine = resume(folder / checkpoint_name(2))
        take_steps(engine, 3, 3)
        save(folder, engine, 3, 1)
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

    def test_the_ledger_must_know_what_any_of_them_remembers(self, folder: Path) -> None:
        """Else damaging or renaming a newer one, or pointing LATEST at an older one, would hide a ledger that was rolled back."""
        save_steps(folder, 2, 4, 6, 8)
        (folder / checkpoint_name(8)).rename(folder / f"set-aside-{checkpoint_name(8)}")
        (folder / "LATEST").write_text("step-00000004\n")
        flip_a_bit(pieces(folder / checkpoint_name(4)))
        positions: list[Mapping[str, Any]] = []
        found = find(folder, positions)
        assert found is not None and found.step == 2
        assert sorted(position["seq"] for position in positions) == [2, 4, 6, 8]


class TestRollback:
    def test_newer_ones_never_come_back(self, folder: Path) -> None:
        """A user points LATEST at an older one; the abandoned future must not be met when a newer one is damaged."""
        save_steps(folder, 2, 4, 6)
        (folder / "LATEST").write_text("step-00000002\n")
        found = find(folder)
        assert found is not None and found.step == 2
        assert names(folder) == [
            "set-aside-step-00000004",
            "set-aside-step-00000006",
            "step-00000002",
        ]
        engine = resume(found.path)
        take_steps(engine, 3, 4)
        save(folder, engine, 4)
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

    def test_training_goes_on_and_the_snapshot_is_of_its_step(
        self, folder: Path, slow_disk: threading.Event
    ) -> None:
        told: list[int] = []
        writer = CheckpointWriter(
            folder,
            Retention(3),
            in_background=True,
            published=lambda step, name, digest: told.append(step),
        )
        engine, reference = new_engine(new_model()), new_engine(new_model())
        take_steps(engine, 1, 2)
        take_steps(reference, 1, 2)
        save(writer, engine, 2)
        take_steps(engine, 3, 5)  # changes the very tensors that are being written
        assert told == [] and not any(folder.glob("step-*")), "not whole yet, so it is not there"
        slow_disk.set()
        writer.finish()
        assert told == [2]
        assert_same(resume(folder / checkpoint_name(2)), reference)

    def test_a_failure_is_an_error_at_the_next_boundary(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
