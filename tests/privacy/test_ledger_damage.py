"""Ledgers that were edited, cut, reordered, torn by a crash or forged, disks that fail, and the mirror in a second place.

Where a damaged file can be read alone, the library's reader and verify.py are both asked. What a crash leaves behind any single
write is in tests/crashes.
"""

import copy
import errno
import json
import os
import shutil
import threading
from dataclasses import replace

import pytest

import privacy.ledger.ledger
from privacy import verify
from privacy.errors import PrivacyStateRefused
from privacy.ledger.chain import TORN_MARK, encode_line, read_chain
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerState, read_ledger
from privacy.ledger.shared import SharedLedger
from privacy.ledger.shared_records import SharedState
from privacy.plan.numbers import make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest
from tests.privacy.ledger_files import (
    ENVIRONMENT,
    NUMBERS,
    PLAN,
    RELEASE,
    create,
    open_fields,
    rechained,
    refused,
    take_step,
    written,
)

VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    10**400,
    0.5,
    -0.5,
    1.5,
    1e308,
    -1e308,
    "",
    "x",
    "00" * 32,
    "00" * 16,
    "FF" * 32,
    [],
    [[]],
    [1],
    ["x"],
    {},
    {"a": 1},
    {"name": "x"},
)
FREE = {"environment", "head"}
"""Objects whose content is nobody's business here."""
MAY_LACK = {
    "data_hmac",
    "commit",
    "accountant",
    "unit",
    "shared_ledger",
    "max_examples_per_owner",
    "restarted_from_step_0",
    "informal_runs",
    "mirror",
    "noise_kind",  # ledgers of version 0.1 lack it
}
OPTIONAL = {
    "target_epsilon",
    "cap",
    "shared_ledger",
    "max_examples_per_owner",
    "num_examples",
}


def require_both_refuse(path, match=r"line \d+: "):
    """Library and verify.py, each naming the line in one sentence."""
    refused(path, match)
    with pytest.raises(verify.Violated, match=match) as error:
        verify.read_ledger(path)
    assert "\n" not in str(error.value)


def test_every_edited_byte_is_refused(tmp_path):
    path = written(tmp_path, steps=1)
    data = path.read_bytes()
    for position in range(0, len(data) - 1, 3):
        changed = bytearray(data)
        changed[position] ^= 0x01
        path.write_bytes(bytes(changed))
        for read, error in (
            (read_ledger, PrivacyStateRefused),
            (verify.read_ledger, verify.Violated),
        ):
            try:
                read(path)
            except error:
                continue
            # The last line has no successor: only a checkpoint's manifest or the mirror can hold it (tested below).
            assert data.count(b"\n", position) == 1, f"byte {position}"


def test_removed_reordered_duplicated_and_inserted_lines_are_refused(tmp_path):
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for index in range(len(lines)):
        variants = [lines[: index + 1] + lines[index:], [*lines[:index], b"\n", *lines[index:]]]
        if index < len(lines) - 1:
            swapped = [*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]]
            variants += [
                lines[:index] + lines[index + 1 :],
                swapped,
                [*lines[:index], b"{}\n", *lines[index:]],
            ]
        for variant in variants:
            path.write_bytes(b"".join(variant))
            require_both_refuse(path)


def test_non_canonical_lines_are_refused(tmp_path):
    path = written(tmp_path, steps=0)
    line = path.read_bytes().splitlines(keepends=True)[0]
    for content in (
        line.replace(b":0,", b": 0,", 1),
        line[:-2] + b" }\n",
        b" " + line,
        line.replace(b"\n", b"\r\n"),
        b"",
        b"\n",
        b"garbage\n",
        b"[1]\n",
        b'"text"\n',
        b"NaN\n",
        line[:-1],
        b"\xff\xfe\n",
        b"x" + TORN_MARK + b"\n",
        line.replace(b'"format":1', b'"format":1,"format":1'),
        b"[" * 100_000 + b"]" * 100_000 + b"\n",
    ):
        path.write_bytes(content)
        require_both_refuse(path, "line 1: ")


