"""What a ledger records, charges and claims, and how it is opened together with its key."""

import json
import os
import time
from dataclasses import replace
from datetime import datetime

import pytest

from privacy.errors import BudgetSpent, PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.run_state import open_run_state
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from privacy.sampling.keys import SamplingKey
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.ledger_files import ENVIRONMENT, PLAN, RELEASE, create, take_step, written


def test_contract_9_records_and_charges(tmp_path):
    path = written(tmp_path)
    with Ledger.open(path) as ledger:
        assert ledger.num_charged == 3 and ledger.state.last_done_step == 3
        assert ledger.state.attempts[3] == 1 and ledger.state.attempts[4] == 0
        assert ledger.plan == PLAN
        nonce = ledger.start_session(ENVIRONMENT)
        assert len(nonce) == 16
        ledger.intent(2, 1, [RELEASE])  # rolled back to an older checkpoint: charges stay
        assert ledger.num_charged == 4
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["seq"] for record in records] == list(range(len(records)))
    assert [record["type"] for record in records] == (
        ["open", "session"] + ["intent", "done"] * 3 + ["checkpoint", "session", "intent"]
    )
    assert len({record["nonce"] for record in records if record["type"] == "session"}) == 2


def test_contract_12_every_record_repeats_the_time_of_the_first(tmp_path):
    """Whatever passes between two sessions, and also where a crash tore a line."""
    path = written(tmp_path)
    time.sleep(1.1)
    path.write_bytes(path.read_bytes() + b'{"seq":9,')
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 4)
        ledger.close("stopped")
    records = [
        json.loads(line) for line in path.read_bytes().splitlines() if not line.endswith(b"#torn")
    ]
    assert {"repair", "session", "close"} <= {record["type"] for record in records}
    (opened,) = {record["time_utc"] for record in records}
    assert datetime.fromisoformat(opened).timestamp() < time.time() - 1.1


def test_contract_9_intent_is_durable_before_it_returns(tmp_path, monkeypatch):
    ledger = create(tmp_path)
    ledger.start_session(ENVIRONMENT)
    calls = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append("write") or write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") or fsync(fd))
    ledger.intent(1, 0, [RELEASE])
    assert calls == ["write", "fsync"]


def test_contract_9_what_is_read_is_durable_before_anything_relies_on_it(tmp_path, monkeypatch):
    """A program that was killed may have left lines that no fsync has made durable: a power cut would take them away."""
    mirror, shared = tmp_path / "mirror.jsonl", tmp_path / "owner.jsonl"
    path = written(tmp_path, mirror=mirror)
    owner = SharedLedger.create(shared, epsilon=2.0, delta=1e-5)
    inodes, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: inodes.add(os.fstat(fd).st_ino) or fsync(fd))
    Ledger.open(path, mirror, mend_at_once=False).release()
    owner.read()
    assert {file.stat().st_ino for file in (path, mirror, shared, tmp_path)} <= inodes


def test_contract_10_budget_refuses_the_intent_that_would_pass_it(tmp_path):
    ledger = create(tmp_path)
    ledger.start_session(ENVIRONMENT)
    for attempt in range(PLAN.max_intents):
        ledger.intent(1, attempt, [RELEASE])
    size = (tmp_path / "ledger.jsonl").stat().st_size
    with pytest.raises(BudgetSpent) as error:
        ledger.intent(1, PLAN.max_intents, [RELEASE])
    assert error.value.exit_code == 3
    assert (tmp_path / "ledger.jsonl").stat().st_size == size
    ledger.close("budget_spent")
    with pytest.raises(PrivacyStateRefused, match="after the end"):
        ledger.start_session(ENVIRONMENT)
    ledger.release()
    assert Ledger.open(tmp_path / "ledger.jsonl").state.closed == "budget_spent"


def test_contract_9_every_start_needs_its_own_session(tmp_path):
    path = written(tmp_path, steps=1)
    with Ledger.open(path) as ledger:
        with pytest.raises(PrivacyStateRefused, match="no session"):
            ledger.intent(2, 0, [RELEASE])
        old = bytes.fromhex(json.loads(path.read_text().splitlines()[1])["nonce"])
        with pytest.raises(PrivacyStateRefused, match="nonce was used"):
            ledger.start_session(ENVIRONMENT, nonce=old)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda ledger: ledger.intent(3, 0, [RELEASE]), "does not follow"),
        (lambda ledger: ledger.intent(2, 0, [RELEASE | {"std": float("nan")}]), "refused to write"),
        (lambda ledger: ledger.intent(2, 0, [RELEASE | {"sensitivity": 0.0}]), "sensitivity"),
        (lambda ledger: ledger.intent(2, 0, [RELEASE, RELEASE]), "this plan releases gradient"),
        (lambda ledger: ledger.done(1, 0), "without its intent"),
        (lambda ledger: ledger.checkpoint(1, "x", "digest"), "digest of `checkpoint`"),
    ],
)
def test_illegal_records_are_not_written(tmp_path, call, match):
    ledger = create(tmp_path)
    ledger.start_session(ENVIRONMENT)
    take_step(ledger, 1)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(PrivacyStateRefused, match=match):
        call(ledger)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    take_step(ledger, 2)  # and the ledger goes on


