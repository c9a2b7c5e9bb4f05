"""Is the mechanism the one that the plan states? Checks of a sandbox run, which trains on canaries by the code that trains.

The sandbox's weights move by exactly the released gradient, which is what an adversary would see. What is expected of each
attempt is computed a second time: who is dealt, by a second sampler; what clipping leaves of each canary's gradient, in double
precision; what noise is added, from the numbers that the source gave. So nothing is left to chance but the shape of the source.

Shapes: A attempts, of which the first S are silent (the noise source returns zeros) and T are noisy; D coordinates of all
trainable parameters, Q of them without any gradient; N examples, every one of them a canary; K entries of their gradients.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..clipping.functions import FUNCTIONS, RAMP
from ..errors import PrivacyStateRefused
from ..ledger.records import read_state
from ..plan import PrivacyPlan
from ..step.engine import ShardLayout
from . import statistics as st
from .canary_model import KEY_BITS, Entries
from .report import AuditReport, Check, fact, random_check
from .second_sampler import Attempt, SecondSampler

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
CLOSE = 0.01
"""How far, relatively, an example's contribution may be from what clipping leaves of it: bounds of norms lie above the norms, and
lower precision rounds. It moves no more than the bound in any case."""


class Sandbox(NamedTuple):
    """What a sandbox run leaves.

    Attributes:
        run: the audited run's plan; `plan` is the sandbox's, with its sigma, C and slack.
        tapes: of each rank its attempts (sandbox.py) and fsyncs.
        micro_batches: of each session.
        layout, names: who owns which coordinates, and the trainable parameters.
        entries: the canaries' gradients.
        present_N: secret coins: whether an example is in the data at all.
        crowd_N: canaries that share their coordinates; hostile_N: those that may contribute anything up to C.
    """

    run: PrivacyPlan
    plan: PrivacyPlan
    ledger: Path
    key: Path
    tapes: Sequence[tuple[list[dict[str, Any]], list[Any]]]
    micro_batches: Sequence[int]
    layout: ShardLayout
    names: Sequence[str]
    entries: Entries
    present_N: Flags
    crowd_N: Flags
    hostile_N: Flags


class Expected:
    """What clipping leaves of the canaries' gradients, hostile ones apart.

    Attributes:
        owner_D: the canary that alone touches a coordinate, -1 for nobody, and -2 for the crowd.
        unknown_D: coordinates of hostile canaries.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._entries = entries = sandbox.entries
        pieces, start = [piece for owned in sandbox.layout.pieces for piece in owned], 0
        self.size = sum(piece.length for piece in pieces)
        self.names_D, coordinate_K = np.empty(self.size, dtype=object), np.full(len(entries.index_K), -1)
        for name, offset, length in pieces:
            here_K = (entries.names_K == name) & (entries.index_K >= offset) & (entries.index_K < offset + length)
            coordinate_K[here_K] = entries.index_K[here_K] - offset + start
            self.names_D[start : start + length] = name
            start += length
        self._make, self._names = FUNCTIONS[sandbox.plan.clipping_function], list(sandbox.names)
        group_of = self._make(self._names, 1.0).group_of
        self._group_K = np.array([group_of[name] for name in entries.names_K.tolist()])
        self.num_examples, self._coordinate_K = len(sandbox.present_N), coordinate_K
        self._known_K = ~sandbox.hostile_N[entries.canaries_K]
        self.owner_D, self.unknown_D = np.full(self.size, -1), np.zeros(self.size, dtype=bool)
        self.owner_D[coordinate_K] = np.where(sandbox.crowd_N[entries.canaries_K], -2, entries.canaries_K)
        self.unknown_D[coordinate_K[~self._known_K]] = True

    def weights(self, bound: float) -> tuple[Floats, Floats]:
        """((K,) factors of the entries, (N,) norms of whole gradients)."""
        function, count = self._make(self._names, bound), self.num_examples
        groups, squares = len(function.bounds), np.where(self._known_K, self._entries.gains_K, 0.0) ** 2
        place = self._entries.canaries_K * groups + self._group_K
        norms_NG = np.sqrt(np.bincount(place, squares, minlength=count * groups).reshape(count, groups))
        columns = [
            function.weight(torch.from_numpy(norms_NG[:, g]), one).numpy() for g, one in enumerate(function.bounds)
        ]
        factors_NG = np.stack(columns, axis=1)
        return factors_NG[self._entries.canaries_K, self._group_K], np.sqrt((norms_NG**2).sum(axis=1))

    def sums(self, included_N: Flags, bound: float) -> tuple[Floats, Floats]:
        """(D,) the sum, and how far it may be from that: not at all where nothing was clipped, and CLOSE elsewhere."""
        factors_K, _ = self.weights(bound)
        here = self._known_K & included_N[self._entries.canaries_K]
        values = factors_K[here] * self._entries.gains_K[here]
        loose = np.where(factors_K[here] == 1, 1e-9, CLOSE) * np.abs(values)
        at = self._coordinate_K[here]
        return np.bincount(at, values, self.size), np.bincount(at, loose, self.size)


