"""Looks in what every step publishes for noise that is too small to be the stated noise.

Each `done` states the norm of the noised gradient, which is stochastically at least that of the
noise alone. A norm below a quantile of the latter refutes the stated standard deviation, whatever
the data are. docs/sums.md derives the test and says what it cannot see; `verify.py` has a copy of
its own.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from scipy.special import gammainc

LEVEL = 1e-9
"""The probability that honest noise of a folder is refuted is at most this."""
RAISED = 1 + 1e-6
"""Raises norms, which are stated in nine digits."""
EXACT_BELOW = 1000
"""From so many coordinates on a bound stands for the exact quantile."""


def is_too_small(squared: float, coordinates: int, level: float) -> bool:
    """Returns whether a sum of squares of standard normals is improbably small.

    That is: whether at least `coordinates` of them add up to so little with a probability of at
    most `level`.
    """
    if coordinates < EXACT_BELOW:
        return bool(gammainc(coordinates / 2, squared / 2) < level)
    # Laurent and Massart 2000, lemma 1.
    return squared < coordinates - 2 * math.sqrt(coordinates * math.log(1 / level))


def noise_seen(records: Iterable[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """Compares what every `done` states with the noise of its intent.

    Args:
        records: all complete ones of a verified ledger, in order.

    Returns:
        A sentence, and names of the norms that are too small for the stated noise.
    """
    norms: list[tuple[str, float, int, int]] = []
    """(name, squared norm over that of the noise, coordinates, comparisons)"""
    plan: Mapping[str, Any] = {}
    coordinates = 0
    std = 0.0
    half_step = 0.0
    total = 0.0
    for record in records:
        if record["type"] == "open":
            plan = record["plan"]
            coordinates = record.get("noised_coordinates") or 0
            exponent = record.get("sum_exponent")
            half_step = 0.0 if exponent is None else math.ldexp(1.0, -exponent - 1)
        elif record["type"] == "intent":
            std = record["releases"][0]["std"]
        elif record["type"] == "done" and coordinates and "noised_norm" in record:
            factor = plan["expected_batch_size"] * RAISED
            all_owners = {"owners": 1, "coordinates": coordinates, "norm": record["noised_norm"]}
            share = record.get("smallest_share", all_owners)
            rounding = half_step * math.sqrt(share["coordinates"])
            squared_share = ((share["norm"] * factor + rounding) / std) ** 2
            name = f"step {record['step']}"
            norms.append((name, squared_share, share["coordinates"], share["owners"]))
            rounding = half_step * math.sqrt(coordinates)
            total += ((record["noised_norm"] * factor + rounding) / std) ** 2
    if not norms:
        return "no norm of a noised sum is stated that could refute the noise", ()
    steps = len(norms)
    smallest = min(math.sqrt(squared / count) for _, squared, count, _ in norms)
    norms.append(("all steps together", total, steps * coordinates, 1))
    level = LEVEL / sum(comparisons for *_, comparisons in norms)
    refuted = tuple(
        name for name, squared, count, _ in norms if is_too_small(squared, count, level)
    )
    verdict = "refuted" if refuted else "not refuted"
    sentence = (
        f"{verdict}: {steps:,} norms over {coordinates:,} coordinates are at least "
        f"{smallest:.4g} of that of the stated noise"
    )
    return sentence, refuted
