"""The audit of the schedule: honest coins pass, and every way of choosing members otherwise is found."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from privacy.audit.audit_report import AuditReport
from privacy.audit.run_audit import members_checks
from privacy.audit.second_sampler import Attempt, SecondSampler
from privacy.ledger.attempts import MembersRecord, members_digest
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.request import PlanRequest
from privacy.sampling import sampler
from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import PoissonSampler, example_keys
from privacy.sampling.rows import deal, shares_of_nodes
from privacy.sampling.sampler import sampler_of

SECRET = bytes(range(32))
KEY = SamplingKey(SECRET)
NONCES = (b"a" * 16, b"b" * 16)
# 30 steps; step 12 was killed, and tried again in a second session.
ATTEMPTS = [Attempt(NONCES[0], step, 0) for step in range(1, 13)] + [
    Attempt(NONCES[1], step, int(step == 12)) for step in range(12, 31)
]


def plan(**changed: object) -> PrivacyPlan:
    fields = {
        "num_examples": 3000,
        "expected_batch_size": 300,
        "num_steps": 30,
        "noise_multiplier": 1.0,
    }
    return make_plan(PlanRequest(**fields | changed))  # type: ignore[arg-type]


coin_key, decide = SamplingKey.coin_key, PoissonSampler.decide


def members(own: PrivacyPlan, attempt: Attempt) -> np.ndarray:
    return sampler.sampler_of(own).members(
        KEY.coin_key(attempt.nonce, attempt.attempt), attempt.step
    )


def record(attempt: Attempt, ids: np.ndarray, world_size: int = 2) -> MembersRecord:
    rows_per_rank = len(ids) // world_size + 5
    row_key = KEY.row_key(attempt.nonce, attempt.attempt)
    parts = [
        deal(row_key, attempt.step, ids, rows_per_rank, world_size, rank)[0]
        for rank in range(world_size)
    ]
    digests = [
        members_digest(KEY, attempt.nonce, attempt.attempt, attempt.step, rank, part)
        for rank, part in enumerate(parts)
    ]
    named = (attempt.step, attempt.attempt, attempt.nonce.hex(), rows_per_rank)
    return MembersRecord(0, "0" * 64, *named, tuple(map(len, parts)), tuple(digests), ())


def trained(own: PrivacyPlan, attempts: Sequence[Attempt]) -> dict:
    return {(a.nonce.hex(), a.step, a.attempt): record(a, members(own, a)) for a in attempts}


def audit(
    own: PrivacyPlan, recorded: dict, attempts: Sequence[Attempt] = ATTEMPTS, **most: int
) -> AuditReport:
    return AuditReport("schedule", members_checks(own, attempts, SECRET, recorded, **most))


def test_honest_members_pass() -> None:
    own = plan()
    report = audit(own, trained(own, ATTEMPTS))
    assert report.verdict == "consistent", report.to_text()
    assert report.false_alarm_rate < 1e-3


def test_without_a_record_of_members_it_is_inconclusive() -> None:
    assert audit(plan(), {}).verdict == "inconclusive"


@pytest.mark.parametrize(
    "wrong", ["the members of the first attempt", "one other example", "fewer rows than members"]
)
def test_members_that_the_coins_did_not_choose_are_found_in_what_was_trained(wrong: str) -> None:
    own = plan()
    recorded, retry = trained(own, ATTEMPTS), next(a for a in ATTEMPTS if a.attempt == 1)
    ids = members(own, ATTEMPTS[11] if wrong.startswith("the members") else retry).copy()
    if wrong.startswith("one"):
        ids[5] += 1
    made = record(retry, ids)
    if wrong.startswith("fewer"):
        nobody = [
            members_digest(KEY, retry.nonce, 1, retry.step, rank, ids[:0]) for rank in range(2)
        ]
        made = replace(made, rows_per_rank=0, counts=(0, 0), digests=tuple(nobody))
    recorded[retry.nonce.hex(), retry.step, 1] = made
    assert audit(own, recorded).failed() == ["trained_members"]


@pytest.mark.parametrize(
    ("target", "name", "broken"),
    [
        (SamplingKey, "coin_key", lambda self, nonce, attempt: coin_key(self, bytes(16), 0)),
        (PoissonSampler, "decide", lambda self, key, step, *bounds: decide(self, key, 1, *bounds)),
        (
            sampler,
            "sampler_of",
            lambda plan: replace(sampler_of(plan), threshold=plan.sampling_threshold * 11 // 10),
        ),
        (sampler, "sampler_of", lambda plan: replace(sampler_of(plan), cap=None)),
    ],
    ids=[
        "they forget session and attempt",
        "they forget the step",
        "another rate",
        "a forgotten cap",
    ],
)
def test_a_mistake_in_the_coins_of_the_run_is_found(
    target: type, name: str, broken: object
) -> None:
    own = plan(cap=290)
    with mock.patch.object(target, name, broken):
        assert audit(own, trained(own, ATTEMPTS)).failed() == ["trained_members"]


def test_a_long_run_is_audited_in_part() -> None:
    own = plan()
    recorded, retry = trained(own, ATTEMPTS), next(a for a in ATTEMPTS if a.attempt == 1)
    report = audit(own, recorded, max_coins=12 * 3000)
    assert report.verdict == "consistent" and " in 12 attempts of 3000 examples" in report.to_text()
    recorded[retry.nonce.hex(), retry.step, 1] = record(retry, members(own, ATTEMPTS[11]))
    assert audit(own, recorded, max_coins=12 * 3000).failed() == ["trained_members"], (
        "retries come first"
    )


def test_other_schemes_are_not_tested() -> None:
    report = audit(plan(sampling="shuffle"), {})
    assert report.verdict == "inconclusive" and "shuffle" in report.to_text()


@pytest.mark.parametrize(
    ("num_examples", "expected", "cap"), [(1, 1, None), (7, 3, 2), (500, 40, None), (501, 500, 499)]
)
def test_the_second_sampler_agrees_with_the_product(
    num_examples: int, expected: int, cap: int | None
) -> None:
    """Single coins by hand too, from the contract's words: word (i mod 2) of AES-256_K(t, i div 2) below floor(B 2^64 / n)."""
    second = SecondSampler(SECRET, num_examples, expected, cap)
    sampler = PoissonSampler.with_expected_batch(num_examples, expected, cap)
    for attempt in (ATTEMPTS[0], ATTEMPTS[12]):
        coin_key = KEY.coin_key(attempt.nonce, attempt.attempt)
        chosen, kept = second.members(attempt)
        np.testing.assert_array_equal(chosen, sampler.decide(coin_key, attempt.step).ids)
        np.testing.assert_array_equal(kept, sampler.members(coin_key, attempt.step))
        keys = example_keys(KEY.example_key(attempt.nonce, attempt.attempt), attempt.step, kept)
        np.testing.assert_array_equal(second.keys(attempt, kept), keys)
        cases: list[tuple[int, tuple[int, ...]]] = [
            (1, ()),
            (2, ()),
            (5, ()),
            (2, (0, 1)),
            (5, (0, 0, 1, 2, 1)),
        ]
        for (world_size, nodes), spare in itertools.product(
            cases, (3, 40)
        ):  # with 3 a share may not fit
            row_key, most = (
                KEY.row_key(attempt.nonce, attempt.attempt),
                spare + len(kept) // world_size,
            )
            shares = shares_of_nodes(nodes, num_examples) if nodes else []
            products = [
                deal(row_key, attempt.step, kept, most, world_size, rank, shares)
                for rank in range(world_size)
            ]
            for rank, (part, rows) in enumerate(
                second.deal(attempt, kept, most, world_size, nodes)
            ):
                np.testing.assert_array_equal(part, products[rank][0])
                np.testing.assert_array_equal(rows, products[rank][1])
                digest = members_digest(
                    KEY, attempt.nonce, attempt.attempt, attempt.step, rank, part
                )
                assert second.digest(attempt, rank, part) == digest
