"""Epsilon of a list of releases, as pure functions: PLD is the claim, PRV and RDP are its cross-checks.

Adjacency is zero-out (NeighboringRelation.REPLACE_SPECIAL): a record is replaced by one that contributes nothing, so
the number of examples and the expected batch are public. No central-limit accountant is offered: Gaussian-DP by
the CLT is 19 % too low at n = 233e6, B = 1.3e6, sigma = 0.728.
Sources: PLD: Koskela et al. 2020, Doroshenko et al. 2022 (connect the dots), by dp-accounting. PRV: Gopi et al. 2021.
RDP: Mironov et al. 2019. Truncated Poisson: dp-accounting's `TruncatedSubsampledGaussianDpEvent`.
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

# Below this delta the mass that dp-accounting truncates (1e-15 a composition) and FFT rounding are no longer small.
PLD_SMALLEST_DELTA = 1e-12
FINE_INTERVAL = 1e-4
COARSE_INTERVAL = 1e-3
# Beyond this nothing is protected: the claim is given on a coarser grid, and what surrounds it is left out, because the
# grids would grow into minutes and gigabytes.
LARGEST_DETAILED_EPSILON = 50.0


@dataclass(frozen=True)
class ReleaseGroup:
    """`count` releases of a Poisson-subsampled Gaussian with the same parameters.

    Attributes:
        sample_rate: q, the probability of inclusion, rounded up.
        noise_multiplier: standard deviation over the *true* L2 sensitivity (`effective_noise_multiplier`).
        count: how many releases.
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
        """The group as a dp-accounting event."""
        rate, sigma = self.sample_rate, self.noise_multiplier
        if self.cap is None:
            one = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
        else:
            one = dp_event.TruncatedSubsampledGaussianDpEvent(
                self.num_examples, rate, self.cap, sigma
            )
        return dp_event.SelfComposedDpEvent(one, self.count)


Groups = Sequence[ReleaseGroup]


def effective_noise_multiplier(noise_multiplier: float, sensitivity_slack: float) -> float:
    """sigma / (1 + r): the clipper promises norms up to C (1 + r), the noise is sigma C. The one place of the slack."""
    if not 0 <= sensitivity_slack <= 1e-3:
        raise PrivacyConfigError(f"sensitivity_slack must be in [0, 1e-3], not {sensitivity_slack}")
    return noise_multiplier / (1 + sensitivity_slack)


