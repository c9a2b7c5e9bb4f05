"""A membership attack on the sandbox's canaries, compared with what a correct mechanism would show.

The best attack on a canary of unit norm knows the sampling rate and scores each step by its likelihood ratio. A lower bound
on epsilon from a thousand canaries stays far below the true epsilon even of a mechanism that leaks all it may, so it is
compared with what a correct one shows in simulation, not with epsilon.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ..accounting.accountants import ReleaseGroup, epsilon_rdp
from . import one_run
from . import statistics as st
from .report import CHECK_ALPHA, Check, random_check
from .sandbox_record import SandboxRecord

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
_SIMULATED = 100_000
_ABSTAIN = 0.2  # the fifth of canaries whose scores say least are left out


def likelihood_ratio_scores(x_TN: Floats, sample_rate: float, noise_multiplier: float) -> Floats:
    """sum_t log(1 - q + q exp((x_t - 1/2) / sigma^2)): how much likelier each canary is in the data than not.

    Args:
        x_TN: noised sums along the canaries' directions, in units of what a canary contributes.
        noise_multiplier: standard deviation of the noise in the same unit.
    """
    exponent = (x_TN - 0.5) / noise_multiplier**2
    with np.errstate(divide="ignore"):
        absent = np.log1p(-sample_rate)
    ratio: Floats = np.logaddexp(absent, np.log(sample_rate) + exponent).sum(axis=0)
    return ratio


@dataclass(frozen=True)
class ExpectedAttack:
    """What the stated mechanism gives: thresholds of the guesses, and their rates of success."""

    low: float
    high: float
    guessed_in: tuple[float, float]
    """P(score > high) of a canary that is (in, not in) the data."""
    guessed_out: tuple[float, float]
    """P(score < low) of a canary that is (in, not in) the data."""

    @classmethod
    @functools.cache
    def simulate(cls, num_steps: int, sample_rate: float, noise_multiplier: float, seed: int = 0) -> Self:
        """Simulates canaries of a perfect mechanism. The seed is public: it fixes the thresholds before the audit."""
        rng = np.random.default_rng(seed)
        scores = {True: np.zeros(0), False: np.zeros(0)}
        for present in scores:
            parts = []
            for _ in range(10):
                x = noise_multiplier * rng.standard_normal((num_steps, _SIMULATED // 10))
                x += present * (rng.random(x.shape) < sample_rate)
                parts.append(likelihood_ratio_scores(x, sample_rate, noise_multiplier))
            scores[present] = np.concatenate(parts)
        pooled = np.concatenate(list(scores.values()))
        low, high = np.quantile(pooled, [(1 - _ABSTAIN) / 2, (1 + _ABSTAIN) / 2])
        inside, outside = scores[True], scores[False]
        return cls(
            float(low),
            float(high),
            (float((inside > high).mean()), float((outside > high).mean())),
            (float((inside < low).mean()), float((outside < low).mean())),
        )

    def correct(self, num_in: int, num_out: int) -> tuple[float, float]:
        """(mean, standard deviation) of the number of correct guesses: a sum of independent trials of two kinds."""
        rates = [(num_in, self.guessed_in[0]), (num_out, self.guessed_out[1])]
        variance = sum(count * rate * (1 - rate) for count, rate in rates)
        return sum(count * rate for count, rate in rates), max(math.sqrt(variance), 1.0)


def attack_checks(record: SandboxRecord) -> list[Check]:
    """Rates of the attack, its signal, and the lower bounds on epsilon."""
    plan, sigma = record.plan, _relative_noise(record)
    # The canaries whose gradient has a single coordinate: (T, number) their noised sums in canary norms.
    owned = np.flatnonzero(~record.quiet)
    ids, first, counts = np.unique(record.canary_D[owned], return_index=True, return_counts=True)
    keep = (counts == 1) & ~record.hostile_N[ids]
    ids = ids[keep]
    x_TN = record.turns(owned[first[keep]], ids) / plan.canary_norm
    present = record.present_N[ids]
    expected = ExpectedAttack.simulate(len(x_TN), plan.sample_rate, sigma)
    scores = likelihood_ratio_scores(x_TN, plan.sample_rate, sigma)
    return [
        _rates(scores, present, expected),
        _signal(record, x_TN[:, present], inside=True),
        _signal(record, x_TN[:, ~present], inside=False),
        _bounds(record, scores, present, expected, len(x_TN)),
    ]


def _relative_noise(record: SandboxRecord) -> float:
    """sigma, relative to what a canary contributes: the same as the plan's with flat clipping."""
    return record.plan.noise_std / record.plan.canary_norm


