"""Is the mechanism the one that the plan states? Checks of a sandbox run (privacy/audit/sandbox_record.py).

The sandbox's weights move by exactly the released gradient, so everything is judged from what an adversary would see, the
weights after each step, and what only a sandbox can know besides: who was a member, and what the noise source returned.
"""

from __future__ import annotations

import itertools

import numpy as np

from privacy.audit import statistics as st
from privacy.audit.attack import attack_checks
from privacy.audit.report import AuditReport, Check, fact, random_check, undecided
from privacy.audit.sandbox_record import SandboxRecord


def audit_mechanism(record: SandboxRecord) -> AuditReport:
    """All checks of one sandbox run."""
    if st.holds_nan([record.weights]):
        checks = [fact("weights", False, "the weights of the sandbox are not finite: a hostile example reached them")]
        return AuditReport.of("mechanism", checks)
    checks = [
        *sensitivity_checks(record),
        *sampling_checks(record),
        *variance_checks(record),
        *independence_checks(record),
        *source_checks(record),
        replica_check(record),
        *count_checks(record),
        *attack_checks(record),
    ]
    return AuditReport.of("mechanism", checks, **record.facts)


# Contributions, from the silent steps


def sensitivity_checks(record: SandboxRecord) -> list[Check]:
    """Clip, divisor, reduction and membership, without noise in the way: exact up to rounding."""
    plan, norms = record.plan, record.contributions()
    tolerance = 2 * record.silent_resolution + 1e-6 * plan.max_grad_norm
    limit = plan.max_grad_norm * (1 + plan.sensitivity_slack) + tolerance
    largest = float(norms.max())
    worst = int(np.unravel_index(norms.argmax(), norms.shape)[1])
    honest = ~record.hostile_N
    included = record.inclusion[: record.silent_steps]
    seen = norms > plan.max_grad_norm / 100
    mismatches = int((seen != included)[:, honest].sum())
    stray = float(np.abs(record.silent[:, record.quiet]).max(initial=0.0))
    return [
        fact(
            "sensitivity",
            largest <= limit,
            f"without noise one example moves the released sum by at most {largest:.6g} (canary in "
            f"{_where(record, worst)}), the plan allows C (1 + r) = {limit:.6g}",
            statistic=largest,
            threshold=limit,
        ),
        _strength(record, norms[:, honest], included[:, honest]),
        fact(
            "membership",
            mismatches == 0,
            f"{mismatches} of {int(seen[:, honest].size)} (step, canary) pairs contribute although the sampler did not "
            "choose them, or were chosen and do not contribute",
            statistic=mismatches,
            threshold=0,
        ),
        fact(
            "stray_gradient",
            stray <= tolerance,
            f"without noise, coordinates without any gradient move by {stray:.2g}",
            statistic=stray,
            threshold=tolerance,
        ),
    ]


def _strength(record: SandboxRecord, norms: np.ndarray, included: np.ndarray) -> Check:
    """Contributions of clipped canaries lie at C: neither scaled by the batch nor by the number of ranks."""
    plan, found = record.plan, norms[included]
    if not found.size:
        return undecided("divisor", "no canary was included in a silent step")
    low, high, floor = float(found.min()), float(found.max()), 0.98 * plan.smallest_norm
    return fact(
        "divisor",
        low >= floor and high <= plan.max_grad_norm / 0.98,
        f"canaries contribute between {low:.5g} and {high:.5g} after multiplication with the public batch size "
        f"{plan.expected_batch_size}; clipping to C = {plan.max_grad_norm:g} alone leaves at least {plan.smallest_norm:.5g}",
        statistic=low,
        threshold=floor,
    )


def _where(record: SandboxRecord, example: int) -> str:
    first = int(np.flatnonzero(record.canary_D == example)[0])
    return next(name for name, start, stop in record.parameters if start <= first < stop)


# Members


def sampling_checks(record: SandboxRecord) -> list[Check]:
    """Inclusion frequency against q, and independence of attempts."""
    n, q = record.plan.num_examples, record.plan.sample_rate
    counts = np.array([len(ids) for ids in record.members])
    times = np.bincount(np.concatenate(record.members), minlength=n)
    first, second = (record.members[index] for index in record.retried)
    common = len(np.intersect1d(first, second))
    return [
        random_check(
            "inclusion_frequency",
            float(st.binomial_p(counts.sum(), n * len(counts), q)),
            f"{counts.sum()} inclusions in {len(counts)} attempts, {n * len(counts) * q:.0f} expected at q = {q:.4g}",
            statistic=float(counts.mean() / n),
        ),
        random_check(
            "inclusion_per_step",
            st.bonferroni(st.binomial_p(counts, n, q)),
            f"batch sizes between {counts.min()} and {counts.max()} of {n}",
        ),
        random_check(
            "inclusion_per_example",
            st.binomial_counts_p(times, len(counts), q),
            "how often each canary was chosen is spread as Binomial(attempts, q)",
        ),
        random_check(
            "step_overlap",
            st.bonferroni(_overlaps(record)),
            "members of any two attempts overlap as independent samples do",
        ),
        random_check(
            "retry_overlap",
            float(st.overlap_p(common, n, len(first), len(second))),
            f"a step and its retry share {common} members, {len(first) * len(second) / n:.0f} expected",
            statistic=common,
        ),
    ]


