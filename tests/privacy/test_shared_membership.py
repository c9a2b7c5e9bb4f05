"""Copies and backups of a run folder, and crashes at every place between a run's own ledger and the shared one."""

import json
import os
import shutil

import pytest

from privacy.errors import PrivacyStateRefused
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.ledger.shared import SharedLedger
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import step_releases

DELTA = 1e-5
PLAN = make_plan(
    PlanRequest(
        num_examples=3000, expected_batch_size=60, num_steps=20, noise_multiplier=2.0, target_delta=DELTA, cap=None
    )
)


def _open(folder, shared):
    folder.mkdir(exist_ok=True)
    terms = SharedTerms(shared.path, "run")
    return open_run_state(folder / "ledger.jsonl", folder / "sampling.key", PLAN, data_manifest=b"x", shared=terms)[0]


def _steps(ledger, first, last):
    for step in range(first, last + 1):
        attempt = ledger.next_attempt(step)
        ledger.intent(step, attempt, step_releases(2.0, 1.0, None))
        ledger.done(step, attempt)


@pytest.fixture
def shared(tmp_path):
    return SharedLedger.create(tmp_path / "owner.jsonl", epsilon=2.0, delta=DELTA)


@pytest.fixture
def session(shared, tmp_path):
    with _open(tmp_path / "run", shared) as ledger:
        ledger.start_session({})
        _steps(ledger, 1, 5)
        yield ledger


def test_a_copied_run_folder_cannot_go_on_beside_the_original(shared, tmp_path):
    with _open(tmp_path / "run", shared) as ledger:
        ledger.start_session({})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with _open(tmp_path / "run", shared) as ledger:
        ledger.start_session({})
    with pytest.raises(PrivacyStateRefused, match="another copy"):
        _open(tmp_path / "copy", shared)
    _open(tmp_path / "run", shared).release()


@pytest.mark.parametrize("end", ["checkpoint", "close"])
def test_a_copy_made_during_a_session_is_refused_once_the_original_went_on(shared, tmp_path, session, end):
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    _steps(session, 6, 20)
    if end == "checkpoint":
        session.checkpoint(20, "step-00000020", "0" * 64)
    else:
        session.close("finished")
    session.release()
    with pytest.raises(PrivacyStateRefused, match="another copy of this run went on") as refused:
        _open(tmp_path / "backup", shared)
    assert refused.value.exit_code == 4
    with _open(tmp_path / "run", shared) as again:
        assert again.num_charged == 20


def test_the_original_stops_when_a_copy_has_taken_its_budget_over(shared, tmp_path, session):
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with _open(tmp_path / "copy", shared) as copy:
        copy.start_session({})
        lines = session.path.read_bytes()
        with pytest.raises(PrivacyStateRefused, match="another copy") as refused:
            _steps(session, 6, 6)
        assert refused.value.exit_code == 4
        assert session.path.read_bytes() == lines  # stopped before the charge
        for late in (lambda: session.checkpoint(5, "step-00000005", "0" * 64), lambda: session.close("finished")):
            with pytest.raises(PrivacyStateRefused, match="another copy"):
                late()
        _steps(copy, 6, 20)
        copy.close("finished")
    assert shared.read().closed == {copy.key_commitment}


def test_a_session_whose_start_was_cut_off_stops(shared, session):
    lines = shared.path.read_bytes().splitlines(keepends=True)
    shared.path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(PrivacyStateRefused, match="or the file was rolled back"):
        _steps(session, 6, 6)
    assert session.num_charged == 5


def test_a_closed_run_is_final(shared, tmp_path, session):
    """Even for a copy that holds every line but the last."""
    _steps(session, 6, 20)
    session.checkpoint(20, "step-00000020", "0" * 64)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    session.close("finished")
    with pytest.raises(PrivacyStateRefused, match="another copy"):
        _open(tmp_path / "copy", shared)


def _crash():
    raise KeyboardInterrupt


@pytest.mark.parametrize("crash", ["start", "at", "close"])
def test_a_crash_between_the_two_ledgers_blocks_nobody(shared, tmp_path, monkeypatch, crash):
    """The run's own ledger is written first, so the shared one is behind it or level with it."""
    run = tmp_path / "run"
    with _open(run, shared) as ledger:
        ledger.start_session({})
        _steps(ledger, 1, 20)
    with _open(run, shared) as ledger:
        note = ledger.witness.note
        monkeypatch.setattr(ledger.witness, "note", lambda kind: _crash() if kind == crash else note(kind))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            ledger.start_session({})
            ledger.checkpoint(20, "step-00000020", "0" * 64)
            ledger.close("finished")
    before = shared.read()
    with _open(run, shared) as ledger:
        if crash == "close":
            assert not before.closed
            assert shared.read().closed == {ledger.key_commitment}
        else:
            ledger.start_session({})
            ledger.checkpoint(20, "step-00000020", "0" * 64)
            assert shared.read().positions[ledger.key_commitment] == ledger.position()


@pytest.mark.parametrize("written", [False, True])
def test_a_crash_inside_the_shared_record_blocks_nobody(shared, tmp_path, monkeypatch, session, written):
    """Torn, or whole but not acknowledged."""
    real = os.write

    def torn(descriptor, data):
        if b'"type":"at"' in data:
            real(descriptor, data if written else data[:40])
            raise KeyboardInterrupt
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", torn)
    with pytest.raises(KeyboardInterrupt):
        session.checkpoint(5, "step-00000005", "0" * 64)
    monkeypatch.undo()
    session.release()
    with _open(tmp_path / "run", shared) as ledger:
        ledger.start_session({})
        _steps(ledger, 6, 6)


def test_a_shared_ledger_that_cannot_be_reached_stops_the_step_before_its_charge(shared, session):
    charged = session.num_charged
    shared.path.rename(shared.path.with_name("elsewhere"))
    with pytest.raises(PrivacyStateRefused, match="cannot use the shared ledger: No such file"):
        _steps(session, 6, 6)
    assert session.num_charged == charged
    shared.path.with_name("elsewhere").rename(shared.path)
    _steps(session, 6, 6)


def test_where_nobody_else_writes_a_step_costs_one_look(shared, monkeypatch, session):
    monkeypatch.setattr(SharedLedger, "locked", _crash)
    _steps(session, 6, 20)


def test_contract_12_what_is_noted_of_a_step_carries_no_time_of_its_own(shared, session):
    session.checkpoint(5, "step-00000005", "0" * 64)
    session.close("finished")
    records = [json.loads(line) for line in shared.path.read_text().splitlines()]
    assert [record["type"] for record in records] == ["open", "reserve", "start", "at", "close"]
    assert {record["time_utc"] for record in records[1:]} == {session.state.opened["time_utc"]}
