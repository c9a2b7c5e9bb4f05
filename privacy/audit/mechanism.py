"""Is the mechanism the one that the plan states? Checks of a sandbox run (privacy/audit/sandbox_record.py).

The sandbox's weights move by exactly the released gradient, so everything is judged from what an adversary would see, the
weights after each step, and what only a sandbox can know besides: who reached the model, what the noise source returned, what the
optimizer got, and when the ledger was durable.
"""

import itertools
import math
from collections.abc import Iterable

import numpy as np

from . import statistics as st
from .attack import attack_checks
from .charges import charge_checks, made_attempts
from .report import AuditReport, Check, fact, random_check, undecided
from .sandbox_record import SandboxRecord
from .schedule import joint_checks
from .second_sampler import SecondSampler, places_in_group


def audit_mechanism(record: SandboxRecord) -> AuditReport:
    """All checks of one sandbox run."""
    if st.holds_nan([record.weights]):
        checks = [fact("weights", False, "the weights of the sandbox are not finite: a hostile example reached them")]
        return AuditReport.of("mechanism", checks)
    checks = [
        *sensitivity_checks(record),
        *dealt_checks(record),
        *sampling_checks(record),
        *variance_checks(record),
        *independence_checks(record),
        *source_checks(record),
        replica_check(record),
        *count_checks(record),
        *charge_checks(record.events),
        *attack_checks(record),
    ]
    return AuditReport.of("mechanism", checks, **record.facts)


# Contributions, from the silent steps


def sensitivity_checks(record: SandboxRecord) -> list[Check]:
    """Clip, divisor, reduction and membership, without noise in the way: exact up to rounding."""
    plan, norms, honest = record.plan, record.contributions(), ~record.hostile_N
    tolerance = 2 * record.silent_resolution + 1e-6 * plan.max_grad_norm
    limit, largest = plan.max_grad_norm * (1 + plan.sensitivity_slack) + tolerance, float(norms.max())
    worst = int(np.unravel_index(norms.argmax(), norms.shape)[1])
    first = int(np.flatnonzero(record.canary_D == worst)[0])
    where = next(name for name, start, stop in record.parameters if start <= first < stop)
    moves = (
        f"without noise one example moves the released sum by at most {largest:.6g} (canary in {where}), the plan allows "
        f"C (1 + r) = {limit:.6g}"
    )
    apart = f"two neighbouring batches that round as differently as they can have sums {record.neighbours:.6g} apart"
    # Contributions of clipped canaries lie at C: neither scaled by the batch nor by the number of ranks.
    included, clipped_limit = record.inclusion[: record.silent_steps], plan.max_grad_norm / 0.98
    clipped = norms[:, honest][included[:, honest]]
    if clipped.size:
        low, high, floor = float(clipped.min()), float(clipped.max()), 0.98 * plan.smallest_norm
        contribute = (
            f"canaries contribute between {low:.5g} and {high:.5g} after multiplication with the public batch size "
            f"{plan.expected_batch_size}; clipping to C = {plan.max_grad_norm:g} alone leaves at least {plan.smallest_norm:.5g}"
        )
        divisor = fact("divisor", low >= floor and high <= clipped_limit, contribute, statistic=low, threshold=floor)
    else:
        divisor = undecided("divisor", "no canary was included in a silent step")
    seen = norms > plan.max_grad_norm / 100
    mismatches = int((seen != included)[:, honest].sum())
    chosen = (
        f"{mismatches} of {int(seen[:, honest].size)} (step, canary) pairs contribute although the sampler did not choose "
        "them, or were chosen and do not contribute"
    )
    stray = float(np.abs(record.silent[:, record.quiet]).max(initial=0.0))
    untouched = f"without noise, coordinates without any gradient move by {stray:.2g}"
    return [
        fact("sensitivity", largest <= limit, moves, statistic=largest, threshold=limit),
        fact("rounding", record.neighbours <= limit, apart, statistic=record.neighbours, threshold=limit),
        divisor,
        fact("membership", mismatches == 0, chosen, statistic=mismatches, threshold=0),
        fact("stray_gradient", stray <= tolerance, untouched, statistic=stray, threshold=tolerance),
    ]