def audit_mechanism(sandbox: Sandbox, **facts: str) -> AuditReport:
    """All checks of one sandbox run."""
    plan, by_attempt = sandbox.plan, list(zip(*(attempts for attempts, _ in sandbox.tapes), strict=True))

    def beside(name: str) -> Floats:
        """(A, D): coordinates in the order of their owners."""
        return np.stack([np.concatenate([noted[name] for noted in ranks]) for ranks in by_attempt])

    def durable(path: Path) -> list[tuple[int, int]]:
        status = path.stat()
        events = itertools.chain(*(fsyncs for _, fsyncs in sandbox.tapes))
        return [(at, size) for device, inode, at, size in events if (device, inode) == (status.st_dev, status.st_ino)]

    first_A = [ranks[0] for ranks in by_attempt]
    steps, records = [noted["step"] for noted in first_A], sandbox.ledger.read_bytes()
    bounds_A, num_silent = np.array([n["bound"] for n in first_A]), sum(n["silent"] for n in first_A)
    before_AD, after_AD = beside("before"), beside("after")
    if not np.isfinite(after_AD).all():
        sentence = "the weights of the sandbox are not finite: a hostile example reached them"
        return AuditReport.of("mechanism", [fact("weights", False, sentence)])
    included_AN = np.zeros((len(steps), plan.num_examples), dtype=bool)
    for included_N, ranks in zip(included_AN, by_attempt, strict=True):
        included_N[np.concatenate([noted["ids"] for noted in ranks])] = True
    included_AN &= sandbox.present_N
    # The step rule is w -= released sum / public batch size. Weights are stored in fp32, which limits what differences show.
    sums_AD, expected = beside("handed") * plan.expected_batch_size, Expected(sandbox)
    moved_AD = (before_AD - after_AD) * plan.expected_batch_size
    resolution_A = np.maximum(np.abs(before_AD), np.abs(after_AD)).max(axis=1) * 2.0**-23 * plan.expected_batch_size
    beyond = float((np.abs(moved_AD - sums_AD).max(axis=1) / np.maximum(resolution_A, 1e-300)).max())
    follow = f"the weights move by what the optimizer got, which is off by at most {beyond:.2g} roundings of a weight"
    checks = [
        fact("weights_follow", beyond <= 4, follow, statistic=beyond, threshold=4),
        *_silent(sandbox, expected, sums_AD[:num_silent], included_AN[:num_silent], bounds_A),
        *_dealt(sandbox, records, by_attempt),
        *_noise(sandbox, expected, sums_AD, included_AN, bounds_A, beside("draws"), by_attempt, num_silent),
        *charge_checks(
            records,
            steps,
            [min(noted["released_at"] for noted in ranks) for ranks in by_attempt],
            durable(sandbox.ledger),
            [at for at, _ in durable(sandbox.ledger.parent)],
            min(noted["least_entropy"] for noted in itertools.chain(*by_attempt)),
        ),
        _stated(sandbox.run, records),
    ]
    if plan.adaptive_clipping is not None:
        checks += _counts(sandbox, expected, first_A, included_AN, num_silent)
    return AuditReport.of("mechanism", checks, **facts)