def test_rollback_is_refused_by_what_a_checkpoint_remembers(tmp_path):
    path = written(tmp_path)
    with Ledger.open(path) as ledger:
        seq, digest = ledger.position()
        ledger.require_not_shorter_than(seq, digest)
        ledger.start_session(ENVIRONMENT)
        ledger.require_not_shorter_than(seq, digest)
        newest = ledger.position()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    with Ledger.open(path) as ledger:
        with pytest.raises(PrivacyStateRefused, match="rolled back"):
            ledger.require_not_shorter_than(*newest)
        ledger.start_session(ENVIRONMENT)  # a fork: same length, another session
        with pytest.raises(PrivacyStateRefused, match="not the one"):
            ledger.require_not_shorter_than(*newest)


# Torn lines


def _last_line_kinds(tmp_path):
    """(type, bytes of the ledger, charges without its last line) of ledgers whose last line is of each type."""
    ledger, cases, charged = create(tmp_path), [], 0
    for write in (
        lambda: ledger.start_session(ENVIRONMENT),
        lambda: ledger.intent(1, 0, [RELEASE]),
        lambda: ledger.done(1, 0),
        lambda: ledger.checkpoint(1, "step-00000001", "cd" * 32),
        lambda: ledger.close("stopped"),
    ):
        write()
        data = ledger.path.read_bytes()
        kind = json.loads(data.splitlines()[-1])["type"]
        cases.append((kind, data, charged))
        charged = ledger.num_charged
    ledger.release()
    return ledger.path, cases


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
def test_contract_9_torn_writes_at_every_byte_of_the_last_line(every, tmp_path, no_fsync):
    path, cases = _last_line_kinds(tmp_path)
    for kind, data, charged_before in cases:
        start = data.rindex(b"\n", 0, -1) + 1
        # Whatever its bytes: it is charged where an intent could have been written, which is not so before `session` and `done`.
        charged = charged_before + (kind not in ("session", "done"))
        for end in (*range(start + 1, len(data) - 1, every), len(data) - 1):
            path.write_bytes(data[:end])
            assert read_ledger(path).num_charged == verify.read_ledger(path).charged() == charged, (
                kind,
                end - start,
            )
            with Ledger.open(path) as ledger:
                assert ledger.num_charged == charged
                ledger.start_session(ENVIRONMENT)
                step = ledger.state.last_done_step + 1
                ledger.intent(step, ledger.state.attempts[step], [RELEASE])
            # Nothing that was on the disk has changed, and the whole verifies again.
            content = path.read_bytes()
            assert content.startswith(data[:end] + TORN_MARK + b"\n")
            with Ledger.open(path) as ledger:
                assert ledger.num_charged == charged + 1
            assert path.read_bytes() == content


def test_contract_9_an_edited_last_line_forgets_no_charge(tmp_path, no_fsync):
    """Its bytes may be those of any record, with or without its newline or the mark of a torn line, or those of none."""
    with create(tmp_path) as ledger:
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 1)
        ledger.intent(2, 0, [RELEASE])
    path = ledger.path
    data = path.read_bytes()
    start = data.rindex(b"\n", 0, -1) + 1
    line, kinds = data[start:-1], (b"session", b"done", b"checkpoint", b"repair", b"open", b"close")
    others = [line.replace(b'"intent"', b'"%s"' % kind) for kind in kinds]
    for torn in (
        *others,
        line,
        b"x",
        b"\0" * 99,
        b"\0" * 9 + line[9:],
        line[:30],
        b"d",
        b'{"seq":4,"type":"done"',
    ):
        for end in (b"", TORN_MARK, TORN_MARK + b"\n", b"\n"):
            path.write_bytes(data[:start] + torn + end)
            if end == b"\n" and torn not in (line, b"\0" * 99, b"\0" * 9 + line[9:]):
                require_both_refuse(path, "line 5: ")
                continue
            assert read_ledger(path).num_charged == verify.read_ledger(path).charged() == 2, (
                torn,
                end,
            )
            with Ledger.open(path) as ledger:
                assert ledger.num_charged == 2


