"""The audit of the schedule: honest coins pass, and every way of choosing members otherwise is found."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from privacy.audit.members import MembersRecord, attempts_by_name, members_digest, read_lines
from privacy.audit.report import AuditReport
from privacy.audit.schedule import Attempt, audit_schedule
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import PoissonSampler
from privacy.sampling.rows import deal

SECRET = bytes(range(32))
KEY = SamplingKey(SECRET)
NONCES = (b"a" * 16, b"b" * 16)
# 30 steps; step 12 was killed, and tried again in a second session.
ATTEMPTS = [Attempt(NONCES[0], step, 0) for step in range(1, 13)] + [
    Attempt(NONCES[1], step, int(step == 12)) for step in range(12, 31)
]


def plan(**changed: object) -> PrivacyPlan:
    fields = {"num_examples": 3000, "expected_batch_size": 300, "num_steps": 30, "noise_multiplier": 1.0}
    return make_plan(PlanRequest(**fields | changed))  # type: ignore[arg-type]


def members(own: PrivacyPlan, attempt: Attempt) -> np.ndarray:
    return own.sampler.members(KEY.coin_key(attempt.nonce, attempt.attempt), attempt.step)


def record(attempt: Attempt, ids: np.ndarray, world_size: int = 2) -> MembersRecord:
    rows_per_rank = len(ids) // world_size + 5
    row_key = KEY.row_key(attempt.nonce, attempt.attempt)
    parts = [part for part, _ in deal(row_key, attempt.step, ids, rows_per_rank, world_size)]
    digests = [
        members_digest(KEY, attempt.nonce, attempt.attempt, attempt.step, rank, part) for rank, part in enumerate(parts)
    ]
    named = (attempt.step, attempt.attempt, attempt.nonce.hex(), rows_per_rank)
    return MembersRecord(0, "0" * 64, *named, tuple(map(len, parts)), tuple(digests))


def trained(own: PrivacyPlan, attempts: Sequence[Attempt]) -> dict:
    return {(a.nonce.hex(), a.step, a.attempt): record(a, members(own, a)) for a in attempts}


def audit(own: PrivacyPlan, recorded: dict | None, attempts: Sequence[Attempt] = ATTEMPTS) -> AuditReport:
    return audit_schedule(own, attempts, KEY, SECRET, recorded)


def test_honest_members_pass() -> None:
    own = plan()
    report = audit(own, trained(own, ATTEMPTS))
    assert report.verdict == "consistent", report.to_text()
    assert report.false_alarm_rate < 1e-3


def test_without_a_record_of_members_it_is_inconclusive() -> None:
    assert audit(plan(), None).verdict == "inconclusive"


def test_an_attempt_that_is_missing_in_the_record_is_inconclusive() -> None:
    own = plan()
    recorded = trained(own, ATTEMPTS)
    del recorded[NONCES[0].hex(), 3, 0]
    report = audit(own, recorded)
    assert report.verdict == "inconclusive" and "step 3" in report.to_text()


def test_members_reused_at_a_retry_are_found_in_what_was_trained() -> None:
    own = plan()
    recorded = trained(own, ATTEMPTS)
    retry = next(a for a in ATTEMPTS if a.attempt == 1)
    recorded[retry.nonce.hex(), retry.step, 1] = record(retry, members(own, ATTEMPTS[11]))
    assert audit(own, recorded).failed() == ["trained_members"]


def test_one_example_exchanged_is_found() -> None:
    own = plan()
    recorded = trained(own, ATTEMPTS)
    first = ATTEMPTS[0]
    ids = members(own, first).copy()
    ids[5] += 1
    recorded[first.nonce.hex(), first.step, 0] = record(first, ids)
    assert audit(own, recorded).failed() == ["trained_members"]


def test_coins_that_forget_session_and_attempt_are_found() -> None:
    own = plan()
    forgetful = SamplingKey(SECRET).coin_key(bytes(16), 0)
    with mock.patch.object(SamplingKey, "coin_key", return_value=forgetful):
        report = audit(own, trained(own, ATTEMPTS))
    assert {"overlap_of_retries", "overlap_of_attempts", "second_derivation"} <= set(report.failed())


def test_coins_that_forget_the_step_are_found() -> None:
    own, decide = plan(), PoissonSampler.decide
    with mock.patch.object(PoissonSampler, "decide", lambda self, key, step, *bounds: decide(self, key, 1, *bounds)):
        report = audit(own, trained(own, ATTEMPTS))
    assert {"overlap_of_attempts", "inclusion_per_example"} <= set(report.failed())


def test_another_sample_rate_is_found() -> None:
    own = plan()
    sampler = PoissonSampler(own.num_examples, own._poisson.threshold * 11 // 10)
    with mock.patch.dict(own.__dict__, sampler=sampler):
        report = audit(own, trained(own, ATTEMPTS))
    assert {"batch_size_total", "second_derivation"} <= set(report.failed())


def test_a_forgotten_cap_is_found() -> None:
    own = plan(cap=290)
    with mock.patch.dict(own.__dict__, sampler=replace(own._poisson, cap=None)):
        assert "cap" in audit(own, trained(own, ATTEMPTS)).failed()


def test_members_that_depend_on_the_world_size_are_found() -> None:
    own, decide = plan(), PoissonSampler.decide

    def from_zero(self: PoissonSampler, key: bytes, step: int, start: int = 0, stop: int | None = None) -> object:
        found = decide(self, key, step, 0, (stop or self.num_examples) - start)
        return found._replace(ids=found.ids + start)

    with mock.patch.object(PoissonSampler, "decide", from_zero):
        assert "world_size_invariance" in audit(own, trained(own, ATTEMPTS)).failed()


def test_a_repeated_attempt_is_found() -> None:
    assert "coins_never_repeat" in audit(plan(), None, [*ATTEMPTS, ATTEMPTS[-1]]).failed()


def test_a_long_run_is_audited_in_part() -> None:
    own = plan()
    report = audit_schedule(own, ATTEMPTS, KEY, SECRET, trained(own, ATTEMPTS), max_coins=12 * 3000)
    assert report.facts["attempts_recomputed"] <= 12 and report.verdict == "consistent"


def test_other_schemes_are_compared_but_not_tested() -> None:
    report = audit(plan(sampling="shuffle"), None)
    assert report.verdict == "inconclusive" and "shuffle" in report.to_text()


def test_torn_lines_of_the_record_are_passed_over(tmp_path: Path) -> None:
    own, path = plan(), tmp_path / "members.jsonl"
    lines = [record(a, members(own, a)).line() for a in ATTEMPTS[:2]]
    path.write_text(lines[0] + lines[1][:40])
    assert attempts_by_name(read_lines(path)) == {
        (NONCES[0].hex(), 1, 0): record(ATTEMPTS[0], members(own, ATTEMPTS[0]))
    }


@pytest.mark.full
def test_no_false_alarm_in_two_hundred_honest_runs() -> None:
    own = plan()
    for number in range(200):
        attempts = [replace(a, nonce=number.to_bytes(8, "big") + a.nonce[:8]) for a in ATTEMPTS]
        report = audit(own, trained(own, attempts), attempts)
        assert report.verdict == "consistent", report.to_text()
