"""Is the mechanism the one that the plan states? Checks of a sandbox run, which trains on canaries by the code that trains.

The sandbox's weights move by exactly the released gradient, so everything is judged from what an adversary would see, the
weights after each step, and what only a sandbox can know besides: who reached the model, what the noise source returned, what the
optimizer got, and when the ledger was durable. Who is dealt is compared with a second sampler, and noise with the numbers that
were drawn, so that nothing about either is left to chance but the shape of the source itself.

Shapes: A attempts, of which the first S are silent (the noise source returns zeros) and T are noisy; D coordinates of all
trainable parameters; N examples, every one of them a canary; R ranks.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import PrivacyStateRefused
from ..ledger.records import read_state
from ..plan import PrivacyPlan
from . import statistics as st
from .report import AuditReport, Check, fact, random_check, undecided
from .second_sampler import Attempt, SecondSampler

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class RankTape(NamedTuple):
    """What one rank did.

    Attributes:
        attempts: in order; each with `step`, `session`, `ids` and `keys` that reached the model, `released_at`, `least_entropy`,
            `num_draws`, `count` (adaptive clipping), and by coordinate the `weights` after it, `draws`, and `handed` to the
            optimizer.
        fsyncs: device and inode of a file, when its fsync had returned, and the size that it made durable.
        names_D, canary_D: of each coordinate that the rank owns its parameter, and the example whose gradient may touch it or -1.
        at_start: the weights before the first attempt.
        neighbours: L2 distance of its sums of two neighbouring batches that round as differently as possible.
    """

    attempts: list[dict[str, Any]]
    fsyncs: list[tuple[int, int, int, int]]
    names_D: NDArray[np.str_]
    canary_D: Integers
    at_start: Floats
    neighbours: float


def audit_mechanism(
    tapes: Sequence[RankTape],
    plan: PrivacyPlan,
    ledger: Path,
    key: Path,
    *,
    noise_std: float,
    count_std: float | None,
    smallest_norm: float,
    rows_per_rank: int,
    num_silent: int,
    present_N: Flags,
    hostile_N: Flags,
    **facts: str,
) -> AuditReport:
    """All checks of one sandbox run.

    Args:
        plan: the sandbox's: the audited run's sigma, C and slack, and a sampling rate with more power.
        noise_std: of the noised sum, per coordinate, as the audited run states it; `count_std` of the count.
        smallest_norm: the least that any honest canary contributes after clipping.
        present_N: secret coins: whether an example is in the data at all.
        hostile_N: examples with NaN, Inf or enormous gradients, which may contribute anything up to C.
    """
    by_attempt = list(zip(*(tape.attempts for tape in tapes), strict=True))  # of each attempt what each rank noted

    def beside(name: str) -> Floats:
        """(A, D): coordinates in the order of their owners, which is all that the checks need."""
        return np.stack([np.concatenate([noted[name] for noted in ranks]) for ranks in by_attempt])

    def durable(path: Path) -> list[tuple[int, int]]:
        status = path.stat()
        events = itertools.chain(*(tape.fsyncs for tape in tapes))
        return [(at, size) for device, inode, at, size in events if (device, inode) == (status.st_dev, status.st_ino)]

    weights_AD = np.concatenate([np.concatenate([tape.at_start for tape in tapes])[None], beside("weights")])
    if np.isnan(weights_AD).any():
        sentence = "the weights of the sandbox are not finite: a hostile example reached them"
        return AuditReport.of("mechanism", [fact("weights", False, sentence)])
    # The step rule is w -= released sum / public batch size. Weights are stored in fp32, which limits what differences show.
    released_AD = -np.diff(weights_AD, axis=0) * plan.expected_batch_size
    resolution_A = np.maximum.accumulate(np.abs(weights_AD).max(axis=1)) * 2.0**-23 * plan.expected_batch_size
    steps, sessions = ([noted[name] for noted in tapes[0].attempts] for name in ("step", "session"))
    seen_AR, keys_AR = ([[noted[name] for noted in ranks] for ranks in by_attempt] for name in ("ids", "keys"))
    chosen_AN = np.zeros((len(steps), plan.num_examples), dtype=bool)
    for chosen_N, seen_R in zip(chosen_AN, seen_AR, strict=True):
        chosen_N[np.concatenate(seen_R)] = True
    inclusion_AN = chosen_AN & present_N
    canary_D = np.concatenate([tape.canary_D for tape in tapes]).astype(np.int64)  # a rank may own nothing, of no type
    quiet_D, records = canary_D < 0, ledger.read_bytes()
    checks = [
        *_sensitivity(
            plan,
            released_AD[:num_silent],
            inclusion_AN[:num_silent],
            canary_D,
            np.concatenate([tape.names_D for tape in tapes]),
            hostile_N,
            smallest_norm=smallest_norm,
            neighbours=max(tape.neighbours for tape in tapes),
            resolution=resolution_A[num_silent],
        ),
        *_dealt(plan, key.read_bytes(), records, steps, sessions, seen_AR, keys_AR, rows_per_rank),
        *_noise(
            plan,
            noise_std,
            released_AD[num_silent:, quiet_D],
            beside("handed")[num_silent:, quiet_D],
            beside("draws"),
            np.array([sum(noted["num_draws"] for noted in ranks) for ranks in by_attempt]),
            quiet_D,
            np.array(sessions[num_silent:]),
            resolution=resolution_A[-1],
        ),
        *charge_checks(
            records,
            steps,
            [min(noted["released_at"] for noted in ranks) for ranks in by_attempt],
            durable(ledger),
            [at for at, _ in durable(ledger.parent)],
            min(noted["least_entropy"] for noted in itertools.chain(*by_attempt)),
        ),
        _stated(plan, records),
    ]
    if count_std is not None:
        counts = [noted["count"] for noted in tapes[0].attempts]
        checks += _counts(count_std, counts, inclusion_AN, hostile_N, num_silent)
    return AuditReport.of("mechanism", checks, **facts)


def _sensitivity(
    plan: PrivacyPlan,
    released_SD: Floats,
    inclusion_SN: Flags,
    canary_D: Integers,
    names_D: NDArray[np.str_],
    hostile_N: Flags,
    *,
    smallest_norm: float,
    neighbours: float,
    resolution: float,
) -> list[Check]:
    """Clip, divisor, reduction and membership in silent steps, without noise in the way: exact up to rounding.

    Args:
        released_SD: sums as the weights show them, times the public batch size.
        inclusion_SN: chosen by the sampler and in the data.
        resolution: largest error of `released_SD` that storing weights in fp32 can cause.
    """
    quiet_D, honest_N = canary_D < 0, ~hostile_N
    norms_SN = np.zeros(inclusion_SN.shape)
    for step, row in enumerate(released_SD):  # canaries own disjoint coordinates
        squares = np.bincount(canary_D[~quiet_D], row[~quiet_D] ** 2, minlength=plan.num_examples)
        norms_SN[step] = np.sqrt(squares)
    tolerance = 2 * resolution + 1e-6 * plan.max_grad_norm
    limit, largest = plan.max_grad_norm * (1 + plan.sensitivity_slack) + tolerance, float(norms_SN.max())
    worst = norms_SN.argmax() % plan.num_examples
    moves = (
        f"without noise one example moves the released sum by at most {largest:.6g} (canary in "
        f"{names_D[canary_D == worst][0]}), the plan allows C (1 + r) = {limit:.6g}"
    )
    apart = f"two neighbouring batches that round as differently as they can have sums {neighbours:.6g} apart"
    # Contributions of clipped canaries lie at C: neither scaled by the batch nor by the number of ranks.
    clipped = norms_SN[inclusion_SN & honest_N]
    if clipped.size:
        low, high, floor = float(clipped.min()), float(clipped.max()), 0.98 * smallest_norm
        contribute = (
            f"canaries contribute between {low:.5g} and {high:.5g} after multiplication with the public batch size "
            f"{plan.expected_batch_size}; clipping to C = {plan.max_grad_norm:g} alone leaves at least {smallest_norm:.5g}"
        )
        is_right = low >= floor and high <= plan.max_grad_norm / 0.98
        divisor = fact("divisor", is_right, contribute, statistic=low, threshold=floor)
    else:
        divisor = undecided("divisor", "no canary was included in a silent step")
    contributes_SN = norms_SN > plan.max_grad_norm / 100
    mismatches = int((contributes_SN != inclusion_SN)[:, honest_N].sum())
    chosen = (
        f"{mismatches} of {int(contributes_SN[:, honest_N].size)} (step, canary) pairs contribute although the sampler did "
        "not choose them, or were chosen and do not contribute"
    )
    stray = float(np.abs(released_SD[:, quiet_D]).max(initial=0.0))
    still = f"without noise, coordinates without any gradient move by {stray:.2g}"
    return [
        fact("sensitivity", largest <= limit, moves, statistic=largest, threshold=limit),
        fact("rounding", neighbours <= limit, apart, statistic=neighbours, threshold=limit),
        divisor,
        fact("membership", mismatches == 0, chosen, statistic=mismatches, threshold=0),
        fact("stray_gradient", stray <= tolerance, still, statistic=stray, threshold=tolerance),
    ]


def _dealt(
    plan: PrivacyPlan,
    secret: bytes,
    ledger: bytes,
    steps: Sequence[int],
    sessions: Sequence[int],
    seen_AR: Sequence[Sequence[Integers]],
    keys_AR: Sequence[Sequence[NDArray[np.uint64]]],
    rows_per_rank: int,
) -> list[Check]:
    """Who reached the model on each rank, in which order and with which keys, is what a second sampler says.

    Args:
        seen_AR, keys_AR: examples, those that are not in the data too, and the secret keys that came with them.
    """
    second = SecondSampler(secret, plan.num_examples, plan.expected_batch_size, plan.cap, plan.bands)
    lines = [json.loads(line) for line in ledger.splitlines()]
    nonces = [bytes.fromhex(line["nonce"]) for line in lines if line["type"] == "session"]
    other_members, other_keys, before = [], 0, Counter[int]()
    # Attempts are counted by what the sandbox did, and not by what its ledger says.
    for index, (step, session, seen, keys) in enumerate(zip(steps, sessions, seen_AR, keys_AR, strict=True)):
        attempt = Attempt(nonces[session], step, before[step], index)
        before[step] += 1
        dealt = second.deal(attempt, second.members(attempt)[1], rows_per_rank, len(seen))
        if not all(np.array_equal(ids[rows.argsort()], mine) for (ids, rows), mine in zip(dealt, seen, strict=True)):
            other_members.append(step)
        for ids, of_ids in zip(seen, keys, strict=True):
            other_keys += int((second.keys(attempt, ids) != of_ids).sum())
    where = f" (first at step {other_members[0]})" if other_members else ""
    members = (
        f"in {len(other_members)} of {len(steps)} attempts other examples reached the model than the coins say by an "
        f"independent derivation, or in another order{where}"
    )
    others = f"{other_keys} examples came with another key than that of their identity, step and attempt"
    return [
        fact("dealt_members", not other_members, members, statistic=len(other_members), threshold=0),
        fact("example_keys", other_keys == 0, others, statistic=other_keys, threshold=0),
    ]


def _noise(
    plan: PrivacyPlan,
    noise_std: float,
    released_TQ: Floats,
    handed_TQ: Floats,
    draws_AD: Floats,
    num_draws_A: Integers,
    quiet_D: Flags,
    sessions_T: Integers,
    *,
    resolution: float,
) -> list[Check]:
    """Every number that the source gave is in the weights once, with the stated scale, is new, and is a Gaussian one.

    Args:
        released_TQ, handed_TQ: where no gradient reaches, what the weights show and what the optimizer got (fp64, over the
            public batch size).
        draws_AD: what the source drew for each coordinate, in silent steps too; NaN where it was asked for another number.
        num_draws_A: how many numbers it was asked for, over all ranks.
    """
    coefficients = plan.noise_strategy.coefficients

    def fresh(rows_TQ: Floats) -> Floats:
        """sum_k c_k row_{t-k} within each session: of correlated noise the fresh part."""
        total = np.zeros_like(rows_TQ)
        for session in np.unique(sessions_T):
            at = np.flatnonzero(sessions_T == session)
            for k, c in enumerate(coefficients[: len(at)]):
                total[at[k:]] += c * rows_TQ[at[: len(at) - k]]
        return total

    size, fewest, most = draws_AD.shape[1], int(num_draws_A.min()), int(num_draws_A.max())
    z = fresh(released_TQ) / noise_std
    ratio = float(np.sqrt((z**2).mean()))
    whole = f"the released noise has {ratio:.5f} times the planned standard deviation sigma C = {noise_std:.6g} ({z.size} values)"
    asked = f"the noise source was asked for {fewest} to {most} numbers a step over all ranks, for {size} coordinates"
    asked_well = fewest == most == size and not np.isnan(draws_AD).any()
    checks = [
        random_check("noise_variance", float(st.variance_p((z**2).sum(), z.size)), whole, statistic=ratio),
        random_check("noise_shape", st.kolmogorov_p(z), "the noise is Gaussian (Kolmogorov-Smirnov)"),
        random_check("noise_tails", st.tail_p(z), "as many values lie beyond 2.5 to 5 deviations as a Gaussian has"),
        fact("one_draw_per_coordinate", asked_well, asked, statistic=float(most), threshold=size),
    ]
    if not asked_well:
        return checks
    drawn_TD = draws_AD[-len(z) :]
    drawn_TQ = drawn_TD[:, quiet_D]
    difference = float(np.abs(z - drawn_TQ).max())
    tolerance = 4 * sum(coefficients) * resolution / noise_std + 1e-6  # b rows are mixed, and their rounding with them
    reach = f"released noise differs from sigma C times the numbers drawn by at most {difference:.2g} sigma C"
    # The numbers of silent steps did not reach the weights, but they must not come again either. Of doubles none are equal by
    # chance; of integers with a spacing of h standard deviations, N^2 h / (2 sqrt(pi)) pairs are, but for the sign.
    duplicates, disguised = st.count_duplicates(np.abs(draws_AD)), st.single_precision_fraction(drawn_TD)
    spacing = 0.0 if plan.lattice is None else 1 / plan.lattice.noise_deviation(plan.noise_multiplier)
    chance = draws_AD.size**2 * spacing / (2 * math.sqrt(math.pi))
    most_by_chance = 2 + math.ceil(chance + 5 * math.sqrt(chance))
    equal = f"{duplicates} of {draws_AD.size} numbers equal an earlier one but for the sign (chance gives {chance:.2g})"
    single = f"{disguised:.2g} of the numbers have no more than single precision, whose normals end at 5.77 sigma"
    # Where there is no gradient the optimizer gets noise alone: sigma C times the draw, where single precision errs by 6e-8.
    # Where past noise cancels in what is left, its own rounding does not.
    scale = noise_std / plan.expected_batch_size
    noise, least = drawn_TQ * scale, 1e-300 if plan.bands == 1 else 1e-3 * scale
    rounded = float((np.abs(fresh(handed_TQ) - noise) / np.maximum(np.abs(noise), least)).max())
    double = f"what the optimizer gets differs from noise added in double precision by {rounded:.2g} of itself"
    return [
        *checks,
        fact("added_in_double", rounded <= 1e-10, double, statistic=rounded, threshold=1e-10),
        fact("draws_reach_the_weights", difference <= tolerance, reach, statistic=difference, threshold=tolerance),
        fact("draws_are_new", duplicates <= most_by_chance, equal, statistic=duplicates, threshold=most_by_chance),
        fact("double_precision", disguised < 1e-3, single, statistic=disguised, threshold=1e-3),
    ]


def _counts(
    std: float, counts_A2: Sequence[tuple[float, float]], inclusion_AN: Flags, hostile_N: Flags, num_silent: int
) -> list[Check]:
    """Released counts of adaptive clipping are centred, of members alone, and noised once, with the stated deviation.

    Args:
        counts_A2: the noised centred count, and the number drawn for it, NaN where the source was not asked exactly once.
    """
    released, draws = np.array(counts_A2).T
    # Every honest canary is clipped and counts -1/2; a hostile one counts -1/2 as well, or 0 if it is not finite.
    honest = -0.5 * inclusion_AN[:, ~hostile_N].sum(axis=1)
    slack = 0.5 * inclusion_AN[:, hostile_N].sum(axis=1) + 1e-6
    noise = np.where(np.arange(len(honest)) < num_silent, 0.0, std * draws)
    wrong = ~((honest - slack + noise <= released) & (released <= honest + 1e-6 + noise))  # NaN is wrong too
    silent, noisy = int(wrong[:num_silent].sum()), int(wrong[num_silent:].sum())
    centred = f"without noise the centred count is half the clipped members, in all but {silent} attempts"
    duplicates = len(draws) - len(np.unique(draws[~np.isnan(draws)]))
    drawn = f"the count is noised by sigma_b = {std:g} times one new number of the source, in all but {noisy} attempts"
    return [
        fact("count_sensitivity", silent == 0, centred, statistic=silent, threshold=0),
        fact("count_draws", noisy == 0 and duplicates == 0, drawn, statistic=noisy, threshold=0),
    ]


def charge_checks(
    ledger: bytes,
    steps: Sequence[int],
    released_at: Sequence[int],
    ledger_durable: Sequence[tuple[int, int]],
    folder_durable: Sequence[int],
    least_entropy: int,
) -> list[Check]:
    """Every attempt is charged once, durably before anything of it is released, and its noise has fresh entropy.

    Args:
        released_at: when noise was first drawn, or a sum first left a process, on any rank. All times are of one clock.
        ledger_durable: when an fsync of the ledger had returned, and the size that it made durable.
        least_entropy: the fewest bytes that any draw of noise took from the system's entropy.
    """
    ends: defaultdict[int, list[int]] = defaultdict(list)  # of the intents of a step, in order
    lines = ledger.splitlines(keepends=True)
    for line, end in zip(map(json.loads, lines), itertools.accumulate(map(len, lines)), strict=True):
        if line["type"] == "intent":
            ends[line["step"]].append(end)
    made, charged = Counter(steps), Counter({step: len(of_step) for step, of_step in ends.items()})
    missing, differing = sum((made - charged).values()), sum((charged - made).values())
    counted = (
        f"{missing} of {made.total()} attempts were made without a charge, and {differing} of {charged.total()} charges are of "
        "no attempt that was made"
    )
    late = 0
    for step, released in zip(steps, released_at, strict=True):
        needed: float = ends[step].pop(0) if ends[step] else math.inf  # never charged
        late += not any(at < released for at, size in ledger_durable if size >= needed)
    order = (
        f"in {late} of {made.total()} attempts noise was drawn, or a sum left a process, before an fsync of the intent had "
        "returned"
    )
    # A folder that was made durable before the file was in it does not hold the file's name.
    first = min((at for at, _ in ledger_durable), default=math.inf)
    named = any(first < at < min(released_at) for at in folder_durable)
    name = "the ledger's name is durable" if named else "no fsync made the ledger's name durable before the first noise"
    entropy = f"every draw of noise took at least {least_entropy} bytes from the entropy of the operating system, 16 are needed"
    return [
        fact("charged_attempts", not missing and not differing, counted, statistic=missing, threshold=0),
        fact("charge_before_release", late == 0, order, statistic=late, threshold=0),
        fact("ledger_name_durable", named, name),
        fact("fresh_entropy", least_entropy >= 16, entropy, statistic=least_entropy, threshold=16),
    ]


def _stated(plan: PrivacyPlan, ledger: bytes) -> Check:
    """The sandbox's ledger is legal, and each of its intents states the audited run's noise, which its reader checks."""
    try:
        stated = read_state(ledger, "the sandbox's ledger")[0].plan
    except PrivacyStateRefused as error:
        return fact("stated_noise", False, str(error))
    same = (stated.noise_multiplier, stated.max_grad_norm) == (plan.noise_multiplier, plan.max_grad_norm)
    return fact("stated_noise", same, "every intent of the sandbox states the noise of the audited run's plan")
