"""Did the training remember canaries? Scores of canaries that were in the data or not by secret coins, and what they prove.

The guesses follow one rule fixed here, before any coin is looked at: the tenth of canaries with the highest scores was in
the data, the tenth with the lowest was not, about the others it makes no guess.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from . import one_run
from .report import Check, Outcome, undecided

GUESSED = 0.1
CONFIDENCE = 0.95
ALPHA = 4e-4
"""The error rate of each of the two bounds that decide; far below it the one-run bound, with its term m delta, proves nothing."""
POWER = (
    "A bound far below the claim is the rule: a thousand canaries in a large data set, seen through the final weights only, "
    "show a fraction of epsilon even when the attack is the best there is. This audit finds gross mistakes (no noise, no "
    "clipping, a training loop around the mechanism); `audit.py mechanism` finds small ones."
)


def audit_canaries(
    scores: NDArray[np.float64], present: NDArray[np.bool_], claimed: float, delta: float
) -> list[Check]:
    """Compares lower bounds on epsilon with the claim.

    Args:
        scores: higher means likelier in the data.
        claimed: epsilon at `delta` that the run claims.
    """
    count = max(1, round(GUESSED * scores.size))
    order = np.sort(scores)
    guesses = one_run.Guesses.from_scores(scores, present, float(order[count]), float(order[-count - 1]))
    inside, outside = scores[present], scores[~present]
    median = float(np.median(scores))
    strict = 1 - ALPHA
    bounds = {
        "epsilon_one_run": one_run.epsilon_one_run(guesses, delta, CONFIDENCE),
        "epsilon_clopper_pearson": one_run.epsilon_clopper_pearson(inside, outside, median, delta, CONFIDENCE),
    }
    proven = max(
        one_run.epsilon_one_run(guesses, delta, strict),
        one_run.epsilon_clopper_pearson(inside, outside, median, delta, strict),
    )
    ceiling = one_run.epsilon_one_run(one_run.Guesses(scores.size, 2 * count, 2 * count), delta, strict)
    numbers = {**bounds, "claimed": claimed, "delta": delta, "confidence": CONFIDENCE, "largest_provable": ceiling}
    sentence = (
        f"{guesses.correct} of {guesses.guesses} guesses about {scores.size} canaries are right: epsilon is at least "
        f"{bounds['epsilon_one_run']:.2f} (one run), {bounds['epsilon_clopper_pearson']:.2f} (Clopper-Pearson) "
        f"with 95 % confidence; claimed are {claimed:.2f}"
    )
    if proven <= claimed and ceiling <= claimed:
        note = f"; so few canaries could not prove more than {ceiling:.2f} even if every guess were right"
        bound = undecided("epsilon_lower_bound", sentence + note, **numbers)
    else:
        outcome: Outcome = "violated" if proven > claimed else "ok"
        bound = Check("epsilon_lower_bound", outcome, sentence, proven, None, claimed, 2 * ALPHA, numbers)
    # How well the scores separate the two kinds is no violation by itself, since epsilon allows for some of it.
    test = stats.mannwhitneyu(inside, outside, alternative="greater")
    area = float(test.statistic) / (inside.size * outside.size)
    sentence = f"scores of canaries in the data are higher with AUROC {area:.3f} (0.5: no trace; p = {test.pvalue:.2g})"
    return [bound, Check("separation", "ok", sentence, area, details={"p_one_sided": float(test.pvalue)})]
