"""Private heads: dense references, sensitivities by leaving one example out, noise by statistics, digits against non-private.

A later step starts from weights that follow from releases, and these may be anything: the search draws them, small and huge. It
looks for the example among hostile ones, some made for the weights of that step. Blocks and chunks are small, so that every sum
has several of them.
"""

import math
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional

from evaluation.command_options import HeadMethod as Offered
from evaluation.private_head import methods, rows
from evaluation.private_head.methods import METHODS, Budget, Piece, Statistic, accuracy
from evaluation.private_head.rows import Rows, clip_rows, rounding
from evaluation.private_head.run import head_plan, make_method, train_head, without_noise
from privacy.errors import PrivacyConfigError
from privacy.noise.source import SystemNoise
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.evaluation.support import digits, exact_delta, spent
from tests.privacy.test_whole_noise import Reals, rounded

L, D, N = 5, 8, 30
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dp-ls", {"alpha": 0.7}),
    ("dp-ls", {"class_moments": True, "max_norm": 0.5}),
    ("dp-newton", {"num_steps": 4}),
    ("dp-newton", {"num_steps": 3, "max_norm": 3.0, "ridge": 1e-6}),
    ("dp-fc", {"num_steps": 4, "max_grad_norm": 0.3}),
    ("dp-fc", {"num_steps": 3, "max_norm": 50.0, "lr": 30.0}),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 8)
    monkeypatch.setattr(methods, "CHUNK_BYTES", 2 * 8 * D**2)


def data(seed: int = 0, count: int = N) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, D)), rng.integers(0, L, count)


def reference(
    method: str, options: dict[str, Any], features: np.ndarray, labels: np.ndarray
) -> torch.Tensor:
    """Dense, by torch's derivatives of the losses as they are published, each example's gradient by itself."""
    o = {
        "max_norm": 1.0,
        "lr": 1.0,
        "max_grad_norm": 1.0,
        "num_steps": 1,
        "alpha": 1.0,
        "ridge": 1e-3,
    } | options
    x, y = torch.tensor(features, dtype=torch.float64), torch.tensor(labels)
    target = functional.one_hot(y, L).double()
    x = x * (o["max_norm"] / x.norm(dim=1, keepdim=True)).clamp(max=1)
    w = torch.zeros(L, D, dtype=torch.float64)
    moment, scale, eye = x.T @ x, len(x) * o["max_norm"] ** 2, torch.eye(D, dtype=torch.float64)
    if method == "dp-ls":
        own = [x[y == label] for label in range(L)]
        extra = [part.T @ part if "class_moments" in o else 0 for part in own]
        both = [o["alpha"] * moment + one + 0.03 * scale * eye for one in extra]
        return torch.stack(
            [torch.linalg.solve(m, part.sum(0)) for m, part in zip(both, own, strict=True)]
        )

    def loss(w: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if method == "dp-newton":
            return functional.binary_cross_entropy_with_logits(
                functional.linear(x, w), target, reduction="sum"
            )
        return functional.cross_entropy(functional.linear(x, w), target)

    for _ in range(o["num_steps"]):
        g = torch.stack([torch.func.grad(loss)(w, x[i], target[i]) for i in range(len(x))])
        if method == "dp-newton":
            for label in range(L):
                h = torch.func.hessian(lambda own, k=label: loss(own, x, target[:, k]))(w[label])
                w[label] = w[label] - torch.linalg.solve(
                    h + o["ridge"] * scale * eye, g.sum(0)[label]
                )
            continue
        g = (g * (o["max_grad_norm"] / g.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None]).sum(0)
        w = w - o["lr"] * torch.linalg.solve(moment + 1e-2 * scale * eye, g.T).T
    return w


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("method", "options"), OPTIONS)
def test_streamed_heads_equal_dense_references(method: str, options: dict[str, Any]) -> None:
    x, y = data(3, 61)
    found = without_noise(Rows(x.astype(np.float32), y), L, method, options)
    expected = reference(method, options, x.astype(np.float32), y).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


