"""Leave one example out: no statistic of any step moves by more than its stated sensitivity, whatever was released before.

A later step starts from weights that follow from releases, and these may be anything: they are drawn here, small and huge. The
example is searched for among hostile ones, some made for the weights of that step. Blocks and chunks are small, so that every sum
has several of them.
"""

import math
import zlib
from typing import Any

import numpy as np
import pytest

from evaluation.private_head import methods, rows
from evaluation.private_head.budget import Budget, Piece
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import make_method
from privacy.noise import SystemNoise

L, D, N = 5, 8, 30
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dp-ls", {}), ("dp-ls", {"class_moments": True, "max_norm": 0.5}),
    ("dp-newton", {"num_steps": 4}), ("dp-newton", {"num_steps": 3, "max_norm": 3.0, "ridge": 1e-6}),
    ("dp-fc", {"num_steps": 4, "max_grad_norm": 0.3}), ("dp-fc", {"num_steps": 3, "max_norm": 50.0, "lr": 30.0}),
    ("dp-fc-bce", {"num_steps": 4}), ("dp-fc-bce", {"num_steps": 3, "bias": 0.0, "max_grad_norm": 2.0}),
    ("dp-gd", {"max_grad_norm": 0.7}),
]  # fmt: skip


class Answers(Budget):
    """Answers what a seed says, whatever the data are, and keeps what would have been noised."""

    def __init__(self, head: methods.HeadMethod, seed: int, scale: float) -> None:
        super().__init__(head.statistics(L), 1.0, SystemNoise())
        self.seen: dict[tuple[str, int], np.ndarray] = {}
        self._seed, self._scale = seed, scale

    def release(self, name: str, values: np.ndarray, piece: Piece = Piece()) -> np.ndarray:  # noqa: B008
        self._take(name, piece)
        assert np.isfinite(values).all()
        self.seen[name, piece.number] = np.array(values)
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode()), piece.number])
        return rng.normal(size=values.shape) * self._scale


pytestmark = pytest.mark.filterwarnings("error")  # a warning would tell of an example too


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 8)
    monkeypatch.setattr(methods, "CHUNK_BYTES", 2 * 8 * D**2)


def moved(
    head: methods.HeadMethod, x_ND: np.ndarray, labels_N: np.ndarray, seed: int, scale: float
) -> dict[str, float]:
    """By how much the first example moves each statistic: it is there, or a row of zeros without its label."""
    zeroed_ND, other_N = x_ND.copy(), labels_N.copy()
    zeroed_ND[0], other_N[0] = 0, 0
    seen = []
    for features_ND, chosen_N in ((x_ND, labels_N), (zeroed_ND, other_N)):
        budget = Answers(head, seed, scale)
        head.fit(Rows(features_ND, chosen_N), L, budget)
        budget.require_spent()
        seen.append(budget.seen)
    squares = dict.fromkeys((statistic.name for statistic in head.statistics(L)), 0.0)
    for (name, _), there in seen[0].items():
        squares[name] += float(np.square(there - seen[1][name, _]).sum())
    return {name: math.sqrt(square) for name, square in squares.items()}


def weights_before(method: str, options: dict[str, Any], step: int, seed: int, scale: float) -> np.ndarray:
    """(L, D): what earlier releases say, which no data change."""
    if step == 0 or "num_steps" not in options:
        return np.zeros((L, D))
    head = make_method(method, {**options, "num_steps": step})
    return head.fit(Rows(np.zeros((N, D)), np.zeros(N, dtype=np.int64)), L, Answers(head, seed, scale))


def examples(rng: np.random.Generator, weights_LD: np.ndarray, label: int) -> list[np.ndarray]:
    """Hostile features: extreme sizes, and directions in which these weights are wrong about all classes, or undecided."""
    wrong_L = np.where(np.arange(L) == label, -1.0, 1.0)
    wrong_D = np.linalg.pinv(weights_LD) @ wrong_L if weights_LD.any() else rng.normal(size=D)
    undecided_D = np.linalg.svd(weights_LD)[2][-1]  # D > L: orthogonal to all of them
    plain_D = rng.normal(size=D)
    mixed_D = plain_D * 10.0 ** rng.uniform(-300, 300, D)
    sizes = [5e-324, 1e-300, 1e-5, 1.0, 1e150, 1e300]
    broken = [np.full(D, value) for value in (0.0, math.nan, math.inf, -math.inf, np.finfo(float).max)]
    directions = [wrong_D, -wrong_D, undecided_D, weights_LD[label], -weights_LD[label], plain_D]
    return [*(direction * size for direction in directions for size in sizes), mixed_D, *broken]


def search(method: str, options: dict[str, Any], seeds: range) -> dict[str, float]:
    """The largest part of each sensitivity that was found."""
    head, worst = make_method(method, options), {}
    bounds = {statistic.name: statistic.sensitivity for statistic in head.statistics(L)}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        scale = float(10.0 ** rng.uniform(-3, 9))
        step = int(rng.integers(0, options.get("num_steps", 1)))
        labels_N = rng.integers(0, L, N)
        weights_LD = weights_before(method, options, step, seed, scale)
        with np.errstate(over="ignore", invalid="ignore"):
            found = examples(rng, weights_LD, int(labels_N[0]))
        for x_D in found:
            others_ND = rng.normal(size=(N, D)) * 10.0 ** rng.uniform(-4, 4)
            if rng.random() < 0.3:
                others_ND[:] = x_D  # the same example again and again
            others_ND[0] = x_D
            for name, change in moved(head, others_ND, labels_N, seed, scale).items():
                worst[name] = max(worst.get(name, 0.0), change / bounds[name])
    return worst


@pytest.mark.parametrize(("method", "options"), OPTIONS)
def test_no_example_moves_any_step_by_more_than_its_sensitivity(method: str, options: dict[str, Any]) -> None:
    worst = search(method, options, range(2))
    assert set(worst) == {statistic.name for statistic in make_method(method, options).statistics(L)}
    assert max(worst.values()) <= 1 + 1e-9, worst


@pytest.mark.full
@pytest.mark.parametrize(("method", "options"), OPTIONS)
def test_no_example_of_many_does(method: str, options: dict[str, Any]) -> None:
    worst = search(method, options, range(100, 150))
    print(method, options, worst)
    assert max(worst.values()) <= 1 + 1e-9, worst


@pytest.mark.parametrize(
    "method", ["dp-fc", *(pytest.param(method, marks=pytest.mark.full) for method in ("dp-newton", "dp-fc-bce"))]
)
def test_the_search_reaches_the_bounds_of_later_steps(method: str) -> None:
    """So it would notice a bound that is too small by a little."""
    worst = search(method, {"num_steps": 3}, range(20, 29))
    assert all(worst[name] > 0.95 for name in worst if name.endswith(("[1]", "[2]"))), worst
