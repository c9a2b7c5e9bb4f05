"""Is the mechanism the one that the plan states? A sandbox run is judged, which trains on canaries by the code that trains.

The sandbox's weights move by exactly the released gradient, so everything is judged from what an adversary would see, the
weights after each step, and what only a sandbox can know besides: who reached the model, what the noise source returned, what the
optimizer got, and when the ledger was durable. Who is dealt is compared with a second sampler, and noise with the numbers that
were drawn, so that nothing about either is left to chance but the shape of the source itself.

Shapes: T noisy steps, S silent steps (the same code with a noise source that returns zeros), D coordinates of all trainable
parameters, N examples, every one of them a canary.
"""

import itertools
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import PrivacyStateRefused
from ..ledger.records import read_state
from ..plan import PrivacyPlan
from . import statistics as st
from .report import AuditReport, Check, fact, random_check, undecided
from .second_sampler import Attempt, SecondSampler

Floats = NDArray[np.float64]
NO_CANARY = -1


@dataclass(frozen=True)
class SandboxEvents:
    """What the sandbox's processes were seen to do, on the machine's monotonic clock.

    Attributes:
        ledger, secret: the bytes of the sandbox's own ledger and sampling key at the end.
        steps: (S + T) the step of each attempt, in the order in which they were made.
        first_release: (S + T) when noise was first drawn, or a sum first left a process, on any rank.
        ledger_durable: (F, 2) when an fsync of the ledger had returned, and the size that it made durable.
        folder_durable: when an fsync of the ledger's folder had returned.
        least_entropy: (S + T) the fewest bytes that any draw of noise took from the system's entropy.
    """

    ledger: bytes
    secret: bytes
    steps: tuple[int, ...]
    first_release: NDArray[np.int64]
    ledger_durable: NDArray[np.int64]
    folder_durable: NDArray[np.int64]
    least_entropy: NDArray[np.int64]

    @property
    def lines(self) -> list[bytes]:
        return self.ledger.splitlines(keepends=True)


@dataclass(frozen=True)
class SandboxRecord:
    """See the module docstring.

    Attributes:
        plan: the sandbox's: the audited run's sigma, C and slack, and a sampling rate with more power.
        noise_std: of the noised sum, per coordinate, as the audited run states it.
        smallest_norm: the least that any honest canary contributes after clipping.
        parameters: (name, first coordinate, coordinate after the last).
        canary_D: the example whose clipped gradient may touch a coordinate, else NO_CANARY.
        weights: (S + T + 1, D) master weights before the first and after each step; the step rule is w -= released.
        draws: (S + T, D) what the noise source drew for each coordinate (in silent steps too), NaN where it was not asked.
        num_draws: (S + T,) how many numbers it was asked for, over all ranks.
        handed: (S + T, D) fp64, what the optimizer got: noised sums over the public batch size.
        seen: per attempt and rank, the examples that reached the model, in order; those that are not in the data too.
        keys: the same of the secret keys that came with them.
        neighbours: L2 distance of the sums of two neighbouring batches that round as differently as possible.
        present_N: secret coins: whether an example is in the data at all.
        hostile_N: examples with NaN, Inf or enormous gradients, which may contribute anything up to C.
        silent_steps: S.
        session_starts: index of the first attempt of each session.
        counts: under adaptive clipping: sigma_b, and for each attempt the noised centred count and the number drawn for it, NaN
            where the source was not asked exactly once.
    """

    plan: PrivacyPlan
    noise_std: float
    smallest_norm: float
    rows_per_rank: int
    world_size: int
    parameters: tuple[tuple[str, int, int], ...]
    canary_D: NDArray[np.int64]
    weights: Floats
    draws: Floats
    num_draws: NDArray[np.int64]
    handed: Floats
    seen: tuple[tuple[NDArray[np.int64], ...], ...]
    keys: tuple[tuple[NDArray[np.uint64], ...], ...]
    neighbours: float
    events: SandboxEvents
    present_N: NDArray[np.bool_]
    hostile_N: NDArray[np.bool_]
    silent_steps: int
    session_starts: tuple[int, ...]
    facts: dict[str, str | int | float] = field(default_factory=dict)
    counts: tuple[float, Floats, Floats] | None = None

    @cached_property
    def released(self) -> Floats:
        """(S + T, D): the released sums as the weights show them, times the public batch size."""
        return -np.diff(self.weights, axis=0) * self.plan.expected_batch_size

    @cached_property
    def quiet(self) -> NDArray[np.bool_]:
        """Coordinates that no gradient touches: there a noisy step shows noise alone."""
        quiet: NDArray[np.bool_] = self.canary_D == NO_CANARY
        return quiet

    def fresh(self, rows_TD: Floats) -> Floats:
        """C times noisy rows, session by session: row t is sum_k c_k row_{t-k}, the fresh noise where rows are noise alone."""
        total, starts = np.zeros_like(rows_TD), [max(start - self.silent_steps, 0) for start in self.session_starts[1:]]
        for start, stop in itertools.pairwise([*starts, len(rows_TD)]):
            rows = rows_TD[start:stop]
            for k, c in enumerate(self.plan.noise_strategy.coefficients[: len(rows)]):
                total[start:stop][k:] += c * rows[: len(rows) - k]
        return total

    @cached_property
    def inclusion(self) -> NDArray[np.bool_]:
        """(S + T, N): chosen by the sampler and in the data."""
        chosen = np.zeros((len(self.seen), self.plan.num_examples), dtype=bool)
        for attempt, ranks in enumerate(self.seen):
            chosen[attempt, np.concatenate(ranks)] = True
        return chosen & self.present_N

    def resolution(self, steps: int) -> float:
        """Largest error of the first rows of `released` that storing weights in fp32 can cause."""
        return float(np.abs(self.weights[: steps + 1]).max()) * 2.0**-23 * self.plan.expected_batch_size


