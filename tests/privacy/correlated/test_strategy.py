"""Strategies of correlated noise: their length in rationals, their inverse, and their error, against dense matrices."""

import math
from fractions import Fraction

import numpy as np
import pytest

from privacy.correlated.strategy import Strategy
from privacy.correlated.workload import MOST_STEPS, MOST_STEPS_OF_WORKLOAD, Workload, optimised, running_sums_error
from privacy.errors import PrivacyConfigError

BANDS = (1, 2, 3, 4, 7, 8, 16, 32, 64, 128, 256)


def dense(strategy, num_steps):
    """C as a matrix."""
    rows = np.zeros((num_steps, num_steps))
    for k, c in enumerate(strategy.coefficients[:num_steps]):
        rows += c * np.eye(num_steps, k=-k)
    return rows


def squared_length(strategy):
    return sum(Fraction(c) ** 2 for c in strategy.coefficients)


@pytest.mark.parametrize("bands", BANDS)
def test_no_column_is_longer_than_1_in_rationals_and_none_is_wasted(bands):
    strategy = Strategy.square_root(bands)
    assert 1 - Fraction(1, 10**13) < squared_length(strategy) <= 1
    assert strategy.bands == bands and all(c > 0 for c in strategy.coefficients)
    # Proportions are those of (1 - x)^(-1/2): binomial(2k, k) / 4^k.
    for k, c in enumerate(strategy.coefficients):
        assert c / strategy.coefficients[0] == pytest.approx(math.comb(2 * k, k) / 4**k, rel=1e-12)


def test_one_band_is_independent_noise_to_the_last_bit():
    assert Strategy.square_root(1) == Strategy.independent() == Strategy((1.0,))
    assert running_sums_error(Strategy.independent(), 99) == math.sqrt(50)
    assert Strategy.independent().inverse(3).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("coefficients", "words"),
    [
        ((), "at least one"),
        ((0.5, 0.0), "positive"),
        ((0.5, -0.1), "positive"),
        ((math.nan,), "positive"),
        ((0.5, 0.6), "grow"),
        ((math.nextafter(1.0, 2.0),), "above 1"),
        ((0.6, 0.6, 0.6), "above 1"),
        # In doubles its squares add up to 1 exactly; in rationals to more.
        ((0.8, 0.6), "above 1"),
    ],
)
def test_strategies_that_would_undercharge_are_refused(coefficients, words):
    with pytest.raises(PrivacyConfigError, match=words):
        Strategy(coefficients)


@pytest.mark.parametrize("bands", [1, 2, 5, 16])
@pytest.mark.parametrize("num_steps", [1, 3, 40])
def test_inverse_and_error_of_running_sums_are_those_of_dense_matrices(bands, num_steps):
    strategy = Strategy.square_root(bands)
    inverse = np.linalg.inv(dense(strategy, num_steps))
    np.testing.assert_allclose(strategy.inverse(num_steps), inverse[:, 0], rtol=1e-10, atol=1e-13)
    running = np.tril(np.ones((num_steps, num_steps))) @ inverse
    expected = math.sqrt((running**2).sum() / num_steps)
    assert running_sums_error(strategy, num_steps) == pytest.approx(expected, rel=1e-10)
    assert Workload([1.0] * num_steps).error(strategy) == pytest.approx(expected, rel=1e-10)


def effect_of(workload):
    """(T, T) what gradient r moves weight t by: the optimizer, run once per gradient."""
    num_steps = len(workload.learning_rates)
    effect = np.zeros((num_steps, num_steps))
    for r in range(num_steps):
        momentum = theta = 0.0
        for t, rate in enumerate(workload.learning_rates):
            momentum = workload.momentum * momentum + (1 - workload.momentum) * (t == r)
            theta = (1 - rate * workload.weight_decay) * theta + rate * momentum
            effect[t, r] = theta
    return effect


def workloads(steps):
    """Constant, warm-up, cosine, and a late start; with and without momentum and weight decay."""
    return [
        Workload([1.0] * steps),
        Workload([0.1 * min(6 * t / steps, 1.0) for t in range(1, steps + 1)], 0.3, 0.9),
        Workload([1e-4 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)], 0.005, 0.5),
        Workload([0.0] * (steps // 3) + [2.0] * (steps - steps // 3), 0.1),
    ]


@pytest.mark.parametrize("workload", workloads(60), ids=range(4))
def test_error_and_spectrum_of_a_workload_are_those_of_the_optimizer_itself(workload):
    effect, strategy = effect_of(workload), Strategy.square_root(7)
    moved = effect @ np.linalg.inv(dense(strategy, len(effect)))
    assert workload.error(strategy) == pytest.approx(math.sqrt((moved**2).sum() / len(effect)), rel=1e-10)
    power = (np.abs(np.fft.rfft(effect, 256, axis=1)) ** 2).mean(0)
    np.testing.assert_allclose(workload.spectrum(256), power, rtol=1e-9, atol=1e-12 * power.max())


@pytest.mark.parametrize("workload", workloads(500), ids=range(4))
@pytest.mark.parametrize("bands", [1, 2, 4, 16])
def test_optimised_coefficients_are_never_worse_and_no_neighbour_is_much_better(workload, bands):
    best = optimised(workload, bands)
    error = workload.error(best)
    assert best.bands == bands and squared_length(best) <= 1
    assert error <= workload.error(Strategy.square_root(bands))
    rng = np.random.default_rng(bands)
    for scale in (0.3, 0.1, 0.03):
        for _ in range(5):
            moved = np.array(best.coefficients) * np.exp(scale * rng.standard_normal(bands))
            other = Strategy.of_unit_length([float(c) for c in np.minimum.accumulate(moved)])
            assert workload.error(other) > 0.98 * error


@pytest.mark.full
def test_optimised_coefficients_are_as_good_as_those_of_jax_privacy():
    """Its `optimize_banded_toeplitz` at 5,760 steps and 32 bands: error ratio 0.584 at sigma 2.222 against 0.729."""
    workload = Workload([1.0] * 5760)
    ratio = workload.error(optimised(workload, 32)) / workload.error(Strategy.independent())
    assert ratio == pytest.approx(0.584 * 0.729 / 2.222, rel=0.01)


def test_workloads_that_cannot_be_measured_are_refused_in_one_line():
    for rates in ([], [1.0] * (MOST_STEPS_OF_WORKLOAD + 1), [0.0], [-1.0, 2.0], [math.inf]):
        with pytest.raises(PrivacyConfigError):
            Workload(rates)
    with pytest.raises(PrivacyConfigError, match="up to"):
        running_sums_error(Strategy.independent(), MOST_STEPS + 1)