def test_a_torn_line_where_the_budget_is_spent_or_no_step_remains_costs_nothing(tmp_path, no_fsync):
    """No intent can have been written there, so an honest crash never takes a run beyond its budget."""
    path = written(tmp_path, steps=6)
    path.write_bytes(path.read_bytes() + b"torn")
    assert read_ledger(path).num_charged == verify.read_ledger(path).charged() == 6
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
        for _ in range(4):
            ledger.intent(5, ledger.state.attempts[5], [RELEASE])
            ledger.start_session(ENVIRONMENT)
    assert ledger.num_charged == ledger.plan.max_intents == 10
    path.write_bytes(path.read_bytes() + b"torn")
    assert read_ledger(path).num_charged == verify.read_ledger(path).charged() == 10


@pytest.mark.parametrize("repeated", [(), (4,), (4, 5)])
def test_contract_9_a_torn_line_is_charged_where_done_steps_are_repeated(
    tmp_path, no_fsync, repeated
):
    """All steps were done once, and a session goes back: an intent can have been written there."""
    path = written(tmp_path, steps=6)
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
        for step in repeated:
            take_step(ledger, step)
        charged = ledger.num_charged
    path.write_bytes(path.read_bytes() + b"torn")
    assert read_ledger(path).num_charged == verify.read_ledger(path).charged() == charged + 1
    with Ledger.open(path) as ledger:
        assert ledger.num_charged == charged + 1


def test_only_the_exact_form_of_a_repair_is_accepted(tmp_path):
    path = written(tmp_path, steps=1)
    path.write_bytes(path.read_bytes() + b'{"seq":5,"type":"inte')
    Ledger.open(path).release()
    lines = path.read_bytes().splitlines(keepends=True)
    torn, repair = lines[-2:]
    record = json.loads(repair)
    header = [record.pop(name) for name in ("seq", "type", "time_utc", "previous")]

    def forged(**changes):
        return encode_line(*header, record | changes) + b"\n"

    other = (
        encode_line(
            header[0], "session", header[2], header[3], {"nonce": "00" * 16, "mirror": False}
        )
        + b"\n"
    )
    for variant in (
        [torn.replace(TORN_MARK, b""), repair],
        [torn.replace(b"inte", b"int"), repair],
        [torn, forged(charged=0)],
        [torn, forged(torn_lines=2)],
        [torn, torn, repair],
        [torn, repair, repair],
        [torn, other],
        [repair],
    ):
        path.write_bytes(b"".join([*lines[:-2], *variant]))
        require_both_refuse(path)
    path.write_bytes(
        b"".join([*lines[:-2], torn])
    )  # the crash between the torn line's end and its repair
    Ledger.open(path).release()


# Disks that fail, and the mirror


@pytest.mark.parametrize("failure", ["short", "enospc", "fsync"])
def test_full_disk_refuses_and_the_step_does_not_happen(tmp_path, monkeypatch, failure):
    path = written(tmp_path)
    ledger = Ledger.open(path)
    ledger.start_session(ENVIRONMENT)
    write = os.write

    def fail(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if failure == "short":
            patch.setattr(os, "write", lambda fd, data: write(fd, data[:37]))
        else:
            patch.setattr(os, "write" if failure == "enospc" else "fsync", fail)
        with pytest.raises(PrivacyStateRefused, match="cannot write the ledger"):
            ledger.intent(4, 0, [RELEASE])
    # The disk works again, but this process does not know what is on it.
    with pytest.raises(PrivacyStateRefused, match="no further records"):
        ledger.intent(4, 0, [RELEASE])
    ledger.release()
    with Ledger.open(path) as ledger:
        assert ledger.num_charged == 3 + (failure != "enospc")
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 4)


