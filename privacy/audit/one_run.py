"""Lower bounds on epsilon from one run with many canaries, each of which was in the data with probability one half.

An auditor guesses for some canaries whether they were in ("in" or "out", abstaining otherwise) and counts correct guesses.
A differentially private mechanism limits how often that can go well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from .statistics import clopper_pearson

Scores = NDArray[np.float64]
LARGEST_EPSILON = 100.0


@dataclass(frozen=True)
class Guesses:
    """`correct` of `guesses` guesses about `canaries` canaries were right."""

    canaries: int
    guesses: int
    correct: int

    @classmethod
    def from_scores(cls, scores: Scores, present: NDArray[np.bool_], low: float, high: float) -> Self:
        """Guesses "in" above `high`, "out" below `low`. The thresholds must not depend on `present`."""
        guessed_in, guessed_out = scores > high, scores < low
        right = int((guessed_in & present).sum() + (guessed_out & ~present).sum())
        return cls(scores.size, int(guessed_in.sum() + guessed_out.sum()), right)


def one_run_p_value(observed: Guesses, epsilon: float, delta: float) -> float:
    """An upper bound on P(at least that number of correct guesses) under any (epsilon, delta)-DP mechanism.

    Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run" (arXiv 2305.08846), theorem 5.2:
    beta + 2 m delta max_i P(v > W >= v - i) / i, with W ~ Binomial(r, e^eps / (1 + e^eps)) and beta = P(W >= v).
    """
    v, r = observed.correct, observed.guesses
    accuracy = special.expit(epsilon)
    beta = float(stats.binom.sf(v - 1, r, accuracy))
    if v == 0 or delta == 0:
        return min(1.0, beta)
    steps = np.arange(1, v + 1)
    mass = np.cumsum(stats.binom.pmf(v - steps, r, accuracy))
    return min(1.0, beta + 2 * observed.canaries * delta * float((mass / steps).max()))


def epsilon_one_run(observed: Guesses, delta: float, confidence: float = 0.95) -> float:
    """Lower bound of Steinke et al. 2023 on epsilon at `delta`; 0 when the guesses refute nothing."""
    return _largest_refuted(lambda epsilon: one_run_p_value(observed, epsilon, delta) < 1 - confidence, LARGEST_EPSILON)


def refutes_gaussian(observed: Guesses, mu: float, confidence: float) -> bool:
    """Whether the guesses refute mu-Gaussian DP.

    Mahloujifar, Melis and Chaudhuri 2024, "Auditing f-Differential Privacy in One Run" (arXiv 2410.22235), the recursion
    on (r, h) of their algorithm for membership inference (alphabet of two) with abstentions.
    """
    m, guesses, correct = observed.canaries, observed.guesses, observed.correct
    tau = (1 - confidence) * guesses / m
    h, r = tau * (guesses - correct) / guesses, tau * correct / guesses
    for i in range(correct - 1, -1, -1):
        higher = max(h, float(special.ndtr(special.ndtri(r) - mu)))
        r += i / (guesses - i) * (higher - h)
        h = higher
        if r + h > guesses / m:
            return True
    return False


def epsilon_one_run_fdp(observed: Guesses, delta: float, confidence: float = 0.95) -> float:
    """Lower bound of Mahloujifar et al. 2024 on epsilon at `delta`, if the mechanism's curve is a Gaussian one.

    Sharper than `epsilon_one_run`, under that assumption, which composed subsampled Gaussians meet approximately
    (Dong, Roth and Su 2022): treat it as an estimate.
    """
    if not observed.guesses:
        return 0.0
    mu = _largest_refuted(lambda mu: refutes_gaussian(observed, mu, confidence), 20.0)
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta(epsilon) of mu-Gaussian DP (Balle and Wang 2018, theorem 8; Dong, Roth and Su 2022, corollary 2.13)."""
    tail = math.exp(min(700.0, epsilon + special.log_ndtr(-epsilon / mu - mu / 2)))
    return float(special.ndtr(-epsilon / mu + mu / 2)) - tail


def gaussian_epsilon(mu: float, delta: float) -> float:
    """epsilon(delta) of mu-Gaussian DP."""
    return _largest_refuted(lambda epsilon: gaussian_delta(mu, epsilon) > delta, 1e3)


def epsilon_clopper_pearson(
    in_scores: Scores, out_scores: Scores, threshold: float, delta: float, confidence: float = 0.95
) -> float:
    """Lower bound from the true and false positive rates of one threshold fixed beforehand (Nasr et al. 2021).

    (eps, delta)-DP needs TPR <= e^eps FPR + delta, and the same for the complements. One run stands for many here: the
    bound assumes that canaries do not influence each other.
    """
    alpha = (1 - confidence) / 4  # four one-sided bounds
    tpr = clopper_pearson(int((in_scores > threshold).sum()), in_scores.size, alpha)
    fpr = clopper_pearson(int((out_scores > threshold).sum()), out_scores.size, alpha)
    ratios = [(tpr[0] - delta, fpr[1]), (1 - fpr[1] - delta, 1 - tpr[0])]
    return max([0.0, *(math.log(top / bottom) for top, bottom in ratios if top > 0 and bottom > 0)])


def _largest_refuted(refuted: Callable[[float], bool], largest: float) -> float:
    """Largest value that is refuted, by bisection; refutation is monotone."""
    if not refuted(0.0 if largest > 20 else 1e-9):
        return 0.0
    low, high = 0.0, largest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
