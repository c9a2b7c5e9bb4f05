"""Ledger, mirror and record of attempts together: no cut lowers epsilon. What a crash leaves of them is in tests/crashes."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privacy.errors import BudgetSpent, PrivacyStateRefused
from privacy.ledger.attempts import (
    LedgerMark,
    MembersRecord,
    ledger_gap,
    read_lines,
    record_gap,
)
from privacy.ledger.chain import hash_line
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerState, read_ledger
from privacy.ledger.run_state import open_run_state
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest
from privacy.run.run_ledger import RunLedger
from privacy.sampling.keys import SamplingKey
from privacy.step.batches import StepBatch
from tests.privacy.ledger_files import rechained

LEDGER, MIRROR, MEMBERS, KEY = "ledger.jsonl", "mirror.jsonl", "members.jsonl", "sampling.key"
FILES = (LEDGER, MIRROR, MEMBERS, KEY, "sampling.key.staged")
State = dict[str, bytes]

pytestmark = pytest.mark.usefixtures("one_rank")


def plan(**changed: Any) -> PrivacyPlan:
    fields = {
        "num_examples": 2000,
        "expected_batch_size": 100,
        "num_steps": 6,
        "noise_multiplier": 4.0,
        "max_grad_norm": 0.7,
        "target_delta": 1e-5,
        "reserved_attempts": 8,
        "sensitivity_slack": 1e-4,
    }
    return make_plan(PlanRequest(**fields | changed))


PLAN = plan()


def opened(folder: Path, own: PrivacyPlan, *, mirrored: bool) -> tuple[Ledger, SamplingKey]:
    mirror = folder / MIRROR if mirrored else None
    return open_run_state(
        folder / LEDGER,
        folder / KEY,
        own,
        data_manifest=b"data",
        mirror=mirror,
        members=folder / MEMBERS,
    )


def session(folder: Path, own: PrivacyPlan, *numbers: int, mirrored: bool, dies: str = "") -> None:
    """One start of the program, which ends after its last step, or in it: `dies` names what that step does not reach."""
    ledger, key = opened(folder, own, mirrored=mirrored)
    with ledger:
        run = RunLedger(ledger, key, own, members=folder / MEMBERS)
        run.start_session()
        for step in numbers:
            last = step == numbers[-1]
            run.note(
                StepBatch(step, np.arange(step), np.zeros((step, 2), np.uint64), 1),
                micro_batch_size=40,
            )
            if last and dies == "intent":
                break
            run.intent(
                step,
                releases=[release_of_step(own.noise_multiplier, own.max_grad_norm)],
            )
            if last and dies == "done":
                break
            run.done(step)
            if step % 2 == 0:
                run.checkpoint(step, f"step-{step}", "cd" * 32)


def put(folder: Path, state: State) -> Path:
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
        if name in state:
            (folder / name).write_bytes(state[name])
            (folder / name).chmod(0o600)
    return folder


def whole_run(folder: Path, *, mirrored: bool) -> State:
    """What a run of five starts with every kind of end leaves on the disk."""
    folder.mkdir()
    session(folder, PLAN, 1, 2, 3, mirrored=mirrored, dies="intent")
    session(folder, PLAN, 3, 4, mirrored=mirrored, dies="done")
    session(folder, PLAN, 4, mirrored=mirrored, dies="intent")
    session(folder, PLAN, 4, 5, mirrored=mirrored)
    session(folder, PLAN, 5, 6, mirrored=mirrored)
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open hundreds of ledgers."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, marks=pytest.mark.full), True],
    ids=["alone", "mirrored"],
)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_rank: object
) -> Any:
    folder = tmp_path_factory.mktemp("run") / "run"
    return request.param, whole_run(folder, mirrored=request.param)


def charged_or_refused(folder: Path, *, mirrored: bool) -> int | str:
    """What an opened ledger charges, or the one line that refuses it."""
    try:
        with opened(folder, PLAN, mirrored=mirrored)[0] as ledger:
            return ledger.num_charged
    except PrivacyStateRefused as error:
        assert "\n" not in str(error)  # noqa: PT017
        return str(error)


def test_contract_9_a_cut_ledger_is_refused_or_charges_as_much(
    run: Any, tmp_path: Path, no_fsync: None
) -> None:
    """At every line, with any of mirror and record removed; the key is kept, since nothing goes on without it."""
    mirrored, whole = run
    lines = whole[LEDGER].splitlines(keepends=True)
    charged, refused = 0, 0
    folder = put(tmp_path / "honest", whole)
    with opened(folder, PLAN, mirrored=mirrored)[0] as ledger:
        charged = ledger.num_charged
    for kept, removed in itertools.product(
        range(len(lines)), [(), (MIRROR,), (MEMBERS,), (MIRROR, MEMBERS)]
    ):
        for torn in (b"", lines[kept][:30]):
            cut = whole | {LEDGER: b"".join(lines[:kept]) + torn}
            if MIRROR not in removed and mirrored:
                cut |= {MIRROR: cut[LEDGER]}  # rolled back with it
            folder = put(
                tmp_path / "cut", {name: data for name, data in cut.items() if name not in removed}
            )
            found = charged_or_refused(folder, mirrored=mirrored)
            assert isinstance(found, str) or found >= charged, (kept, removed)
            refused += isinstance(found, str)
    assert refused > 3 * len(lines)


def wrong_attempts(
    state: LedgerState, before: list[LedgerMark], after: list[LedgerMark]
) -> str | None:
    """What the audit says of a ledger and of the record as it was before and after it."""
    return ledger_gap(before, state) or record_gap(state, after)


def test_the_audit_finds_every_cut_that_takes_a_session_a_charge_or_a_checkpoint(
    run: Any, tmp_path: Path
) -> None:
    """The ledger alone is cut, so that no checkpoint contradicts it; private/ is kept."""
    _, whole = run
    record = list(read_lines(put(tmp_path / "run", whole) / MEMBERS))
    lines = whole[LEDGER].splitlines(keepends=True)
    kinds = [json.loads(line)["type"] for line in lines]
    last = max(
        number for number, kind in enumerate(kinds) if kind in ("session", "intent", "checkpoint")
    )
    for kept in range(2, last + 1):
        (tmp_path / "run" / LEDGER).write_bytes(b"".join(lines[:kept]))
        check = wrong_attempts(read_ledger(tmp_path / "run" / LEDGER), record, record)
        assert check is not None, kept


def test_any_line_of_the_record_that_is_lost_is_refused_where_a_charge_needs_it(
    run: Any, tmp_path: Path, no_fsync: None
) -> None:
    mirrored, whole = run
    lines = whole[MEMBERS].splitlines(keepends=True)
    intents = {
        intent.seq: intent for intent in read_ledger(put(tmp_path / "a", whole) / LEDGER).intents
    }
    for index, line in enumerate(lines):
        fields = json.loads(line)
        needed = "step" in fields and fields["seq"] + 1 in intents
        folder = put(
            tmp_path / "b", whole | {MEMBERS: b"".join(lines[:index] + lines[index + 1 :])}
        )
        found = charged_or_refused(folder, mirrored=mirrored)
        assert needed == (isinstance(found, str) and "no record of their attempt" in found)


def test_a_second_attempt_without_a_charge_in_one_session_is_refused(
    run: Any, tmp_path: Path
) -> None:
    mirrored, whole = run
    folder = put(tmp_path / "run", whole)
    record = [line for line in read_lines(folder / MEMBERS) if isinstance(line, MembersRecord)][-1]
    position = {
        "seq": len(whole[LEDGER].splitlines()) - 1,
        "hash": hash_line(whole[LEDGER].splitlines()[-1]),
    }
    with (folder / MEMBERS).open("a") as file:
        file.write(replace(record, step=record.step + 1, **position).line())
    opened(folder, PLAN, mirrored=mirrored)[0].release()
    with (folder / MEMBERS).open("a") as file:
        file.write(replace(record, step=record.step + 2, **position).line())
    with pytest.raises(PrivacyStateRefused, match="lacks or ended"):
        opened(folder, PLAN, mirrored=mirrored)
    before = list(read_lines(folder / MEMBERS))
    assert wrong_attempts(read_ledger(folder / LEDGER), before, before)


def test_a_record_without_its_ledger_is_refused(run: Any, tmp_path: Path) -> None:
    mirrored, whole = run
    folder = put(tmp_path / "run", {MEMBERS: whole[MEMBERS]})
    with pytest.raises(PrivacyStateRefused, match="the ledger that charged them is gone"):
        opened(folder, PLAN, mirrored=mirrored)


def test_contract_10_a_ledger_written_anew_with_more_noise_in_plan_and_intents_is_refused(
    tmp_path: Path,
) -> None:
    """In itself the forged ledger is legal, and its epsilon lower; the record of attempts names other lines."""
    (tmp_path / "run").mkdir()
    session(tmp_path / "run", PLAN, 1, 2, mirrored=False)
    records = [json.loads(line) for line in (tmp_path / "run" / LEDGER).read_bytes().splitlines()]
    honest = read_ledger(tmp_path / "run" / LEDGER).epsilon()
    for stated in (
        records[0]["plan"],
        *(release for record in records for release in record.get("releases", ())),
    ):
        stated["std" if "std" in stated else "noise_multiplier"] *= 1.5
    (tmp_path / "run" / LEDGER).write_bytes(rechained(records))
    forged = read_ledger(tmp_path / "run" / LEDGER)
    lower = forged.epsilon()
    assert lower is not None and honest is not None and lower < honest
    with pytest.raises(PrivacyStateRefused, match="rolled back or replaced"):
        opened(tmp_path / "run", forged.plan, mirrored=False)
    record = list(read_lines(tmp_path / "run" / MEMBERS))
    assert wrong_attempts(forged, record, record)


def test_an_intent_beyond_the_budget_is_recorded_and_never_charged(tmp_path: Path) -> None:
    """The record of an attempt comes before its intent, which is refused: the next start accepts that."""
    own = plan(num_steps=2, reserved_attempts=0)
    (tmp_path / "run").mkdir()
    session(tmp_path / "run", own, 1, 2, mirrored=False)
    with pytest.raises(BudgetSpent):
        session(tmp_path / "run", own, 2, mirrored=False)
    opened(tmp_path / "run", own, mirrored=False)[0].release()
