"""Whether the noise that was drawn can be the noise that the ledger states, seen from what every step publishes.

Given the past, the clipped sum S of a step is fixed, whatever the data are and whoever chose them, and its noise w is fresh. So
|S + w|^2 is stochastically at least |w|^2 = std^2 chi-square(P), a non-central chi-square: a norm below a quantile of that
refutes the stated std, whatever S is. Each `done` states the norm of the noised gradient, |S + w| / B. What the test rests on:

* std is that of the intent whose `done` it is, so C may move between steps and between attempts;
* P counts every coordinate that is noised once: trained, tied ones once, no padding, no replica. It stands in the ledger from
  its opening; too large a P would be a false alarm;
* LEVEL is that of the whole folder: each of m comparisons, an owner of a step being one, is made at LEVEL / m. Sums over steps
  are compared too: given its past each step is at least its own chi-square, so the sum is at least one of all coordinates;
* from EXACT_BELOW coordinates on the quantile is Laurent and Massart's bound (2000, lemma 1), P - 2 sqrt(P ln(m / LEVEL));
* norms are raised by RAISED first, for nine digits and for the rounding of certified noise;
* under correlated noise S follows past noise and may cancel it, so the scale is std / c_0, the fresh part of a row, alone;
* the count of adaptive clipping is one coordinate, without power in one step: its squares are pooled, about a centre that
  follows from earlier releases alone;
* norms by owner are post-processing of the charged release under a public layout. The smallest for its number of coordinates is
  published: it alone shows one owner of many without noise.

It refutes or fails to refute, and never verifies: it is blind where |S|^2 passes what is missing, to equal noise on two owners,
to old noise and to wrong tails. A large norm says nothing, since data may make it. `verify.py` has the same test of its own.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from scipy.special import gammainc

LEVEL = 1e-9
RAISED = 1 + 1e-6
EXACT_BELOW = 1000
MEMORY = 8
"""Steps that the centre of the noised fractions remembers; C moves, and the fraction with it."""


class NoiseSeen(NamedTuple):
    """What the norms of a ledger say.

    Attributes:
        coordinates: P; None where the ledger does not state it, and nothing is compared.
        steps: `done` records with a norm.
        smallest, pooled: |S + w| over what the stated noise has in the mean: of the worst step or owner, and of all steps.
        refuted: what is too small, in words; empty where nothing is.
    """

    coordinates: int | None
    steps: int
    smallest: float | None
    pooled: float | None
    refuted: tuple[str, ...]


def is_too_small(squared: float, coordinates: int, level: float) -> bool:
    """Whether a sum of at least `coordinates` squares of standard normals is this small with a probability of at most `level`."""
    if coordinates < EXACT_BELOW:
        return bool(gammainc(coordinates / 2, squared / 2) < level)
    return squared < coordinates - 2 * math.sqrt(coordinates * math.log(1 / level))


def noise_seen(records: Iterable[Mapping[str, Any]]) -> NoiseSeen:
    """Compares what every `done` states with the noise of its intent.

    Args:
        records: all whole ones of a verified ledger, in order.
    """
    found: list[
        tuple[str, float, int, int]
    ] = []  # (what, squared norm over that of the noise, coordinates, comparisons)
    plan: Mapping[str, Any] = {}
    coordinates, std, total = None, 0.0, 0.0
    fractions, centre, spread = 0, 0.0, 0.0
    for record in records:
        if record["type"] == "open":
            plan, coordinates = record["plan"], record.get("noised_coordinates")
        elif record["type"] == "intent":
            std = record["releases"][0]["std"]
        elif record["type"] == "done" and coordinates and "noised_norm" in record and std > 0:
            batch, step = plan["expected_batch_size"], record["step"]
            scale = std / plan.get("correlated", {"coefficients": [1.0]})["coefficients"][0] / batch
            squared = (RAISED * record["noised_norm"] / scale) ** 2
            total += squared
            share = record.get(
                "smallest_share", {"owners": 1, "coordinates": coordinates, "norm": record["noised_norm"]}
            )
            squared = (RAISED * share["norm"] / scale) ** 2
            found.append((f"step {step}", squared, share["coordinates"], share["owners"]))
            if "noised_fraction" in record:
                deviation = plan["adaptive_clipping"]["unclipped_num_std"] / batch
                # The first has no centre that follows from earlier ones.
                spread += (RAISED * (record["noised_fraction"] - centre) / deviation) ** 2 if fractions else 0.0
                fractions += 1
                centre += (record["noised_fraction"] - centre) / min(fractions, MEMORY)
    steps = len(found)
    ratios = [math.sqrt(squared / count) for _, squared, count, _ in found]
    if found:
        found.append(("all steps together", total, steps * int(coordinates or 0), 1))
    if fractions > 1:
        found.append(("the counts of unclipped examples", spread, fractions - 1, 1))
    level = LEVEL / max(1, sum(comparisons for *_, comparisons in found))
    refuted = tuple(what for what, squared, count, _ in found if is_too_small(squared, count, level))
    pooled = math.sqrt(total / steps / (coordinates or 1)) if steps else None
    return NoiseSeen(coordinates, steps, min(ratios, default=None), pooled, refuted)