# Members


def dealt_checks(record: SandboxRecord) -> list[Check]:
    """Who reached the model on each rank, in which order and with which keys, is what a second sampler says."""
    plan, events = record.plan, record.events
    second = SecondSampler(events.secret, plan.num_examples, plan.expected_batch_size, plan.cap, plan.bands)
    other_members, other_keys, out_of_turn = [], 0, 0
    for attempt, seen, keys in zip(made_attempts(events, record.session_starts), record.seen, record.keys, strict=True):
        dealt = [
            ids[np.argsort(rows)]
            for ids, rows in second.deal(attempt, second.members(attempt)[1], plan.rows_per_rank, record.world_size)
        ]
        out_of_turn += sum(int((ids % plan.bands != attempt.before % plan.bands).sum()) for ids in seen)
        if not all(map(np.array_equal, dealt, seen)):
            other_members.append(attempt.step)
        other_keys += sum(
            int((second.keys(attempt, ids) != of_ids).sum()) for ids, of_ids in zip(seen, keys, strict=True)
        )
    where = f" (first at step {other_members[0]})" if other_members else ""
    dealt_sentence = (
        f"in {len(other_members)} of {len(record.seen)} attempts other examples reached the model than the coins say by an "
        f"independent derivation, or in another order{where}"
    )
    keys_sentence = f"{other_keys} examples came with another key than that of their identity, step and attempt"
    turns_sentence = f"{out_of_turn} examples reached the model whose group was not the one whose turn it was"
    return [
        fact("group_turns", out_of_turn == 0, turns_sentence, statistic=out_of_turn, threshold=0),
        fact("dealt_members", not other_members, dealt_sentence, statistic=len(other_members), threshold=0),
        fact("example_keys", other_keys == 0, keys_sentence, statistic=other_keys, threshold=0),
    ]


def sampling_checks(record: SandboxRecord) -> list[Check]:
    """Inclusion frequency against q, and independence of attempts."""
    bands, q = record.plan.bands, record.plan.sample_rate
    n = record.plan.num_examples // bands
    members = [places_in_group(ids, record.plan.num_examples, bands) for ids in record.members]
    counts = np.array([len(ids) for ids in members])
    total, mean = counts.sum(), float(counts.mean() / n)
    frequency = f"{total} inclusions in {len(counts)} attempts, {n * len(counts) * q:.0f} expected at q = {q:.4g}"
    sizes = f"batch sizes between {counts.min()} and {counts.max()} of {n}"
    ratio, spread_p = st.size_spread_p(counts, n, q, record.plan.cap)
    varied = f"sizes of batches vary {ratio:.3f} times as much as Binomial(n, q) does"
    times = st.binomial_counts_p(np.bincount(np.concatenate(members), minlength=n), len(counts), q)
    spread = "how often each canary was chosen is spread as Binomial(attempts, q)"
    chosen = np.zeros((len(members), n), dtype=np.int64)  # the cap is eight standard deviations away
    for step, ids in enumerate(members):
        chosen[step, ids] = 1
    i, j = np.triu_indices(len(chosen), 1)
    overlaps = st.bonferroni(st.overlap_p((chosen @ chosen.T)[i, j], n, counts[i], counts[j]))
    independent = "members of any two attempts overlap as independent samples do"
    first, second = (members[index] for index in record.retried)
    common = len(np.intersect1d(first, second))
    retry = f"a step and its retry share {common} members, {len(first) * len(second) / n:.0f} expected"
    retry_p = float(st.overlap_p(common, n, len(first), len(second)))
    return [
        random_check("inclusion_frequency", float(st.binomial_p(total, n * len(counts), q)), frequency, statistic=mean),
        random_check("inclusion_per_step", st.bonferroni(st.binomial_p(counts, n, q)), sizes),
        random_check("batch_size_spread", spread_p, varied, statistic=ratio),
        random_check("inclusion_per_example", times, spread),
        *joint_checks(members, chosen.astype(bool), n, q),
        random_check("step_overlap", overlaps, independent),
        random_check("retry_overlap", retry_p, retry, statistic=common),
    ]


