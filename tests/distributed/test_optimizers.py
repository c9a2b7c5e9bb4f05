"""Every optimizer on two real ranks that hold parts of parameters, against the float64 references over whole parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.step.engine import GradShard
from privacy.step.noise_variance import NoiseVariance
from tests.distributed.ranks import ROOT, run_ranks
from tests.trainer import test_optimizers as whole
from trainer.config.machine import load_machine_settings
from trainer.engines import build_engine
from trainer.ranks import distributed

KINDS = ("adamw", "adam_bc", "sgd")


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 11), nn.LayerNorm(11), nn.Linear(11, 3), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        made[1].weight.add_(0.1 * torch.randn(11))
    return made


def gradients() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        {n: 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in model().named_parameters()}
        for _ in range(whole.STEPS)
    ]


def rank_all(device: torch.device, engines: list[tuple[str, int]]) -> dict[tuple[str, int, str], Any]:
    """This rank's pieces after all steps, by engine, stage and optimizer."""
    found = {}
    for name, stage in engines:
        machine = load_machine_settings(ROOT / "ds_configs" / f"zero{stage}.json")
        for kind in KINDS:
            engine = build_engine(name, model(), whole.section(kind), machine, device, 1)  # type: ignore[arg-type]
            noise = NoiseVariance(whole.BETAS[1])
            for number, gradient in enumerate(gradients(), 1):
                shards = [
                    GradShard(p.name, p.offset, gradient[p.name].view(-1)[p.offset : p.offset + p.length].clone())
                    for p in engine.layout.owned_by(distributed.rank())
                ]
                engine.step(shards, lr=whole.LR, noise_variance=noise.after(number, whole.STDS[number - 1]))
            found[name, stage, kind] = [(s.piece, s.tensors["param"].clone()) for s in engine.state()]
    return found


@pytest.mark.parametrize(
    "engines",
    [
        [("local", 1), ("deepspeed", 1), ("deepspeed", 3)],
        pytest.param([("deepspeed", 2)], marks=pytest.mark.full),
    ],
)
def test_sharded_equals_the_publication(engines: list[tuple[str, int]]) -> None:
    results = run_ranks(f"{__name__}:rank_all", 2, engines=engines)
    start = {n: p.detach() for n, p in model().named_parameters()}
    for name, stage in engines:
        for kind in KINDS:
            expected = whole.REFERENCES[kind](start, gradients())
            covered = 0
            for rank in results:
                for piece, values in rank[name, stage, kind]:
                    covered += piece.length
                    exact = expected[piece.name].view(-1)[piece.offset : piece.offset + piece.length]
                    close = torch.allclose(values.double(), exact, rtol=2e-5, atol=2e-6)
                    assert close, (name, stage, kind, piece, (values - exact).abs().max())
            assert covered == sum(w.numel() for w in start.values())
