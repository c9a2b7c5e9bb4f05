"""Adaptive clipping on real ranks: one noise draw for the count, the same C everywhere, and a resume that goes on bit by bit."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.adaptive_clipping import AdaptiveClipping
from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import LocalSums
from privacy.noise import SystemNoise
from privacy.releases import GRADIENT, UNCLIPPED, Release
from privacy.step.adaptive_bound import MANIFEST_KEY, resumed_bound
from privacy.step.sharded_sums import ShardedSums
from privacy.step.step import StepRecord, train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import NoLedger, a_mechanism, build, micro_batches, pairs
from trainer.errors import ConfigError

ADAPTIVE = AdaptiveClipping(0.5, 0.3, 1.7)
C, SIGMA, BATCH_SIZE = 0.5, 1.1, 7
BOUND, FRACTION = "privacy/clipping_bound", "privacy/noised_unclipped_fraction"


class KeptLedger(NoLedger):
    """Keeps the intents."""

    def __init__(self) -> None:
        super().__init__()
        self.intents: list[list[Release]] = []

    def intent(self, step: int, **release: Any) -> None:
        super().intent(step, **release)
        self.intents.append(list(release["releases"]))


class OnlyAfterAnIntent(SystemNoise):
    """Draws silence for gradients and `count` in turn for the count; refuses to draw before the intent."""

    def __init__(self, ledger: KeptLedger, counts: list[float]) -> None:
        self._ledger, self._counts = ledger, list(counts)
        self.num_count_draws = 0

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        assert self._ledger.open_intent, "noise is drawn before the intent is durable"
        if count > 1:
            return torch.zeros(count, dtype=torch.int64)
        self.num_count_draws += 1
        return torch.tensor([round(deviation * self._counts.pop(0))])


def adaptive_run(
    device: torch.device,
    name: str,
    stage: int,
    draws: list[float],
    manifest: dict[str, Any] | None = None,
    *,
    sharded: bool = False,
) -> tuple[Any, KeptLedger, OnlyAfterAnIntent]:
    engine = build(device, name, stage)
    ledger = KeptLedger()
    noise = OnlyAfterAnIntent(ledger, draws)
    accumulator = ShardedSums if sharded else LocalSums
    clipped = ClippedSum(
        engine.module,
        C,
        shapes=engine.shapes,
        adaptive=ADAPTIVE,
        accumulator=accumulator,
        self_check=False,
    )
    if manifest is not None:
        clipped.max_grad_norm = resumed_bound(manifest, C)
    run = a_mechanism(engine, clipped, noise, SIGMA, BATCH_SIZE)
    run.ledger = ledger
    run.plan = replace(run.plan, max_grad_norm=C)
    return run, ledger, noise


DRAWS = [0.3, -1.4, 2.2, -0.7]


def rank_steps(
    device: torch.device,
    name: str,
    stage: int,
    counts: tuple[int, ...],
    resume_after: int | None,
    sharded: bool = False,
) -> Any:
    """C and the published fraction of four steps; with `resume_after`, in two starts that share a manifest only."""
    run, ledger, noise = adaptive_run(device, name, stage, DRAWS, sharded=sharded)
    published: list[dict[str, float]] = []
    draws = 0
    for step in range(1, len(DRAWS) + 1):
        if step - 1 == resume_after:
            manifest = json.loads(
                json.dumps({"step": step - 1, MANIFEST_KEY: run.clipped.max_grad_norm})
            )
            draws, module = noise.num_count_draws, run.engine.module
            run, ledger, noise = adaptive_run(device, name, stage, DRAWS[step - 1 :], manifest)
            run.engine.module.load_state_dict(module.state_dict())
        record: StepRecord = train_step(run, step, iter(micro_batches(pairs(), counts)))
        published.append({name: value.value for name, value in record.public.items()})
        assert ledger.intents[-1][0]["sensitivity"] == published[-1][BOUND]
    return published, run.clipped.max_grad_norm, draws + noise.num_count_draws, ledger.intents


def close(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    for name in (BOUND, FRACTION):
        assert [step[name] for step in one] == pytest.approx(
            [step[name] for step in other], rel=1e-4
        )


def rank_alone(device: torch.device) -> list[Any]:
    return [rank_steps(device, "local", 1, (7,), resume_after) for resume_after in (None, 2)]


@pytest.fixture(scope="module")
def both(sums_products_in_all: None) -> Any:
    """The four steps on one rank, at once and in two starts."""
    return run_ranks(f"{__name__}:rank_alone", 1)[0]


@pytest.mark.parametrize(
    ("name", "stage", "sharded"),
    [
        ("local", 1, True),
        pytest.param("deepspeed", 3, True, marks=pytest.mark.full),
        pytest.param("deepspeed", 3, False, marks=pytest.mark.full),
        pytest.param("fsdp", 3, True, marks=pytest.mark.full),
    ],
)
def test_two_ranks_adapt_as_one_and_noise_the_count_once(
    name: str, stage: int, sharded: bool, both: Any
) -> None:
    options = {
        "name": name,
        "stage": stage,
        "sharded": sharded,
        "counts": (5, 2),
        "resume_after": None,
    }
    first, second = run_ranks(f"{__name__}:rank_steps", 2, **options)
    alone, _ = both
    assert first[:2] == second[:2], "ranks hold different bounds"
    close(alone[0], first[0])
    assert (alone[2], first[2], second[2]) == (len(DRAWS), len(DRAWS), 0)
    bounds = [step[BOUND] for step in first[0]]
    assert bounds[0] == C and len(set(bounds)) == len(DRAWS)
    for published, after in zip(first[0], [*bounds[1:], first[1]], strict=True):
        assert after == ADAPTIVE.next_bound(published[BOUND], published[FRACTION], C)
    for intent, bound in zip(first[3], bounds, strict=True):
        assert [r["name"] for r in intent] == [GRADIENT, UNCLIPPED]
        assert intent[0]["sensitivity"] == bound
        assert sum((r["sensitivity"] / r["std"]) ** 2 for r in intent) == pytest.approx(
            SIGMA**-2, rel=1e-12
        )


def test_a_resume_goes_on_with_the_same_bound_bit_by_bit(both: Any) -> None:
    alone, again = both
    # The optimizer's moments are not part of this, so that weights differ after the third step.
    assert again[0][:3] == alone[0][:3]


@pytest.mark.parametrize("bound", [None, 0.0, math.nan, math.inf, C * 1e5, "0.5", 1])
def test_a_manifest_without_a_sensible_bound_is_refused(bound: object) -> None:
    with pytest.raises(ConfigError, match=MANIFEST_KEY):
        resumed_bound({"step": 3, MANIFEST_KEY: bound}, C)
