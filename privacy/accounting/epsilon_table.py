"""Epsilon after k charged intents of one frozen schedule: computed once, kept in a file, looked up in microseconds.

The file is a cache and nothing more: it repeats what the plan alone determines (hence public), it is keyed by everything the
values depend on, accountant version included, and a file that does not fit is computed anew. Claims (report, audit, the end of
a run) come from the ledger, never from here.
"""

import functools
import hashlib
import itertools
import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from .accountants import (
    COARSE_INTERVAL,
    PLD_SMALLEST_DELTA,
    ReleaseGroup,
    accountant_version,
    epsilon,
    one_step_distribution,
    overflow_probability,
    with_overflow,
)

_FORMAT = 1
_TABLE_POINTS = 64
# The part of delta set aside for the cap's overflow; it moves epsilon by about 1e-5.
_OVERFLOW_SHARE = 1e-4


class EpsilonTable:
    """Epsilon by charged intents.

    At grid points the value is a PLD upper bound for exactly that k; between two grid points it is the value of the
    next one, so a query never understates. `num_steps` and `max_intents` are grid points at the fine discretisation.
    """

    def __init__(
        self,
        group: ReleaseGroup,
        delta: float,
        max_intents: int,
        num_steps: int | None = None,
        cache: Path | None = None,
        bands: int = 1,
    ) -> None:
        """Args:
        group: one release of the schedule; its count is ignored.
        cache: file to take the values from, or to write them to; a file of another schedule is replaced.
        bands: number of groups of examples that take turns; the group with most of k intents has ceil(k / bands).
        """
        self._group, self._delta, self._bands = group.times(1), delta, bands
        max_intents, num_steps = self._turns(max_intents), None if num_steps is None else self._turns(num_steps)
        self._fine = {max_intents, max_intents if num_steps is None else num_steps}
        # All counts up to 64; beyond that 64 equal strides and the powers of two, so that the start is fine too.
        even = {math.ceil(max_intents * point / _TABLE_POINTS) for point in range(1, _TABLE_POINTS + 1)}
        powers = {2**power for power in range(max_intents.bit_length()) if 2**power <= max_intents}
        self._counts = sorted(even | powers | self._fine)
        known = None if cache is None else self._read(cache)
        if known is not None:
            self._values = known
            return
        coarse = _composer(self._group, self._delta)
        values = [self.exact(count * bands) if count in self._fine else coarse(count) for count in self._counts]
        # Epsilon grows with k, so a later (finer) bound that is smaller also holds for every earlier k.
        self._values = list(itertools.accumulate(reversed(values), min))[::-1]
        if cache is not None:
            identity = self._identity()
            content = {"identity": identity, "values": self._values, "sha256": _digest(identity, self._values)}
            temporary = cache.with_name(cache.name + ".creating")
            try:
                temporary.write_text(json.dumps(content))
                os.replace(temporary, cache)
            except OSError:
                temporary.unlink(missing_ok=True)  # a full disk costs the next start some seconds, nothing else

    def epsilon(self, num_charged: int) -> float:
        """Upper bound on the epsilon of the first `num_charged` intents; exact but slow beyond `max_intents`."""
        if num_charged <= 0:
            return 0.0
        index = bisect_left(self._counts, self._turns(num_charged))
        return self._values[index] if index < len(self._values) else self.exact(num_charged)

    def count_for(self, num_charged: int) -> int:
        """The count whose epsilon stands for that of `num_charged` intents: the next one that the table has."""
        index = bisect_left(self._counts, self._turns(num_charged))
        return self._counts[index] * self._bands if num_charged > 0 and index < len(self._counts) else num_charged

    def _turns(self, num_charged: int) -> int:
        """How many of these intents the group of examples with most of them has."""
        return -(-num_charged // self._bands)

    def exact(self, num_charged: int) -> float:
        """The fine PLD value for this very count: the number for reports (seconds at a million-example batch)."""
        return epsilon([self._group.times(self._turns(num_charged))], self._delta)

    def _identity(self) -> dict[str, object]:
        """Everything that the values depend on."""
        return {
            "format": _FORMAT,
            "accountant": accountant_version(),
            "group": asdict(self._group),
            "delta": self._delta,
            "counts": self._counts,
            "fine": sorted(self._fine),
        }

    def _read(self, path: Path) -> list[float] | None:
        try:
            content = json.loads(path.read_bytes())
            values, identity = [float(value) for value in content["values"]], content["identity"]
            fits = identity == self._identity() and content["sha256"] == _digest(identity, values)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return values if fits and len(values) == len(self._counts) else None


def _digest(identity: object, values: list[float]) -> str:
    return hashlib.sha256(json.dumps([identity, values], sort_keys=True).encode()).hexdigest()


def _composer(group: ReleaseGroup, delta: float) -> Callable[[int], float]:
    """count -> epsilon, sharing the one-step distribution, on the coarse discretisation (still an upper bound).

    Where charging the overflow of the cap in delta costs next to nothing that is done, because the distribution with
    the cap is ten times as long. Otherwise (a million-example batch at delta 1e-9) that one is used.
    """
    if delta < PLD_SMALLEST_DELTA or group.noise_multiplier == 0:
        return lambda count: epsilon([group.times(count)], delta)
    plain = one_step_distribution(group.without_cap(), COARSE_INTERVAL)
    capped = functools.cache(lambda: one_step_distribution(group, COARSE_INTERVAL))

    def evaluate(count: int) -> float:
        tau = overflow_probability([group.times(count)])
        composed = plain.self_compose(count)
        bound = float(composed.get_epsilon_for_delta(delta * (1 - _OVERFLOW_SHARE)))
        if tau * (1 + math.exp(min(bound, 700.0))) <= _OVERFLOW_SHARE * delta:
            return bound
        bound = with_overflow(lambda left: float(composed.get_epsilon_for_delta(left)), tau, delta)
        if tau * (1 + math.exp(min(bound, 700.0))) <= 0.01 * delta:
            return bound
        return min(bound, float(capped().self_compose(count).get_epsilon_for_delta(delta)))

    return evaluate
