"""A checkpoint of any engine, stage and world size is bit-equal on any other after loading: weights, moments and average."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.checkpoints.read import AVERAGE, Checkpoint, newest_whole
from privacy.checkpoints.write import CheckpointWriter, Retention
from privacy.ranks import collectives as distributed
from privacy.ranks.engine import Engine, GradShard
from privacy.step.averaging import WeightAverage
from tests.distributed.ranks import ROOT, run_ranks
from tests.trainer import test_optimizers as whole
from trainer.config.machine import load_machine_settings
from trainer.engines import build_engine
from trainer.optimizers import moments

REDUCED = [("local", 1), ("deepspeed", 3)]
ALL = [*REDUCED, ("deepspeed", 1), ("deepspeed", 2), ("fsdp", 3), ("fairscale", 1)]
SECTION = whole.section("adamw")

Whole = dict[str, Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(7, 11), nn.LayerNorm(11), nn.Linear(11, 3), nn.Linear(3, 1, bias=False)
    )
    with torch.no_grad():
        made[1].weight.add_(0.1 * torch.randn(11))
    return made


def gradients() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        {
            n: 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            for n, p in model().named_parameters()
        }
        for _ in range(whole.STEPS)
    ]


def new_engine(name: str, stage: int, module: nn.Module, device: torch.device) -> Engine:
    machine = load_machine_settings(ROOT / "ds_configs" / f"zero{stage}.json")
    return build_engine(name, module, SECTION, machine, device, 1)  # type: ignore[arg-type]


def step(engine: Engine, gradient: dict[str, Tensor]) -> None:
    shards = [
        GradShard(
            p.name, p.offset, gradient[p.name].view(-1)[p.offset : p.offset + p.length].clone()
        )
        for p in engine.layout.owned_by(distributed.rank())
    ]
    engine.step(shards, lr=whole.LR)


def gathered(average: WeightAverage) -> Whole:
    """ "kind|parameter" -> all coordinates, from every rank's pieces."""
    mine = [
        (s.piece, {k: v.detach().cpu().clone() for k, v in s.tensors.items()})
        for s in average.states()
    ]
    shapes = {n: p.shape for n, p in model().named_parameters()}
    out: Whole = {}
    for pieces in distributed.gather_objects(mine):
        for piece, tensors in pieces:
            for kind, values in tensors.items():
                flat = out.setdefault(
                    f"{kind}|{piece.name}", torch.full((shapes[piece.name].numel(),), torch.nan)
                )
                flat[piece.offset : piece.offset + piece.length] = values
    return out


def rank_save(
    device: torch.device, folder: Path, engines: list[tuple[str, int]]
) -> dict[str, Whole]:
    """Two steps under each engine, then a checkpoint; what was in memory."""
    found = {}
    for name, stage in engines:
        engine = new_engine(name, stage, model(), device)
        average = WeightAverage(0.5).start(engine, None)
        for number, gradient in enumerate(gradients()[:2], 1):
            step(engine, gradient)
            average.update(number)
        target = folder / f"{name}-{stage}-{distributed.world_size()}"
        if distributed.rank() == 0:
            target.mkdir()
        writer = CheckpointWriter(target, Retention(1), in_background=stage == 3)
        writer.save(2, average.states(), engine.shapes, {"ledger": {}})
        writer.finish()
        found[target.name] = gathered(average)
    return found


def rank_load(device: torch.device, folder: Path, engines: list[tuple[str, int]]) -> dict[str, Any]:
    """Every checkpoint in `folder` under each engine: what is in memory then."""
    found = {}
    for target in sorted(folder.iterdir()):
        for name, stage in engines:
            checkpoint = newest_whole(target, lambda position: None)
            assert checkpoint is not None
            module = model()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            checkpoint.load_weights(module)
            engine = new_engine(name, stage, module, device)
            checkpoint.restore(engine, moments(SECTION))
            found[f"{target.name} -> {name}-{stage}"] = gathered(
                WeightAverage(0.5).start(engine, checkpoint)
            )
            step(engine, gradients()[2])  # and it can go on from there
            found[f"{target.name} -> {name}-{stage}, a step later"] = {
                f"param|{s.piece.name}|{s.piece.offset}": s.tensors["param"].detach().cpu().clone()
                for s in engine.state()
            }
    return found


def move(folder: Path, engines: list[tuple[str, int]], *worlds: tuple[int, int]) -> None:
    """worlds: (world size that saves, world size that loads)."""
    for saving, loading in worlds:
        target = folder / f"{saving}-{loading}"
        target.mkdir()
        saved = run_ranks(f"{__name__}:rank_save", saving, folder=target, engines=engines)[0]
        kinds = {key.split("|")[0] for state in saved.values() for key in state}
        assert kinds == {"param", "exp_avg", "exp_avg_sq", AVERAGE}
        results = run_ranks(f"{__name__}:rank_load", loading, folder=target, engines=engines)
        loaded = {key: state for key, state in results[0].items() if "later" not in key}
        assert len(loaded) == len(engines) ** 2
        for key, state in loaded.items():
            before = saved[key.split(" -> ")[0]]
            assert state.keys() == before.keys()
            assert all(torch.equal(state[tensor], before[tensor]) for tensor in before), key
        # All engines take the third step from there to the same place as an uninterrupted float64 run.
        exact = whole.reference(
            "adamw", {n: p.detach() for n, p in model().named_parameters()}, gradients()[:3]
        )
        for key, state in (
            (key, state) for rank in results for key, state in rank.items() if "later" in key
        ):
            for piece, values in state.items():
                _, name, offset = piece.split("|")
                expected = exact[name].view(-1)[int(offset) : int(offset) + values.numel()]
                assert torch.allclose(values.view(-1).double(), expected, rtol=2e-5, atol=2e-6), (
                    key,
                    piece,
                )


def test_from_two_ranks_to_one(tmp_path: Path) -> None:
    move(tmp_path, REDUCED, (2, 1))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_engine_to_every_engine(tmp_path: Path) -> None:
    move(tmp_path, ALL, (1, 2), (2, 2), (2, 1))


@pytest.mark.full
def test_damage_is_found_whichever_rank_hashes_the_file(tmp_path: Path) -> None:
    """Each rank hashes its share of the files; all ranks go back together."""
    results = run_ranks(f"{__name__}:rank_damage", 2, folder=tmp_path)
    assert results == [[1, 1], [1, 1]]


def rank_damage(device: torch.device, folder: Path) -> list[int]:
    """Steps that are resumed from, with the file of rank 0 and of rank 1 damaged."""
    found = []
    engine = new_engine("local", 1, model(), device)
    for damaged in (0, 1):
        target = folder / str(damaged)
        distributed.on_main(target.mkdir)
        writer = CheckpointWriter(target, Retention(3))
        for number in (1, 2):
            step(engine, gradients()[number])
            writer.save(number, engine.state(), engine.shapes, {"ledger": {}})
        part = target / f"step-00000002/rank-0000{damaged}-of-00002.safetensors"
        distributed.on_main(lambda part=part: part.write_bytes(part.read_bytes()[:-2] + b"?!"))  # type: ignore[misc]
        checkpoint = newest_whole(target, lambda position: None)
        assert isinstance(checkpoint, Checkpoint)
        found.append(checkpoint.step)
    return found