class Answers(Budget):
    """Answers what a seed says, whatever the data are, and keeps what would have been noised."""

    def __init__(self, head: methods.HeadMethod, seed: int, scale: float) -> None:
        super().__init__(head.statistics(L, D), 1.0, SystemNoise(), N)
        self.seen: dict[tuple[str, int], np.ndarray] = {}
        self._seed, self._scale = seed, scale

    def release(self, name: str, values: np.ndarray, piece: Piece = Piece()) -> np.ndarray:  # noqa: B008
        self._take(name, piece)
        assert np.isfinite(values).all()
        self.seen[name, piece.number] = np.array(values)
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode()), piece.number])
        return rng.normal(size=values.shape) * self._scale


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
    squares = dict.fromkeys((statistic.name for statistic in head.statistics(L, D)), 0.0)
    for (name, _), there in seen[0].items():
        squares[name] += float(np.square(there - seen[1][name, _]).sum())
    return {name: math.sqrt(square) for name, square in squares.items()}


def weights_before(
    method: str, options: dict[str, Any], step: int, seed: int, scale: float
) -> np.ndarray:
    """(L, D): what earlier releases say, which no data change."""
    if step == 0 or "num_steps" not in options:
        return np.zeros((L, D))
    head = make_method(method, {**options, "num_steps": step})
    return head.fit(
        Rows(np.zeros((N, D)), np.zeros(N, dtype=np.int64)), L, Answers(head, seed, scale)
    )


def examples(rng: np.random.Generator, weights_LD: np.ndarray, label: int) -> list[np.ndarray]:
    """Hostile features: extreme sizes, and directions in which these weights are wrong about all classes, or undecided."""
    wrong_L = np.where(np.arange(L) == label, -1.0, 1.0)
    wrong_D = np.linalg.pinv(weights_LD) @ wrong_L if weights_LD.any() else rng.normal(size=D)
    undecided_D = np.linalg.svd(weights_LD)[2][-1]  # D > L: orthogonal to all of them
    plain_D = rng.normal(size=D)
    mixed_D = plain_D * 10.0 ** rng.uniform(-300, 300, D)
    sizes = [5e-324, 1e-300, 1e-5, 1.0, 1e150, 1e300]
    broken = [
        np.full(D, value) for value in (0.0, math.nan, math.inf, -math.inf, np.finfo(float).max)
    ]
    directions = [wrong_D, -wrong_D, undecided_D, weights_LD[label], -weights_LD[label], plain_D]
    return [*(direction * size for direction in directions for size in sizes), mixed_D, *broken]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("error")  # a warning would tell of an example too
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(100, 150), marks=pytest.mark.full)])
@pytest.mark.parametrize(("method", "options"), OPTIONS)
def test_no_example_moves_any_step_by_more_than_its_sensitivity(
    method: str, options: dict[str, Any], seeds: range
) -> None:
    head = make_method(method, options)
    bounds = {statistic.name: statistic.sensitivity for statistic in head.statistics(L, D)}
    worst: dict[str, float] = {}
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
    assert set(worst) == set(bounds) and max(worst.values()) <= 1 + 1e-9, worst


def test_one_example_among_a_million_does_not_change_how_others_round() -> None:
    """2^19 ones, a half, the example x of -1, then 3/4 of the last place below 2^19 each: one long fp64 sum moves by 2e-5."""
    k = 19
    features = np.full((2 ** (k + 1), 2), 0.0)
    features[:, 0] = -0.75 * 2.0 ** (k - 53)
    features[: 2**k, 0], features[2**k, 0], features[2**k + 1, 0] = 1, 0.5, -1
    zeroed = features.copy()
    zeroed[2**k + 1] = 0
    sums = [
        Rows(x, np.zeros(len(x), dtype=np.int64)).sum(lambda x_BD, _: x_BD.sum(0), 1, "")
        for x in (features, zeroed)
    ]
    assert (
        abs(float(np.linalg.norm(sums[0] - sums[1])) - 1)
        <= rounding(len(features))
        < SENSITIVITY_SLACK / 4
    )
    assert rounding(96_000_000) <= SENSITIVITY_SLACK / 4
    head_plan(96_000_000, 1.0, None)
    with pytest.raises(PrivacyConfigError, match="rounding may move its sums further"):
        head_plan(97_000_000, 1.0, None)