def _overlaps(record: SandboxRecord) -> np.ndarray:
    chosen = np.zeros((len(record.members), record.plan.num_examples), dtype=np.int64)
    for step, ids in enumerate(record.members):
        chosen[step, ids] = 1
    common, counts = chosen @ chosen.T, chosen.sum(axis=1)
    i, j = np.triu_indices(len(chosen), 1)
    return st.overlap_p(common[i, j], record.plan.num_examples, counts[i], counts[j])


# Noise, as the weights show it


def variance_checks(record: SandboxRecord) -> list[Check]:
    """Size and shape of the noise: over all coordinates, per step, per parameter, per rank."""
    z, squares = record.noise, record.noise**2
    ratio = float(np.sqrt(squares.mean()))
    owner, steps = record.owner_D[record.quiet], len(z)
    by_parameter = {name: squares[:, _inside(record, start, stop)] for name, start, stop in record.parameters}
    by_rank = [squares[:, owner == rank] for rank in range(record.world_size)]
    batch = np.log(np.maximum(record.realised[record.silent_steps :], 1))
    slope, trend = st.scale_trend_p(squares.sum(axis=1), z.shape[1], batch)
    return [
        random_check(
            "noise_variance",
            float(st.variance_p(squares.sum(), z.size)),
            f"the released noise has {ratio:.5f} times the planned standard deviation sigma C = {record.plan.noise_std:.6g} "
            f"({z.size} values)",
            statistic=ratio,
        ),
        random_check(
            "noise_variance_per_step",
            st.bonferroni(st.variance_p(squares.sum(axis=1), z.shape[1])),
            "the same in each step by itself",
        ),
        random_check(
            "noise_variance_per_parameter",
            st.bonferroni([float(st.variance_p(s.sum(), s.size)) for s in by_parameter.values() if s.size]),
            "the same in each parameter by itself: " + ", ".join(f"{n} {_rms(s)}" for n, s in by_parameter.items()),
        ),
        random_check(
            "noise_variance_per_rank",
            st.bonferroni([float(st.variance_p(s.sum(), s.size)) for s in by_rank if s.size]),
            "the same in the coordinates of each rank: " + ", ".join(_rms(s) for s in by_rank),
        ),
        random_check(
            "noise_mean",
            st.bonferroni(st.normal_p(z.sum(axis=0) / np.sqrt(steps))),
            "no coordinate's noise has a mean other than 0",
        ),
        random_check(
            "noise_follows_batch",
            trend,
            f"the noise scales as (realised batch size)^{slope:.3f}; the public divisor gives the power 0",
            statistic=slope,
        ),
        random_check("noise_shape", st.kolmogorov_p(z), "the noise is Gaussian (Kolmogorov-Smirnov)"),
        random_check("noise_tails", st.tail_p(z), "as many values beyond 4 standard deviations as a Gaussian has"),
    ]


def _inside(record: SandboxRecord, start: int, stop: int) -> np.ndarray:
    at = np.flatnonzero(record.quiet)
    return (at >= start) & (at < stop)


def _rms(squares: np.ndarray) -> str:
    return f"{np.sqrt(squares.mean()):.4f}" if squares.size else "-"


def independence_checks(record: SandboxRecord) -> list[Check]:
    """No noise comes twice: not in another step, another rank, or another place of the same step."""
    z, owner = record.noise, record.owner_D[record.quiet]
    steps, steps_p = st.pairwise_correlation_p(z)
    shifted, shifted_p = st.lagged_correlation_p(z[:-1], z[1:])
    within, within_p = st.lagged_correlation_p(z, z, skip_zero=True)
    checks = [
        _correlation("noise_across_steps", steps, steps_p, "two steps, coordinate by coordinate"),
        _correlation("noise_across_steps_shifted", shifted, shifted_p, "one step and the next, at any shift"),
        _correlation("noise_across_coordinates", within, within_p, "two places of one step, at any shift"),
    ]
    shards = [z[:, owner == rank] for rank in range(record.world_size)]
    shards = [shard for shard in shards if shard.shape[1]]
    if len(shards) > 1:
        width = min(shard.shape[1] for shard in shards)
        pairs = itertools.combinations([shard[:, :width] for shard in shards], 2)
        largest, p = zip(*(st.lagged_correlation_p(a, b) for a, b in pairs), strict=True)
        between = "two ranks' shards in the same step, at any shift"
        checks.append(_correlation("noise_across_ranks", max(largest), st.bonferroni(p), between))
    return checks