def joint_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Several Gaussian releases on one and the same sample act as one: 1 / sqrt(sum sigma_i^-2)."""
    if not noise_multipliers or min(noise_multipliers) <= 0:
        return 0.0
    inverse = math.hypot(
        *(1 / sigma for sigma in noise_multipliers)
    )  # squares of extreme values would overflow
    return 1 / inverse if inverse > 0 else math.inf


def epsilon(groups: Groups, delta: float) -> float:
    """The claimed epsilon at `delta`: PLD with the cap, or RDP below delta 1e-12 (cap overflow charged in delta)."""
    groups = _active(groups)
    if groups and all(group.sample_rate == 1 and group.cap is None for group in groups):
        return epsilon_gaussian(groups, delta)
    if delta < PLD_SMALLEST_DELTA:
        return with_overflow(
            lambda left: epsilon_rdp(groups, left), overflow_probability(groups), delta
        )
    return epsilon_pld(groups, delta)


def claimed_epsilon(groups: Groups, delta: float) -> tuple[float, float | None]:
    """(epsilon, value interval of the grid): `epsilon`, in bounded time however hopeless it is.

    The grid has about epsilon / interval points (minutes at sigma 0.1), so that above LARGEST_DETAILED_EPSILON the
    interval grows with epsilon. A coarser grid still gives an upper bound. The interval is None for the accountants
    that have none.
    """
    unsampled = all(group.sample_rate == 1 and group.cap is None for group in groups)
    if unsampled or delta < PLD_SMALLEST_DELTA:
        return epsilon(groups, delta), None
    upper = epsilon_rdp(groups, delta)
    if upper <= LARGEST_DETAILED_EPSILON:
        return epsilon(groups, delta), FINE_INTERVAL
    if not math.isfinite(upper):
        return upper, None
    interval = FINE_INTERVAL * 10 ** math.ceil(math.log10(upper / LARGEST_DETAILED_EPSILON))
    claim = epsilon_pld(groups, delta, interval)
    if claim <= LARGEST_DETAILED_EPSILON:
        return epsilon(groups, delta), FINE_INTERVAL
    return claim, interval


def epsilon_gaussian(groups: Groups, delta: float) -> float:
    """Exact epsilon without any sampling: all releases together are one Gaussian with mu^2 = sum of count / sigma^2.

    delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu) (Balle and Wang 2018, theorem 8), for any delta.
    """
    groups = _active(groups)
    if (certain := _certain(groups, delta)) is not None:
        return certain
    mu = math.sqrt(math.fsum(group.count / group.noise_multiplier**2 for group in groups))
    if mu == 0:
        return 0.0
    return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) * (
        1 + 1e-9
    )  # the root is found to 1e-12


def epsilon_pld(groups: Groups, delta: float, interval: float = FINE_INTERVAL) -> float:
    """Upper bound by privacy loss distributions; inf without noise; PrivacyConfigError below delta 1e-12."""
    return _epsilon_pld(_active(groups), delta, interval, NeighboringRelation.REPLACE_SPECIAL)


def epsilon_replace_one(groups: Groups, delta: float, interval: float = FINE_INTERVAL) -> float:
    """PLD epsilon when a record is exchanged for an arbitrary other one (up to twice the sensitivity)."""
    return _epsilon_pld(_active(groups), delta, interval, NeighboringRelation.REPLACE_ONE)


@functools.lru_cache(maxsize=256)
def _epsilon_pld(
    groups: tuple[ReleaseGroup, ...], delta: float, interval: float, relation: NeighboringRelation
) -> float:
    _require_pld(delta)
    if (certain := _certain(groups, delta)) is not None:
        return certain
    return float(loss_distribution(groups, interval, relation).get_epsilon_for_delta(delta))


def loss_distribution(
    groups: Groups,
    interval: float,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
) -> PrivacyLossDistribution:
    """The distribution of the privacy loss of all groups together, discretised upwards; at least one is not empty."""
    whole: PrivacyLossDistribution | None = None
    for group in _active(groups):
        part = one_step_distribution(group.times(1), interval, relation).self_compose(group.count)
        whole = part if whole is None else whole.compose(part)
    assert whole is not None
    return whole


# One step of a run is asked for again and again (calibration, table, claim), and with a cap it costs seconds.
@functools.lru_cache(maxsize=4)
def one_step_distribution(
    group: ReleaseGroup,
    interval: float,
    relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
) -> PrivacyLossDistribution:
    """The distribution of one release of `group`, whose count is ignored."""
    if group.cap is None:
        return privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=group.noise_multiplier,
            value_discretization_interval=interval,
            sampling_prob=group.sample_rate,
            neighboring_relation=relation,
        )
    assert group.num_examples is not None  # checked by ReleaseGroup
    return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=group.num_examples,
        sampling_probability=group.sample_rate,
        truncated_batch_size=group.cap,
        noise_multiplier=group.noise_multiplier,
        value_discretization_interval=interval,
        neighboring_relation=relation,
    )


def epsilon_group(groups: Groups, delta: float, k: int, interval: float = FINE_INTERVAL) -> float:
    """PLD epsilon for k records of one person or k copies of one record, all zeroed out (the cap is left out).

    Each release is a mixture of Gaussians whose shift is Binomial(k, q) (Schuchardt et al. 2024), far tighter than
    the generic group-privacy conversion.
    """
    groups = _active(groups)
    _require_pld(delta)
    if (certain := _certain(groups, delta)) is not None:
        return certain
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, interval)
    for group in groups:
        shifts = [float(hits) for hits in range(k + 1)]
        chances = [float(chance) for chance in stats.binom.pmf(range(k + 1), k, group.sample_rate)]
        chances[0] = 1 - math.fsum(chances[1:])
        mixture = dp_event.MixtureOfGaussiansDpEvent(group.noise_multiplier, shifts, chances)
        accountant.compose(dp_event.SelfComposedDpEvent(mixture, group.count))
    return float(accountant.get_epsilon(delta))


def epsilon_rdp(groups: Groups, delta: float) -> float:
    """Upper bound by Renyi DP, without the cap; sound for any delta, loose (about 10 % at epsilon 8)."""
    groups = _active(groups)
    if (certain := _certain(groups, delta)) is not None:
        return certain
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(
        logging.ERROR
    )  # it reports each order that it leaves out; leaving out orders keeps the bound sound
    try:
        return float(_renyi(groups).get_epsilon(delta))
    finally:
        logger.setLevel(level)


@functools.lru_cache(maxsize=64)  # one run is asked for at many values of delta
def _renyi(groups: tuple[ReleaseGroup, ...]) -> RdpAccountant:
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        accountant.compose(group.without_cap().event())
    return accountant


def overflow_probability(groups: Groups) -> float:
    """Union bound on the probability that any batch of the run exceeds its cap."""
    return math.fsum(
        group.count * float(stats.binom.sf(group.cap, group.num_examples, group.sample_rate))
        for group in groups
        if group.cap is not None
    )


def with_overflow(uncapped: Callable[[float], float], tau: float, delta: float) -> float:
    """Epsilon of the capped run from the epsilon curve of the uncapped one, `uncapped(delta)`.

    The two runs differ with probability at most tau (on both neighbours), so (eps, d)-DP of the uncapped run gives
    (eps, d + tau (1 + e^eps))-DP. We want the smallest epsilon >= uncapped(delta - tau (1 + e^epsilon)): iteration
    from below is monotone; it tests a value a millionth above the last one, so that it ends.
    """
    value = uncapped(delta)
    while tau > 0:
        candidate = value * (1 + 1e-6)
        left = delta - tau * (1 + math.exp(min(candidate, 700.0)))
        if left <= 0:
            return math.inf
        following = uncapped(left)
        if following <= candidate:
            return candidate
        value = following
    return value


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
    """The order of an RDP filter at which most runs like the first one fit: a function of what was fixed before any output.

    A run whose parameters were chosen after outputs of another were seen is adaptive: PLD and the usual choice of the best
    order afterwards no longer hold. An RDP filter of one order, fixed before the first run, does (Feldman and Zrnic 2021, arXiv
    2008.11193, theorem 4.3): runs may be added as long as the sum of their RDP at that order stays within the budget.

    At one order epsilon is linear in the number of runs, rho per run plus the conversion; of sampled Gaussians rho
    explodes above some order, so the budget alone (as for plain Gaussians) would choose badly.
    """

    def capacity(order: float) -> float:
        one, two = (
            filtered_epsilon([first.times(k * first.count)], delta, order, epsilon_total)
            for k in (1, 2)
        )
        if not 0 < one < two < math.inf:
            return -math.inf
        return (epsilon_total - (2 * one - two)) / (two - one)

    best: float = max(_ORDERS, key=capacity)
    return best


def filtered_epsilon(groups: Groups, delta: float, order: float, ceiling: float) -> float:
    """Epsilon at `delta` from the RDP of all groups at this one order; inf when the caps' overflow leaves no delta.

    Args:
        ceiling: the total budget, at which the overflow is charged in delta (`with_overflow`).
    """
    left = delta - overflow_probability(groups) * (1 + math.exp(min(ceiling, 700.0)))
    if left <= 0 or any(group.noise_multiplier == 0 for group in groups):
        return math.inf
    accountant = RdpAccountant([order], NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        accountant.compose(group.without_cap().event())
    return float(accountant.get_epsilon(left))


def total_epsilon(
    groups: Groups, delta: float, *, adaptive: bool, order: float, ceiling: float
) -> float:
    """Epsilon of all runs together. Once one run is adaptive the filter covers all of them, earlier ones included."""
    return (
        filtered_epsilon(groups, delta, order, ceiling)
        if adaptive and groups
        else epsilon(groups, delta)
    )


_TABLE_POINTS = 64


class EpsilonTable:
    """Epsilon after k charged intents of one frozen schedule: a value is computed when it is first asked for, and then looked up.

    Claims (report, audit, the end of a run) come from the ledger, never from here.
    At grid points the value is a PLD upper bound for exactly that k; between two grid points it is the value of the
    next one, so a query never understates. `num_steps` and `max_intents` are grid points at the fine discretisation.
    """

    def __init__(
        self, group: ReleaseGroup, delta: float, max_intents: int, num_steps: int | None = None
    ) -> None:
        """The count of `group`, one release of the schedule, is ignored."""
        self._group, self._delta, most = group.times(1), delta, max_intents
        self._fine = sorted({most, most if num_steps is None else num_steps})
        # All counts up to 64; beyond that 64 equal strides and the powers of two, so that the start is fine too.
        even = {math.ceil(most * point / _TABLE_POINTS) for point in range(1, _TABLE_POINTS + 1)}
        powers = {2**power for power in range(most.bit_length()) if 2**power <= most}
        self._counts = sorted(even | powers | set(self._fine))
        self._values: dict[int, float] = {}

    def epsilon(self, num_charged: int) -> float:
        """Upper bound on the epsilon of the first `num_charged` intents; exact but slow beyond `max_intents`."""
        if num_charged <= 0:
            return 0.0
        count = self.count_for(num_charged)
        if count > self._counts[-1]:
            return self.exact(num_charged)
        if count not in self._values:
            # Epsilon grows with k, so a later (finer) bound that is smaller also holds for every earlier k.
            fine = [self.exact(later) for later in self._fine if later >= count]
            self._values[count] = (
                fine[0] if count in self._fine else min(self._coarse(count), *fine)
            )
        return self._values[count]

    def count_for(self, num_charged: int) -> int:
        """The count whose epsilon stands for that of `num_charged` intents: the next one that the table has."""
        index = bisect_left(self._counts, num_charged)
        return self._counts[index] if num_charged > 0 and index < len(self._counts) else num_charged

    def exact(self, num_charged: int) -> float:
        """The fine PLD value for this very count: the number for reports (seconds at a million-example batch)."""
        return epsilon([self._group.times(num_charged)], self._delta)

    def _coarse(self, count: int) -> float:
        """The same on the coarse discretisation (still an upper bound), which shares the one-step distribution.

        Where charging the overflow of the cap in delta costs next to nothing that is done, because the distribution with
        the cap is ten times as long. Otherwise (a million-example batch at delta 1e-9) that one is used.
        """
        group, delta = self._group.times(count), self._delta
        if delta < PLD_SMALLEST_DELTA or group.noise_multiplier == 0:
            return epsilon([group], delta)
        composed = one_step_distribution(self._group.without_cap(), COARSE_INTERVAL).self_compose(
            count
        )
        tau = overflow_probability([group])
        bound = with_overflow(lambda left: float(composed.get_epsilon_for_delta(left)), tau, delta)
        if tau * (1 + math.exp(min(bound, 700.0))) <= 0.01 * delta:
            return bound
        capped = one_step_distribution(self._group, COARSE_INTERVAL).self_compose(count)
        return min(bound, float(capped.get_epsilon_for_delta(delta)))


class CrossCheckUnavailable(RuntimeError):
    """A cross-check failed numerically; the claim does not depend on it."""


def epsilon_prv(
    groups: Groups, delta: float, eps_error: float = 0.01
) -> tuple[float, float, float]:
    """(lower, estimate, upper) by the PRV accountant, without the cap: the truth lies inside (Gopi et al. 2021).

    Raises: CrossCheckUnavailable where its quadrature fails (known for very large epsilon), on finer meshes too.
    """
    groups = _active(groups)
    if (certain := _certain(groups, delta)) is not None:
        return certain, certain, certain
    # Imported here: it is a cross-check that training itself does not need.
    from prv_accountant import GaussianMechanism, PoissonSubsampledGaussianMechanism, PRVAccountant

    prvs = [
        GaussianMechanism(noise_multiplier=group.noise_multiplier)
        if group.sample_rate == 1
        else PoissonSubsampledGaussianMechanism(
            sampling_probability=group.sample_rate, noise_multiplier=group.noise_multiplier
        )
        for group in groups
    ]
    counts = [group.count for group in groups]
    failure: RuntimeError | None = None
    for error in (eps_error, eps_error / 3, eps_error / 10):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the package warns about rounding inside its own quadrature
            try:
                accountant = PRVAccountant(prvs, error, delta / 1000, max_self_compositions=counts)
                lower, estimate, upper = accountant.compute_epsilon(delta, counts)
            except RuntimeError as problem:
                failure = problem
                continue
        return float(lower), float(estimate), float(upper)
    raise CrossCheckUnavailable(f"the PRV accountant fails here: {failure}")


FALSE_POSITIVE_RATES = (1e-3, 1e-2)
_EPSILONS = np.concatenate([np.linspace(0, 10, 1001), np.linspace(10.1, 60, 500)])


def risk_of(
    whole: PrivacyLossDistribution, tail: float = 0.0, rates: Sequence[float] = FALSE_POSITIVE_RATES
) -> dict[str, Any]:
    """What everything released means for an attacker who wants to know whether an example was in the data:
    {"advantage", "true_positive_rates": [[false-positive rate, bound], ...]}.

    For any test, with D the data with the example and D' without: P(alarm | D) <= e^eps P(alarm | D') + delta(eps) for every
    eps, so the true-positive rate at false-positive rate a is at most min over eps of e^eps a + delta(eps), and the advantage
    (true minus false positives) at most delta(0), the total variation. delta(eps) is our own PLD profile, an upper bound, so
    these are upper bounds too (Kaissis et al. 2024 and Kulynych et al. 2024, arXiv 2407.02191, use the same duality). For the
    other half, the same inequality holds for no alarm and with D and D' exchanged; all eps together give the trade-off
    function exactly (Dong, Roth and Su 2022, proposition 2.13).

    Args:
        tail: delta that the bounded support of the noise costs, added to every delta.
        rates: the false-positive rates.
    """
    deltas = np.minimum(np.asarray(whole.get_delta_for_epsilon(_EPSILONS)) + tail, 1.0)
    growth, bounds = np.exp(_EPSILONS), []
    for rate in rates:
        steep, flat = deltas + growth * rate, 1 - (1 - deltas - rate) / growth
        # An attack may always guess, so that less than `rate` is no bound.
        bounds.append([rate, float(min(max(rate, np.minimum(steep, flat).min()), 1.0))])
    return {"advantage": float(deltas[0]), "true_positive_rates": bounds}


def tan(groups: Groups) -> float:
    """Total amount of noise, 1 / (q / sigma * sqrt(T / 2)) (Sander et al. 2023), over all groups; inf when empty."""
    eta_squared = math.fsum(
        (group.sample_rate / group.noise_multiplier) ** 2 * group.count / 2
        if group.noise_multiplier
        else math.inf
        for group in _active(groups)
    )
    return 1 / math.sqrt(eta_squared) if eta_squared else math.inf


def accountant_version() -> str:
    """Name and version of the library behind the claim, for ledger and card."""
    return f"dp-accounting {getattr(dp_accounting, '__version__', '') or importlib.metadata.version('dp-accounting')}"


def _active(groups: Groups) -> tuple[ReleaseGroup, ...]:
    return tuple(group for group in groups if group.count and group.sample_rate)


def _certain(groups: Groups, delta: float) -> float | None:
    """The epsilon of active groups that needs no accountant: none, or infinite without noise. Refuses a delta that is none."""
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