# Noise, as the weights show it


def variance_checks(record: SandboxRecord) -> list[Check]:
    """Size and shape of the noise: over all coordinates, per step, per parameter, per rank."""

    def variances(parts: Iterable[np.ndarray]) -> float:
        return st.bonferroni([float(st.variance_p(part.sum(), part.size)) for part in parts if part.size])

    def rms(part: np.ndarray) -> str:
        return f"{np.sqrt(part.mean()):.4f}" if part.size else "-"

    z, squares = record.noise, record.noise**2
    ratio, sum_T = float(np.sqrt(squares.mean())), squares.sum(axis=1)
    whole = (
        f"the released noise has {ratio:.5f} times the planned standard deviation sigma C = {record.plan.noise_std:.6g} "
        f"({z.size} values)"
    )
    owner, at = record.owner_D[record.quiet], np.flatnonzero(record.quiet)
    by_parameter = {name: squares[:, (start <= at) & (at < stop)] for name, start, stop in record.parameters}
    by_rank = [squares[:, owner == rank] for rank in range(record.world_size)]
    parameters = "the same in each parameter by itself: " + ", ".join(f"{n} {rms(s)}" for n, s in by_parameter.items())
    ranks = "the same in the coordinates of each rank: " + ", ".join(map(rms, by_rank))
    means = st.bonferroni(st.normal_p(z.sum(axis=0) / np.sqrt(len(z))))
    batch = np.log(np.maximum(record.realised[record.silent_steps :], 1))
    slope, trend = st.scale_trend_p(sum_T, z.shape[1], batch)
    scales = f"the noise scales as (realised batch size)^{slope:.3f}; the public divisor gives the power 0"
    per_step = st.bonferroni(st.variance_p(sum_T, z.shape[1]))
    return [
        random_check("noise_variance", float(st.variance_p(squares.sum(), z.size)), whole, statistic=ratio),
        random_check("noise_variance_per_step", per_step, "the same in each step by itself"),
        random_check("noise_variance_per_parameter", variances(by_parameter.values()), parameters),
        random_check("noise_variance_per_rank", variances(by_rank), ranks),
        random_check("noise_mean", means, "no coordinate's noise has a mean other than 0"),
        random_check("noise_follows_batch", trend, scales, statistic=slope),
        random_check("noise_shape", st.kolmogorov_p(z), "the noise is Gaussian (Kolmogorov-Smirnov)"),
        random_check(
            "noise_tails", st.tail_p(z), "as many values beyond 2.5 to 5 standard deviations as a Gaussian has"
        ),
    ]


def independence_checks(record: SandboxRecord) -> list[Check]:
    """No noise comes twice: not in another step, another rank, or another place, not reversed, and not with other signs."""
    z, owner = record.noise, record.owner_D[record.quiet]
    strongest, p_steps = st.pairwise_correlation_p(z)
    # In their own places, so that what was drawn side by side stays side by side.
    placed = np.zeros((len(z), len(record.quiet)))
    placed[:, record.quiet] = z
    where, correlation, p_places = st.shifted_and_reversed_p(placed, record.quiet)
    steps = f"largest correlation between two steps, coordinate by coordinate: {strongest:.4f}"
    places = (
        "largest correlation between places at any distance or in reverse, of the values or of their sizes, in one step or "
        f"two: {correlation:.4f} ({where})"
    )
    checks = [
        random_check("noise_across_steps", p_steps, steps, statistic=strongest),
        random_check("noise_across_places", p_places, places, statistic=correlation),
    ]
    shards = [z[:, owner == rank] for rank in range(record.world_size)]
    shards = [shard for shard in shards if shard.shape[1]]
    if len(shards) > 1:
        width = min(shard.shape[1] for shard in shards)
        pairs = itertools.combinations([shard[:, :width] for shard in shards], 2)
        largest, p = zip(*(st.lagged_correlation_p(a, b) for a, b in pairs), strict=True)
        ranks = f"largest correlation between two ranks' shards in the same step, at any shift: {max(largest):.4f}"
        checks.append(random_check("noise_across_ranks", st.bonferroni(p), ranks, statistic=max(largest)))
    return checks


