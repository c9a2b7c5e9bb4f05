"""Whether the noise that was drawn can be the noise that the ledger states, seen from what every step publishes.

Given the past, the clipped sum S of a step is fixed, whatever the data are and whoever chose them, and its noise w is fresh. So
|S + w|^2 is stochastically at least |w|^2 = std^2 chi-square(P), a non-central chi-square: a norm below a quantile of that
refutes the stated std, whatever S is. Each `done` states the norm of the noised gradient, |S + w| / B. What the test rests on:

* std is that of the intent whose `done` it is;
* P counts every coordinate that is noised once: trained, tied ones once, no padding, no replica. It stands in the ledger from
  its opening; too large a P would be a false alarm;
* LEVEL is that of the whole folder: each of m comparisons, an owner of a step being one, is made at LEVEL / m. Sums over steps
  are compared too: given its past each step is at least its own chi-square, so the sum is at least one of all coordinates;
* from EXACT_BELOW coordinates on the quantile is Laurent and Massart's bound (2000, lemma 1), P - 2 sqrt(P ln(m / LEVEL));
* norms are raised by RAISED first, for nine digits;
* where noise is whole steps h of the sums, what is seen is round(S + w): each of its P entries is at most
  h / 2 off, so |S + w| is at most |round(S + w)| + sqrt(P) h / 2. (A factor 1 + h / (2 std) on the norm
  would not do: with one entry and std = h / 5 it is 0 as a rule, and stays 0.) h is 2^-f of the ledger's
  opening. Noise of version 0.1 has no step;
* norms by owner are post-processing of the charged release under a public layout. The smallest for its number of coordinates is
  published: it alone shows one owner of many without noise.

It refutes or fails to refute, and never verifies: it is blind where |S|^2 passes what is missing, to equal noise on two owners,
to old noise and to wrong tails. A large norm says nothing, since data may make it. `verify.py` has the same test of its own.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from scipy.special import gammainc

LEVEL = 1e-9
RAISED = 1 + 1e-6
EXACT_BELOW = 1000


def is_too_small(squared: float, coordinates: int, level: float) -> bool:
    """Whether a sum of at least `coordinates` squares of standard normals is this small with a probability of at most `level`."""
    if coordinates < EXACT_BELOW:
        return bool(gammainc(coordinates / 2, squared / 2) < level)
    return squared < coordinates - 2 * math.sqrt(coordinates * math.log(1 / level))


def noise_seen(records: Iterable[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """Compares what every `done` states with the noise of its intent: (a sentence, what is too small for the stated noise).

    Args:
        records: all whole ones of a verified ledger, in order.
    """
    norms: list[tuple[str, float, int, int]] = []
    """(what, squared norm over that of the noise, coordinates, comparisons)"""
    plan: Mapping[str, Any] = {}
    coordinates = 0
    std = half_step = total = 0.0
    for record in records:
        if record["type"] == "open":
            plan, coordinates = record["plan"], record.get("noised_coordinates") or 0
            exponent = record.get("sum_exponent")
            half_step = 0.0 if exponent is None else math.ldexp(1.0, -exponent - 1)
        elif record["type"] == "intent":
            std = record["releases"][0]["std"]
        elif record["type"] == "done" and coordinates and "noised_norm" in record:
            raised = plan["expected_batch_size"] * RAISED
            whole = {"owners": 1, "coordinates": coordinates, "norm": record["noised_norm"]}
            share = record.get("smallest_share", whole)
            squared, squared_share = (
                ((one["norm"] * raised + half_step * math.sqrt(one["coordinates"])) / std) ** 2
                for one in (whole, share)
            )
            norms.append(
                (f"step {record['step']}", squared_share, share["coordinates"], share["owners"])
            )
            total += squared
    if not norms:
        return "no norm of a noised sum is stated that could refute the noise", ()
    steps, least = len(norms), min(math.sqrt(squared / count) for _, squared, count, _ in norms)
    norms.append(("all steps together", total, steps * coordinates, 1))
    level = LEVEL / sum(comparisons for *_, comparisons in norms)
    refuted = tuple(
        what for what, squared, count, _ in norms if is_too_small(squared, count, level)
    )
    said = f"{steps:,} norms over {coordinates:,} coordinates are at least {least:.4g} of that of the stated noise"
    return f"{'refuted' if refuted else 'not refuted'}: {said}", refuted
