"""Each sanity check fires for its own defect, on real ranks, and is silent in a run without one."""

import re
from typing import Any

import torch
from torch import Tensor

from privacy.clipping import ClippedSum
from privacy.noise import SystemNoise
from privacy.step import collectives
from privacy.step.step import Mechanism, train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import a_mechanism, build, micro_batches, pairs
from trainer.errors import RemoteError
from trainer.loop.sanity import SanityChecks, SanityError


class SeededNoise:
    """The classic mistake: a generator with a seed that all ranks, or all steps, share."""

    def __init__(self, *, per_rank: bool) -> None:
        self._generator = torch.Generator().manual_seed(collectives.rank() if per_rank else 0)
        self._fresh_per_step = per_rank

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        if self._fresh_per_step:
            self._generator.manual_seed(2 * count + collectives.rank())  # the same in every step
        return torch.randn(count, generator=self._generator, dtype=torch.float64)


def rank_checks(device: torch.device, name: str, stage: int, defects: list[str]) -> dict[str, str]:
    """What the checks said about two steps, by defect; empty if nothing."""
    said = {}
    for defect in defects:
        engine = build(device, name, stage)
        source: Any = {
            "same noise on all ranks": lambda: SeededNoise(per_rank=False),
            "same noise in all steps": lambda: SeededNoise(per_rank=True),
        }.get(defect, SystemNoise)()
        checks = SanityChecks(engine, source)
        sigma = 0.0 if defect == "a parameter that does not move" else 1.0
        run = a_mechanism(
            engine, ClippedSum(engine.module, 0.5, shapes=engine.shapes, self_check=False), checks.noise, sigma, 4
        )
        said[defect] = ""
        try:
            for step in (1, 2):
                one_step(run, step, checks, defect)
        except (SanityError, RemoteError) as error:
            said[defect] = f"{type(error).__name__} {error}"
    return said


def one_step(run: Mechanism, step: int, checks: SanityChecks, defect: str) -> None:
    rank, batches = collectives.rank(), micro_batches(pairs(), (5, 2))
    planned = len(batches) + (rank if defect == "another plan" else 0)
    if defect == "a micro-batch less" and rank == 1:
        batches.pop()
    train_step(run, step, checks.before_step(step, iter(batches), planned))
    if defect == "replicas differ" and rank == 1 and step == 2:
        with torch.no_grad():  # the last bit of one number
            next(p for p in run.engine.module.parameters() if p.dim() == 2).view(torch.int32)[1, 0] ^= 1
    if defect == "a parameter that does not move":
        for state in run.engine.state():
            if state.piece.name.endswith("norm.weight"):
                state.tensors["param"].copy_(checks._initial[state.piece])  # type: ignore[index]
    checks.after_step(step)


MESSAGES = {
    "": "",
    "same noise on all ranks": r"after step 1: rank \d drew noise that was drawn before",
    "same noise in all steps": r"after step [12]: rank \d drew noise that was drawn before",
    "another plan": r"after step 1: the planned number of micro-batches differs between ranks: \[4, 5\]",
    "a micro-batch less": r"after step 1: the number of micro-batches differs between ranks: \[4, 3\]",
    "replicas differ": r"after step 2: .* differs between the replicas of ranks 0 and 1",
    "a parameter that does not move": r"after step 1: \d+ trainable parameters did not move .*norm",
}


def check(name: str, stage: int, defects: list[str]) -> None:
    results = run_ranks(f"{__name__}:rank_checks", 2, name=name, stage=stage, defects=defects)
    for defect in defects:
        for rank, kind in enumerate(("SanityError", "RemoteError")):
            said = results[rank][defect]
            assert re.match(f"{kind} sanity check {MESSAGES[defect]}" if defect else "$", said), (defect, said)


def test_each_check_fires() -> None:
    check("local", 1, list(MESSAGES))