# The source of the noise, which a sandbox can watch


def source_checks(record: SandboxRecord) -> list[Check]:
    """Every number that the source gave is in the weights once, with the stated scale, and is new."""
    total, fewest, most = record.weights.shape[1], record.num_draws.min(), record.num_draws.max()
    draws = record.draws[record.silent_steps :]
    asked_well = fewest == most == total and not st.holds_nan([draws])
    asked = f"the noise source was asked for {fewest} to {most} numbers a step over all ranks, for {total} coordinates"
    checks = [fact("one_draw_per_coordinate", bool(asked_well), asked, statistic=float(most), threshold=total)]
    if not asked_well:
        return checks
    difference = float(np.abs(record.noise - draws[:, record.quiet]).max())
    # C mixes b rows, and their rounding with them.
    tolerance = 4 * sum(record.plan.coefficients) * record.resolution / record.plan.noise_std + 1e-6
    reach = f"released noise differs from sigma C times the numbers drawn by at most {difference:.2g} sigma C"
    # The numbers of silent steps did not reach the weights, but they must not come again either.
    duplicates, disguised = st.count_duplicates(np.abs(record.draws)), st.single_precision_fraction(draws)
    # Of doubles none are equal by chance; of integers with a spacing of h standard deviations, N^2 h / (2 sqrt(pi)) pairs are,
    # but for the sign.
    chance = record.draws.size**2 * record.plan.draw_spacing / (2 * math.sqrt(math.pi))
    most_by_chance = 2 + math.ceil(chance + 5 * math.sqrt(chance))
    equal = (
        f"{duplicates} of {record.draws.size} numbers equal an earlier one but for the sign (chance gives {chance:.2g})"
    )
    single = f"{disguised:.2g} of the numbers have no more than single precision, whose normals end at 5.77 sigma"
    # Where there is no gradient the optimizer gets noise alone: sigma C times the draw, where single precision errs by 6e-8.
    scale = record.plan.noise_std / record.plan.expected_batch_size
    noise = draws[:, record.quiet] * scale
    handed = record.fresh(record.handed[record.silent_steps :, record.quiet])
    # Where past noise cancels in what is left, its own rounding does not.
    least = 1e-300 if record.plan.bands == 1 else 1e-3 * scale
    rounded = float((np.abs(handed - noise) / np.maximum(np.abs(noise), least)).max())
    double = f"what the optimizer gets differs from noise added in double precision by {rounded:.2g} of itself"
    return [
        *checks,
        fact("added_in_double", rounded <= 1e-10, double, statistic=rounded, threshold=1e-10),
        fact("draws_reach_the_weights", difference <= tolerance, reach, statistic=difference, threshold=tolerance),
        fact("draws_are_new", duplicates <= most_by_chance, equal, statistic=duplicates, threshold=most_by_chance),
        fact("double_precision", disguised < 1e-3, single, statistic=disguised, threshold=1e-3),
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
    wrong_silent, wrong_noisy = int(wrong[silent].sum()), int(wrong[noisy].sum())
    centred = (
        f"without noise the centred count is half the clipped members, in all but {wrong_silent} of {record.silent_steps} "
        "attempts"
    )
    duplicates = len(counts.draws) - len(np.unique(counts.draws[~np.isnan(counts.draws)]))
    drawn = (
        f"the count is noised by sigma_b = {counts.std:g} times one new number of the source, in all but {wrong_noisy} "
        "attempts"
    )
    z = ((counts.released - honest)[noisy] / counts.std)[slack[noisy] < 1e-3]
    p_value, ratio = (float(st.variance_p((z**2).sum(), len(z))), np.sqrt((z**2).mean())) if len(z) else (1.0, 0.0)
    noise = f"the noise on the count has {ratio:.4f} times its standard deviation ({len(z)} values)"
    return [
        fact("count_sensitivity", wrong_silent == 0, centred, statistic=wrong_silent, threshold=0),
        fact("count_draws", wrong_noisy == 0 and duplicates == 0, drawn, statistic=wrong_noisy, threshold=0),
        random_check("count_noise_variance", p_value, noise),
    ]