def _correlation(name: str, largest: float, p: float, between: str) -> Check:
    return random_check(name, p, f"largest correlation between {between}: {largest:.4f}", statistic=largest)


# The source of the noise, which a sandbox can watch


def source_checks(record: SandboxRecord) -> list[Check]:
    """Every number that the source gave is in the weights once, with the stated scale, and is new."""
    total = record.weights.shape[1]
    draws = record.draws[record.silent_steps :]
    asked_well = bool((record.num_draws == total).all()) and not st.holds_nan([draws])
    checks = [
        fact(
            "one_draw_per_coordinate",
            asked_well,
            f"the noise source was asked for {record.num_draws.min()} to {record.num_draws.max()} numbers a step over "
            f"all ranks, for {total} coordinates",
            statistic=float(record.num_draws.max()),
            threshold=total,
        )
    ]
    if not asked_well:
        return checks
    difference = float(np.abs(record.noise - draws[:, record.quiet]).max())
    tolerance = 4 * record.resolution / record.plan.noise_std + 1e-6
    # The numbers of silent steps did not reach the weights, but they must not come again either.
    duplicates, disguised = st.count_duplicates(record.draws), st.single_precision_fraction(draws)
    return [
        *checks,
        fact(
            "draws_reach_the_weights",
            difference <= tolerance,
            f"released noise differs from sigma C times the numbers drawn by at most {difference:.2g} sigma C",
            statistic=difference,
            threshold=tolerance,
        ),
        fact(
            "draws_are_new",
            duplicates <= 2,
            f"{duplicates} of {record.draws.size} numbers equal an earlier one bit by bit (chance gives less than 1e-3)",
            statistic=duplicates,
            threshold=2,
        ),
        fact(
            "double_precision",
            disguised < 1e-3,
            f"{disguised:.2g} of the numbers have no more than single precision, whose normals end at 5.77 sigma",
            statistic=disguised,
            threshold=1e-3,
        ),
    ]


def replica_check(record: SandboxRecord) -> Check:
    """Ranks that hold whole replicas hold the same one after every step."""
    if record.replica_digests is None or record.world_size == 1:
        return fact("replicas", True, "no two ranks hold whole replicas: nothing can differ")
    differing = sum(len(set(digests)) > 1 for digests in record.replica_digests)
    sentence = f"the ranks' replicas differ after {differing} of {len(record.replica_digests)} steps"
    return fact("replicas", differing == 0, sentence, statistic=differing, threshold=0)


# The count of adaptive clipping


def count_checks(record: SandboxRecord) -> list[Check]:
    """Released counts are centred, of members alone, and noised once, with the stated standard deviation."""
    counts = record.counts
    if counts is None:
        return []
    # Every honest canary is clipped and counts -1/2; a hostile one counts -1/2 as well, or 0 if it is not finite.
    honest = -0.5 * record.inclusion[:, ~record.hostile_N].sum(axis=1)
    slack = 0.5 * record.inclusion[:, record.hostile_N].sum(axis=1) + 1e-6
    silent, noisy = slice(0, record.silent_steps), slice(record.silent_steps, None)
    beyond = np.where(np.arange(len(honest)) < record.silent_steps, 0.0, counts.std) * counts.draws
    low, high = honest - slack + beyond, honest + 1e-6 + beyond
    wrong = ~((low <= counts.released) & (counts.released <= high))  # NaN is wrong too
    certain = slack[noisy] < 1e-3
    z = ((counts.released - honest)[noisy] / counts.std)[certain]
    duplicates = len(counts.draws) - len(np.unique(counts.draws[~np.isnan(counts.draws)]))
    return [
        fact(
            "count_sensitivity",
            not wrong[silent].any(),
            f"without noise the centred count is half the clipped members, in all but {wrong[silent].sum()} of "
            f"{record.silent_steps} attempts",
            statistic=int(wrong[silent].sum()),
            threshold=0,
        ),
        fact(
            "count_draws",
            not wrong[noisy].any() and duplicates == 0,
            f"the count is noised by sigma_b = {counts.std:g} times one new number of the source, in all but "
            f"{wrong[noisy].sum()} attempts",
            statistic=int(wrong[noisy].sum()),
            threshold=0,
        ),
        random_check(
            "count_noise_variance",
            float(st.variance_p((z**2).sum(), len(z))) if len(z) else 1.0,
            f"the noise on the count has {np.sqrt((z**2).mean()) if len(z) else 0:.4f} times its standard deviation "
            f"({len(z)} values)",
        ),
    ]
