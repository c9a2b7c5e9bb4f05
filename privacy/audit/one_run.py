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
