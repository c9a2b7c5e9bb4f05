"""A data owner's ledger over several runs, and the copies of a run that meet in it."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from privacy.accounting.accountants import (
    ReleaseGroup,
    epsilon,
    filter_order,
    filtered_epsilon,
    total_epsilon,
)
from privacy.errors import BudgetSpent, PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest

ROOT = Path(__file__).resolve().parents[2]
DELTA = 1e-5


def _plan(sigma=2.0, **changes):
    own = {
        "num_examples": 3000,
        "expected_batch_size": 60,
        "num_steps": 60,
        "noise_multiplier": sigma,
    }
    return make_plan(PlanRequest(**own | {"target_delta": DELTA, "cap": None} | changes))


def _open(folder, shared, plan=None, **terms):
    folder.mkdir(exist_ok=True)
    joined = None if shared is None else SharedTerms(shared.path, folder.name, **terms)
    return open_run_state(
        folder / "ledger.jsonl",
        folder / "sampling.key",
        plan or _plan(),
        data_manifest=b"x",
        shared=joined,
    )[0]


def _reserve(shared, run, name, plan=None, **terms):
    with shared.reserving(run, name, plan or _plan(), **terms):
        pass


@pytest.fixture
def shared(tmp_path):
    return SharedLedger.create(tmp_path / "owner.jsonl", epsilon=2.0, delta=DELTA)


def test_runs_fixed_in_advance_compose_by_pld(shared, tmp_path):
    group = _plan().release_group(_plan().max_intents)
    for number in range(1, 4):
        _open(tmp_path / f"run{number}", shared, fixed_in_advance=True).release()
        assert shared.read().epsilon() == pytest.approx(
            epsilon([group.times(number * group.count)], DELTA), rel=1e-4
        )
    assert shared.summary()["accounting"] == "pld"


def test_a_run_chosen_after_outputs_goes_through_the_rdp_filter(shared, tmp_path):
    _open(tmp_path / "a", shared).release()
    before = shared.read().epsilon()
    _open(tmp_path / "b", shared).release()
    state, group = shared.read(), _plan().release_group(62)
    assert state.epsilon() == filtered_epsilon(
        [group, group],
        state.opened["delta"] - 2 * _plan().noise_tail_delta,
        state.rdp_order(group),
        2.0,
    )
    assert state.epsilon() > epsilon([group.times(124)], DELTA) > before
    rows = shared.summary(next(iter(state.reservations)))["runs"]
    assert [(row["name"], row["is_this_run"], row["chosen_after_outputs"]) for row in rows] == [
        ("a", True, False),
        ("b", False, True),
    ]
    assert rows[0]["epsilon"] == rows[1]["epsilon"] == pytest.approx(_plan().epsilon_with_reserve)


def test_the_order_of_the_filter_is_that_of_the_first_run(shared, tmp_path):
    """One that suited a later run would follow from what was seen."""
    plans = [_plan(1.0), _plan(8.0)]
    groups = [plan.release_group(plan.max_intents) for plan in plans]
    for number, plan in enumerate(plans):
        _open(tmp_path / f"run{number}", shared, plan).release()
    state, left = shared.read(), DELTA - sum(plan.noise_tail_delta for plan in plans)
    first, later = (filtered_epsilon(groups, left, state.rdp_order(group), 2.0) for group in groups)
    assert state.epsilon() == first != later


def test_the_filter_stays_for_runs_that_were_fixed_in_advance(shared, tmp_path):
    """PLD does not cover runs of which one was chosen after outputs of another."""
    plan = _plan(6.0)
    group = plan.release_group(plan.max_intents)
    for name, is_fixed in (("a", True), ("b", False), ("c", True)):
        _open(tmp_path / name, shared, plan, fixed_in_advance=is_fixed).release()
    state = shared.read()
    assert [entry.adaptive for entry in state.reservations.values()] == [False, True, False]
    by_filter = filtered_epsilon([group] * 3, DELTA, state.rdp_order(group), 2.0)
    assert state.epsilon() == by_filter > epsilon([group.times(3 * group.count)], DELTA)
    assert shared.summary()["accounting"] == "rdp_filter"


def test_no_room_is_exit_3_and_never_fitting_exit_2(shared, tmp_path):
    with pytest.raises(PrivacyConfigError, match="never fits"):
        _open(tmp_path / "huge", shared, _plan(0.5))
    number = 0
    with pytest.raises(BudgetSpent, match="would be reserved") as refused:  # noqa: PT012
        for number in range(20):
            _open(tmp_path / f"run{number}", shared, _plan(0.95), fixed_in_advance=True).release()
    assert refused.value.exit_code == 3
    assert 2 <= number < 20 and shared.read().epsilon() <= 2.0
    assert len(shared.read().reservations) == number
    # The refused runs have no ledger. They can be tried again; where nothing has changed, they are refused again.
    with pytest.raises(BudgetSpent):
        _open(tmp_path / f"run{number}", shared, _plan(0.95), fixed_in_advance=True)
    for name in ("huge", f"run{number}"):
        assert not (tmp_path / name / "ledger.jsonl").exists()
    _open(tmp_path / "huge", shared, _plan(50.0), fixed_in_advance=True).release()


def test_what_is_refused_leaves_a_torn_line_to_the_next_that_writes(tmp_path):
    shared = SharedLedger.create(
        tmp_path / "owner.jsonl", epsilon=2.0, delta=DELTA, mirror=tmp_path / "mirror.jsonl"
    )
    files = shared.path, tmp_path / "mirror.jsonl"
    with _open(tmp_path / "run", shared) as ledger:
        ledger.start_session({})
    with shared.path.open("ab") as file:
        file.write(b'{"seq":9,"type":"reserve"')
    before = [path.read_bytes() for path in files]
    for name, plan in (
        ("run", _plan(9.0)),
        ("new", _plan(0.5)),
        ("new", _plan(1.05)),
        ("new", _plan(sampling="shuffle")),
    ):
        with pytest.raises((PrivacyConfigError, BudgetSpent)):
            _open(tmp_path / name, shared, plan)
    _open(
        tmp_path / "run", shared
    ).release()  # writes no line, and may be refused by what comes after
    assert [path.read_bytes() for path in files] == before
    _open(tmp_path / "new", shared, _plan(20.0)).release()
    assert (
        shared.path.read_bytes() == files[1].read_bytes()
        and shared.path.read_bytes().count(b" #torn\n") == 1
    )
    assert len(shared.read_unlocked().reservations) == 2


def test_a_resume_reserves_once_and_cannot_change_its_terms(shared, tmp_path):
    for _ in range(3):
        with _open(tmp_path / "run", shared) as ledger:
            ledger.start_session({})
    assert len(shared.read().reservations) == 1
    with pytest.raises(PrivacyConfigError, match="not the shared ledger"):
        _open(tmp_path / "run", None)
    other = SharedLedger.create(tmp_path / "other.jsonl", epsilon=2.0, delta=DELTA)
    with pytest.raises(PrivacyConfigError, match="not the shared ledger"):
        _open(tmp_path / "run", other)


def test_budgets_that_make_no_sense_are_refused(tmp_path):
    for epsilon_, delta in ((0.0, DELTA), (math.inf, DELTA), (1.0, 1.0)):
        with pytest.raises(PrivacyConfigError):
            SharedLedger.create(tmp_path / "bad.jsonl", epsilon=epsilon_, delta=delta)


def test_the_filter_bounds_pld_from_above_and_counts_everything():
    group = _plan().release_group(60)
    order = filter_order(group, 2.0, DELTA)
    for runs in ([group], [group, group.times(10)]):
        by_filter = total_epsilon(runs, DELTA, adaptive=True, order=order, ceiling=2.0)
        assert (
            total_epsilon(runs, DELTA, adaptive=False, order=order, ceiling=2.0)
            < by_filter
            < math.inf
        )
    assert total_epsilon([], DELTA, adaptive=True, order=order, ceiling=2.0) == 0
    silent = _plan(0.0, sampling="poisson").release_group(1)
    assert filtered_epsilon([silent], DELTA, order, 2.0) == math.inf
    capped = make_plan(
        PlanRequest(
            num_examples=3000, expected_batch_size=60, num_steps=60, noise_multiplier=2.0, cap=70
        )
    )
    assert filtered_epsilon([capped.release_group(60)], DELTA, order, 2.0) == math.inf
    # Small noise at a small rate: above a low order nothing would be amplified any more.
    small = ReleaseGroup(0.008, 1.0, 24)
    assert (
        total_epsilon(
            [small] * 2, DELTA, adaptive=True, order=filter_order(small, 4.0, DELTA), ceiling=4.0
        )
        < 4
    )
    assert filter_order(small, 8.0, DELTA) < filter_order(ReleaseGroup(1.0, 10.0, 1), 2.0, DELTA)


def test_runs_without_a_guarantee_are_counted_where_the_owner_permits_them(shared, tmp_path):
    """One by one: what is deleted and trained anew under its name has read the data twice."""
    simulated = _plan(informal_reasons=("TAN simulation",))
    with pytest.raises(
        PrivacyConfigError, match="without a formal guarantee cannot reserve: TAN simulation"
    ):
        _open(tmp_path / "run", shared, simulated)
    open_minded = SharedLedger.create(
        tmp_path / "open.jsonl", epsilon=2.0, delta=DELTA, informal_runs=True
    )
    for attempt in range(2):
        for _ in range(2):  # a resume is the same run
            with _open(tmp_path / "simulated", open_minded, simulated) as ledger:
                ledger.start_session({})
        assert len(open_minded.summary()["informal_runs"]) == attempt + 1
        shutil.rmtree(tmp_path / "simulated")
    assert (
        open_minded.summary()["informal_runs"]
        == [{"name": "simulated", "reason": "TAN simulation"}] * 2
    )
    assert open_minded.summary()["epsilon_reserved"] == 0


def test_cut_off_lines_are_missed_by_the_runs_that_saw_them_and_by_the_mirror(shared, tmp_path):
    mirrored = SharedLedger.create(
        tmp_path / "second.jsonl", epsilon=2.0, delta=DELTA, mirror=tmp_path / "elsewhere.jsonl"
    )
    for owner, folder in ((shared, tmp_path / "a"), (mirrored, tmp_path / "b")):
        with _open(folder, owner) as ledger:
            ledger.start_session({})
        whole = owner.path.read_bytes()
        owner.path.write_bytes(whole.splitlines(keepends=True)[0])  # without the reservation
        with pytest.raises(PrivacyStateRefused, match="rolled back") as refused:
            _open(folder, owner)
        assert refused.value.exit_code == 4
        if owner is mirrored:
            with pytest.raises(PrivacyStateRefused, match=r"mirror is longer .* rolled back"):
                _open(tmp_path / "new", owner)  # also for a run that has seen nothing
        owner.path.write_bytes(whole)
        with _open(folder, owner) as ledger:
            ledger.start_session({})
    assert mirrored.path.read_bytes() == (tmp_path / "elsewhere.jsonl").read_bytes()
    with pytest.raises(PrivacyConfigError, match="a mirror of a new shared ledger is a new file"):
        SharedLedger.create(
            tmp_path / "third.jsonl", epsilon=2.0, delta=DELTA, mirror=tmp_path / "elsewhere.jsonl"
        )


def test_a_mirror_is_another_file_in_a_folder_that_is_there(tmp_path):
    path, terms = tmp_path / "owner.jsonl", {"epsilon": 1.0, "delta": DELTA}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone/file")
    for name in ("owner.jsonl", "./owner.jsonl", "gone/mirror.jsonl", "pipe", "nowhere", "."):
        with pytest.raises(PrivacyConfigError) as refused:
            SharedLedger.create(path, **terms, mirror=tmp_path / name)
        assert "\n" not in str(refused.value) and sorted(os.listdir(tmp_path)) == [
            "nowhere",
            "pipe",
        ], name
    SharedLedger.create(path, **terms)
    with pytest.raises(PrivacyConfigError, match="exists already; to see it: "):
        SharedLedger.create(path, **terms, mirror=tmp_path / "mirror.jsonl")
    assert not (tmp_path / "mirror.jsonl").exists()


def test_a_grid_is_fixed_once_a_run_of_it_has_begun(shared):
    first, second = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}
    assert shared.freeze_grid("", first, has_runs=True) == {}
    assert shared.freeze_grid("", first, has_runs=False) == first
    assert shared.freeze_grid("", second, has_runs=False) == second
    _reserve(shared, "a" * 64, "a", _plan(), fixed_in_advance=True)
    assert shared.freeze_grid("", first, has_runs=False) == second
    # Deleted and trained anew, or outside of the grid, whatever is said of it: what came of the others has been seen.
    for run, name in (("b", "b"), ("c", "b"), ("d", "z")):
        _reserve(shared, run * 64, name, _plan(), fixed_in_advance=True)
    assert [run["chosen_after_outputs"] for run in shared.summary()["runs"]] == [
        False,
        False,
        True,
        True,
    ]


def test_each_study_on_an_owner_s_ledger_has_its_own_grid(shared):
    _reserve(shared, "a" * 64, "a", _plan())
    for study, point in (("one", "b"), ("other", "c")):
        assert shared.freeze_grid(study, {point: "1"}, has_runs=False) == {point: "1"}
    _reserve(shared, "b" * 64, "b", _plan(), fixed_in_advance=True)
    assert shared.freeze_grid("one", {"b": "2"}, has_runs=False) == {"b": "1"}
    assert shared.freeze_grid("other", {"c": "2"}, has_runs=False) == {"c": "2"}
    assert [run["chosen_after_outputs"] for run in shared.summary()["runs"]] == [False, False]


# Copies and backups of a run folder, which must not spend what one run reserved

SHORT = _plan(num_steps=20)


def _steps(ledger, first, last):
    for step in range(first, last + 1):
        attempt = ledger.state.attempts[step]
        ledger.intent(step, attempt, [release_of_step(2.0, 1.0)])
        ledger.done(step, attempt)


@pytest.fixture
def session(shared, tmp_path):
    with _open(tmp_path / "run", shared, SHORT) as ledger:
        ledger.start_session({})
        _steps(ledger, 1, 5)
        yield ledger


def test_a_copied_run_folder_cannot_go_on_beside_the_original(shared, tmp_path):
    with _open(tmp_path / "run", shared, SHORT) as ledger:
        ledger.start_session({})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with _open(tmp_path / "run", shared, SHORT) as ledger:
        ledger.start_session({})
    with pytest.raises(PrivacyStateRefused, match="another copy"):
        _open(tmp_path / "copy", shared, SHORT)
    _open(tmp_path / "run", shared, SHORT).release()


@pytest.mark.parametrize("end", ["checkpoint", "close"])
def test_a_copy_made_during_a_session_is_refused_once_the_original_went_on(
    shared, tmp_path, session, end
):
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    _steps(session, 6, 20)
    if end == "checkpoint":
        session.checkpoint(20, "step-00000020", "0" * 64)
    else:
        session.close("finished")
    session.release()
    with pytest.raises(PrivacyStateRefused, match="another copy of this run went on") as refused:
        _open(tmp_path / "backup", shared, SHORT)
    assert refused.value.exit_code == 4
    with _open(tmp_path / "run", shared, SHORT) as again:
        assert again.num_charged == 20


def test_the_original_stops_when_a_copy_has_taken_its_budget_over(shared, tmp_path, session):
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with _open(tmp_path / "copy", shared, SHORT) as copy:
        copy.start_session({})
        lines = session.path.read_bytes()
        with pytest.raises(PrivacyStateRefused, match="another copy") as refused:
            _steps(session, 6, 6)
        assert refused.value.exit_code == 4
        assert session.path.read_bytes() == lines  # stopped before the charge
        for late in (
            lambda: session.checkpoint(5, "step-00000005", "0" * 64),
            lambda: session.close("finished"),
        ):
            with pytest.raises(PrivacyStateRefused, match="another copy"):
                late()
        _steps(copy, 6, 20)
        copy.close("finished")
    assert shared.read().closed == {copy.state.opened["key_commitment"]}


def test_a_session_whose_start_was_cut_off_stops(shared, session):
    lines = shared.path.read_bytes().splitlines(keepends=True)
    shared.path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(PrivacyStateRefused, match="or the file was rolled back"):
        _steps(session, 6, 6)
    assert session.num_charged == 5


def test_a_shared_ledger_that_cannot_be_reached_stops_the_step_before_its_charge(shared, session):
    charged = session.num_charged
    shared.path.rename(shared.path.with_name("elsewhere"))
    with pytest.raises(PrivacyStateRefused, match="cannot use the shared ledger: No such file"):
        _steps(session, 6, 6)
    assert session.num_charged == charged
    shared.path.with_name("elsewhere").rename(shared.path)
    _steps(session, 6, 6)


def test_where_nobody_else_writes_a_step_costs_one_look(shared, monkeypatch, session):
    monkeypatch.setattr(SharedLedger, "locked", lambda self: pytest.fail("the file was read"))
    _steps(session, 6, 20)


def test_contract_12_what_is_noted_of_a_step_carries_no_time_of_its_own(shared, session):
    session.checkpoint(5, "step-00000005", "0" * 64)
    session.close("finished")
    records = [json.loads(line) for line in shared.path.read_text().splitlines()]
    assert [record["type"] for record in records] == ["open", "reserve", "start", "at", "close"]
    assert {record["time_utc"] for record in records[1:]} == {session.state.opened["time_utc"]}
