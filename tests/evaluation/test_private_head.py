"""Private heads: sensitivities by leave-one-out, noise by statistics, planted mistakes, digits against non-private."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from evaluation.private_head.budget import Budget, Piece, Statistic
from evaluation.private_head.methods import METHODS, accuracy
from evaluation.private_head.rows import ROUNDING_SLACK, Rows, clip_rows, rounding
from evaluation.private_head.run import head_plan, make_method, train_head, without_noise
from privacy.errors import BudgetSpent, PrivacyConfigError
from privacy.noise import NoiseSource, SystemNoise
from tests.evaluation.digits import digits

L, D = 5, 6
OPTIONS: list[tuple[str, dict[str, float]]] = [
    ("dp-ls", {}), ("dp-ls", {"class_moments": True, "max_norm": 0.5}), ("dp-newton", {"num_steps": 3}),
    ("dp-fc", {"num_steps": 4, "max_grad_norm": 0.3}), ("dp-fc-bce", {"num_steps": 4, "bias": -1.0}),
    ("dp-gd", {"max_grad_norm": 0.7}),
]  # fmt: skip


class Recorder(Budget):
    """Notes what is released; without noise, or with the given noise."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.seen: dict[str, np.ndarray] = {}

    def release(self, name: str, values: np.ndarray, piece: Piece = Piece()) -> np.ndarray:  # noqa: B008
        self.seen[name] = np.array(values)
        return super().release(name, values, piece)


def data(seed: int = 0, n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, D)), rng.integers(0, L, n)


