"""One run moved from engine to engine and from one number of ranks to another, through checkpoints alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.checkpoints.read import newest_whole
from privacy.checkpoints.write import CheckpointWriter, Retention
from privacy.clipping import ClippedSum
from privacy.ranks import collectives
from privacy.ranks.engine import Engine
from privacy.step.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    MICRO_BATCH,
    NUM_EXAMPLES,
    a_mechanism,
    machine_settings,
    micro_batches,
    not_charged,
    pairs,
    tiny_captioner,
    whole_parameters,
)
from tests.distributed.test_parity import ENGINES, MAX_GRAD_NORM, OPTIMIZERS, SIGMA, NamedNoise
from tests.privacy.clipping import oracle
from trainer.engines import build_engine
from trainer.optimizers import moments

CHAIN = [("zero3", 2), ("fsdp", 1), ("zero1", 2), ("oss", 2)]
MORE = [
    ("hsdp 2x1", 2),
    ("fsdp offload", 2),
    ("local", 2),
    ("zero3 offload", 2),
    ("hsdp 1x2", 2),
    ("zero2", 1),
    ("fsdp", 2),
]
STEPS_PER_LINK = 2
DEALS = {1: [(7,), (7,)], 2: [(5, 2), (0, 7)]}

State = dict[tuple[str, str], Tensor]


def rank_link(
    device: torch.device, engine: str, optimizer: str, folder: Path, num_steps: int
) -> tuple[State, State]:
    """Resumes from the newest checkpoint, if there is one, and trains on; the whole state before and after."""
    name, stage, settings = ENGINES[engine]
    model = tiny_captioner()
    checkpoint = newest_whole(folder, lambda position: None)
    if checkpoint is not None:
        checkpoint.load_weights(model)
    machine = machine_settings(stage, **settings)
    wrapped = build_engine(name, model, OPTIMIZERS[optimizer], machine, device, MICRO_BATCH)  # type: ignore[arg-type]
    if checkpoint is not None:
        checkpoint.restore(wrapped, moments(OPTIMIZERS[optimizer]))
    done = checkpoint.step if checkpoint is not None else 0
    before = whole_state(wrapped)
    clipped = ClippedSum(wrapped.module, MAX_GRAD_NORM, shapes=wrapped.shapes)
    run = a_mechanism(wrapped, clipped, NamedNoise(wrapped, done + 1), SIGMA, NUM_EXAMPLES)
    deals = DEALS[collectives.world_size()]
    for step in range(done + 1, done + num_steps + 1):
        train_step(run, not_charged(), step, iter(micro_batches(pairs(), deals[step % 2])))
    CheckpointWriter(folder, Retention(2)).save(
        done + num_steps, wrapped.state(), wrapped.shapes, {}
    )
    return before, whole_state(wrapped)


def whole_state(engine: Engine) -> State:
    """Master weights and moments put together from all ranks' pieces, by kind and parameter; a fresh engine has no moments."""
    mine = {kind for shard in engine.state() for kind in shard.tensors}
    kinds = sorted(set().union(*collectives.gather_objects(mine)))
    return {
        (kind, name): whole
        for kind in kinds
        for name, whole in whole_parameters(engine, kind).items()
    }


def equal_bits(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("optimizer", "chain"),
    [("adamw", CHAIN), *((name, CHAIN + MORE) for name in OPTIMIZERS)],
)
def test_a_run_moves_between_engines_and_world_sizes(
    optimizer: str, chain: Any, tmp_path: Path
) -> None:
    moved, alone = tmp_path / "moved", tmp_path / "alone"
    moved.mkdir()
    alone.mkdir()
    last: State | None = None
    for engine, world_size in chain:
        links = run_ranks(
            f"{__name__}:rank_link",
            world_size,
            engine=engine,
            optimizer=optimizer,
            folder=moved,
            num_steps=STEPS_PER_LINK,
        )
        for before, _ in links:
            assert last is None or equal_bits(before, last), f"{engine} did not load what was saved"
        last = links[0][1]
    assert last is not None and {kind for kind, _ in last} == {"param", "exp_avg", "exp_avg_sq"}
    assert not any(part.isnan().any() for part in last.values())
    ((start, expected),) = run_ranks(
        f"{__name__}:rank_link",
        1,
        engine="local",
        optimizer=optimizer,
        folder=alone,
        num_steps=STEPS_PER_LINK * len(chain),
    )
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        ends = [
            {name: part for (k, name), part in state.items() if k == kind}
            for state in (last, expected)
        ]
        assert oracle.relative_error(*ends) < 1e-5, kind
    assert (
        oracle.relative_error(
            *({n: p for (k, n), p in s.items() if k == "param"} for s in (start, expected))
        )
        > 1e-3
    )