class Noted(Budget):
    """Keeps each statistic in units of its noise, before and after it was drawn."""

    drawn: dict[str, np.ndarray]

    def release(self, name: str, values: np.ndarray, piece: Piece = Piece()) -> np.ndarray:  # noqa: B008
        noised = super().release(name, values, piece)
        std = next(release["std"] for release in self.releases if release["name"] == name)
        self.drawn[name] = (noised - values) / std
        return noised


@pytest.mark.parametrize(("method", "options"), OPTIONS)
def test_every_class_and_step_of_a_method_gets_noise_of_its_own(
    method: str, options: dict[str, float]
) -> None:
    """Of the standard deviation that the ledger states, independent between classes, steps and statistics; it costs the plan."""
    features, labels = data()
    head, draws, mu = make_method(method, dict(options)), [], 0.8
    for _ in range(80):
        budget = Noted(head.statistics(L, D), mu, SystemNoise(), len(labels))
        budget.drawn = {}
        head.fit(Rows(features, labels), L, budget)
        budget.require_spent()
        # A row per class of every statistic, or per statistic that has no classes; the first D entries of each.
        parts = [
            noise.reshape(L if len(noise) == L else 1, -1)[:, :D] for noise in budget.drawn.values()
        ]
        draws.append(np.concatenate(parts))
    assert math.sqrt(
        sum((r["sensitivity"] / r["std"]) ** 2 for r in budget.releases)
    ) == pytest.approx(mu)
    rows_RN = np.array(draws).transpose(1, 0, 2).reshape(len(draws[0]), -1)
    correlations = np.corrcoef(rows_RN)[np.triu_indices(len(rows_RN), 1)]
    p_value = (
        2
        * stats.norm.sf(np.abs(correlations).max() * math.sqrt(rows_RN.shape[1]))
        * len(correlations)
    )
    assert p_value > 1e-4 and stats.kstest(rows_RN.ravel(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("pieces", [1, 3])
def test_contract_7_a_statistic_of_a_private_head_is_the_rounded_gaussian_mechanism(
    pieces: int,
) -> None:
    """Each entry is rounded once, by the step of the whole statistic, however many pieces it comes in."""
    sensitivity, size, source = 0.3, 3 * 40 * 40, Reals()
    budget = Budget([Statistic("m", sensitivity, size)], 0.5, source, 500)
    exponent, rng = budget.units["m"].exponent, np.random.default_rng(5)
    assert size * Fraction(4) ** 13 <= Fraction(sensitivity) ** 2 * Fraction(4) ** exponent
    values = rng.normal(size=(3, 40, 40))
    for number, part in enumerate(np.split(values, pieces)):
        found = budget.release("m", part, Piece(number, pieces))
        expected = [
            math.ldexp(rounded(Fraction(round(Fraction(s) * 2**exponent)) + Fraction(n)), -exponent)
            for s, n in zip(part.ravel().tolist(), source.reals[number].tolist(), strict=True)
        ]
        assert found.ravel().tolist() == expected
    assert all(
        Fraction(d) >= Fraction(budget.releases[0]["std"]) * 2**exponent for d in source.deviations
    )


def test_symmetric_noise_has_the_variance_of_the_frobenius_mechanism() -> None:
    found = []
    for _ in range(300):
        budget = Budget([Statistic("m", 1.0, L * D * D)], 1.0, SystemNoise(), 1000)
        # Far from the cone's border, so that the projection changes nothing.
        found.append(budget.release_symmetric("m", 1000 * np.eye(D)[None])[0] - 1000 * np.eye(D))
    noise = np.array(found)
    assert np.allclose(noise, noise.swapaxes(1, 2))
    for values, variance in (
        (noise[:, np.arange(D), np.arange(D)], 1.0),
        (noise[:, *np.triu_indices(D, 1)], 0.5),
    ):
        ratio = (values**2).sum() / variance
        assert 1e-4 < stats.chi2.cdf(ratio, values.size) < 1 - 1e-4
    budget = Budget([Statistic("m", 1.0, L * D * D)], 0.1, SystemNoise(), 1000)
    assert np.linalg.eigvalsh(budget.release_symmetric("m", np.zeros((L, D, D)))).min() >= -1e-9


def test_a_statistic_is_released_once() -> None:
    budget = Budget([Statistic("m", 1.0, 3), Statistic("n", 1.0, 3)], 1.0, SystemNoise(), 9)
    budget.release("m", np.zeros(3))
    for name in ("m", "other"):
        with pytest.raises(RuntimeError, match="released before, or never planned"):
            budget.release(name, np.zeros(3))
    with pytest.raises(RuntimeError, match="never released: n"):
        budget.require_spent()


def test_clipped_rows() -> None:
    rows_ND = np.array(
        [
            [3.0, 4.0],
            [0.3, 0.4],
            [1e200, 0.0],
            [np.nan, 1.0],
            [np.inf, 0.0],
            [0.0, 0.0],
            [1.7e308] * 2,
        ]
    )
    expected = [[0.6, 0.8], [0.3, 0.4], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert clip_rows(rows_ND, 1.0) == pytest.approx(np.array(expected))


@pytest.mark.parametrize(
    ("method", "options", "epsilon", "least"),
    [
        ("dp-ls", {}, 2.0, 0.8),
        ("dp-ls", {}, 8.0, 0.87),
        ("dp-fc", {"max_grad_norm": 0.3, "num_steps": 5}, 8.0, 0.8),
        ("dp-newton", {"ridge": 0.05}, 8.0, 0.5),
    ],
)
def test_digits(
    tmp_path: Path, method: str, options: dict[str, float], epsilon: float, least: float
) -> None:
    x, y, x_test, y_test = digits()
    best = accuracy(without_noise(Rows(x, y), 10, method, dict(options)), x_test, y_test)
    result = train_head(
        Rows(x, y),
        10,
        method,
        epsilon=epsilon,
        delta=1e-5,
        output=tmp_path / "head",
        options=dict(options),
    )
    found = accuracy(result.weights_LD, x_test, y_test)
    assert result.epsilon == pytest.approx(epsilon, rel=1e-3) and result.epsilon <= epsilon  # type: ignore[operator]
    assert exact_delta(spent(tmp_path / "head/ledger.jsonl"), result.epsilon) == pytest.approx(
        1e-5, rel=1e-2
    )  # type: ignore[arg-type]
    assert least <= found <= best + 0.1  # the noise is drawn anew each time
    x, other = x[:100].copy(), y[:100].copy()
    x[7], other[7] = 0, (y[7] + 1) % 10  # a row of zeros adds nothing, whatever its label
    weights = [
        without_noise(Rows(x, labels), 10, method, dict(options)) for labels in (y[:100], other)
    ]
    assert np.array_equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("dp-x", {}, "unknown method"),
        ("dp-ls", {"sigma": 1}, "no option 'sigma'"),
        ("dp-ls", {"max_norm": 0}, "max_norm = 0: input should be greater"),
        ("dp-ls", {"max_norm": 1e-200}, "max_norm = 1e-200"),
        ("dp-ls", {"max_norm": math.nan}, "max_norm = nan"),
        ("dp-newton", {"ridge": 0}, "ridge = 0"),
        ("dp-fc", {"num_steps": 1.5}, "num_steps = 1.5"),
        ("dp-ls", {"class_moments": 1}, "class_moments = 1"),
    ],
)
def test_refused(method: str, options: dict[str, float], match: str) -> None:
    with pytest.raises(PrivacyConfigError, match=match):
        make_method(method, dict(options))
    with pytest.raises(PrivacyConfigError, match="labels must be between 0 and 1"):
        without_noise(Rows(np.zeros((2, 3)), np.array([0, 2])), 2, "dp-ls")
    assert set(get_args(Offered)) == set(METHODS)