def test_file_changed_behind_our_back(tmp_path):
    path = written(tmp_path)
    with Ledger.open(path) as ledger:
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(PrivacyStateRefused, match="bytes where this process"):
            ledger.start_session(ENVIRONMENT)
    with Ledger.open(path) as ledger:
        shutil.copy(path, tmp_path / "copy")
        os.replace(tmp_path / "copy", path)
        with pytest.raises(PrivacyStateRefused, match="taken its name"):
            ledger.start_session(ENVIRONMENT)


def test_a_ledger_that_another_program_has_open_is_refused_after_some_patience(
    tmp_path, monkeypatch
):
    path = written(tmp_path)
    monkeypatch.setattr(privacy.ledger.ledger, "LOCK_PATIENCE", 0.1)
    with Ledger.open(path) as ledger:
        before = path.read_bytes()
        refused(path, match="another program has the ledger open")
        assert path.read_bytes() == before
        ledger.start_session(ENVIRONMENT)
    monkeypatch.setattr(privacy.ledger.ledger, "LOCK_PATIENCE", 30.0)
    ending = Ledger.open(path)
    threading.Timer(0.3, ending.release).start()
    Ledger.open(path).release()


def test_create_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    for name in ("write", "fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(
                os, name, lambda *_args: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
            )
            with pytest.raises(PrivacyStateRefused, match="cannot create"):
                Ledger.create(path, open_fields())
        assert not path.exists()
    Ledger.create(path, open_fields()).release()
    assert [item.name for item in tmp_path.iterdir()] == ["ledger.jsonl"]
    with pytest.raises(PrivacyStateRefused, match="never overwritten"):
        Ledger.create(path, open_fields())


def test_mirror_shorter_by_any_number_of_bytes_is_completed(tmp_path, no_fsync):
    mirror = tmp_path / "mirror.jsonl"
    path = written(tmp_path, steps=1, mirror=mirror)
    whole = path.read_bytes()
    assert mirror.read_bytes() == whole
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (*range(0, last, 50), *range(last, len(whole), 4), len(whole) - 1):
        half = (len(whole) - end) // 2
        for copied in (
            whole[:end],
            whole[:end] + bytes(half),
            whole[:end] + bytes(half) + whole[end + half :],
        ):
            mirror.write_bytes(copied)
            if (
                copied == whole or end >= last
            ):  # a crash may leave zeros where the last write had come to nothing
                Ledger.open(path, mirror).release()
                assert mirror.read_bytes() == whole
            else:
                refused(path, match="lacks more than the last line|differs from", mirror=mirror)
                assert mirror.read_bytes() == copied


def test_lines_that_were_added_behind_the_mirror_are_refused(tmp_path):
    """One line more is what a crash leaves; two are somebody else's."""
    mirror = tmp_path / "mirror.jsonl"
    path = written(tmp_path, steps=1, mirror=mirror)
    kept = path.read_bytes()
    with Ledger.open(path, mirror) as ledger:
        ledger.start_session(ENVIRONMENT)
        one = path.read_bytes()
        take_step(ledger, 2)
    two = path.read_bytes()
    mirror.write_bytes(kept)
    refused(path, match="the ledger's last lines are not its own", mirror=mirror)
    assert mirror.read_bytes() == kept and path.read_bytes() == two
    path.write_bytes(one)
    Ledger.open(path, mirror).release()
    assert mirror.read_bytes() == one


def test_mirror_longer_different_missing_or_left_out_is_refused(tmp_path):
    mirror = tmp_path / "mirror.jsonl"
    path = written(tmp_path)
    with Ledger.open(path, mirror) as ledger:  # which may be added later
        ledger.start_session(ENVIRONMENT)
    whole = path.read_bytes()
    assert mirror.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # the run folder was restored from an older copy
    refused(path, match="rolled back", mirror=mirror)
    path.write_bytes(whole[:-5])
    refused(path, match="is longer than", mirror=mirror)
    path.write_bytes(whole)
    mirror.write_bytes(whole.replace(b"abc", b"abd"))
    refused(path, match="differs from", mirror=mirror)
    refused(path, match="has had a mirror")
    mirror.unlink()
    refused(path, match="is gone", mirror=mirror)
    mirror.write_bytes(whole)
    path.unlink()
    with pytest.raises(PrivacyStateRefused, match="mirror without its ledger"):
        Ledger.create(path, open_fields(), mirror)