def _silent(sandbox: Sandbox, expected: Expected, sums_SD: Floats, included_SN: Flags, bounds_A: Floats) -> list[Check]:
    """Clip, divisor, reduction and membership in silent steps, without noise in the way.

    Args:
        sums_SD: what was released, times the public batch size.
        included_SN: chosen by the sampler and in the data.
    """
    plan, own_D = sandbox.plan, expected.owner_D >= 0
    honest_N = ~(sandbox.hostile_N | sandbox.crowd_N)
    largest, where, furthest, mismatches, whole, stray = 0.0, "", 0.0, 0, 0.0, 0.0
    for sum_D, included_N, bound in zip(sums_SD, included_SN, bounds_A, strict=False):

        def norms(values_D: Floats) -> Floats:
            """(N,) of canaries that own their coordinates."""
            squares = values_D[own_D] ** 2
            return np.sqrt(np.bincount(expected.owner_D[own_D], squares, minlength=plan.num_examples))

        all_D, loose_D = expected.sums(np.ones_like(included_N), bound)
        due_D, _ = expected.sums(included_N, bound)
        norms_N, all_N = norms(sum_D), np.maximum(norms(all_D), 1e-300)
        worst = int(norms_N.argmax())
        if norms_N[worst] / bound > largest:
            largest, where = float(norms_N[worst] / bound), str(expected.names_D[expected.owner_D == worst][0])
        mismatches += int(((norms_N > all_N / 2) != included_N)[honest_N].sum())
        furthest = max(furthest, float((norms(sum_D - due_D) / all_N)[honest_N].max()))
        crowd_D = expected.owner_D == -2
        allowed = loose_D[crowd_D] + (0.0 if plan.lattice is None else included_N.sum() * 2.0**-plan.lattice.exponent)
        whole = max(whole, float((np.abs(sum_D - due_D)[crowd_D] / allowed).max()))
        stray = max(stray, float(np.abs(sum_D[expected.owner_D == -1]).max()))
    limit = 1 + plan.sensitivity_slack + 1e-6
    moves = f"without noise one example moves the sum by at most {largest:.6g} C (in {where}), {limit:.6g} C is allowed"
    divided = (
        f"times the public batch size {plan.expected_batch_size}, canaries contribute what clipping leaves of them, but for at "
        f"most {furthest:.2g} of it"
    )
    chosen = (
        f"{mismatches} of {int(honest_N.sum()) * len(sums_SD)} (step, canary) pairs contribute although the sampler did not "
        "choose them, or were chosen and do not contribute"
    )
    exact = f"sums of a crowd that is not clipped differ from their exact value by at most {whole:.2g} times what may be lost"
    still = f"without noise, coordinates without any gradient move by {stray:.2g}"
    return [
        fact("sensitivity", largest <= limit, moves, statistic=largest, threshold=limit),
        fact("divisor", furthest <= CLOSE, divided, statistic=furthest, threshold=CLOSE),
        fact("membership", mismatches == 0, chosen, statistic=mismatches, threshold=0),
        fact("whole_sums", whole <= 1, exact, statistic=whole, threshold=1),
        fact("stray_gradient", stray == 0, still, statistic=stray, threshold=0),
    ]