class Replay:
    """The same noise for two data sets, so that later steps start from equal weights as far as the first step is equal."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(5)

    def standard_normal(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(self._rng.standard_normal(count))


def test_one_example_among_a_million_does_not_change_how_others_round() -> None:
    """2^19 ones, a half, the example x of -1, then 3/4 of the last place below 2^19 each: one long fp64 sum moves by 2e-5."""
    k = 19
    features = np.full((2 ** (k + 1), 2), 0.0)
    features[:, 0] = -0.75 * 2.0 ** (k - 53)
    features[: 2**k, 0], features[2**k, 0], features[2**k + 1, 0] = 1, 0.5, -1
    zeroed = features.copy()
    zeroed[2**k + 1] = 0
    seen = []
    for x in (features, zeroed):
        head = make_method("dp-ls", {})
        budget = Recorder(head.statistics(1), 1.0, Replay())
        head.fit(Rows(x, np.zeros(len(x), dtype=np.int64)), 1, budget)
        seen.append(budget.seen["class_sums"])
    assert abs(float(np.linalg.norm(seen[0] - seen[1])) - 1) <= rounding(len(features)) < ROUNDING_SLACK / 2


def test_more_examples_than_the_slack_covers_are_refused() -> None:
    head_plan(1 << 22, 1.0, None)
    with pytest.raises(PrivacyConfigError, match="rounding may move its sums further"):
        head_plan(6_000_000, 1.0, None)


def _keeping(self: Recorder, name: str, values: np.ndarray, piece: Piece = Piece()) -> np.ndarray:  # noqa: B008
    self.seen[name] = np.array(values)
    released = Budget.release(self, name, values, piece)
    self.answers[name] = released.copy()  # type: ignore[attr-defined]
    return released


@pytest.mark.parametrize(("method", "options"), OPTIONS)
def test_all_statistics_together_cost_the_plan(method: str, options: dict[str, float]) -> None:
    head = make_method(method, dict(options))
    mu = 0.37
    budget = Budget(head.statistics(L), mu, SystemNoise())
    assert math.sqrt(sum((r["sensitivity"] / r["std"]) ** 2 for r in budget.releases)) == pytest.approx(mu)
    features, labels = data()
    head.fit(Rows(features, labels), L, budget)
    budget.require_spent()


class Reseeded:
    """The mistake of one key for everything: each draw starts over."""

    def standard_normal(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(self.key).standard_normal(count))

    def __init__(self, key: int) -> None:
        self.key = key


def drawn_by(method: str, options: dict[str, float], noise: list[NoiseSource]) -> np.ndarray:
    """(rows, draws): what the method's own statistics got as noise, in units of its standard deviation; a row per class of
    every statistic, or per statistic that has no classes."""
    features, labels = data()
    head = make_method(method, dict(options))
    found = []
    for source in noise:
        budget = Recorder(head.statistics(L), 0.8, source)
        answers: dict[str, np.ndarray] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorder, "release", _keeping)
            budget.answers = answers  # type: ignore[attr-defined]
            head.fit(Rows(features, labels), L, budget)
        stds = {release["name"]: release["std"] for release in budget.releases}
        rows = [(answers[name] - budget.seen[name]) / std for name, std in stds.items()]
        # The first D entries of each row: as many for a vector as for a matrix.
        found.append(np.concatenate([row.reshape(L if len(row) == L else 1, -1)[:, :D] for row in rows]))
    return np.array(found).transpose(1, 0, 2).reshape(len(found[0]), -1)


def smallest_p(rows_RN: np.ndarray) -> float:
    """Over pairs of rows, of zero correlation; corrected for their number."""
    correlations = np.corrcoef(rows_RN)[np.triu_indices(len(rows_RN), 1)]
    return min(
        1.0, float(2 * stats.norm.sf(np.abs(correlations).max() * math.sqrt(rows_RN.shape[1]))) * len(correlations)
    )


@pytest.mark.parametrize(("method", "options"), OPTIONS)
def test_every_class_and_step_of_a_method_gets_noise_of_its_own(method: str, options: dict[str, float]) -> None:
    """Also of the standard deviation that the ledger states; one key for all draws is caught."""
    rows = drawn_by(method, options, [SystemNoise() for _ in range(150)])
    assert smallest_p(rows) > 1e-4 and stats.kstest(rows.ravel(), "norm").pvalue > 1e-4
    if method != "dp-gd":  # its one draw has nothing to be like
        assert smallest_p(drawn_by(method, options, [Reseeded(key) for key in range(150)])) < 1e-10


def test_symmetric_noise_has_the_variance_of_the_frobenius_mechanism() -> None:
    found = []
    for _ in range(300):
        budget = Budget([Statistic("m", 1.0)], 1.0, SystemNoise())
        # Far from the cone's border, so that the projection changes nothing.
        found.append(budget.release_symmetric("m", 1000 * np.eye(D)[None])[0] - 1000 * np.eye(D))
    noise = np.array(found)
    assert np.allclose(noise, noise.swapaxes(1, 2))
    diagonal = noise[:, np.arange(D), np.arange(D)]
    upper = noise[:, *np.triu_indices(D, 1)]
    for values, variance in ((diagonal, 1.0), (upper, 0.5)):
        ratio = (values**2).sum() / variance
        assert 1e-4 < stats.chi2.cdf(ratio, values.size) < 1 - 1e-4


def test_a_projected_matrix_has_no_negative_eigenvalue() -> None:
    budget = Budget([Statistic("m", 1.0)], 0.1, SystemNoise())
    assert np.linalg.eigvalsh(budget.release_symmetric("m", np.zeros((L, D, D)))).min() >= -1e-9


def test_a_statistic_is_released_once() -> None:
    budget = Budget([Statistic("m", 1.0), Statistic("n", 1.0)], 1.0, SystemNoise())
    budget.release("m", np.zeros(3))
    for name in ("m", "other"):
        with pytest.raises(RuntimeError, match="released before, or never planned"):
            budget.release(name, np.zeros(3))
    with pytest.raises(RuntimeError, match="never released: n"):
        budget.require_spent()


def test_clipped_rows() -> None:
    rows = np.array([[3.0, 4.0], [0.3, 0.4], [1e200, 0.0], [np.nan, 1.0], [np.inf, 0.0], [0.0, 0.0], [1.7e308] * 2])
    expected = [[0.6, 0.8], [0.3, 0.4], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert clip_rows(rows, 1.0) == pytest.approx(np.array(expected))


def recomputed(ledger: Path) -> float:
    """Epsilon of all releases of all intents, by dp-accounting's own Gaussian PLD."""
    from dp_accounting.dp_event import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    accountant = PLDAccountant()
    for release in (release for record in records if record["type"] == "intent" for release in record["releases"]):
        accountant.compose(GaussianDpEvent(release["std"] / release["sensitivity"]))
    return float(accountant.get_epsilon(records[0]["plan"]["target_delta"]))