# Forgers, who make all numbers and hashes fit again


def drop(number):
    return lambda records: records.pop(number - 1)


def double(number):
    return lambda records: records.insert(number - 1, copy.deepcopy(records[number - 1]))


def swap(*pairs):
    def edit(records):
        for first, second in pairs:
            records[first - 1], records[second - 1] = records[second - 1], records[first - 1]

    return edit


def change(number, **fields):
    return lambda records: records[number - 1].update(fields)


def plan_of(**fields):
    return lambda records: records[0]["plan"].update(fields)


# Lines: 1 open, 2 session, 3 intent, 4 done, 5 intent, 6 session, 7 intent, 8 done, 9 intent, 10 done, 11 checkpoint, 12 close.
ILLEGAL = {
    "open dropped": (drop(1), "line 1: the first record"),
    "open doubled": (double(1), "line 2: the first record"),
    "session dropped": (drop(2), "line 2: .*outside of a session"),
    "session doubled": (double(2), "line 3: the session nonce was used before"),
    "intent dropped": (drop(3), "line 3: `done` without its intent"),
    "retry dropped": (drop(5), "line 6: attempt 1 of step 2"),
    "intent doubled": (double(3), "line 4: attempt 0 of step 1"),
    "done dropped": (drop(4), "line 4: step 2 .*while step 1 is not done"),
    "done doubled": (double(4), "line 5: `done` without its intent"),
    "done before intent": (swap((3, 4)), "line 3: `done` without its intent"),
    "steps swapped": (swap((7, 9), (8, 10)), "line 7: step 3 skips step 2"),
    "a checkpoint of a step to come": (swap((4, 11)), "line 4: a checkpoint of .*step.* not done"),
    "close doubled": (double(12), "line 13: a record after"),
    "close of fewer charges": (change(12, num_charged=3), "line 12: `close` states"),
    "close for no reason": (change(12, reason="tired"), "line 12: .*`close`"),
    "finished too early": (change(12, reason="finished"), None),
    "a record of no type": (change(4, type="repair"), "line 4: "),
    "an unknown record": (change(4, type="signature"), "line 4: unknown record type"),
    "another release": (change(5, releases=[{**RELEASE, "name": "weights"}]), "line 5: "),
    "more noise": (change(5, releases=[{**RELEASE, "std": 4.01}]), "line 5: gradient states"),
    "no release": (change(5, releases=[]), "line 5: an intent lists its releases"),
    "half of a character": (
        change(2, environment={"commit": "\ud800"}),
        "line 2: .*no.* ledger record",
    ),
    "a smaller rate": (plan_of(sample_rate=0.01), "line 1: "),
    "a smaller threshold": (plan_of(sampling_threshold="1"), "line 1: "),
    "a smaller batch": (plan_of(expected_batch_size=50), "line 1: "),
    "fewer steps": (plan_of(num_steps=2), "line 9: step"),
    "another adjacency": (plan_of(adjacency="replace_one"), "line 1: "),
    "a claim without grounds": (plan_of(enabled=False), "line 1: "),
}
"""Edits, and the line that both readers refuse; None where verify.py alone does."""


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_ledger_that_no_honest_program_writes_is_refused_by_both_readers(
    name, tmp_path, no_fsync
):
    with create(tmp_path) as ledger:
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 1)
        ledger.intent(2, 0, [RELEASE])
        ledger.start_session(ENVIRONMENT)
        for step in (2, 3):
            take_step(ledger, step)
        ledger.checkpoint(3, "step-00000003", "cd" * 32)
        ledger.close("stopped")
    edit, said = ILLEGAL[name]
    records = [json.loads(line) for line in ledger.path.read_bytes().splitlines()]
    edit(records)
    ledger.path.write_bytes(rechained(records))
    if said is not None:
        require_both_refuse(ledger.path, said)
    else:
        with pytest.raises(verify.Violated, match="line 12: the run finished after step 3"):
            verify.read_ledger(ledger.path)