def _dealt(sandbox: Sandbox, ledger: bytes, by_attempt: Sequence[Sequence[dict[str, Any]]]) -> list[Check]:
    """Who reached the model on each rank, in which order and with which keys, is what a second sampler says."""
    plan = sandbox.plan
    second = SecondSampler(sandbox.key.read_bytes(), plan.num_examples, plan.expected_batch_size, plan.cap, plan.bands)
    lines = [json.loads(line) for line in ledger.splitlines()]
    nonces = [bytes.fromhex(line["nonce"]) for line in lines if line["type"] == "session"]
    other_members, other_keys, before = [], 0, Counter[int]()
    # Attempts are counted by what the sandbox did, and not by what its ledger says.
    for index, ranks in enumerate(by_attempt):
        step, session = ranks[0]["step"], ranks[0]["session"]
        attempt = Attempt(nonces[session], step, before[step], index)
        before[step] += 1
        size = sandbox.micro_batches[session]
        rows = size * math.ceil(plan.max_batch_size / len(ranks) / size)
        dealt = second.deal(attempt, second.members(attempt)[1], rows, len(ranks))
        pairs = zip(dealt, ranks, strict=True)
        if not all(np.array_equal(ids[rows.argsort()], noted["ids"]) for (ids, rows), noted in pairs):
            other_members.append(step)
        for noted in ranks:
            other_keys += int(((second.keys(attempt, noted["ids"]) & np.uint64(KEY_BITS)) != noted["keys"]).sum())
    where = f" (first at step {other_members[0]})" if other_members else ""
    members = (
        f"in {len(other_members)} of {len(by_attempt)} attempts other examples reached the model than the coins say by an "
        f"independent derivation, or in another order{where}"
    )
    others = f"{other_keys} examples came with another key than that of their identity, step and attempt"
    return [
        fact("dealt_members", not other_members, members, statistic=len(other_members), threshold=0),
        fact("example_keys", other_keys == 0, others, statistic=other_keys, threshold=0),
    ]


def _noise(
    sandbox: Sandbox,
    expected: Expected,
    sums_AD: Floats,
    included_AN: Flags,
    bounds_A: Floats,
    draws_AD: Floats,
    by_attempt: Sequence[Sequence[dict[str, Any]]],
    num_silent: int,
) -> list[Check]:
    """Every number that the source gave is in the released sum once, with the stated scale, is new, and is a Gaussian one.

    Args:
        sums_AD: what was released, times the public batch size, in fp64.
        draws_AD: what the source drew for each coordinate, in silent steps too; NaN where it was asked for another number.
    """
    plan, coefficients = sandbox.plan, sandbox.plan.noise_strategy.coefficients
    # The noise is judged by what the audited run states, never by what the sandbox says that it used.
    sigma, adaptive = sandbox.run.noise_multiplier, sandbox.run.adaptive_clipping
    if adaptive is not None:
        sigma = adaptive.gradient_noise_multiplier(sigma)
    std_A1, sessions_T = sigma * bounds_A[:, None], np.array([r[0]["session"] for r in by_attempt[num_silent:]])

    def fresh(rows_TX: Floats) -> Floats:
        """sum_k c_k row_{t-k} within each session: of correlated noise the fresh part. Rows before it are silent."""
        total = np.zeros_like(rows_TX)
        for session in np.unique(sessions_T):
            at = np.flatnonzero(sessions_T == session)
            for k, c in enumerate(coefficients[: len(at)]):
                total[at[k:]] += c * rows_TX[at[: len(at) - k]]
        return total

    quiet_D, drawn_TD = expected.owner_D == -1, draws_AD[num_silent:]
    z = fresh(sums_AD[num_silent:, quiet_D] / std_A1[num_silent:])
    num_draws = [sum(noted["num_draws"] for noted in ranks) for ranks in by_attempt]
    size, fewest, most = draws_AD.shape[1], min(num_draws), max(num_draws)
    ratio, stated = float(np.sqrt((z**2).mean())), sigma * plan.max_grad_norm
    whole = f"the released noise has {ratio:.5f} times the planned standard deviation sigma C = {stated:.6g} ({z.size} values)"
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
    due = [
        expected.sums(included_N, bound)
        for included_N, bound in zip(included_AN[num_silent:], bounds_A[num_silent:], strict=True)
    ]
    due_TD, loose_TD = (np.stack(column) / std_A1[num_silent:] for column in zip(*due, strict=True))
    lattice = 0.0 if plan.lattice is None else included_AN.shape[1] * 2.0**-plan.lattice.exponent / std_A1.min()
    apart_TD = np.abs(fresh(sums_AD[num_silent:] / std_A1[num_silent:] - due_TD) - drawn_TD)
    beyond_TD = (apart_TD - fresh(loose_TD) - lattice - 1e-6)[:, ~expected.unknown_D]
    difference = float(beyond_TD.max(initial=0.0))
    reach = f"what is released is sums and sigma C times the numbers drawn, on every coordinate, but for {difference:.2g} sigma C"
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
    noise, least = drawn_TD[:, quiet_D], 1e-300 if plan.bands == 1 else 1e-3
    rounded = float((np.abs(z - noise) / np.maximum(np.abs(noise), least)).max())
    double = f"what the optimizer gets differs from noise added in double precision by {rounded:.2g} of itself"
    return [
        *checks,
        fact("added_in_double", rounded <= 1e-10, double, statistic=rounded, threshold=1e-10),
        fact("draws_reach_the_weights", difference <= 0, reach, statistic=difference, threshold=0),
        fact("draws_are_new", duplicates <= most_by_chance, equal, statistic=duplicates, threshold=most_by_chance),
        fact("double_precision", disguised < 1e-3, single, statistic=disguised, threshold=1e-3),
    ]


