"""Noise is whole steps of the sum that it is added to, so a release is a function of the Gaussian mechanism.

Noise made of doubles was not: Box-Muller makes a pair of normals from two uniforms of 53 bits, and most pairs of
doubles have no such uniforms behind them. So the last bits of a released sum told which of two neighbours it was of.
"""

import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privacy.clipping import ClippedSum
from privacy.errors import PrivacyConfigError
from privacy.loop import PrivateLoop, floats
from privacy.noise.rounded_normal import deviation_in_units
from privacy.plan.limits import MOST_DEVIATION
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from privacy.ranks.engine import even_layout
from privacy.run.mechanism import clipper_of
from privacy.sampling.sampler import sampler_of
from privacy.step.step import Charge, Mechanism, train_step
from privacy.sums.grid import LARGEST_INT64, Grid
from privacy.sums.local import LocalSums
from privacy.sums.sharded import ShardedSums
from tests.privacy.loop.own import quick

SIGMA, N, WIDTH = 16.0, 64, 600
AROUND = 12
"""Doubles on either side of a recomputed uniform that are tried."""


class Zero(nn.Module):
    """Begins at zero weights, so that one step of SGD with a rate of 1 leaves minus the noised mean in them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1, bias=False).double()
        nn.init.zeros_(self.head.weight)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.head(x_BD.double())[:, 0]


def sum_of(x_ND: Tensor) -> np.ndarray:
    """The clipped sum that an adversary computes, who knows all examples."""
    clipped = ClippedSum(Zero(), 1.0, cap=N, rows=N)
    clipped.add_micro_batch(clipped.model, {"x_BD": x_ND}, torch.zeros(N, dtype=torch.bool))
    return dict(clipped.sums())["head.weight"].flatten().numpy()


def explained(y_D: np.ndarray, sum_D: np.ndarray) -> float:
    """Share of pairs of coordinates whose y is the sum and sigma times what Box-Muller makes of some two uniforms."""
    z_D, half = (y_D - sum_D) / SIGMA, WIDTH // 2
    a_P, b_P = z_D[:half], z_D[half:]
    first_P, second_P = (
        np.exp(-(a_P**2 + b_P**2) / 2),
        np.mod(np.arctan2(b_P, a_P), 2 * np.pi) / (2 * np.pi),
    )
    k = np.arange(-AROUND, AROUND + 1)
    uniforms = (
        first_P[:, None, None]
        + k[None, :, None] * np.spacing(first_P)[:, None, None]
        + 0.0 * k[None, None, :],
        second_P[:, None, None]
        + k[None, None, :] * np.spacing(second_P)[:, None, None]
        + 0.0 * k[None, :, None],
    )
    u_PKK, v_PKK = (torch.from_numpy(one) for one in uniforms)
    radius_PKK, angle_PKK = u_PKK.log().mul(-2.0).sqrt(), v_PKK.mul(2 * math.pi)
    hits = [
        torch.from_numpy(of_sum)[:, None, None].add(normal_PKK, alpha=SIGMA)
        == torch.from_numpy(of_y)[:, None, None]
        for normal_PKK, of_sum, of_y in (
            (radius_PKK * angle_PKK.cos(), sum_D[:half], y_D[:half]),
            (radius_PKK * angle_PKK.sin(), sum_D[half:], y_D[half:]),
        )
    ]
    return float((hits[0] & hits[1]).flatten(1).any(1).double().mean())


def test_contract_7_a_float64_model_does_not_tell_which_of_two_neighbours_it_saw(
    tmp_path: Path,
) -> None:
    """With noise made of doubles the true sum explained every pair, and its neighbour's one in seven."""
    x_ND = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1))
    model = Zero()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with (
        quick(),
        PrivateLoop(
            model,
            optimizer,
            TensorDataset(x_ND),
            example=(floats(WIDTH),),
            loss=model,
            run_dir=tmp_path / "run",
            starts_from="public",
            expected_batch_size=N,
            num_steps=1,
            micro_batch_size=N,
            noise_multiplier=SIGMA,
            target_delta=1e-3,
        ) as loop,
    ):
        assert len(list(loop)) == 1
    y_D = -model.head.weight.detach().flatten().numpy() * N  # N is a power of two: exact
    neighbour_ND = x_ND.clone()
    neighbour_ND[0] = 0
    true_D, other_D = sum_of(x_ND), sum_of(neighbour_ND)
    assert 0.9 < np.linalg.norm(true_D - other_D) < 1.001
    share, share_of_other = explained(y_D, true_D), explained(y_D, other_D)
    # Two shares of 300 pairs each, of which chance explains some 14 %.
    assert abs(share - share_of_other) < 5 * math.sqrt(2 * 0.14 * 0.86 / 300), (
        share,
        share_of_other,
    )


