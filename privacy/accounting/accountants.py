"""Epsilon of a list of releases, as pure functions: PLD is the claim, PRV and RDP cross-check it.

Adjacency is zero-out (NeighboringRelation.REPLACE_SPECIAL): a record is replaced by one that
contributes nothing, so the number of examples and the expected batch are public.
Sources: PLD: Koskela et al. 2020, Doroshenko et al. 2022 (connect the dots), by dp-accounting.
PRV: Gopi et al. 2021. RDP: Mironov et al. 2019. Truncated Poisson: dp-accounting's
`TruncatedSubsampledGaussianDpEvent`. No central-limit accountant: Gaussian-DP by the CLT is 19 %
too low at n = 233e6, B = 1.3e6, sigma = 0.728.
"""

import functools
import importlib.metadata
import logging
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from ..errors import PrivacyConfigError

# Below this delta the mass that dp-accounting truncates (1e-15 a composition) and FFT rounding are
# not small.
PLD_SMALLEST_DELTA = 1e-12
FINE_INTERVAL = 1e-4
COARSE_INTERVAL = 1e-3
# Beyond this nothing is protected: the claim is given on a coarser grid, and the numbers around it
# are left out, because the grids would grow into minutes and gigabytes.
LARGEST_DETAILED_EPSILON = 50.0


@dataclass(frozen=True)
class ReleaseGroup:
    """`count` releases of a Poisson-subsampled Gaussian with the same parameters.

    Attributes:
        sample_rate: q, the probability of inclusion, rounded up.
        noise_multiplier: standard deviation over the *true* L2 sensitivity
            (`effective_noise_multiplier`).
        count: number of releases.
        num_examples, cap: given together when batches above `cap` examples are cut down uniformly.
    """

    sample_rate: float
    noise_multiplier: float
    count: int
    num_examples: int | None = None
    cap: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sample_rate <= 1:
            raise PrivacyConfigError(f"sample_rate must be in [0, 1], not {self.sample_rate}")
        if not (self.noise_multiplier >= 0 and self.count >= 0):
            raise PrivacyConfigError("noise_multiplier and count must not be negative")
        if self.cap is not None and self.num_examples is None:
            raise PrivacyConfigError("a cap needs the number of examples")

    def without_cap(self) -> Self:
        return replace(self, num_examples=None, cap=None)

    def times(self, count: int) -> Self:
        return replace(self, count=count)

    def event(self) -> dp_event.DpEvent:
        """Returns the group as a dp-accounting event."""
        rate = self.sample_rate
        sigma = self.noise_multiplier
        if self.cap is None:
            release = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
        else:
            release = dp_event.TruncatedSubsampledGaussianDpEvent(
                self.num_examples, rate, self.cap, sigma
            )
        return dp_event.SelfComposedDpEvent(release, self.count)


Groups = Sequence[ReleaseGroup]


def effective_noise_multiplier(noise_multiplier: float, sensitivity_slack: float) -> float:
    """Returns sigma / (1 + r): clipped norms are at most C (1 + r), and the noise is sigma C.

    No other place charges the slack.
    """
    if not 0 <= sensitivity_slack <= 1e-3:
        raise PrivacyConfigError(f"sensitivity_slack must be in [0, 1e-3], not {sensitivity_slack}")
    return noise_multiplier / (1 + sensitivity_slack)


