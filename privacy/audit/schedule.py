"""Were the members of every batch the ones that independent coins of rate q choose? Needs the sampling key.

Inside the trust boundary only: who was in which batch is what amplification by sampling keeps secret.
"""

import hashlib
import hmac
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import sparse

from privacy.audit import statistics as st
from privacy.audit.members import MembersRecord, members_digest
from privacy.audit.report import AuditReport, Check, fact, random_check, undecided
from privacy.plan import PrivacyPlan
from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import Ids, slice_bounds
from privacy.sampling.rows import deal

WORLD_SIZES = (1, 2, 3, 4, 8)
MAX_COINS = 2 * 10**9
"""Coins that one audit tosses again (about 20 s); a longer run is audited on a part of its attempts."""
_INDEPENDENT = 2048  # coins derived a second time, one by one


@dataclass(frozen=True)
class Attempt:
    """One charged attempt, as the ledger has it."""

    nonce: bytes
    step: int
    attempt: int


@dataclass(frozen=True)
class _Drawn:
    attempt: Attempt
    chosen: Ids  # before the cap
    members: Ids


def read_attempts(records: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts of a verified ledger's records, in order."""
    attempts, nonce = [], b""
    for record in records:
        if record["type"] == "session":
            nonce = bytes.fromhex(record["nonce"])
        elif record["type"] == "intent":
            attempts.append(Attempt(nonce, record["step"], record["attempt"]))
    return attempts


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
        recorded: what the trainer noted (privacy/audit/members.py), None when it noted nothing.
        max_coins: bounds the work; retried steps come first, then attempts evenly over the run.
    """
    if not attempts:
        return AuditReport.of("schedule", [undecided("attempts", "nothing was charged yet")])
    sampler, drawn = plan.sampler, []
    for attempt in _pick(attempts, max(2, max_coins // plan.num_examples)):
        decided = sampler.decide(sampler.coin_key(key, attempt.nonce, attempt.attempt), attempt.step)
        drawn.append(_Drawn(attempt, decided.ids, sampler.merge([decided])))
    if plan.sampling == "poisson":
        repeated = len(attempts) - len(set(attempts))
        earlier = (
            f"{repeated} of {len(attempts)} attempts have session nonce, step and attempt number of an earlier one"
        )
        checks = [
            fact("coins_never_repeat", repeated == 0, earlier, statistic=repeated, threshold=0),
            *_sizes(plan, drawn),
            *_overlaps(plan.num_examples, drawn),
            _second_derivation(plan, secret, drawn),
        ]
    else:
        dependent = (
            f"the run samples by {plan.sampling!r}: its coins are meant to depend on each other and are not tested"
        )
        checks = [undecided("sampling", dependent)]
    # Slices decided by any number of ranks join to the same members.
    differing = 0
    for item in (drawn[0], drawn[len(drawn) // 2], drawn[-1]):
        coin_key = sampler.coin_key(key, item.attempt.nonce, item.attempt.attempt)
        for world_size in WORLD_SIZES:
            bounds = [slice_bounds(sampler.num_examples, world_size, rank) for rank in range(world_size)]
            parts = [sampler.decide(coin_key, item.attempt.step, *bound) for bound in bounds]
            differing += not np.array_equal(sampler.merge(parts), item.members)
    sizes = ", ".join(map(str, WORLD_SIZES))
    sentence = f"members differ for {differing} of {3 * len(WORLD_SIZES)} choices of attempt and world size ({sizes})"
    checks.append(fact("world_size_invariance", differing == 0, sentence, statistic=differing, threshold=0))
    checks.append(_trained(key, drawn, recorded))
    return AuditReport.of("schedule", checks, attempts_charged=len(attempts), attempts_recomputed=len(drawn))


def _pick(attempts: Sequence[Attempt], count: int) -> list[Attempt]:
    """All, or the retried steps and an even choice of the others, in order."""
    if len(attempts) <= count:
        return list(attempts)
    steps: dict[int, list[int]] = defaultdict(list)
    for index, attempt in enumerate(attempts):
        steps[attempt.step].append(index)
    retried = [index for group in steps.values() if len(group) > 1 for index in group][: count // 2]
    even = np.linspace(0, len(attempts) - 1, count - len(retried)).round().astype(int).tolist()
    return [attempts[index] for index in sorted({*retried, *even})]


def _sizes(plan: PrivacyPlan, drawn: Sequence[_Drawn]) -> list[Check]:
    n, q, cap = plan.num_examples, plan.sample_rate, plan.cap
    counts = np.array([len(item.chosen) for item in drawn])
    total, expected = int(counts.sum()), n * len(counts) * q
    inclusions = f"{total} inclusions in {len(counts)} attempts of {n} examples, {expected:.0f} expected"
    sizes = f"batch sizes run from {counts.min()} to {counts.max()}, as Binomial(n, q) of mean {n * q:.1f} does"
    window = min(n, 1 << 22)  # memory: one counter per example
    times = np.zeros(window, dtype=np.int64)
    for item in drawn:
        times[item.chosen[item.chosen < window]] += 1
    spread = (
        f"how often each of {window} examples was chosen ({times.min()} to {times.max()} times) is spread as "
        "Binomial(attempts, q)"
    )
    largest = max(len(item.members) for item in drawn)
    capped = f"the largest batch has {largest} examples, the cap is {cap}"
    total_p = float(st.binomial_p(total, n * len(counts), q))
    return [
        random_check("batch_size_total", total_p, inclusions, statistic=float(counts.mean())),
        random_check("batch_size_each", st.bonferroni(st.binomial_p(counts, n, q)), sizes),
        random_check("inclusion_per_example", st.binomial_counts_p(times, len(counts), q), spread),
        fact("cap", cap is None or largest <= cap, capped, statistic=largest, threshold=cap),
    ]


def _overlaps(n: int, drawn: Sequence[_Drawn]) -> list[Check]:
    """Members of two attempts, and above all of a step and its retry, overlap as independent samples do."""
    counts = np.array([len(item.chosen) for item in drawn])
    rows = np.repeat(np.arange(len(drawn)), counts)
    ones, columns = np.ones(counts.sum(), dtype=np.int64), np.concatenate([item.chosen for item in drawn])
    table = sparse.csr_matrix((ones, (rows, columns)), shape=(len(drawn), n))
    common: NDArray[np.int64] = (table @ table.T).toarray()
    i, j = np.triu_indices(len(drawn), 1)
    p_values = st.overlap_p(common[i, j], n, counts[i], counts[j])
    pairs = f"{len(i)} pairs of attempts share as many members as independent samples do (hypergeometric)"
    steps = np.array([item.attempt.step for item in drawn])
    again = steps[i] == steps[j]
    retries = f"the same for the {int(again.sum())} pairs of attempts at one step: a retry took new coins"
    return [
        random_check("overlap_of_attempts", st.bonferroni(p_values), pairs),
        random_check("overlap_of_retries", st.bonferroni(p_values[again]), retries),
    ]


def _second_derivation(plan: PrivacyPlan, secret: bytes, drawn: Sequence[_Drawn]) -> Check:
    """Single coins derived again by other code."""
    n = plan.num_examples
    each = max(1, _INDEPENDENT // min(len(drawn), 16))
    differing = total = 0
    for item in drawn[:: max(1, len(drawn) // 16)]:
        derived = coin_key(secret, item.attempt.nonce, item.attempt.attempt)
        examples = np.unique(np.linspace(0, n - 1, min(n, each)).astype(int))
        chosen = np.isin(examples, item.chosen)
        again = [is_chosen(derived, item.attempt.step, int(i), plan.expected_batch_size, n) for i in examples]
        differing += int((chosen != np.array(again)).sum())
        total += len(examples)
    sentence = f"{differing} of {total} coins come out differently when derived by independent code"
    return fact("second_derivation", differing == 0, sentence, statistic=differing, threshold=0)


def _trained(
    key: SamplingKey, drawn: Sequence[_Drawn], recorded: Mapping[tuple[str, int, int], MembersRecord] | None
) -> Check:
    """What the ranks were dealt is what the coins say."""
    if recorded is None:
        return undecided("trained_members", "the run kept no record of what it trained on (private/members.jsonl)")
    missing, wrong = [], []
    for item in drawn:
        attempt = item.attempt
        record = recorded.get((attempt.nonce.hex(), attempt.step, attempt.attempt))
        if record is None:
            missing.append(attempt.step)
            continue
        world_size = len(record.digests)
        if record.rows_per_rank * world_size < len(item.members):
            wrong.append(attempt.step)
            continue
        row_key = key.row_key(attempt.nonce, attempt.attempt)
        dealt = deal(row_key, attempt.step, item.members, record.rows_per_rank, world_size)
        digests = [
            members_digest(key, attempt.nonce, attempt.attempt, attempt.step, rank, ids)
            for rank, (ids, _) in enumerate(dealt)
        ]
        if list(record.digests) != digests or list(record.counts) != [len(ids) for ids, _ in dealt]:
            wrong.append(attempt.step)
    sentence = f"in {len(wrong)} of {len(drawn)} attempts the ranks were dealt other examples than the coins say"
    if wrong:
        sentence += f" (first at step {wrong[0]})"
    elif missing:
        note = f"; {len(missing)} attempts, the first at step {missing[0]}, are not in private/members.jsonl"
        return undecided("trained_members", sentence + note)
    return fact("trained_members", not wrong, sentence, statistic=len(wrong), threshold=0)


# A second derivation of the Poisson coins, from the contract's text alone and sharing no code with privacy/sampling/poisson.py:
#   K = HKDF-SHA256(key, info = "poisson coins v1\0" | session nonce | attempt)
#   example i is in step t  iff  word (i mod 2) of AES-256_K(t, i div 2) < floor(B 2^64 / n)
# One block at a time: slow, and simple enough to be checked by eye.


def coin_key(secret: bytes, nonce: bytes, attempt: int) -> bytes:
    """HKDF-SHA256 (RFC 5869) without salt, one block of output."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    info = b"poisson coins v1\0" + nonce + attempt.to_bytes(8, "big")
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def is_chosen(key: bytes, step: int, example: int, expected_batch_size: int, num_examples: int) -> bool:
    """The coin of one example in one step, before the cap."""
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    block = encryptor.update(step.to_bytes(8, "big") + (example // 2).to_bytes(8, "big"))
    word = block[8 * (example % 2) :][:8]
    return int.from_bytes(word, "little") < (expected_batch_size << 64) // num_examples