# S + round(N) = round(S + N), on what a run adds up and hands to its optimizer


class Reals:
    """Rounds real normals that it keeps: doubles, which are rational numbers. A tie, as reals have none, goes up."""

    def __init__(self) -> None:
        self.reals: list[np.ndarray] = []
        self.deviations: list[float] = []

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        real = np.random.default_rng(len(self.reals)).normal(size=count) * deviation
        self.reals.append(real)
        self.deviations.append(deviation)
        whole = np.floor(real)
        return torch.from_numpy((whole + (real - whole >= 0.5)).astype(np.int64))


def rounded(number: Fraction) -> int:
    return math.floor(number + Fraction(1, 2))


class Captured:
    """As much of an engine as a step needs; keeps what its optimizer would get."""

    device = torch.device("cpu")

    def __init__(self, model: nn.Module) -> None:
        self.compute_dtype = next(model.parameters()).dtype
        self.layout = even_layout({name: p.shape for name, p in model.named_parameters()}, 1)
        self.values: list[Tensor] = []

    def step(self, shards: Any, *, lr: float) -> None:
        self.values = [shard.values.clone() for shard in shards]


SIDE = 130
MODES: dict[str, dict[str, Any]] = {
    "8 bytes": {"dtype": torch.float64},
    "6 bytes": {},
    "sharded": {"accumulator": ShardedSums},
    "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
}


def step_of(mode: str, noise: Any, bound: float, sigma: float = 1.5) -> tuple[ClippedSum, Captured]:
    """A step on examples whose sum is the same every time; 16,900 numbers are too many for the short layout."""
    changed = dict(MODES[mode])
    dtype, accumulator = changed.pop("dtype", torch.float32), changed.pop("accumulator", LocalSums)
    fields = {
        "num_examples": 400,
        "expected_batch_size": 24,
        "num_steps": 3,
        "noise_multiplier": sigma,
        "max_grad_norm": bound,
        "sensitivity_slack": 1e-3,
        "informal_reasons": ("a test",),
    }
    plan = make_plan(PlanRequest(**fields | changed))  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, 1)).to(dtype)
    clipped = clipper_of(plan, model, accumulator=accumulator, rows=64)
    engine, x_BD = Captured(model), torch.randn(48, SIDE, dtype=dtype)
    mechanism = Mechanism(
        plan=plan,
        sampler=sampler_of(plan),
        clipped=clipped,
        noise=noise,  # type: ignore[arg-type]
        engine=engine,
        task=lambda x_BD: model(x_BD)[:, 0],
    )
    ledger = SimpleNamespace(intent=lambda *_, **__: None, done=lambda *_, **__: None)
    charge = Charge(ledger, lambda _: 1.0, lambda _: None)  # type: ignore[arg-type]
    batches = [
        SimpleNamespace(
            inputs={"x_BD": part}, is_padding_B=torch.zeros(16, dtype=torch.bool), num_undecodable=0
        )
        for part in x_BD.split(16)
    ]
    train_step(mechanism, charge, 1, iter(batches))
    return clipped, engine


class Silent:
    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=torch.int64)


@pytest.mark.parametrize("bound", [1.0, 0.37])
@pytest.mark.parametrize("mode", MODES)
def test_contract_7_what_the_optimizer_gets_is_the_rounded_gaussian_mechanism(
    mode: str, bound: float
) -> None:
    """In steps of the sum and exactly: whole sums without noise, and round(S + N) with it, for N as it was drawn."""
    source = Reals()
    _, silent = step_of(mode, Silent(), bound)
    clipped, noisy = step_of(mode, source, bound)
    exponent = clipped.exponent
    assert exponent is not None
    if mode == "6 bytes":
        assert clipped.grid.layout_of(SIDE * SIDE) == "int32+int16"
    assert {Fraction(d) for d in source.deviations} == {
        Fraction(deviation_in_units(1.5 * bound, exponent))
    }
    assert (
        Fraction(source.deviations[0]) >= Fraction(1.5) * Fraction(bound) * Fraction(2) ** exponent
    )
    moved = 0
    for without, with_noise, real in zip(silent.values, noisy.values, source.reals, strict=True):
        assert without.dtype == with_noise.dtype == torch.float64
        total = (without * 24 * 2.0**exponent).round()
        assert torch.equal(total * 2.0**-exponent / 24, without), "sums are whole steps"
        pairs = zip(total.tolist(), real.tolist(), strict=True)
        expected = torch.tensor(
            [rounded(Fraction(s) + Fraction(n)) for s, n in pairs], dtype=torch.float64
        )
        assert torch.equal(expected * 2.0**-exponent / 24, with_noise)
        moved += int((total != 0).sum())
    assert moved > SIDE * SIDE