def joint_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Returns 1 / sqrt(sum sigma_i^-2): several Gaussian releases on one sample act as one."""
    if not noise_multipliers or min(noise_multipliers) <= 0:
        return 0.0
    # By hypot, since squares of extreme values would overflow.
    inverse = math.hypot(*(1 / sigma for sigma in noise_multipliers))
    return 1 / inverse if inverse > 0 else math.inf


def epsilon(groups: Groups, delta: float) -> float:
    """Returns the claimed epsilon at `delta`, by PLD with the cap.

    Below delta 1e-12 it is by RDP, and the overflow of the cap is charged in delta.
    """
    groups = _active(groups)
    if groups and all(group.sample_rate == 1 and group.cap is None for group in groups):
        return epsilon_gaussian(groups, delta)
    if delta < PLD_SMALLEST_DELTA:
        tau = overflow_probability(groups)
        return with_overflow(functools.partial(epsilon_rdp, groups), tau, delta)
    return epsilon_pld(groups, delta)


def claimed_epsilon(groups: Groups, delta: float) -> tuple[float, float | None]:
    """Returns `epsilon` in bounded time, however large, and the value interval of its grid.

    The grid has about epsilon / interval points (minutes at sigma 0.1), so that above
    LARGEST_DETAILED_EPSILON the interval grows with epsilon. A coarser grid still gives an upper
    bound. The interval is None for the accountants that have none.
    """
    is_unsampled = all(group.sample_rate == 1 and group.cap is None for group in groups)
    if is_unsampled or delta < PLD_SMALLEST_DELTA:
        return epsilon(groups, delta), None
    upper_bound = epsilon_rdp(groups, delta)
    if upper_bound <= LARGEST_DETAILED_EPSILON:
        return epsilon(groups, delta), FINE_INTERVAL
    if not math.isfinite(upper_bound):
        return upper_bound, None
    interval = FINE_INTERVAL * 10 ** math.ceil(math.log10(upper_bound / LARGEST_DETAILED_EPSILON))
    claim = epsilon_pld(groups, delta, interval)
    if claim <= LARGEST_DETAILED_EPSILON:
        return epsilon(groups, delta), FINE_INTERVAL
    return claim, interval


def epsilon_gaussian(groups: Groups, delta: float) -> float:
    """Returns the exact epsilon without any sampling, for any delta.

    All releases together are one Gaussian with mu^2 = sum of count / sigma^2, and delta(eps) =
    Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu) (Balle and Wang 2018, theorem 8).
    """
    groups = _active(groups)
    trivial_epsilon = _trivial_epsilon(groups, delta)
    if trivial_epsilon is not None:
        return trivial_epsilon
    mu = math.sqrt(math.fsum(group.count / group.noise_multiplier**2 for group in groups))
    if mu == 0:
        return 0.0
    root = float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))
    # The root is found to 1e-12; the factor makes the result an upper bound.
    return root * (1 + 1e-9)


def epsilon_pld(groups: Groups, delta: float, interval: float = FINE_INTERVAL) -> float:
    """Returns an upper bound by privacy loss distributions; inf without noise.

    Raises:
        PrivacyConfigError: delta is below 1e-12.
    """
    return _epsilon_pld(_active(groups), delta, interval, NeighboringRelation.REPLACE_SPECIAL)


def epsilon_replace_one(groups: Groups, delta: float, interval: float = FINE_INTERVAL) -> float:
    """Returns the PLD epsilon of exchanging a record for any other one.

    The exchange moves a sum by up to twice the sensitivity.
    """
    return _epsilon_pld(_active(groups), delta, interval, NeighboringRelation.REPLACE_ONE)


@functools.lru_cache(maxsize=256)
def _epsilon_pld(
    groups: tuple[ReleaseGroup, ...], delta: float, interval: float, relation: NeighboringRelation
) -> float:
    _require_pld(delta)
    trivial_epsilon = _trivial_epsilon(groups, delta)
    if trivial_epsilon is not None:
        return trivial_epsilon
    return float(loss_distribution(groups, interval, relation).get_epsilon_for_delta(delta))


def loss_distribution(
    groups: Groups,
    interval: float,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
) -> PrivacyLossDistribution:
    """Returns the distribution of the privacy loss of all groups together, discretised upwards.

    At least one group is not empty.
    """
    composition: PrivacyLossDistribution | None = None
    for group in _active(groups):
        step = one_step_distribution(group.times(1), interval, relation)
        steps = step.self_compose(group.count)
        composition = steps if composition is None else composition.compose(steps)
    assert composition is not None
    return composition


# Calibration, table and claim ask for one step of a run again and again, and with a cap it costs
# seconds.
@functools.lru_cache(maxsize=4)
def one_step_distribution(
    group: ReleaseGroup,
    interval: float,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
) -> PrivacyLossDistribution:
    """Returns the distribution of the privacy loss of one release of `group`; ignores its count."""
    if group.cap is None:
        return privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=group.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=group.sample_rate,
            neighboring_relation=relation,
        )
    # ReleaseGroup refuses a cap without it.
    assert group.num_examples is not None
    return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=group.num_examples,
        sampling_probability=group.sample_rate,
        truncated_batch_size=group.cap,
        noise_multiplier=group.noise_multiplier,
        value_discretization_interval=interval,
        neighboring_relation=relation,
    )


def epsilon_group(groups: Groups, delta: float, k: int, interval: float = FINE_INTERVAL) -> float:
    """Returns the PLD epsilon of k records of one person, or k copies of one, all zeroed out.

    The cap is left out. Each release is a mixture of Gaussians whose shift is Binomial(k, q)
    (Schuchardt et al. 2024), far tighter than the generic group-privacy conversion.
    """
    groups = _active(groups)
    _require_pld(delta)
    trivial_epsilon = _trivial_epsilon(groups, delta)
    if trivial_epsilon is not None:
        return trivial_epsilon
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, interval)
    for group in groups:
        shifts = [float(hits) for hits in range(k + 1)]
        mass = stats.binom.pmf(range(k + 1), k, group.sample_rate)
        chances = [float(chance) for chance in mass]
        # The mixture requires a sum of 1: the rounding of the others goes to the shift of zero.
        chances[0] = 1 - math.fsum(chances[1:])
        mixture = dp_event.MixtureOfGaussiansDpEvent(group.noise_multiplier, shifts, chances)
        accountant.compose(dp_event.SelfComposedDpEvent(mixture, group.count))
    return float(accountant.get_epsilon(delta))


def epsilon_rdp(groups: Groups, delta: float) -> float:
    """Returns an upper bound by Renyi DP, without the cap.

    It is sound for any delta, and loose (about 10 % at epsilon 8).
    """
    groups = _active(groups)
    trivial_epsilon = _trivial_epsilon(groups, delta)
    if trivial_epsilon is not None:
        return trivial_epsilon
    logger = logging.getLogger("absl")
    level = logger.level
    # The library logs each order that it leaves out; the bound is sound without them.
    logger.setLevel(logging.ERROR)
    try:
        return float(_renyi(groups).get_epsilon(delta))
    finally:
        logger.setLevel(level)


# One run is asked for at many values of delta.
@functools.lru_cache(maxsize=64)
def _renyi(groups: tuple[ReleaseGroup, ...]) -> RdpAccountant:
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        accountant.compose(group.without_cap().event())
    return accountant


def overflow_probability(groups: Groups) -> float:
    """Returns a union bound on the probability that any batch of the run exceeds its cap."""
    tails = []
    for group in groups:
        if group.cap is not None:
            tail = stats.binom.sf(group.cap, group.num_examples, group.sample_rate)
            tails.append(group.count * float(tail))
    return math.fsum(tails)


def with_overflow(uncapped: Callable[[float], float], tau: float, delta: float) -> float:
    """Returns epsilon of the capped run from the epsilon curve of the uncapped one.

    The two runs differ with probability at most tau (on both neighbours), so (eps, d)-DP of the
    uncapped run gives (eps, d + tau (1 + e^eps))-DP. The result is the smallest epsilon >=
    uncapped(delta - tau (1 + e^epsilon)): iteration from below is monotone; it tests a number a
    millionth above the last one, so that it ends.

    Args:
        uncapped: delta -> epsilon of the uncapped run.
        tau: probability that a batch of the run exceeds the cap.
    """
    estimate = uncapped(delta)
    while tau > 0:
        candidate = estimate * (1 + 1e-6)
        # The bound of the exponent keeps exp from an overflow.
        uncapped_delta = delta - tau * (1 + math.exp(min(candidate, 700.0)))
        if uncapped_delta <= 0:
            return math.inf
        estimate = uncapped(uncapped_delta)
        if estimate <= candidate:
            return candidate
    return estimate


_ORDERS = [
    1.1,
    1.25,
    1.5,
    1.75,
    *(2 + step / 4 for step in range(25)),
    *range(9, 65),
    80,
    96,
    128,
    192,
    256,
    512,
]


def filter_order(first: ReleaseGroup, epsilon_total: float, delta: float) -> float:
    """Returns the order of an RDP filter at which most runs like the first one fit.

    The order depends only on numbers that were fixed before any output, as the filter requires
    (Feldman and Zrnic 2021, arXiv 2008.11193, theorem 4.3; docs/ledger.md).

    At one order epsilon is linear in the number of runs, rho per run plus the conversion; of
    sampled Gaussians rho explodes above some order, so the budget alone (as for plain Gaussians)
    would choose badly.
    """

    def capacity(order: float) -> float:
        two_runs = first.times(2 * first.count)
        epsilon_1 = filtered_epsilon([first], delta, order, epsilon_total)
        epsilon_2 = filtered_epsilon([two_runs], delta, order, epsilon_total)
        if not 0 < epsilon_1 < epsilon_2 < math.inf:
            return -math.inf
        return (epsilon_total - (2 * epsilon_1 - epsilon_2)) / (epsilon_2 - epsilon_1)

    best: float = max(_ORDERS, key=capacity)
    return best


def filtered_epsilon(groups: Groups, delta: float, order: float, ceiling: float) -> float:
    """Returns epsilon at `delta` from the RDP of all groups at this one order.

    inf when the caps' overflow leaves no delta.

    Args:
        ceiling: the total budget, at which the overflow is charged in delta (`with_overflow`).
    """
    accounted_delta = delta - overflow_probability(groups) * (1 + math.exp(min(ceiling, 700.0)))
    if accounted_delta <= 0 or any(group.noise_multiplier == 0 for group in groups):
        return math.inf
    accountant = RdpAccountant([order], NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        accountant.compose(group.without_cap().event())
    return float(accountant.get_epsilon(accounted_delta))


def total_epsilon(
    groups: Groups, delta: float, *, adaptive: bool, order: float, ceiling: float
) -> float:
    """Returns epsilon of all runs together.

    Args:
        adaptive: whether the parameters of one run were chosen after outputs of others; then the
            filter covers all runs, earlier ones included.
        order, ceiling: of the filter (`filtered_epsilon`).
    """
    if adaptive and groups:
        return filtered_epsilon(groups, delta, order, ceiling)
    return epsilon(groups, delta)


_TABLE_POINTS = 64


class EpsilonTable:
    """A table of epsilon after k charged intents of one frozen schedule, computed on demand.

    Claims (report, audit, the end of a run) come from the ledger, never from here. At grid points
    the entry is a PLD upper bound for exactly that k; between two grid points it is the entry of
    the next one, so a query never understates. `num_steps` and `max_intents` are grid points at the
    fine discretisation.
    """

    def __init__(
        self, group: ReleaseGroup, delta: float, max_intents: int, num_steps: int | None = None
    ) -> None:
        """Plans the grid of the table.

        Args:
            group: one release of the schedule; its count is ignored.
        """
        self._group = group.times(1)
        self._delta = delta
        self._fine_counts = sorted({max_intents, max_intents if num_steps is None else num_steps})
        # All counts up to 64; beyond that 64 equal strides and the powers of two, so that the start
        # is fine too.
        points = range(1, _TABLE_POINTS + 1)
        strides = {math.ceil(max_intents * point / _TABLE_POINTS) for point in points}
        exponents = range(max_intents.bit_length())
        powers = {2**exponent for exponent in exponents if 2**exponent <= max_intents}
        self._counts = sorted(strides | powers | set(self._fine_counts))
        self._epsilons: dict[int, float] = {}

    def epsilon(self, num_charged: int) -> float:
        """Returns an upper bound on the epsilon of the first `num_charged` intents.

        Beyond `max_intents` it is exact and slow.
        """
        if num_charged <= 0:
            return 0.0
        count = self.count_for(num_charged)
        if count > self._counts[-1]:
            return self.exact(num_charged)
        if count not in self._epsilons:
            # Epsilon grows with k, so a later (finer) bound that is smaller also holds for every
            # earlier k.
            fine_bounds = [
                self.exact(fine_count) for fine_count in self._fine_counts if fine_count >= count
            ]
            if count in self._fine_counts:
                self._epsilons[count] = fine_bounds[0]
            else:
                self._epsilons[count] = min(self._coarse(count), *fine_bounds)
        return self._epsilons[count]

    def count_for(self, num_charged: int) -> int:
        """Returns the next count of the table; its epsilon bounds that of `num_charged` intents."""
        index = bisect_left(self._counts, num_charged)
        if num_charged > 0 and index < len(self._counts):
            return self._counts[index]
        return num_charged

    def exact(self, num_charged: int) -> float:
        """Returns the fine PLD epsilon of exactly `num_charged` intents, for reports.

        It takes seconds at a million-example batch.
        """
        return epsilon([self._group.times(num_charged)], self._delta)

    def _coarse(self, count: int) -> float:
        """Returns an upper bound on the coarse grid, which shares the distribution of one step.

        The overflow of the cap is charged in delta where that costs next to nothing, because the
        distribution with the cap is ten times as long. Otherwise (a million-example batch at delta
        1e-9) the distribution with the cap is used.
        """
        group = self._group.times(count)
        delta = self._delta
        if delta < PLD_SMALLEST_DELTA or group.noise_multiplier == 0:
            return epsilon([group], delta)
        uncapped_step = one_step_distribution(self._group.without_cap(), COARSE_INTERVAL)
        uncapped_steps = uncapped_step.self_compose(count)
        tau = overflow_probability([group])
        bound = float(with_overflow(uncapped_steps.get_epsilon_for_delta, tau, delta))
        if tau * (1 + math.exp(min(bound, 700.0))) <= 0.01 * delta:
            return bound
        capped_steps = one_step_distribution(self._group, COARSE_INTERVAL).self_compose(count)
        return min(bound, float(capped_steps.get_epsilon_for_delta(delta)))


class CrossCheckUnavailable(RuntimeError):
    """A cross-check failed numerically; the claim does not depend on it."""


def epsilon_prv(
    groups: Groups, delta: float, eps_error: float = 0.01
) -> tuple[float, float, float]:
    """Returns (lower, estimate, upper) by the PRV accountant, without the cap.

    The true epsilon is between the bounds (Gopi et al. 2021).

    Raises:
        CrossCheckUnavailable: its quadrature fails on finer meshes too, as it does for very large
            epsilon.
    """
    groups = _active(groups)
    trivial_epsilon = _trivial_epsilon(groups, delta)
    if trivial_epsilon is not None:
        return trivial_epsilon, trivial_epsilon, trivial_epsilon
    # Imported here: it is a cross-check that training itself does not need.
    from prv_accountant import GaussianMechanism, PoissonSubsampledGaussianMechanism, PRVAccountant

    variables = []
    for group in groups:
        sigma = group.noise_multiplier
        if group.sample_rate == 1:
            variables.append(GaussianMechanism(noise_multiplier=sigma))
        else:
            variables.append(
                PoissonSubsampledGaussianMechanism(
                    sampling_probability=group.sample_rate, noise_multiplier=sigma
                )
            )
    counts = [group.count for group in groups]
    failure: RuntimeError | None = None
    for mesh_error in (eps_error, eps_error / 3, eps_error / 10):
        with warnings.catch_warnings():
            # The package warns about rounding inside its own quadrature.
            warnings.simplefilter("ignore")
            try:
                accountant = PRVAccountant(
                    variables, mesh_error, delta / 1000, max_self_compositions=counts
                )
                lower, estimate, upper = accountant.compute_epsilon(delta, counts)
            except RuntimeError as error:
                failure = error
                continue
        return float(lower), float(estimate), float(upper)
    raise CrossCheckUnavailable(f"the PRV accountant fails here: {failure}")


FALSE_POSITIVE_RATES = (1e-3, 1e-2)
_EPSILONS = np.concatenate([np.linspace(0, 10, 1001), np.linspace(10.1, 60, 500)])


def risk_of(
    distribution: PrivacyLossDistribution,
    tail: float = 0.0,
    rates: Sequence[float] = FALSE_POSITIVE_RATES,
) -> dict[str, Any]:
    """Returns bounds on an attacker who wants to know whether an example was in the data.

    {"advantage", "true_positive_rates": [[false-positive rate, bound], ...]}.

    For any test, with D the data with the example and D' without: P(alarm | D) <=
    e^eps P(alarm | D') + delta(eps) for every eps, so the true-positive rate at false-positive rate
    a is at most min over eps of e^eps a + delta(eps), and the advantage (true minus false
    positives) at most delta(0), the total variation. delta(eps) is our own PLD profile, an upper
    bound, so these are upper bounds too (Kaissis et al. 2024 and Kulynych et al. 2024, arXiv
    2407.02191, use the same duality). For the other half, the same inequality holds for no alarm
    and with D and D' exchanged; all eps together give the trade-off function exactly (Dong, Roth
    and Su 2022, proposition 2.13).

    Args:
        distribution: of the privacy loss of all releases.
        tail: delta that the bounded support of the noise costs, added to every delta.
        rates: the false-positive rates.
    """
    profile = np.asarray(distribution.get_delta_for_epsilon(_EPSILONS))
    deltas = np.minimum(profile + tail, 1.0)
    growth = np.exp(_EPSILONS)
    bounds = []
    for rate in rates:
        steep_bounds = deltas + growth * rate
        flat_bounds = 1 - (1 - deltas - rate) / growth
        # An attack may always guess, so that less than `rate` cannot be a bound.
        bound = max(rate, np.minimum(steep_bounds, flat_bounds).min())
        bounds.append([rate, float(min(bound, 1.0))])
    return {"advantage": float(deltas[0]), "true_positive_rates": bounds}


def total_amount_of_noise(groups: Groups) -> float:
    """Returns the total amount of noise over all groups; inf when there are none.

    1 / (q / sigma * sqrt(T / 2)) (Sander et al. 2023).
    """
    terms = []
    for group in _active(groups):
        if group.noise_multiplier:
            ratio = group.sample_rate / group.noise_multiplier
            terms.append(ratio**2 * group.count / 2)
        else:
            terms.append(math.inf)
    eta_squared = math.fsum(terms)
    return 1 / math.sqrt(eta_squared) if eta_squared else math.inf


def accountant_version() -> str:
    """Returns name and version of the library behind the claim, for ledger and card."""
    version = getattr(dp_accounting, "__version__", "")
    if not version:
        version = importlib.metadata.version("dp-accounting")
    return f"dp-accounting {version}"


def _active(groups: Groups) -> tuple[ReleaseGroup, ...]:
    return tuple(group for group in groups if group.count and group.sample_rate)


def _trivial_epsilon(groups: Groups, delta: float) -> float | None:
    """Returns 0 without active groups and infinity without noise; None where an accountant decides.

    Raises:
        PrivacyConfigError: delta is not between 0 and 1.
    """
    if not 0 < delta < 1:
        raise PrivacyConfigError(f"delta must be between 0 and 1, not {delta}")
    if any(group.noise_multiplier == 0 for group in groups):
        return math.inf
    return None if groups else 0.0


def _require_pld(delta: float) -> None:
    if 0 < delta < PLD_SMALLEST_DELTA:
        raise PrivacyConfigError(
            f"PLD is not reported below delta {PLD_SMALLEST_DELTA}; use the RDP accountant there"
        )