def test_contract_10_epsilon_comes_from_the_ledger_and_equals_an_independent_recomputation(
    tmp_path,
):
    path = written(tmp_path)
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
    path.write_bytes(path.read_bytes() + b'{"seq":10,"type":"i')
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
        ledger.intent(4, 0, [RELEASE])  # died before `done`
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
        ledger.intent(4, 1, [RELEASE])
        ledger.done(4, 1)
        assert ledger.num_charged == 6
        groups = ledger.state.charged_groups()
        assert sum(group.count for group in groups) == 6 and len(groups) == 1
        charged, expected = recompute(path)
        assert charged == 6
        assert ledger.state.epsilon() == pytest.approx(expected, rel=1e-6)
        assert ledger.state.epsilon() == PLAN.epsilon_after(6)


def test_contract_11_no_epsilon_without_a_formal_guarantee(tmp_path):
    plan = make_plan(
        PlanRequest(num_examples=100, expected_batch_size=10, num_steps=3, noise_multiplier=0.0)
    )
    ledger = Ledger.create(
        tmp_path / "l", {"plan": plan.frozen_fields(), "key_commitment": "ab" * 32}
    )
    ledger.start_session({})
    ledger.intent(1, 0, [{"name": "gradient", "std": 0.0, "sensitivity": 1.0}])
    assert ledger.state.epsilon() is None and ledger.num_charged == 1


# Key and ledger of a run folder, made once and reopened


def _state(tmp_path, plan=PLAN, data=b"manifest", **more):
    return open_run_state(
        tmp_path / "ledger.jsonl", tmp_path / "sampling.key", plan, data_manifest=data, **more
    )


def test_run_state_is_created_once_and_reopened(tmp_path):
    ledger, key = _state(tmp_path)
    ledger.release()
    again, same = _state(tmp_path)
    assert same.commitment() == key.commitment() == again.state.opened["key_commitment"]
    content = (tmp_path / "ledger.jsonl").read_bytes()
    assert (
        tmp_path / "sampling.key"
    ).read_bytes().hex().encode() not in content and b"manifest" not in content


def test_run_state_refuses_what_does_not_fit(tmp_path):
    ledger, _ = _state(tmp_path)
    ledger.release()
    with pytest.raises(
        PrivacyConfigError,
        match="frozen, so give the old value or another run folder: noise_multiplier was 4",
    ):
        _state(tmp_path, plan=replace(PLAN, noise_multiplier=5.0))
    with pytest.raises(PrivacyConfigError, match="data"):
        _state(tmp_path, data=b"another manifest")
    (tmp_path / "sampling.key").rename(tmp_path / "away")
    with pytest.raises(PrivacyStateRefused, match="cannot read the sampling key"):
        _state(tmp_path)
    SamplingKey.create(tmp_path / "sampling.key")
    with pytest.raises(PrivacyStateRefused, match="committed"):
        _state(tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(PrivacyStateRefused, match="without its ledger"):
        _state(tmp_path)
    (tmp_path / "sampling.key").unlink()
    with pytest.raises(PrivacyStateRefused, match="checkpoint without its ledger"):
        _state(tmp_path, has_checkpoint=True)


def test_a_refused_state_is_left_as_it_was(tmp_path):
    """Neither a torn line is repaired nor a mirror made before key, data, plan and record of attempts fit."""
    _state(tmp_path, members=tmp_path / "members.jsonl")[0].release()
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b"torn")
    (tmp_path / "members.jsonl").write_text('{"seq":5,"hash":"x"}\n')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for refused in (
        {"data": b"other"},
        {"plan": replace(PLAN, noise_multiplier=5.0)},
        {"members": tmp_path / "members.jsonl"},
    ):
        with pytest.raises((PrivacyStateRefused, PrivacyConfigError)):
            _state(tmp_path, mirror=tmp_path / "mirror.jsonl", **refused)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
