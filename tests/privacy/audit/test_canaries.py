"""Lower bounds on epsilon from canaries: a closed form, the paper's own formula, validity in simulation, and verdicts."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from privacy.audit.canaries import Guesses, audit_canaries, epsilon_one_run, one_run_p_value


def test_all_right_without_delta_has_a_closed_form() -> None:
    # accuracy^r = 0.05 with accuracy = e^eps / (1 + e^eps)
    accuracy = 0.05 ** (1 / 100)
    expected = math.log(accuracy / (1 - accuracy))
    assert epsilon_one_run(Guesses(100, 100, 100), 0.0) == pytest.approx(expected, abs=1e-6)
    assert epsilon_one_run(Guesses(1000, 1000, 505), 1e-6) == 0, "coin tosses prove nothing"


def test_p_value_is_the_sum_of_theorem_5_2() -> None:
    m, r, v, epsilon, delta = 50, 30, 24, 0.7, 1e-3
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = [stats.binom.sf(v - i - 1, r, accuracy) for i in range(v + 1)]  # P(W >= v - i)
    worst = max((tail[i] - tail[0]) / i for i in range(1, v + 1))
    expected = tail[0] + 2 * m * delta * worst
    assert one_run_p_value(Guesses(m, r, v), epsilon, delta) == pytest.approx(expected)


def canaries(mu: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Independent canaries of a mu-Gaussian-DP mechanism: scores and coins."""
    rng = np.random.default_rng(seed)
    present = rng.random(count) < 0.5
    return rng.standard_normal(count) + mu * present, present


@pytest.mark.parametrize("mu", [1.0, 2.5])
def test_bounds_stay_below_the_truth_and_are_not_empty(mu: float) -> None:
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(1 / mu))
    true = accountant.get_epsilon(1e-5)
    checks = [audit_canaries(*canaries(mu, 1000, seed), claimed=0.01, delta=1e-5)[0] for seed in range(8)]
    found = np.array([check.details["epsilon_one_run"] for check in checks])
    assert (found < true).all() and (found > 0.1 * true).all()


def test_canaries_that_leak_refute_a_small_claim_and_others_do_not() -> None:
    scores, present = canaries(4.0, 1000, 1)
    check, separation = audit_canaries(scores, present, 0.5, 1e-7)
    assert check.outcome == "violated" and separation.statistic > 0.95
    assert audit_canaries(scores, present, 8.0, 1e-7)[0].outcome == "inconclusive"  # could not prove so much
    silent, _ = canaries(0.0, 1000, 2)
    check, separation = audit_canaries(silent, present, 0.5, 1e-7)
    assert check.outcome == "ok" and abs(separation.statistic - 0.5) < 0.1
