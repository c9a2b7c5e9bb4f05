"""The premises of the proof, recomputed from the objects of a run before anything is charged.

Theorem. T releases of a run cost at most what its `ReleaseGroup` says: T Poisson-subsampled
Gaussians of rate q, cap K and noise multiplier s, if these premises hold.

* One example moves a sum by at most C (1 + r) (privacy/sums/grid.py): C is finite; an
  fp32 sum of n examples rounds by n^2 u C <= r C / 4, with products that are those of fp32; d
  coordinates round to steps h with sqrt(d) h <= 2^-13 C; and no sum leaves its layout or 62 bits,
  whatever rank adds it. (Certified arithmetic has r = 0: nothing rounds beside its integers.)
* Each coordinate of a sum gets noise once (contract 7): owners cover each coordinate exactly once,
  all ranks mean the same step, and the deviation is at most the 2^50 steps that are drawn exactly
  (privacy/noise/rounded_normal.py).
* The noise is what is charged: the releases of a step, as they are drawn, are together one Gaussian
  of noise multiplier sigma (Dong, Roth and Su 2019, corollary 3.3), so that the deviation of a sum
  is at least sigma C; and s (1 + r) <= sigma.
* The sample is what is charged (privacy/sampling): q is no less than the rate of the coins, K is
  the cap of the sampler, and so many members have rows (rows.py). Sums are divided by the public
  B = q n.

Two premises are asked for in every step, too: `ClippedSum.release` asks for a finite C and a
deviation that can be drawn, `reduce_to_owners` for equal steps. How a head's sums round in double
precision is asked for by its plan, which limits the number of examples
(`evaluation.private_head.rows.rounding`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..accounting.accountants import ReleaseGroup
from ..errors import PrivacyConfigError
from ..noise.rounded_normal import deviation_in_units
from ..numerics.precision import require_exact_products, wide_dtype
from ..plan.limits import MOST_DEVIATION
from ..plan.releases import SENSITIVITY_SLACK, Release
from ..ranks import collectives
from ..sampling.poisson import PoissonSampler
from ..step.batches import max_micro_batches
from ..sums.grid import LARGEST_INT64, LARGEST_SPLIT, Unit
from ..sums.totals import SumTarget

if TYPE_CHECKING:
    from ..clipping import ClippedSum
    from ..plan.numbers import PrivacyPlan
    from ..ranks.engine import Engine
    from ..step.step import Mechanism

ROUNDED_TWICE = 1 + Fraction(1, 2**50)
"""Bounds the relative error of a product or quotient of doubles."""
ROUNDED_OFTEN = 1 + Fraction(1, 2**40)
"""The same for noise that several releases share, which takes roots and sums."""


class NoisedSum(NamedTuple):
    """A sum that gets noise and is released.

    Attributes:
        release: as the ledger's intent states it.
        num_coordinates: numbers of the sum, each with noise of its own.
        unit: the step of sum and noise.
        num_rows: the most rows that are added up, on all ranks together.
    """

    release: Release
    num_coordinates: int
    unit: Unit
    num_rows: int


def require(premises: Mapping[str, bool]) -> None:
    """Refuses the start if a premise does not hold.

    Raises:
        PrivacyConfigError: names the first such premise.
    """
    for premise, holds in premises.items():
        if not holds:
            raise PrivacyConfigError(
                f"a premise of the guarantee does not hold: {premise}; the run is not started, and "
                "nothing is charged: report this line as a defect, with the recipe or the program"
            )


def require_premises(
    mechanism: Mechanism, micro_batch_size: int, nodes: Sequence[int] = ()
) -> None:
    """Refuses a run whose premises do not hold. Collective.

    A run without a formal guarantee needs those of its owners alone.

    Args:
        micro_batch_size, nodes: of `LogicalBatches`.

    Raises:
        PrivacyConfigError: on all ranks, in one line that names the first premise that does not
            hold.
    """
    plan = mechanism.plan
    clipped = mechanism.clipped
    engine = mechanism.engine
    ranks = collectives.refuse_together(lambda: _of_this_rank(plan, clipped, engine))
    num_ranks = len(ranks)
    states = {state for state, _ in ranks}
    require({"all ranks have the same step 2^-f, C and owners": len(states) == 1})
    if not plan.formal_guarantee:
        return
    sampler = mechanism.sampler
    charged = plan.release_group(1)
    divisor = plan.expected_batch_size
    # A formal guarantee implies both.
    assert isinstance(sampler, PoissonSampler) and clipped.exponent is not None
    most_members = sampler.num_examples if sampler.cap is None else sampler.cap
    num_micro_batches = max_micro_batches(sampler, num_ranks, micro_batch_size, nodes, divisor)
    most_rows = num_micro_batches * micro_batch_size * num_ranks
    expected = -(-sampler.threshold * sampler.num_examples >> 64)
    is_same_number = charged.num_examples == sampler.num_examples
    is_rounded_up = Fraction(charged.sample_rate) * 2**64 >= sampler.threshold
    require({"the cap that is charged is the sampler's": charged.cap == sampler.cap})
    require({"the number of examples that is charged is the sampler's": is_same_number})
    require({f"{most_members} members of a step have rows": most_rows >= most_members})
    require({"q is rounded up": is_rounded_up})
    divisor_premise = f"sums are divided by B = q n = {expected}, and not by {divisor}"
    require({divisor_premise: divisor == expected})
    num_rows = sum(rows for _, rows in ranks)
    unit = clipped.accumulator.unit
    if unit is None:  # certified: padding adds nothing, and an entry is at most C
        largest = math.floor(Fraction(clipped.sensitivity) * Fraction(2) ** clipped.exponent)
        num_rows = most_members
        unit = Unit(clipped.exponent, largest)
    num_coordinates = sum(map(engine.layout.count, range(num_ranks)))
    release = clipped.release(plan.noise_multiplier)
    noised = NoisedSum(release, num_coordinates, unit, num_rows)
    slack = 0.0 if clipped.mode == "certified" else SENSITIVITY_SLACK
    require_noised([noised], charged, plan.noise_multiplier, slack)


def _of_this_rank(
    plan: PrivacyPlan, clipped: ClippedSum, engine: Engine
) -> tuple[tuple[object, ...], int]:
    """Returns the state that all ranks must have in common, and the rows that this one may add."""
    engine.layout.check(engine.shapes)
    is_same = clipped.accumulator.shapes == engine.shapes
    require({"the parameters that are summed are those that get noise": is_same})
    grid = clipped.grid
    unit = clipped.accumulator.unit
    n = SumTarget.examples
    if unit is not None and plan.formal_guarantee:
        dtype = wide_dtype(engine.compute_dtype)
        require_exact_products(engine.device, dtype, engine.shapes.values())
        assert grid.rows is not None, "a grid has room for a number of rows"
        # n^2 u of C, and eps is 2 u.
        rounding = n * n * torch.finfo(dtype).eps / 2
        is_small = rounding <= SENSITIVITY_SLACK / 4
        is_split = grid.layout == "int32+int16"
        fits = not is_split or grid.rows * unit.largest <= LARGEST_SPLIT
        rows = f"{grid.rows:,} rows of at most {unit.largest:,} steps"
        require({f"a sum of {n} examples in {dtype} rounds by at most r C / 4": is_small})
        require({f"a sum of {rows} fits into 6 bytes": fits})
    owners = hashlib.sha256(repr(engine.layout.pieces).encode()).digest()
    return (clipped.exponent, clipped.sensitivity, owners), grid.rows or 0


def require_noised(
    sums: Sequence[NoisedSum],
    charged: ReleaseGroup,
    noise_multiplier: float,
    sensitivity_slack: float,
) -> None:
    """Refuses releases of a step whose noise does not cover them, or is not the charged one.

    Args:
        charged: the group that the accountant gets.
        noise_multiplier: sigma, of all of them together.
        sensitivity_slack: r of their arithmetic; 0 where nothing is rounded.

    Raises:
        PrivacyConfigError: names the premise.
    """
    inverse_variance = Fraction(0)
    sigma = Fraction(noise_multiplier)
    r = Fraction(sensitivity_slack)
    for release, d, unit, num_rows in sums:
        name = release["name"]
        bound = release["sensitivity"]
        require({f"C of the {name} is a finite number above 0": 0 < bound < math.inf})
        deviation = deviation_in_units(release["std"], unit.exponent)
        require({f"noise of the {name} is at most 2^50 steps": 0 < deviation <= MOST_DEVIATION})
        steps = Fraction(bound) * Fraction(2) ** unit.exponent  # C / h
        # Both sides of sqrt(d) h <= 2^-13 C are squared, so that the comparison is exact.
        is_fine = r == 0 or d * 4**13 <= steps**2
        has_room = num_rows * unit.largest < LARGEST_INT64
        require({f"{d:,} numbers of the {name} round by at most 2^-13 C together": is_fine})
        require({f"a sum of {num_rows:,} rows of the {name} stays below 2^62 steps": has_room})
        # Releases together are one Gaussian: 1 / sigma^2 is the sum of theirs (corollary 3.3).
        inverse_variance += (steps / Fraction(deviation)) ** 2
    rounding = 1 if len(sums) == 1 else ROUNDED_OFTEN
    is_covered = inverse_variance * sigma**2 <= rounding
    needed_sigma = Fraction(charged.noise_multiplier) * (1 + r)
    is_charged = needed_sigma <= sigma * ROUNDED_TWICE
    require({f"noise of all releases is worth sigma = {noise_multiplier:g}": is_covered})
    require({f"sigma / (1 + {sensitivity_slack:g}) is what is charged": is_charged})
