"""Checkpoints: bit-equal back, whatever the number of pieces; whole or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from privacy.checkpoints import read as checkpoint
from privacy.checkpoints import write as checkpoint_writer
from privacy.checkpoints.read import Checkpoint, checkpoint_name, file_digest
from privacy.checkpoints.write import CheckpointWriter, Retention
from privacy.step.engine import GradShard, Piece, ShardState, even_layout
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import OptimizerSection
from trainer.engines.local import LocalEngine
from trainer.errors import ConfigError
from trainer.optimizers import moments
from trainer.run.frozen import FrozenWeights

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
            GradShard(p.name, p.offset, torch.randn(p.length, generator=generator, dtype=torch.float64))
            for p in engine.layout.owned_by(0)
        ]
        engine.step(shards, lr=1e-2)


def save_checkpoint(folder: Path, engine: LocalEngine, step: int, facts: dict[str, object], *, keep: int) -> str:
    """The digest that the ledger is told."""
    told: list[tuple[int, str, str]] = []
    writer = CheckpointWriter(folder, Retention(keep), published=lambda *published: told.append(published))
    writer.save(step, engine.state(), engine.shapes, facts)
    assert [(found, name) for found, name, _ in told] == [(step, checkpoint_name(step))]
    return told[0][2]


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


@pytest.fixture
def saved(folder: Path) -> Path:
    """The checkpoint of three steps."""
    engine = new_engine(new_model())
    take_steps(engine, 1, 3)
    save_checkpoint(folder, engine, 3, {"formal_guarantee": True}, keep=2)
    return folder / checkpoint_name(3)


@pytest.mark.parametrize("dtype", ["", "_bf16"])
def test_resumed_equals_uninterrupted_to_the_bit(folder: Path, dtype: str) -> None:
    engine = new_engine(new_model(), dtype)
    take_steps(engine, 1, 3)
    save_checkpoint(folder, engine, 3, {}, keep=2)
    resumed = resume(folder / checkpoint_name(3), dtype)
    assert_same(resumed, engine)
    take_steps(engine, 4, 6)
    take_steps(resumed, 4, 6)
    assert_same(resumed, engine)


def split_in(world_size: int, folder: Path, engine: LocalEngine) -> Path:
    """What `world_size` ranks would have written of this engine."""
    whole = {s.piece.name: s.tensors for s in engine.state()}
    temporary, target = folder / ".split.tmp", folder / checkpoint_name(3)
    temporary.mkdir()
    files = {}
    for rank, pieces in enumerate(even_layout(engine.shapes, world_size).pieces):
        name = f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
        states = [
            ShardState(p, {k: v[p.offset : p.offset + p.length] for k, v in whole[p.name].items()}) for p in pieces
        ]
        tensors = {f"{k}|{s.piece.name}|{s.piece.offset}": v.clone() for s in states for k, v in s.tensors.items()}
        save_file(tensors, temporary / name)
        files[name] = file_digest(temporary / name)
    shapes = {name: list(shape) for name, shape in engine.shapes.items()}
    manifest = {"format": checkpoint.FORMAT, "step": 3, "parameters": shapes, "files": files}
    checkpoint_writer._publish(temporary, target, manifest, Retention(1))
    return target


@pytest.mark.parametrize("world_size", [3, 8])
def test_pieces_of_other_world_sizes(folder: Path, world_size: int) -> None:
    engine = new_engine(new_model())
    take_steps(engine, 1, 3)
    path = split_in(world_size, folder, engine)
    assert len(list(path.glob("rank-*"))) == world_size
    assert_same(resume(path), engine)
    found, weight = Checkpoint(path), dict(engine.module.named_parameters())["0.weight"].detach()
    assert torch.equal(found.full("param", "0.weight"), weight)
    for offset in range(0, weight.numel(), 4):  # across the borders of pieces
        piece = Piece("0.weight", offset, min(9, weight.numel() - offset))
        assert torch.equal(found.part("param", piece), weight.view(-1)[offset : offset + piece.length])


def test_no_pickle(saved: Path) -> None:
    """Loading a pickle runs code. safetensors: 8 bytes of header length, then a JSON header, then raw numbers."""
    for file in saved.glob("*.safetensors"):
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
    frozen, engine = FrozenWeights(model), new_engine(model)
    take_steps(engine, 1, 1)
    save_checkpoint(folder, engine, 1, {}, keep=1)
    other = new_model(seed=5)
    other[0].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"does not fit the model; the first difference is 0\.weight"):
        Checkpoint(folder / checkpoint_name(1)).load_weights(other)
    states, shapes = [*engine.state(), *frozen.states()], {**engine.shapes, **frozen.shapes}
    CheckpointWriter(folder, Retention(1)).save(2, states, shapes, frozen.facts())
    found = Checkpoint(folder / checkpoint_name(2))
    found.load_weights(other)
    assert found.frozen == {"0.weight"} and all(
        torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True)
    )
    found.restore(new_engine(other), moments(OPTIMIZER))
