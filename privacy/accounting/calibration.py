"""The smallest noise multiplier whose epsilon, reserve and cap included, stays at or below a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from privacy.accounting.accountants import (
    COARSE_INTERVAL,
    FINE_INTERVAL,
    PLD_SMALLEST_DELTA,
    ReleaseGroup,
    effective_noise_multiplier,
    epsilon,
    epsilon_pld,
    epsilon_rdp,
)
from privacy.errors import PrivacyConfigError
from privacy.limits import MAX_NOISE_MULTIPLIER

MIN_NOISE_MULTIPLIER = 0.3
TOLERANCE = 1e-3
# Sigma is rounded up to this many decimals, so that the printed value is the one that runs; at the DP-Cap point that
# changes epsilon by at most 2e-5.
DECIMALS = 6
_ABSOLUTE_MIN = 0.05
_MAX_EVALUATIONS = 60

Progress = Callable[[str, float, float], None]


@dataclass(frozen=True)
class Calibrated:
    """Result of a calibration: sigma before the slack, its epsilon, and whether the smallest allowed sigma sufficed."""

    noise_multiplier: float
    epsilon: float
    clamped: bool


def calibrate_noise_multiplier(
    group: ReleaseGroup,
    delta: float,
    target_epsilon: float,
    *,
    sensitivity_slack: float = 0.0,
    allow_small_noise: bool = False,
    progress: Progress | None = None,
) -> Calibrated:
    """Finds sigma with target - 1e-3 <= epsilon <= target (1 % of the target where that is less).

    Args:
        group: rate, count (steps plus reserve) and cap of the run; its own noise multiplier is ignored.
        delta, target_epsilon: the guarantee to meet; PLD at delta >= 1e-12, RDP below.
        sensitivity_slack: r; epsilon is that of sigma / (1 + r).
        allow_small_noise: allows sigma below 0.3. Without it 0.3 is returned, `clamped`, where it suffices.
        progress: called with (stage, sigma, epsilon) after every evaluation.

    Raises:
        PrivacyConfigError: the target is not positive, or no amount of noise reaches it.
    """
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise PrivacyConfigError(f"target_epsilon must be positive and finite, not {target_epsilon}")
    floor = _ABSOLUTE_MIN if allow_small_noise else MIN_NOISE_MULTIPLIER
    tolerance = min(TOLERANCE, 0.01 * target_epsilon)
    sigma = 1.0
    # Each stage starts where the cheaper one before it ended; only the last, the claim itself, is binding.
    for stage, curve in _stages(group, delta):
        final = stage == "confirm"

        def evaluate(sigma: float, stage: str = stage, curve: Callable[[ReleaseGroup], float] = curve) -> float:
            value = curve(replace(group, noise_multiplier=effective_noise_multiplier(sigma, sensitivity_slack)))
            if progress is not None:
                progress(stage, sigma, value)
            return value

        # The earlier stages stop in the upper middle of the band, so that the last one confirms at its first try.
        target = target_epsilon if final else target_epsilon - 0.25 * tolerance
        sigma, value = _solve(evaluate, target, sigma, tolerance if final else 0.5 * tolerance, floor)
    return Calibrated(sigma, value, clamped=sigma <= floor)


def _stages(group: ReleaseGroup, delta: float) -> list[tuple[str, Callable[[ReleaseGroup], float]]]:
    confirm = ("confirm", lambda group: epsilon([group], delta))
    if group.sample_rate == 1 and group.cap is None:
        return [confirm]  # a closed form
    if delta < PLD_SMALLEST_DELTA:
        return [("coarse", lambda group: epsilon_rdp([group], delta)), confirm]
    stages = [
        ("coarse", lambda group: epsilon_pld([group.without_cap()], delta, COARSE_INTERVAL)),
        ("fine", lambda group: epsilon_pld([group.without_cap()], delta, FINE_INTERVAL)),
    ]
    return stages if group.cap is None else [*stages, confirm]


def _solve(
    evaluate: Callable[[float], float], target: float, guess: float, tolerance: float, floor: float
) -> tuple[float, float]:
    """(sigma, epsilon) with target - tolerance <= epsilon <= target, or the floor: safeguarded secant in log-log."""
    low = high = previous = None
    slope, sigma = -2.0, max(guess, floor)
    best: tuple[float, float] | None = None
    for _ in range(_MAX_EVALUATIONS):
        sigma = _rounded_up(sigma)
        value = evaluate(sigma)
        if value <= target:
            if target - value <= tolerance or sigma <= floor:
                return sigma, value
            high, best = sigma, (sigma, value)
        else:
            low = sigma
        if best is not None and low is not None and best[0] - low <= 1.5 * 10**-DECIMALS:
            return best  # epsilon jumps here by more than the tolerance: no smaller sigma exists
        if previous is not None:
            slope = _slope(previous, (sigma, value), slope)
        previous = (sigma, value)
        sigma = max(_next(sigma, value, target - tolerance / 2, slope, low, high), floor)
        if sigma > MAX_NOISE_MULTIPLIER:
            break
    if best is not None:
        return best
    raise PrivacyConfigError(
        f"no noise multiplier up to {MAX_NOISE_MULTIPLIER:g} reaches epsilon {target:.6g} at this delta and cap"
    )


def _slope(first: tuple[float, float], second: tuple[float, float], before: float) -> float:
    """d log epsilon / d log sigma through two points, kept to plausible values."""
    (sigma_0, value_0), (sigma_1, value_1) = first, second
    if sigma_0 == sigma_1 or not (0 < value_0 < math.inf and 0 < value_1 < math.inf):
        return before
    return min(max(math.log(value_1 / value_0) / math.log(sigma_1 / sigma_0), -20.0), -0.3)


def _next(sigma: float, value: float, aim: float, slope: float, low: float | None, high: float | None) -> float:
    """The secant's next sigma, at most a factor of two away and always inside of the bracket."""
    if math.isinf(value):
        factor = 2.0
    elif value <= 0:
        factor = 0.5
    else:
        factor = min(max((aim / value) ** (1 / slope), 0.5), 2.0)
    proposal = sigma * factor
    if low is not None and high is not None and not low < proposal < high:
        return math.sqrt(low * high)
    return proposal


def _rounded_up(sigma: float) -> float:
    scale: int = 10**DECIMALS
    return math.ceil(sigma * scale - 1e-6) / scale