@pytest.mark.parametrize(
    ("method", "options", "epsilon", "least"),
    [
        ("dp-ls", {}, 2.0, 0.8), ("dp-ls", {}, 8.0, 0.87), ("dp-fc", {"max_grad_norm": 0.3, "num_steps": 5}, 8.0, 0.8),
        ("dp-gd", {"max_grad_norm": 1.0}, 2.0, 0.7), ("dp-newton", {"ridge": 0.05}, 8.0, 0.5),
    ],
)  # fmt: skip
def test_digits(tmp_path: Path, method: str, options: dict[str, float], epsilon: float, least: float) -> None:
    x, y, x_test, y_test = digits()
    best = accuracy(without_noise(Rows(x, y), 10, method, dict(options)), x_test, y_test)
    result = train_head(
        Rows(x, y), 10, method, epsilon=epsilon, delta=1e-5, output=tmp_path / "head", options=dict(options)
    )
    found = accuracy(result.weights_LD, x_test, y_test)
    assert (
        result.epsilon is not None and result.epsilon == pytest.approx(epsilon, rel=1e-3) and result.epsilon <= epsilon
    )
    assert recomputed(tmp_path / "head/ledger.jsonl") == pytest.approx(result.epsilon, rel=1e-3)
    assert least <= found <= best + 0.1  # the noise is drawn anew each time


def test_a_second_head_in_one_folder_is_refused(tmp_path: Path) -> None:
    features, labels = data()
    train_head(Rows(features, labels), L, "dp-gd", epsilon=1.0, output=tmp_path)
    with pytest.raises(PrivacyConfigError, match="holds a finished head"):
        train_head(Rows(features, labels), L, "dp-gd", epsilon=1.0, output=tmp_path)


def test_a_crash_after_the_charge_stays_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = data()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(METHODS["dp-gd"], "fit", crash)
        with pytest.raises(KeyboardInterrupt):
            train_head(Rows(features, labels), L, "dp-gd", epsilon=1.0, output=tmp_path)
    with pytest.raises(BudgetSpent):
        train_head(Rows(features, labels), L, "dp-gd", epsilon=1.0, output=tmp_path)


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("dp-x", {}, "unknown method"), ("dp-ls", {"sigma": 1}, "no option 'sigma'"),
        ("dp-ls", {"max_norm": 0}, "max_norm = 0: input should be greater"),
        ("dp-ls", {"max_norm": 1e-200}, "max_norm = 1e-200"), ("dp-ls", {"max_norm": math.nan}, "max_norm = nan"),
        ("dp-gd", {"max_grad_norm": -1}, "max_grad_norm = -1"), ("dp-newton", {"ridge": 0}, "ridge = 0"),
        ("dp-fc", {"num_steps": 0}, "num_steps = 0"), ("dp-fc", {"num_steps": 1.5}, "num_steps = 1.5"),
        ("dp-fc-bce", {"bias": math.inf}, "bias = inf"), ("dp-ls", {"class_moments": 1}, "class_moments = 1"),
    ],
)  # fmt: skip
def test_refused(method: str, options: dict[str, float], match: str) -> None:
    with pytest.raises(PrivacyConfigError, match=match):
        make_method(method, dict(options))
    with pytest.raises(PrivacyConfigError, match="labels must be between 0 and 1"):
        without_noise(Rows(np.zeros((2, 3)), np.array([0, 2])), 2, "dp-ls")


def test_the_plan_is_exact() -> None:
    plan = head_plan(1200, 1.0, 1e-5)
    mu = (1 + plan.sensitivity_slack) / plan.noise_multiplier
    delta = stats.norm.cdf(mu / 2 - 1 / mu) - math.e * stats.norm.cdf(-mu / 2 - 1 / mu)
    assert delta <= 1e-5 and delta == pytest.approx(1e-5, rel=0.02)