def _rates(scores: Floats, present: NDArray[np.bool_], expected: ExpectedAttack) -> Check:
    """Four exact binomial tests against simulated rates (whose own error, 0.2 %, is far below the resolution)."""
    num_in, num_out = int(present.sum()), int((~present).sum())
    inside, outside = scores[present], scores[~present]
    observed = [
        (int((inside > expected.high).sum()), num_in, expected.guessed_in[0]),
        (int((outside > expected.high).sum()), num_out, expected.guessed_in[1]),
        (int((inside < expected.low).sum()), num_in, expected.guessed_out[0]),
        (int((outside < expected.low).sum()), num_out, expected.guessed_out[1]),
    ]
    # The simulated rates carry an error of their own: a rate within it must not count as impossible.
    p_values = [float(st.binomial_p(k, m, np.clip(rate, 1e-5, 1 - 1e-5))) for k, m, rate in observed]
    (tp, _, tpr), (fp, _, fpr) = observed[:2]
    return random_check(
        "attack_rates",
        st.bonferroni(p_values),
        f"the attack finds {tp} of {num_in} canaries in the data ({tpr * num_in:.0f} expected) and {fp} of {num_out} that "
        f"are not ({fpr * num_out:.0f} expected)",
    )


def _signal(record: SandboxRecord, x: Floats, *, inside: bool) -> Check:
    """Mean noised sum of canaries: q times their norm for those in the data, 0 for the others."""
    q, sigma = record.plan.sample_rate, _relative_noise(record)
    mean, variance = (q, sigma**2 + q * (1 - q)) if inside else (0.0, sigma**2)
    z = (float(x.mean()) - mean) / np.sqrt(variance / x.size) if x.size else 0.0
    return random_check(
        f"signal_{'in' if inside else 'out'}",
        float(st.normal_p(z)),
        f"canaries {'in' if inside else 'kept out of'} the data show a mean of {x.mean() if x.size else 0:.4f} canary norms, "
        f"{mean:.4f} expected",
        statistic=float(x.mean()) if x.size else 0.0,
    )


def _bounds(
    record: SandboxRecord, scores: Floats, present: NDArray[np.bool_], expected: ExpectedAttack, turns: int
) -> Check:
    """Lower bounds on the sandbox's epsilon: inside what a correct mechanism shows, and below its true epsilon."""
    plan, delta = record.plan, record.plan.target_delta
    guesses = one_run.Guesses.from_scores(scores, present, expected.low, expected.high)
    mean, sd = expected.correct(int(present.sum()), int((~present).sum()))
    reach = float(stats.norm.isf(CHECK_ALPHA / 2)) * sd
    low, high = (
        one_run.epsilon_one_run(
            replace(guesses, correct=int(np.clip(round(correct), 0, guesses.guesses))), delta, CONFIDENCE
        )
        for correct in (mean - reach, mean + reach)
    )
    bound = one_run.epsilon_one_run(guesses, delta, CONFIDENCE)
    sigma = _relative_noise(record) / (1 + plan.sensitivity_slack)
    true = epsilon_rdp([ReleaseGroup(plan.sample_rate, sigma, turns)], delta)
    refuted = one_run.epsilon_one_run(guesses, delta, 1 - CHECK_ALPHA) > true
    # Half a guess of continuity: the count is whole.
    z = max(0.0, abs(guesses.correct - mean) - 0.5) / sd
    return random_check(
        "epsilon_lower_bounds",
        0.0 if refuted else float(st.normal_p(z)),
        f"{guesses.correct} of {guesses.guesses} guesses about {guesses.canaries} canaries are right: epsilon of the sandbox "
        f"is at least {bound:.2f} (one run, 95 %), where a correct mechanism of epsilon {true:.1f} shows {low:.2f} to {high:.2f}",
        statistic=bound,
        expected_interval=[low, high],
        epsilon_one_run_fdp=one_run.epsilon_one_run_fdp(guesses, delta, CONFIDENCE),
        epsilon_clopper_pearson=one_run.epsilon_clopper_pearson(
            scores[present], scores[~present], (expected.low + expected.high) / 2, delta, CONFIDENCE
        ),
        epsilon_of_sandbox=true,
        confidence=CONFIDENCE,
        canaries=guesses.canaries,
        guesses=guesses.guesses,
        correct=guesses.correct,
    )