@pytest.fixture
def run(tmp_path, no_fsync):
    """A run's ledger with a record of every type."""
    fields = open_fields() | {
        "data_hmac": "cd" * 32,
        "commit": "abc",
        "accountant": "dp 1",
        "unit": "one example",
        "shared_ledger": "ef" * 32,
        "max_examples_per_owner": 3,
    }
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, fields) as ledger:
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 1)
        ledger.checkpoint(1, "step-00000001", "cd" * 32)
    path.write_bytes(path.read_bytes() + b"torn")
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT, restarted=True)
        ledger.intent(1, 1, [RELEASE])
        ledger.done(1, 1)
        ledger.close("stopped")
    return path


@pytest.fixture
def owner(tmp_path, no_fsync):
    """A shared ledger with a record of every type."""
    path = tmp_path / "owner.jsonl"
    shared = SharedLedger.create(
        path, epsilon=2.0, delta=1e-5, informal_runs=True, mirror=tmp_path / "mirror.jsonl"
    )
    shared.freeze_grid("study", {"point": "12"}, has_runs=False)
    for run, plan in (("a" * 64, PLAN), ("b" * 64, replace(PLAN, informal_reasons=("a test",)))):
        with shared.reserving(run, "run", plan):
            pass
    with shared.locked() as chain:
        chain.mend()
        for kind in ("start", "at", "close"):
            chain.append(
                kind, "2026-01-01T00:00:00", {"run": "a" * 64, "position": 3, "hash": "ab" * 32}
            )
    return path


def places(value, path=()):
    """Every path to a value inside a record, the record's own fields first."""
    if isinstance(value, dict):
        parts = [item for item in value.items() if item[0] not in ("seq", "type", "previous")]
    else:
        parts = list(enumerate(value)) if isinstance(value, list) else []
    for name, inner in parts:
        yield (*path, name)
        if name not in FREE:
            yield from places(inner, (*path, name))


def inside(record, path):
    for name in path:
        record = record[name]
    return record


def kind_of(value):
    return "number" if type(value) in (int, float) else type(value).__name__


def forgeries(lines):
    """(line number from 1, type, path, old value, new value, bytes up to that line) for every field and value, "removed" too."""
    for number, line in enumerate(lines):
        if line.endswith(b"#torn"):
            continue
        record = json.loads(line)
        changes = [(("unheard",), None, 1)]
        changes += [
            (path, inside(record, path), new)
            for path in places(record)
            for new in (*VALUES, "removed")
        ]
        for path, old, new in changes:
            if kind_of(new) == kind_of(old) and new == old:
                continue
            fields = copy.deepcopy(record)
            inside(fields, path[:-1])[path[-1]] = new
            if new == "removed":
                del inside(fields, path[:-1])[path[-1]]
            kind, time_utc, previous = (
                record["type"],
                fields.pop("time_utc", None),
                record["previous"],
            )
            for name in ("seq", "type", "previous"):
                del fields[name]
            forged = encode_line(number, kind, time_utc, previous, fields)
            yield number + 1, kind, path, old, new, b"\n".join([*lines[:number], forged]) + b"\n"


