"""Epsilon after k charged intents of one frozen schedule: a value is computed when it is first asked for, and then looked up.

Claims (report, audit, the end of a run) come from the ledger, never from here.
"""

import math
from bisect import bisect_left

from . import accountants
from .accountants import COARSE_INTERVAL, ReleaseGroup, epsilon, one_step_distribution, overflow_probability

_TABLE_POINTS = 64


class EpsilonTable:
    """Epsilon by charged intents.

    At grid points the value is a PLD upper bound for exactly that k; between two grid points it is the value of the
    next one, so a query never understates. `num_steps` and `max_intents` are grid points at the fine discretisation.
    """

    def __init__(self, group: ReleaseGroup, delta: float, max_intents: int, num_steps: int | None = None) -> None:
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
            self._values[count] = fine[0] if count in self._fine else min(self._coarse(count), *fine)
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
        if delta < accountants.PLD_SMALLEST_DELTA or group.noise_multiplier == 0:
            return epsilon([group], delta)
        composed = one_step_distribution(self._group.without_cap(), COARSE_INTERVAL).self_compose(count)
        tau = overflow_probability([group])
        bound = accountants.with_overflow(lambda left: float(composed.get_epsilon_for_delta(left)), tau, delta)
        if tau * (1 + math.exp(min(bound, 700.0))) <= 0.01 * delta:
            return bound
        capped = one_step_distribution(self._group, COARSE_INTERVAL).self_compose(count)
        return min(bound, float(capped.get_epsilon_for_delta(delta)))
