"""Did the training remember canaries? Scores of canaries that were in the data or not by secret coins, and what they prove.

The guesses follow one rule fixed here, before any coin is looked at: the tenth of canaries with the highest scores was in
the data, the tenth with the lowest was not, about the others it makes no guess. A differentially private mechanism limits how
often such guesses can be right, which gives a lower bound on epsilon from one run.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from .report import Check, Outcome, undecided

GUESSED = 0.1
CONFIDENCE = 0.95
ALPHA = 4e-4
"""The error rate of the bound that decides; far below it the bound, with its term m delta, proves nothing."""
LARGEST_EPSILON = 100.0
POWER = (
    "A bound far below the claim is the rule: a thousand canaries in a large data set, seen through the final weights only, "
    "show a fraction of epsilon even when the attack is the best there is. This audit finds gross mistakes (no noise, no "
    "clipping, a training loop around the mechanism); `audit.py mechanism` finds small ones."
)


@dataclass(frozen=True)
class Guesses:
    """`correct` of `guesses` guesses about `canaries` canaries were right."""

    canaries: int
    guesses: int
    correct: int


def audit_canaries(
    scores: NDArray[np.float64], present: NDArray[np.bool_], claimed: float, delta: float
) -> list[Check]:
    """Compares a lower bound on epsilon with the claim.

    Args:
        scores: higher means likelier in the data.
        claimed: epsilon at `delta` that the run claims.
    """
    count = max(1, round(GUESSED * scores.size))
    order = np.sort(scores)
    guessed_in, guessed_out = scores > order[-count - 1], scores < order[count]
    right = int((guessed_in & present).sum() + (guessed_out & ~present).sum())
    guesses = Guesses(scores.size, int(guessed_in.sum() + guessed_out.sum()), right)
    bound, proven = (epsilon_one_run(guesses, delta, confidence) for confidence in (CONFIDENCE, 1 - ALPHA))
    ceiling = epsilon_one_run(Guesses(scores.size, 2 * count, 2 * count), delta, 1 - ALPHA)
    numbers = {"epsilon_one_run": bound, "claimed": claimed, "delta": delta}
    numbers |= {"confidence": CONFIDENCE, "largest_provable": ceiling}
    sentence = (
        f"{right} of {guesses.guesses} guesses about {scores.size} canaries are right: epsilon is at least {bound:.2f} with "
        f"95 % confidence; claimed are {claimed:.2f}"
    )
    if proven <= claimed and ceiling <= claimed:
        note = f"; so few canaries could not prove more than {ceiling:.2f} even if every guess were right"
        check = undecided("epsilon_lower_bound", sentence + note, **numbers)
    else:
        outcome: Outcome = "violated" if proven > claimed else "ok"
        check = Check("epsilon_lower_bound", outcome, sentence, proven, None, claimed, ALPHA, numbers)
    # How well the scores separate the two kinds is no violation by itself, since epsilon allows for some of it.
    inside, outside = scores[present], scores[~present]
    test = stats.mannwhitneyu(inside, outside, alternative="greater")
    area = float(test.statistic) / (inside.size * outside.size)
    sentence = f"scores of canaries in the data are higher with AUROC {area:.3f} (0.5: no trace; p = {test.pvalue:.2g})"
    return [check, Check("separation", "ok", sentence, area, details={"p_one_sided": float(test.pvalue)})]


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


def epsilon_one_run(observed: Guesses, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon at `delta` that the guesses refute, by bisection; 0 when they refute nothing."""
    low, high = 0.0, LARGEST_EPSILON
    for _ in range(60):  # what refutes a larger epsilon refutes every smaller one
        middle = (low + high) / 2
        refuted = one_run_p_value(observed, middle, delta) < 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low if low > 1e-9 else 0.0
