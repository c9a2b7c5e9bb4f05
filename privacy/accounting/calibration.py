"""The smallest noise multiplier whose epsilon, reserve and cap included, is at most a target."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import PrivacyConfigError
from . import accountants
from .accountants import (
    Groups,
    ReleaseGroup,
    effective_noise_multiplier,
    epsilon,
    epsilon_pld,
    epsilon_rdp,
)

MAX_NOISE_MULTIPLIER = 1e4
"""Above it the loss of one step is finer than the grids of the accountants."""
MIN_NOISE_MULTIPLIER = 0.3
TOLERANCE = 1e-3
# Sigma is rounded up to this many decimals, so that the printed value is the one that runs; at the
# DP-Cap point that changes epsilon by at most 2e-5.
DECIMALS = 6
_ABSOLUTE_MIN = 0.05
_MAX_EVALUATIONS = 60

Progress = Callable[[str, float, float], None]
_Stage = tuple[str, ReleaseGroup, Callable[[Groups], float]]


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        noise_multiplier: sigma before the slack.
        epsilon: of that sigma.
        clamped: whether the smallest allowed sigma sufficed.
    """

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
) -> Calibration:
    """Finds sigma with target - 1e-3 <= epsilon <= target (1 % of the target where that is less).

    Args:
        group: rate, count (steps plus reserve) and cap of the run; its own noise multiplier is
            ignored.
        delta, target_epsilon: the guarantee to meet; PLD at delta >= 1e-12, RDP below.
        sensitivity_slack: r; epsilon is that of sigma / (1 + r).
        allow_small_noise: allows sigma below 0.3. Without it 0.3 is returned, `clamped`, where it
            suffices.
        progress: called with (stage, sigma, epsilon) after every evaluation.

    Raises:
        PrivacyConfigError: the target is not positive, or no amount of noise reaches it.
    """
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise PrivacyConfigError(
            f"target_epsilon must be positive and finite, not {target_epsilon}"
        )
    smallest = _ABSOLUTE_MIN if allow_small_noise else MIN_NOISE_MULTIPLIER
    tolerance = min(TOLERANCE, 0.01 * target_epsilon)
    # (name, group, curve). Each stage starts where the cheaper one before it ended; only the last,
    # the claim itself, is binding.
    final_stage: _Stage = ("confirm", group, functools.partial(epsilon, delta=delta))
    stages = [final_stage]
    has_closed_form = group.sample_rate == 1 and group.cap is None
    if not has_closed_form and delta < accountants.PLD_SMALLEST_DELTA:
        stages = [("coarse", group, functools.partial(epsilon_rdp, delta=delta)), final_stage]
    elif not has_closed_form:
        uncapped = group.without_cap()
        stages = []
        for name, interval in (
            ("coarse", accountants.COARSE_INTERVAL),
            ("fine", accountants.FINE_INTERVAL),
        ):
            pld = functools.partial(epsilon_pld, delta=delta, interval=interval)
            stages.append((name, uncapped, pld))
        if group.cap is not None:
            stages.append(final_stage)
    sigma = 1.0
    for name, stage_group, curve in stages:
        evaluate = functools.partial(
            _evaluate, name, stage_group, curve, sensitivity_slack, progress
        )
        if name == "confirm":
            sigma, claim = _solve(evaluate, target_epsilon, sigma, tolerance, smallest)
        else:
            # The earlier stages stop in the upper middle of the band, so that the last one confirms
            # at its first try.
            target = target_epsilon - 0.25 * tolerance
            sigma, claim = _solve(evaluate, target, sigma, 0.5 * tolerance, smallest)
    return Calibration(sigma, claim, clamped=sigma <= smallest)


def _evaluate(
    stage: str,
    group: ReleaseGroup,
    curve: Callable[[Groups], float],
    sensitivity_slack: float,
    progress: Progress | None,
    sigma: float,
) -> float:
    """Returns the epsilon of `group` at `sigma` and reports it."""
    accounted_sigma = effective_noise_multiplier(sigma, sensitivity_slack)
    claim = curve([replace(group, noise_multiplier=accounted_sigma)])
    if progress is not None:
        progress(stage, sigma, claim)
    return claim


def _solve(
    evaluate: Callable[[float], float],
    target: float,
    guess: float,
    tolerance: float,
    smallest: float,
) -> tuple[float, float]:
    """Returns (sigma, epsilon) with target - tolerance <= epsilon <= target, or the smallest sigma.

    By a safeguarded secant in log-log coordinates.
    """
    scale = 10**DECIMALS
    # The bracket: sigma `low` spends too much, sigma `high` does not.
    low: float | None = None
    high: float | None = None
    previous: tuple[float, float] | None = None
    best: tuple[float, float] | None = None
    slope = -2.0
    sigma = max(guess, smallest)
    for _ in range(_MAX_EVALUATIONS):
        sigma = math.ceil(sigma * scale - 1e-6) / scale
        claim = evaluate(sigma)
        if claim <= target:
            if target - claim <= tolerance or sigma <= smallest:
                return sigma, claim
            high = sigma
            best = (sigma, claim)
        else:
            low = sigma
        # Epsilon jumps here by more than the tolerance: no smaller sigma exists.
        if best is not None and low is not None and best[0] - low <= 1.5 / scale:
            return best
        # d log epsilon / d log sigma through the last two points, kept to plausible values.
        is_usable = 0 < claim < math.inf
        if previous is not None and is_usable:
            previous_sigma, previous_claim = previous
            if previous_sigma != sigma and 0 < previous_claim < math.inf:
                log_ratio = math.log(claim / previous_claim)
                slope = log_ratio / math.log(sigma / previous_sigma)
                slope = min(max(slope, -20.0), -0.3)
        previous = (sigma, claim)
        # The secant's next sigma, at most a factor of two away and always inside of the bracket.
        if is_usable:
            factor = ((target - tolerance / 2) / claim) ** (1 / slope)
            proposal = sigma * min(max(factor, 0.5), 2.0)
        else:
            proposal = sigma * (2.0 if claim > 0 else 0.5)
        if low is not None and high is not None and not low < proposal < high:
            proposal = math.sqrt(low * high)
        sigma = max(proposal, smallest)
        if sigma > MAX_NOISE_MULTIPLIER:
            break
    if best is not None:
        return best
    raise PrivacyConfigError(
        f"no noise multiplier up to {MAX_NOISE_MULTIPLIER:g} reaches epsilon {target:.6g} at this "
        "delta and cap"
    )
