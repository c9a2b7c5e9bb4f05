"""Were the members of every batch the ones that independent coins of rate q choose? Needs the sampling key.

Three witnesses are compared: the product's sampler, a second one that shares no code with it (second_sampler.py), and the private
record of what the ranks were dealt. A rate that all three have wrong would show in the number of inclusions.

Inside the trust boundary only: who was in which batch is what amplification by sampling keeps secret.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ledger.members import MembersRecord
from ..plan import PrivacyPlan
from ..sampling.keys import SamplingKey
from ..sampling.poisson import Ids
from . import statistics as st
from .report import AuditReport, Check, fact, random_check, undecided
from .second_sampler import Attempt, SecondSampler, count_attempts

MAX_COINS = 10**9
"""Coins that one audit tosses again, twice each (about 20 s); a longer run is audited on a part of its attempts."""


@dataclass(frozen=True)
class _Drawn:
    """What the product's sampler says of one attempt, before the cap and after it, and whom the second one makes members."""

    attempt: Attempt
    chosen: Ids
    members: Ids
    second: Ids


def audit_schedule(
    plan: PrivacyPlan,
    attempts: Sequence[Attempt],
    key: SamplingKey,
    secret: bytes,
    recorded: Mapping[tuple[str, int, int], MembersRecord] | None,
    max_coins: int = MAX_COINS,
) -> AuditReport:
    """Recomputes the members of the charged attempts and tests them.

    Args:
        secret: the key's 32 bytes, for the second derivation.
        recorded: what the trainer noted (privacy/ledger/members.py), None when it noted nothing.
        max_coins: bounds the work; retried steps come first, then attempts evenly over the run.
    """
    if not attempts:
        return AuditReport.of("schedule", [undecided("attempts", "nothing was charged yet")])
    if plan.sampling != "poisson":
        dependent = (
            f"the run samples by {plan.sampling!r}: its coins are meant to depend on each other and are not tested"
        )
        return AuditReport.of("schedule", [undecided("sampling", dependent)])
    # Two derivations from the same key, by code that has nothing in common; the run itself is the third witness, below.
    sampler = plan.sampler
    second = SecondSampler(secret, plan.num_examples, plan.expected_batch_size, plan.cap, plan.bands)
    drawn, differing = [], 0
    for attempt in _pick(attempts, max(2, max_coins // plan.num_examples)):
        turn = sampler.of_attempt(attempt.before)
        decided = turn.decide(turn.coin_key(key, attempt.nonce, attempt.attempt), attempt.step)
        chosen, members = second.members(attempt)
        for mine, other in ((chosen, decided.ids), (members, sampler.merge([decided]))):
            differing += 0 if np.array_equal(mine, other) else max(1, len(np.setxor1d(mine, other)))
        drawn.append(_Drawn(attempt, decided.ids, sampler.merge([decided]), members))
    misnumbered = sum(a != b for a, b in zip(attempts, count_attempts(attempts), strict=True))
    numbers = (
        f"{misnumbered} of {len(attempts)} attempts have another number than that of earlier charges of their step"
    )
    coins = (
        f"{differing} examples are members by one of two independent derivations of coins and cap, and not by the other"
    )
    checks = [
        fact("attempt_numbers", misnumbered == 0, numbers, statistic=misnumbered, threshold=0),
        fact("second_derivation", differing == 0, coins, statistic=differing, threshold=0),
        *_sizes(plan, drawn),
        _trained(second, drawn, recorded),
    ]
    return AuditReport.of("schedule", checks, attempts_charged=len(attempts), attempts_recomputed=len(drawn))


def _pick(attempts: Sequence[Attempt], count: int) -> list[Attempt]:
    """All, or the retried steps and an even choice of the others, in order."""
    if len(attempts) <= count:
        return list(attempts)
    # Coins of a retry are what a program that forgets its attempts gets wrong, so retried steps have half of the room.
    steps: dict[int, list[int]] = defaultdict(list)
    for index, attempt in enumerate(attempts):
        steps[attempt.step].append(index)
    retried = [index for group in steps.values() if len(group) > 1 for index in group][: count // 2]
    even = np.linspace(0, len(attempts) - 1, count - len(retried)).round().astype(int).tolist()
    return [attempts[index] for index in sorted({*retried, *even})]


def _sizes(plan: PrivacyPlan, drawn: Sequence[_Drawn]) -> list[Check]:
    """As many inclusions as the rate has, and no batch above the cap; places that not every group has are left out."""
    n, cap = plan.num_examples // plan.bands, plan.cap
    total = sum(int((item.chosen // plan.bands < n).sum()) for item in drawn)
    coins, largest = n * len(drawn), max(len(item.members) for item in drawn)
    inclusions = f"{total} inclusions in {len(drawn)} attempts of {n} examples, {coins * plan.sample_rate:.0f} expected"
    total_p = float(st.binomial_p(total, coins, plan.sample_rate))
    capped = f"the largest batch has {largest} examples, the cap is {cap}"
    return [
        random_check("batch_size_total", total_p, inclusions, statistic=total / len(drawn)),
        fact("cap", cap is None or largest <= cap, capped, statistic=largest, threshold=cap),
    ]


def _trained(
    second: SecondSampler, drawn: Iterable[_Drawn], recorded: Mapping[tuple[str, int, int], MembersRecord] | None
) -> Check:
    """What the ranks were dealt, in order, is what the coins say by the second derivation."""
    if recorded is None:
        return undecided("trained_members", "the run kept no record of what it trained on (private/members.jsonl)")
    compared, wrong = 0, []
    for item in drawn:
        attempt = item.attempt
        record = recorded.get((attempt.nonce.hex(), attempt.step, attempt.attempt))
        if record is None:
            continue
        compared += 1
        # The record holds digests under the key, so the deal is made again and its digests are compared.
        world_size, members = len(record.digests), item.second
        numbers = list(dict.fromkeys(record.nodes))
        fits = not numbers or (len(record.nodes) == world_size and numbers == list(range(len(numbers))))
        if record.rows_per_rank * world_size < len(members) or not fits:
            wrong.append(attempt.step)
            continue
        dealt = [ids for ids, _ in second.deal(attempt, members, record.rows_per_rank, world_size, record.nodes)]
        digests = [second.digest(attempt, rank, ids) for rank, ids in enumerate(dealt)]
        if list(record.digests) != digests or list(record.counts) != [len(ids) for ids in dealt]:
            wrong.append(attempt.step)
    sentence = f"in {len(wrong)} of {compared} attempts the ranks were dealt other examples than the coins say"
    if wrong:
        sentence += f" (first at step {wrong[0]})"
    return fact("trained_members", not wrong, sentence, statistic=len(wrong), threshold=0)