def audit_mechanism(record: SandboxRecord) -> AuditReport:
    """All checks of one sandbox run."""
    if st.holds_nan([record.weights]):
        checks = [fact("weights", False, "the weights of the sandbox are not finite: a hostile example reached them")]
        return AuditReport.of("mechanism", checks)
    checks = [
        *sensitivity_checks(record),
        *dealt_checks(record),
        *noise_checks(record),
        *count_checks(record),
        *charge_checks(record.events),
        stated_check(record),
    ]
    return AuditReport.of("mechanism", checks, **record.facts)


def sensitivity_checks(record: SandboxRecord) -> list[Check]:
    """Clip, divisor, reduction and membership in silent steps, without noise in the way: exact up to rounding."""
    plan, honest, silent = record.plan, ~record.hostile_N, record.released[: record.silent_steps]
    norms = np.zeros((record.silent_steps, plan.num_examples))
    for step, row in enumerate(silent):  # canaries own disjoint coordinates
        owned = np.bincount(record.canary_D[~record.quiet], row[~record.quiet] ** 2, minlength=plan.num_examples)
        norms[step] = np.sqrt(owned)
    tolerance = 2 * record.resolution(record.silent_steps) + 1e-6 * plan.max_grad_norm
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
        low, high, floor = float(clipped.min()), float(clipped.max()), 0.98 * record.smallest_norm
        contribute = (
            f"canaries contribute between {low:.5g} and {high:.5g} after multiplication with the public batch size "
            f"{plan.expected_batch_size}; clipping to C = {plan.max_grad_norm:g} alone leaves at least {record.smallest_norm:.5g}"
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
    stray = float(np.abs(silent[:, record.quiet]).max(initial=0.0))
    untouched = f"without noise, coordinates without any gradient move by {stray:.2g}"
    return [
        fact("sensitivity", largest <= limit, moves, statistic=largest, threshold=limit),
        fact("rounding", record.neighbours <= limit, apart, statistic=record.neighbours, threshold=limit),
        divisor,
        fact("membership", mismatches == 0, chosen, statistic=mismatches, threshold=0),
        fact("stray_gradient", stray <= tolerance, untouched, statistic=stray, threshold=tolerance),
    ]


def dealt_checks(record: SandboxRecord) -> list[Check]:
    """Who reached the model on each rank, in which order and with which keys, is what a second sampler says."""
    plan, events = record.plan, record.events
    second = SecondSampler(events.secret, plan.num_examples, plan.expected_batch_size, plan.cap, plan.bands)
    records = [json.loads(line) for line in events.lines]
    nonces = [bytes.fromhex(line["nonce"]) for line in records if line["type"] == "session"]
    other_members, other_keys, out_of_turn, before = [], 0, 0, Counter[int]()
    # Attempts are counted by what the sandbox did, and not by what its ledger says.
    for index, (step, seen, keys) in enumerate(zip(events.steps, record.seen, record.keys, strict=True)):
        attempt = Attempt(nonces[bisect_right(record.session_starts, index) - 1], step, before[step], index)
        before[step] += 1
        dealt = [
            ids[np.argsort(rows)]
            for ids, rows in second.deal(attempt, second.members(attempt)[1], record.rows_per_rank, record.world_size)
        ]
        out_of_turn += sum(int((ids % plan.bands != index % plan.bands).sum()) for ids in seen)
        if not all(map(np.array_equal, dealt, seen)):
            other_members.append(step)
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


def noise_checks(record: SandboxRecord) -> list[Check]:
    """Every number that the source gave is in the weights once, with the stated scale, is new, and is a Gaussian one."""
    total, fewest, most = record.weights.shape[1], record.num_draws.min(), record.num_draws.max()
    draws, plan = record.draws[record.silent_steps :], record.plan
    z = record.fresh(record.released[record.silent_steps :, record.quiet]) / record.noise_std
    ratio = float(np.sqrt((z**2).mean()))
    whole = (
        f"the released noise has {ratio:.5f} times the planned standard deviation sigma C = {record.noise_std:.6g} "
        f"({z.size} values)"
    )
    tails = "as many values beyond 2.5 to 5 standard deviations as a Gaussian has"
    asked_well = fewest == most == total and not st.holds_nan([draws])
    asked = f"the noise source was asked for {fewest} to {most} numbers a step over all ranks, for {total} coordinates"
    checks = [
        random_check("noise_variance", float(st.variance_p((z**2).sum(), z.size)), whole, statistic=ratio),
        random_check("noise_shape", st.kolmogorov_p(z), "the noise is Gaussian (Kolmogorov-Smirnov)"),
        random_check("noise_tails", st.tail_p(z), tails),
        fact("one_draw_per_coordinate", bool(asked_well), asked, statistic=float(most), threshold=total),
    ]
    if not asked_well:
        return checks
    difference = float(np.abs(z - draws[:, record.quiet]).max())
    # C mixes b rows, and their rounding with them.
    tolerance = (
        4 * sum(plan.noise_strategy.coefficients) * record.resolution(len(record.draws)) / record.noise_std + 1e-6
    )
    reach = f"released noise differs from sigma C times the numbers drawn by at most {difference:.2g} sigma C"
    # The numbers of silent steps did not reach the weights, but they must not come again either.
    duplicates, disguised = st.count_duplicates(np.abs(record.draws)), st.single_precision_fraction(draws)
    # Of doubles none are equal by chance; of integers with a spacing of h standard deviations, N^2 h / (2 sqrt(pi)) pairs are,
    # but for the sign.
    spacing = 0.0 if plan.lattice is None else 1 / plan.lattice.noise_deviation(plan.noise_multiplier)
    chance = record.draws.size**2 * spacing / (2 * math.sqrt(math.pi))
    most_by_chance = 2 + math.ceil(chance + 5 * math.sqrt(chance))
    equal = (
        f"{duplicates} of {record.draws.size} numbers equal an earlier one but for the sign (chance gives {chance:.2g})"
    )
    single = f"{disguised:.2g} of the numbers have no more than single precision, whose normals end at 5.77 sigma"
    # Where there is no gradient the optimizer gets noise alone: sigma C times the draw, where single precision errs by 6e-8.
    scale = record.noise_std / plan.expected_batch_size
    noise = draws[:, record.quiet] * scale
    handed = record.fresh(record.handed[record.silent_steps :, record.quiet])
    # Where past noise cancels in what is left, its own rounding does not.
    least = 1e-300 if plan.bands == 1 else 1e-3 * scale
    rounded = float((np.abs(handed - noise) / np.maximum(np.abs(noise), least)).max())
    double = f"what the optimizer gets differs from noise added in double precision by {rounded:.2g} of itself"
    return [
        *checks,
        fact("added_in_double", rounded <= 1e-10, double, statistic=rounded, threshold=1e-10),
        fact("draws_reach_the_weights", difference <= tolerance, reach, statistic=difference, threshold=tolerance),
        fact("draws_are_new", duplicates <= most_by_chance, equal, statistic=duplicates, threshold=most_by_chance),
        fact("double_precision", disguised < 1e-3, single, statistic=disguised, threshold=1e-3),
    ]


def count_checks(record: SandboxRecord) -> list[Check]:
    """Released counts of adaptive clipping are centred, of members alone, and noised once, with the stated deviation."""
    if record.counts is None:
        return []
    std, released, draws = record.counts
    # Every honest canary is clipped and counts -1/2; a hostile one counts -1/2 as well, or 0 if it is not finite.
    honest = -0.5 * record.inclusion[:, ~record.hostile_N].sum(axis=1)
    slack = 0.5 * record.inclusion[:, record.hostile_N].sum(axis=1) + 1e-6
    beyond = np.where(np.arange(len(honest)) < record.silent_steps, 0.0, std * draws)
    low, high = honest - slack + beyond, honest + 1e-6 + beyond
    wrong = ~((low <= released) & (released <= high))  # NaN is wrong too
    silent, noisy = int(wrong[: record.silent_steps].sum()), int(wrong[record.silent_steps :].sum())
    centred = f"without noise the centred count is half the clipped members, in all but {silent} attempts"
    duplicates = len(draws) - len(np.unique(draws[~np.isnan(draws)]))
    drawn = f"the count is noised by sigma_b = {std:g} times one new number of the source, in all but {noisy} attempts"
    return [
        fact("count_sensitivity", silent == 0, centred, statistic=silent, threshold=0),
        fact("count_draws", noisy == 0 and duplicates == 0, drawn, statistic=noisy, threshold=0),
    ]


def charge_checks(events: SandboxEvents) -> list[Check]:
    """Every attempt is charged once, durably before anything of it is released, and its noise has fresh entropy."""
    ends: defaultdict[int, list[int]] = defaultdict(list)  # of the intents of a step, in order
    for line, end in zip(events.lines, itertools.accumulate(map(len, events.lines)), strict=True):
        record = json.loads(line)
        if record["type"] == "intent":
            ends[record["step"]].append(end)
    made, charged = Counter(events.steps), Counter({step: len(of_step) for step, of_step in ends.items()})
    missing, differing = sum((made - charged).values()), sum((charged - made).values())
    counted = (
        f"{missing} of {made.total()} attempts were made without a charge, and {differing} of {charged.total()} charges are of "
        "no attempt that was made"
    )
    late = 0
    for step, released_at in zip(events.steps, events.first_release.tolist(), strict=True):
        if ends[step]:
            durable = events.ledger_durable[events.ledger_durable[:, 1] >= ends[step].pop(0), 0]
            late += not (durable.size and durable.min() < released_at)
        else:
            late += 1  # never charged
    order = (
        f"in {late} of {made.total()} attempts noise was drawn, or a sum left a process, before an fsync of the intent had "
        "returned"
    )
    first = events.ledger_durable[:, 0].min(initial=2**62)
    named = bool(((events.folder_durable > first) & (events.folder_durable < events.first_release.min())).any())
    name = "the ledger's name is durable" if named else "no fsync made the ledger's name durable before the first noise"
    least = int(events.least_entropy.min())
    entropy = f"every draw of noise took at least {least} bytes from the entropy of the operating system, 16 are needed"
    return [
        fact("charged_attempts", not missing and not differing, counted, statistic=missing, threshold=0),
        fact("charge_before_release", late == 0, order, statistic=late, threshold=0),
        fact("ledger_name_durable", named, name),
        fact("fresh_entropy", least >= 16, entropy, statistic=least, threshold=16),
    ]


def stated_check(record: SandboxRecord) -> Check:
    """The sandbox's ledger is legal, and each of its intents states the audited run's noise, which its reader checks."""
    try:
        plan = read_state(record.events.ledger, "the sandbox's ledger")[0].plan
    except PrivacyStateRefused as error:
        return fact("stated_noise", False, str(error))
    same = (plan.noise_multiplier, plan.max_grad_norm) == (record.plan.noise_multiplier, record.plan.max_grad_norm)
    return fact("stated_noise", same, "every intent of the sandbox states the noise of the audited run's plan")