def _counts(
    sandbox: Sandbox, expected: Expected, noted_A: Sequence[dict[str, Any]], included_AN: Flags, num_silent: int
) -> list[Check]:
    """Released counts of adaptive clipping are centred, of members alone, and noised once, with the stated deviation; C follows.

    What an attempt notes is the noised centred count, the number drawn for it (NaN where the source was not asked exactly once),
    the fraction that was published, and C after it.
    """
    adaptive = sandbox.run.adaptive_clipping
    assert adaptive is not None
    std, draws, wrong, still = adaptive.unclipped_num_std, [], np.zeros(len(noted_A), dtype=bool), 0
    for index, (noted, included_N) in enumerate(zip(noted_A, included_AN, strict=True)):
        count, drawn, fraction, moved = noted["count"]
        _, norms_N = expected.weights(noted["bound"])
        centred_N = np.clip((1 - norms_N / noted["bound"]) / RAMP + 0.5, 0, 1) - 0.5
        noise = 0.0 if index < num_silent else std * drawn
        # A hostile example counts -1/2, or 0 if it is not finite.
        honest, hostile = centred_N[included_N & ~sandbox.hostile_N].sum(), (included_N & sandbox.hostile_N).sum()
        wrong[index] = not (honest - 0.5 * hostile - 1e-6 <= count - noise <= honest + 1e-6)  # NaN is wrong too
        rate, quantile = adaptive.clipbound_learning_rate, adaptive.target_unclipped_quantile
        still += not math.isclose(moved, noted["bound"] * math.exp(-rate * (fraction - quantile)), rel_tol=1e-9)
        draws.append(drawn)
    silent, noisy = int(wrong[:num_silent].sum()), int(wrong[num_silent:].sum())
    centred = f"without noise the centred count is that of members whose norm is below C or above, in all but {silent} attempts"
    duplicates = len(draws) - len(np.unique(np.array(draws)[~np.isnan(draws)]))
    added = f"the count is noised by sigma_b = {std:g} times one new number of the source, in all but {noisy} attempts"
    follows = f"C follows from the noised count that was published in all but {still} attempts"
    return [
        fact("count_sensitivity", silent == 0, centred, statistic=silent, threshold=0),
        fact("count_draws", noisy == 0 and duplicates == 0, added, statistic=noisy, threshold=0),
        fact("bound_follows", still == 0, follows, statistic=still, threshold=0),
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
