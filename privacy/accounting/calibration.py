"""The smallest noise multiplier whose epsilon, reserve and cap included, stays at or below a target."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import PrivacyConfigError
from . import accountants
from .accountants import ReleaseGroup, effective_noise_multiplier, epsilon, epsilon_pld, epsilon_rdp

MAX_NOISE_MULTIPLIER = 1e4
"""Above it the loss of one step is finer than the grids of the accountants."""
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
        raise PrivacyConfigError(
            f"target_epsilon must be positive and finite, not {target_epsilon}"
        )
    floor = _ABSOLUTE_MIN if allow_small_noise else MIN_NOISE_MULTIPLIER
    tolerance = min(TOLERANCE, 0.01 * target_epsilon)
    sigma = 1.0
    # Each stage starts where the cheaper one before it ended; only the last, the claim itself, is binding.
    stages: list[tuple[str, Callable[[ReleaseGroup], float]]] = [
        ("confirm", lambda group: epsilon([group], delta))
    ]
    if group.sample_rate == 1 and group.cap is None:
        pass  # a closed form
    elif delta < accountants.PLD_SMALLEST_DELTA:
        stages.insert(0, ("coarse", lambda group: epsilon_rdp([group], delta)))
    else:
        stages = [
            (
                "coarse",
                lambda group: epsilon_pld(
                    [group.without_cap()], delta, accountants.COARSE_INTERVAL
                ),
            ),
            (
                "fine",
                lambda group: epsilon_pld([group.without_cap()], delta, accountants.FINE_INTERVAL),
            ),
            *(stages if group.cap is not None else []),
        ]
    for stage, curve in stages:
        final = stage == "confirm"

        def evaluate(
            sigma: float, stage: str = stage, curve: Callable[[ReleaseGroup], float] = curve
        ) -> float:
            value = curve(
                replace(
                    group, noise_multiplier=effective_noise_multiplier(sigma, sensitivity_slack)
                )
            )
            if progress is not None:
                progress(stage, sigma, value)
            return value

        # The earlier stages stop in the upper middle of the band, so that the last one confirms at its first try.
        target = target_epsilon if final else target_epsilon - 0.25 * tolerance
        sigma, value = _solve(
            evaluate, target, sigma, tolerance if final else 0.5 * tolerance, floor
        )
    return Calibrated(sigma, value, clamped=sigma <= floor)


def _solve(
    evaluate: Callable[[float], float], target: float, guess: float, tolerance: float, floor: float
) -> tuple[float, float]:
    """(sigma, epsilon) with target - tolerance <= epsilon <= target, or the floor: safeguarded secant in log-log."""
    low = high = previous = None
    slope, sigma, scale = -2.0, max(guess, floor), 10**DECIMALS
    best: tuple[float, float] | None = None
    for _ in range(_MAX_EVALUATIONS):
        sigma = math.ceil(sigma * scale - 1e-6) / scale
        value = evaluate(sigma)
        if value <= target:
            if target - value <= tolerance or sigma <= floor:
                return sigma, value
            high, best = sigma, (sigma, value)
        else:
            low = sigma
        if best is not None and low is not None and best[0] - low <= 1.5 / scale:
            return best  # epsilon jumps here by more than the tolerance: no smaller sigma exists
        # d log epsilon / d log sigma through the last two points, kept to plausible values.
        if (
            previous is not None
            and previous[0] != sigma
            and 0 < previous[1] < math.inf
            and 0 < value < math.inf
        ):
            slope = min(
                max(math.log(value / previous[1]) / math.log(sigma / previous[0]), -20.0), -0.3
            )
        previous = (sigma, value)
        # The secant's next sigma, at most a factor of two away and always inside of the bracket.
        if 0 < value < math.inf:
            proposal = sigma * min(max(((target - tolerance / 2) / value) ** (1 / slope), 0.5), 2.0)
        else:
            proposal = sigma * (2.0 if value > 0 else 0.5)
        if low is not None and high is not None and not low < proposal < high:
            proposal = math.sqrt(low * high)
        sigma = max(proposal, floor)
        if sigma > MAX_NOISE_MULTIPLIER:
            break
    if best is not None:
        return best
    raise PrivacyConfigError(
        f"no noise multiplier up to {MAX_NOISE_MULTIPLIER:g} reaches epsilon {target:.6g} at this delta and cap"
    )