# The conditions, at their limits


@pytest.mark.parametrize("coordinates", [1, 10_000, 407_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cap", [1, 1000, 1_319_879])
def test_contract_7_the_step_is_coarser_where_the_noise_could_not_be_drawn(
    coordinates: int, dtype: torch.dtype, cap: int
) -> None:
    """For every C of a binade the deviation is at most 2^50 steps; no coarser than it must be; never too coarse."""
    usual = Grid.of(coordinates, dtype, cap)
    for sigma in (1e-9, 0.3, 255.9, 256.0, 2.0**10, 2.0**11, 1e4, 2.0**19, 2.0**21, 2.0**36):
        coarsest = next(b for b in range(1, 99) if coordinates * 4**13 <= 4 ** (b - 1))
        if deviation_in_units(sigma * math.nextafter(1.0, 0), coarsest) > MOST_DEVIATION:
            with pytest.raises(
                PrivacyConfigError, match=r"passes what is drawn exactly, 2\^50 steps"
            ):
                Grid.of(coordinates, dtype, cap, noise_multiplier=sigma)
            continue
        grid = Grid.of(coordinates, dtype, cap, noise_multiplier=sigma)
        for bound in (1.0, 0.75, math.nextafter(1.0, 0), math.nextafter(2.0, 0), 3e-7):
            unit = grid.unit(bound)
            assert unit is not None
            assert 0 < deviation_in_units(sigma * bound, unit.exponent) <= MOST_DEVIATION
            assert (
                coordinates * Fraction(4) ** 13
                <= Fraction(bound) ** 2 * Fraction(4) ** unit.exponent
            )
            assert 2 * cap * unit.largest <= LARGEST_INT64 and LARGEST_INT64 + 2**56 < 2**63
        assert grid.bits <= usual.bits
        finer = deviation_in_units(sigma * math.nextafter(1.0, 0), grid.bits + 1)
        assert grid.bits == usual.bits or finer > MOST_DEVIATION


def test_contract_7_a_step_with_enormous_noise_draws_what_it_states() -> None:
    """sigma = 10,000 in the finest steps of a float64 sum would pass what is drawn exactly."""
    source = Reals()
    clipped, engine = step_of("8 bytes", source, 1.0, sigma=1e4)
    assert clipped.exponent is not None and max(source.deviations) <= MOST_DEVIATION
    usual = ClippedSum(clipped.model, 1.0, cap=clipped.grid.rows)
    assert usual.exponent is not None and usual.exponent > clipped.exponent
    spread = torch.cat(engine.values).std() * 24
    assert 0.98 < float(spread) / 1e4 < 1.02
    with pytest.raises(PrivacyConfigError, match="takes a coarser step"):
        usual.release(1e4)


@pytest.mark.parametrize(("made_for", "drawn"), [(1.0, 0.0), (0.0, 1.0)])
def test_contract_7_a_step_is_there_exactly_where_noise_is(made_for: float, drawn: float) -> None:
    clipped = ClippedSum(nn.Linear(3, 1), 1.0, noise_multiplier=made_for)
    assert (clipped.exponent is None) == (made_for == 0)
    with pytest.raises(PrivacyConfigError, match=f"noise_multiplier={drawn:g}"):
        clipped.release(drawn)
    assert clipped.release(made_for)["std"] == made_for


def test_contract_7_without_noise_sums_stay_doubles_and_nothing_is_drawn() -> None:
    _, engine = step_of("6 bytes", None, 1.0, sigma=0.0)
    assert all(values.dtype == torch.float64 for values in engine.values)
    assert float((torch.cat(engine.values).abs() * 2.0**40 % 1).max()) > 0, (
        "a step would have rounded small gradients"
    )