def may_be_accepted(kind, path, old, new):
    """Whether a record could honestly be so: another value of the same type, or a field that may be missing."""
    if path == ("unheard",):
        return kind == "open"
    if new == "removed":
        return path[-1] in MAY_LACK or path[0] in {*FREE, "points"}
    return kind_of(new) == kind_of(old) or (path[-1] in OPTIONAL and (new is None or old is None))


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("which", ["run", "owner"])
def test_no_record_is_accepted_with_a_value_of_another_type_or_raises_another_error(
    run, owner, which, every
):
    """verify.py refuses every line of a run that the library refuses."""
    path, state_of = (run, LedgerState) if which == "run" else (owner, SharedState)
    lines, count = path.read_bytes().splitlines(), 0
    for number, kind, place, old, new, data in list(forgeries(lines))[::every]:
        state, honest = state_of(), state_of()
        try:
            read_chain(data, state, "it")
        except PrivacyStateRefused as error:
            assert (  # noqa: PT017
                str(error).startswith(f"it: line {number}: ")
                and "\n" not in str(error)
                and error.exit_code == 4
            )
            count += 1
            if which == "run":
                run.write_bytes(data)
                with pytest.raises(verify.Violated, match=rf"line {number}: "):
                    verify.read_ledger(run)
            continue
        assert may_be_accepted(kind, place, old, new), (kind, place, old, new)
        assert which == "run" or place != ("unheard",)
        if which == "run":
            read_chain(b"\n".join(lines[:number]) + b"\n", honest, "it")
            assert state.num_charged >= honest.num_charged
    assert count > 800 // every


# A ledger written anew, with a chain that fits: no number in an intent lowers epsilon


def plan(**changed):
    return make_plan(
        PlanRequest(**NUMBERS | {"max_grad_norm": 0.7, "reserved_attempts": 8} | changed)
    )


PLANS = {
    "plain": plan(),
    "no cap": plan(cap=None),
    "small noise": plan(
        noise_multiplier=0.25,
        allow_small_noise=True,
        num_examples=200,
        expected_batch_size=20,
        cap=None,
    ),
}
CHANGES = {
    "doubled": lambda x: 2 * x,
    "halved": lambda x: x / 2,
    "one more": lambda x: x + 1,
    "one less": lambda x: x - 1,
    "a millionth more": lambda x: x * (1 + 1e-6),
    "negative": lambda x: -x,
    "zero": lambda x: 0,
    "huge": lambda x: 1e300,
}


def numbers(value):
    """(container, key) of every number in it."""
    for key, item in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        if type(item) in (int, float) and key != "seq":
            yield value, key
        yield from numbers(item)


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(own, id=name, marks=[pytest.mark.full] * (name == "small noise"))
        for name, own in PLANS.items()
    ],
)
def test_contract_10_no_number_of_an_intent_written_anew_lowers_epsilon(own, tmp_path, no_fsync):
    """Four steps, the third of them killed and tried again: each number of each intent, changed in every way."""
    path = tmp_path / "ledger.jsonl"
    releases = [release_of_step(own.noise_multiplier, own.max_grad_norm)]
    with Ledger.create(path, {"plan": own.frozen_fields(), "key_commitment": "ab" * 32}) as ledger:
        for steps in ([1, 2, 3], [3, 4]):
            ledger.start_session({})
            for step in steps:
                ledger.intent(step, ledger.state.attempts[step], releases)
                if step != 3 or steps[0] == 3:
                    ledger.done(step, ledger.state.attempts[step] - 1)
    honest, records = (
        read_ledger(path).epsilon(),
        [json.loads(line) for line in path.read_bytes().splitlines()],
    )
    assert rechained(records) == path.read_bytes() and read_ledger(path).num_charged == 5
    places = [
        (i, n)
        for i, r in enumerate(records)
        if r["type"] == "intent"
        for n in range(len(list(numbers(r))))
    ]
    assert len(places) == 5 * (2 + 2 * len(releases))
    for index, number in places:
        for name, change in CHANGES.items():
            forged = copy.deepcopy(records)
            container, key = list(numbers(forged[index]))[number]
            container[key] = change(container[key])
            path.write_bytes(rechained(forged))
            try:
                found = read_ledger(path).epsilon()
            except PrivacyStateRefused:
                with pytest.raises(verify.Violated):
                    verify.read_ledger(path)
                continue
            assert found >= honest, (index, key, name)
