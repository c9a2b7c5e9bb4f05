import errno
import json
import os
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privacy import ledger as ledger_module
from privacy.errors import BudgetSpent, PrivacyConfigError, PrivacyStateRefused
from privacy.keys import SamplingKey
from privacy.ledger import Ledger
from privacy.ledger_format import TORN_MARK, encode_line, may_be_intent, read_ledger
from privacy.plan import make_plan
from privacy.run_state import open_run_state
from tests.privacy.ledger_epsilon import recompute

# Large noise and few examples: the accountant answers in a fraction of a second.
PLAN = make_plan(
    num_examples=2000,
    expected_batch_size=100,
    num_steps=6,
    noise_multiplier=4.0,
    target_delta=1e-5,
    reserved_attempts=4,
    sensitivity_slack=1e-4,
)
RELEASE = {"name": "gradient", "std": 4.0 * 0.5, "sensitivity": 0.5}
ENVIRONMENT = {"commit": "abc"}


@pytest.fixture
def no_fsync(monkeypatch):
    """For tests that open hundreds of ledgers and are not about durability."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


def _fields():
    return {"plan": PLAN.frozen_fields(), "key_commitment": "ab" * 32}


def _create(tmp_path, mirror=None):
    return Ledger.create(tmp_path / "ledger.jsonl", _fields(), mirror)


def _step(ledger, step):
    attempt = ledger.next_attempt(step)
    ledger.intent(step, attempt, [RELEASE])
    ledger.done(step, attempt)


def _run(tmp_path, steps=3, mirror=None):
    """A ledger with one session, `steps` steps and a checkpoint, released."""
    ledger = _create(tmp_path, mirror)
    ledger.start_session(ENVIRONMENT)
    for step in range(1, steps + 1):
        _step(ledger, step)
    ledger.checkpoint(steps, "checkpoints/step", "cd" * 32)
    ledger.release()
    return tmp_path / "ledger.jsonl"


def _refused(path, match=None, mirror=None):
    with pytest.raises(PrivacyStateRefused, match=match) as error:
        Ledger.open(path, mirror)
    assert error.value.exit_code == 4
    assert "\n" not in str(error.value)


def test_contract_9_records_and_charges(tmp_path):
    path = _run(tmp_path)
    with Ledger.open(path) as ledger:
        assert ledger.num_charged == 3 and ledger.last_done_step == 3
        assert ledger.next_attempt(3) == 1 and ledger.next_attempt(4) == 0
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


def test_contract_9_intent_is_durable_before_it_returns(tmp_path, monkeypatch):
    ledger = _create(tmp_path)
    ledger.start_session(ENVIRONMENT)
    calls = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append("write") or write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") or fsync(fd))
    ledger.intent(1, 0, [RELEASE])
    assert calls == ["write", "fsync"]


def test_contract_9_mirror_is_written_second_and_before_return(tmp_path, monkeypatch):
    ledger = _create(tmp_path, tmp_path / "mirror.jsonl")
    calls = []
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, data: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or write(fd, data)
    )
    ledger.start_session(ENVIRONMENT)
    assert calls == [str(tmp_path / "ledger.jsonl"), str(tmp_path / "mirror.jsonl")]


def test_contract_10_budget_refuses_the_intent_that_would_pass_it(tmp_path):
    ledger = _create(tmp_path)
    ledger.start_session(ENVIRONMENT)
    for attempt in range(PLAN.max_intents):
        ledger.intent(1, attempt, [RELEASE])
    size = (tmp_path / "ledger.jsonl").stat().st_size
    with pytest.raises(BudgetSpent) as error:
        ledger.intent(1, PLAN.max_intents, [RELEASE])
    assert error.value.exit_code == 3
    assert (tmp_path / "ledger.jsonl").stat().st_size == size
    ledger.close("budget_spent")
    with pytest.raises(PrivacyStateRefused, match="after `close`"):
        ledger.start_session(ENVIRONMENT)
    ledger.release()
    assert Ledger.open(tmp_path / "ledger.jsonl").closed == "budget_spent"


def test_contract_9_every_start_needs_its_own_session(tmp_path):
    path = _run(tmp_path, steps=1)
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
        (lambda ledger: ledger.intent(1, 1, [RELEASE]), "does not follow"),
        (lambda ledger: ledger.intent(2, 1, [RELEASE]), "0 is next"),
        (lambda ledger: ledger.intent(2, 0, []), "releases"),
        (lambda ledger: ledger.intent(2, 0, [RELEASE | {"std": float("nan")}]), "refused to write"),
        (lambda ledger: ledger.intent(2, 0, [RELEASE | {"sensitivity": 0.0}]), "sensitivity"),
        (lambda ledger: ledger.intent(2, 0, [RELEASE | {"std": 1.99}]), "below the planned"),
        (lambda ledger: ledger.intent(2, 0, [RELEASE, RELEASE]), "below the planned"),
        (lambda ledger: ledger.done(1, 0), "without its intent"),
        (lambda ledger: ledger.done(2, 0), "without its intent"),
        (lambda ledger: ledger.checkpoint(2, "x", "cd" * 32), "not done"),
        (lambda ledger: ledger.checkpoint(1, "x", "digest"), "SHA-256"),
        (lambda ledger: ledger.close("bored"), "reason"),
    ],
)
def test_illegal_records_are_not_written(tmp_path, call, match):
    ledger = _create(tmp_path)
    ledger.start_session(ENVIRONMENT)
    _step(ledger, 1)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(PrivacyStateRefused, match=match):
        call(ledger)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    _step(ledger, 2)  # and the ledger goes on


# Broken chains


def test_every_edited_byte_is_refused(tmp_path):
    path = _run(tmp_path, steps=1)
    data = path.read_bytes()
    for position in range(0, len(data) - 1, 3):
        changed = bytearray(data)
        changed[position] ^= 0x01
        path.write_bytes(bytes(changed))
        number = data[:position].count(b"\n") + 1
        last = number == data.count(b"\n")
        try:
            read_ledger(path)
        except PrivacyStateRefused:
            continue
        # The last line has no successor: only a checkpoint's manifest or the mirror can hold it (tested below).
        assert last, f"byte {position} in line {number}"


def test_removed_reordered_duplicated_and_inserted_lines_are_refused(tmp_path):
    path = _run(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for index in range(len(lines)):
        variants = [lines[: index + 1] + lines[index:], [*lines[:index], b"\n", *lines[index:]]]
        if index < len(lines) - 1:
            swapped = [*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]]
            variants += [lines[:index] + lines[index + 1 :], swapped, [*lines[:index], b"{}\n", *lines[index:]]]
        for variant in variants:
            path.write_bytes(b"".join(variant))
            _refused(path, match=r"line \d+: ")


def test_non_canonical_lines_are_refused(tmp_path):
    path = _create(tmp_path).path
    line = path.read_bytes()
    for changed in (line.replace(b":0,", b": 0,", 1), line[:-2] + b" }\n", b" " + line, line.replace(b"\n", b"\r\n")):
        path.write_bytes(changed)
        _refused(path, match="line 1")
    for content in (
        b"",
        b"\n",
        b"garbage\n",
        b"[1]\n",
        b'"text"\n',
        b"NaN\n",
        line[:-1],
        b"\xff\xfe\n",
        b"x" + TORN_MARK + b"\n",
    ):
        path.write_bytes(content)
        _refused(path, match="line 1")


def test_rollback_is_refused_by_what_a_checkpoint_remembers(tmp_path):
    path = _run(tmp_path)
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


# Torn writes


def _last_line_kinds(tmp_path):
    """Ledgers whose last line is of each type that can follow others."""
    ledger = _create(tmp_path)
    path = ledger.path
    cases = []

    def keep(kind, charged):
        cases.append((kind, path.read_bytes(), charged))

    ledger.start_session(ENVIRONMENT)
    keep("session", 0)
    ledger.intent(1, 0, [RELEASE])
    keep("intent", 0)
    ledger.done(1, 0)
    keep("done", 1)
    ledger.checkpoint(1, "checkpoints/step-1", "cd" * 32)
    keep("checkpoint", 1)
    ledger.close("stopped")
    keep("close", 1)
    ledger.release()
    return path, cases


def test_contract_9_torn_writes_at_every_byte_of_the_last_line(tmp_path, no_fsync):
    path, cases = _last_line_kinds(tmp_path)
    for kind, data, charged_before in cases:
        start = data.rindex(b"\n", 0, -1) + 1
        number = data.count(b"\n") - 1
        told_apart = len(b'{"seq":%d,"type":"' % number)
        for end in range(start + 1, len(data)):
            path.write_bytes(data[:end])
            torn_charged = (kind == "intent" or end - start <= told_apart) and kind != "session"
            assert read_ledger(path).num_charged == charged_before + torn_charged, (kind, end - start)
            with Ledger.open(path) as ledger:
                assert ledger.num_charged == charged_before + torn_charged
                ledger.start_session(ENVIRONMENT)
                step = ledger.last_done_step + 1
                ledger.intent(step, ledger.next_attempt(step), [RELEASE])
            # Nothing that was on the disk has changed, and the whole verifies again.
            content = path.read_bytes()
            assert content.startswith(data[:end] + TORN_MARK + b"\n")
            with Ledger.open(path) as ledger:
                assert ledger.num_charged == charged_before + torn_charged + 1
            assert path.read_bytes() == content


def test_contract_9_torn_repairs_at_every_byte(tmp_path, no_fsync):
    path = _run(tmp_path, steps=1)
    data = path.read_bytes() + b'{"seq":5,"type":"intent","time'
    path.write_bytes(data)
    Ledger.open(path).release()
    repaired = path.read_bytes()
    assert read_ledger(path).num_charged == 2
    for end in range(len(data), len(repaired)):
        path.write_bytes(repaired[:end])
        with Ledger.open(path) as ledger:
            # A torn repair that cannot be told from an intent is charged too.
            assert ledger.num_charged in (2, 3)
            ledger.start_session(ENVIRONMENT)
            _step(ledger, 2)
        if end % 40 == 0:
            assert recompute(path)[0] == read_ledger(path).num_charged
        assert path.read_bytes().startswith(repaired[: len(data)] + TORN_MARK + b"\n" if end > len(data) + 6 else data)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(min_size=1, max_size=60).filter(lambda tail: b"\n" not in tail))
def test_contract_9_any_garbage_tail_is_kept_and_charged(tmp_path, tail):
    directory = tmp_path / "fresh"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    path = _run(directory, steps=1)
    before = path.read_bytes()
    path.write_bytes(before + tail)
    with Ledger.open(path) as ledger:
        assert ledger.num_charged == 1 + may_be_intent(tail, 5)
    assert path.read_bytes().startswith(before + tail + TORN_MARK + b"\n")
    Ledger.open(path).release()


def test_only_the_exact_form_of_a_repair_is_accepted(tmp_path):
    path = _run(tmp_path, steps=1)
    path.write_bytes(path.read_bytes() + b'{"seq":5,"type":"inte')
    Ledger.open(path).release()
    lines = path.read_bytes().splitlines(keepends=True)
    torn, repair = lines[-2:]
    record = json.loads(repair)
    header = [record.pop(name) for name in ("seq", "type", "time_utc", "previous")]

    def forged(**changes):
        return encode_line(*header, record | changes) + b"\n"

    other = encode_line(header[0], "session", header[2], header[3], {"nonce": "00" * 16, "mirror": False}) + b"\n"
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
        _refused(path)
    path.write_bytes(b"".join([*lines[:-2], torn]))  # the crash between the torn line's end and its repair
    Ledger.open(path).release()


# Disks that fail


@pytest.mark.parametrize("failure", ["short", "enospc", "fsync"])
def test_full_disk_refuses_and_the_step_does_not_happen(tmp_path, monkeypatch, failure):
    path = _run(tmp_path)
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
        _step(ledger, 4)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        ledger = _create(disk)
        ledger.start_session(ENVIRONMENT)
        _step(ledger, 1)
        with pytest.raises(PrivacyStateRefused, match=r"bytes were written|No space"):  # noqa: PT012
            (disk / "filler").write_bytes(b"x" * 56 * 1024)
            while True:
                ledger.checkpoint(1, "p" * 500, "cd" * 32)
        ledger.release()
        (disk / "filler").unlink()
        with Ledger.open(disk / "ledger.jsonl") as ledger:
            ledger.start_session(ENVIRONMENT)
            _step(ledger, 2)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_interrupted_write_blocks_further_records(tmp_path, monkeypatch):
    path = _run(tmp_path)
    ledger = Ledger.open(path)
    ledger.start_session(ENVIRONMENT)

    def interrupt(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.intent(4, 0, [RELEASE])
    with pytest.raises(PrivacyStateRefused, match="no further records"):
        ledger.intent(4, 0, [RELEASE])
    ledger.release()
    assert read_ledger(path).num_charged == 4


def test_unreadable_missing_or_read_only_file(tmp_path, monkeypatch):
    _refused(tmp_path / "none.jsonl", match="No such file")
    path = _run(tmp_path)
    original = os.open

    def read_only(name, flags, *rest):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        return original(name, flags, *rest)

    monkeypatch.setattr(ledger_module.os, "open", read_only)
    _refused(path, match="Read-only file system")
    with pytest.raises(PrivacyStateRefused, match="Read-only"):
        Ledger.create(tmp_path / "new.jsonl", _fields())
    assert read_ledger(path).num_charged == 3


def test_file_changed_behind_our_back(tmp_path):
    path = _run(tmp_path)
    first, second = Ledger.open(path), Ledger.open(path)
    second.start_session(ENVIRONMENT)
    with pytest.raises(PrivacyStateRefused, match="bytes where this process"):
        first.start_session(ENVIRONMENT)
    copy = tmp_path / "copy"
    shutil.copy(path, copy)
    os.replace(copy, path)
    with pytest.raises(PrivacyStateRefused, match="taken its name"):
        second.intent(4, 0, [RELEASE])


# Creation and mirror


def test_create_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    for name in ("write", "fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            with pytest.raises(PrivacyStateRefused, match="cannot create"):
                Ledger.create(path, _fields())
        assert not path.exists()
    (tmp_path / "ledger.jsonl.creating").write_bytes(b'{"seq":0,"ty')  # left by a crash
    Ledger.create(path, _fields()).release()
    assert [item.name for item in tmp_path.iterdir()] == ["ledger.jsonl"]
    with pytest.raises(PrivacyStateRefused, match="never overwritten"):
        Ledger.create(path, _fields())


def test_open_record_must_be_complete(tmp_path):
    for fields in ({}, {"plan": PLAN.frozen_fields()}, {"plan": {}, "key_commitment": "ab" * 32}):
        with pytest.raises(PrivacyStateRefused):
            Ledger.create(tmp_path / "ledger.jsonl", fields)
    contradiction = _fields() | {"plan": PLAN.frozen_fields() | {"sample_rate": 0.01}}
    with pytest.raises(PrivacyStateRefused, match="sample_rate"):
        Ledger.create(tmp_path / "ledger.jsonl", contradiction)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_mirror_shorter_by_any_number_of_bytes_is_completed(tmp_path, no_fsync):
    mirror = tmp_path / "mirror.jsonl"
    path = _run(tmp_path, steps=1, mirror=mirror)
    whole = path.read_bytes()
    assert mirror.read_bytes() == whole
    for end in range(len(whole)):
        mirror.write_bytes(whole[:end])
        Ledger.open(path, mirror).release()
        assert mirror.read_bytes() == whole


def test_mirror_and_torn_ledger_end_equal(tmp_path):
    mirror = tmp_path / "mirror.jsonl"
    path = _run(tmp_path, steps=1, mirror=mirror)
    path.write_bytes(path.read_bytes() + b'{"seq":5,"ty')
    Ledger.open(path, mirror).release()
    assert mirror.read_bytes() == path.read_bytes()
    Ledger.open(path, mirror).release()


def test_mirror_longer_different_missing_or_left_out_is_refused(tmp_path):
    mirror = tmp_path / "mirror.jsonl"
    path = _run(tmp_path, mirror=mirror)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # the run folder was restored from an older copy
    _refused(path, match="rolled back", mirror=mirror)
    path.write_bytes(whole[:-5])
    _refused(path, match="is longer than", mirror=mirror)
    path.write_bytes(whole)
    mirror.write_bytes(whole.replace(b"abc", b"abd"))
    _refused(path, match="differs from", mirror=mirror)
    _refused(path, match="has had a mirror")
    mirror.unlink()
    _refused(path, match="is gone", mirror=mirror)
    mirror.write_bytes(whole)
    path.unlink()
    with pytest.raises(PrivacyStateRefused, match="mirror without its ledger"):
        Ledger.create(path, _fields(), mirror)


def test_mirror_can_be_added_later(tmp_path):
    path, mirror = _run(tmp_path), tmp_path / "mirror.jsonl"
    with Ledger.open(path, mirror) as ledger:
        ledger.start_session(ENVIRONMENT)
    assert mirror.read_bytes() == path.read_bytes()
    _refused(path, match="has had a mirror")


# Epsilon


def test_contract_10_epsilon_comes_from_the_ledger_and_equals_an_independent_recomputation(tmp_path):
    path = _run(tmp_path)
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
        ledger.intent(4, 0, [RELEASE])  # died before `done`
    path.write_bytes(path.read_bytes() + b'{"seq":11,"type":"i')
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
        # Two releases on one sample that together are noisier than planned: another group.
        ledger.intent(4, 1, [RELEASE | {"std": 8.0}, {"name": "count", "std": 3.0, "sensitivity": 0.5}])
        ledger.done(4, 1)
        assert ledger.num_charged == 6
        groups = ledger.charged_groups()
        assert sum(group.count for group in groups) == 6 and len(groups) == 2
        charged, expected = recompute(path)
        assert charged == 6
        assert ledger.epsilon() == pytest.approx(expected, rel=1e-6)
        assert PLAN.epsilon_after(5) < ledger.epsilon() < PLAN.epsilon_after(6)


def test_contract_11_no_epsilon_without_a_formal_guarantee(tmp_path):
    plan = make_plan(num_examples=100, expected_batch_size=10, num_steps=3, noise_multiplier=0.0)
    ledger = Ledger.create(tmp_path / "l", {"plan": plan.frozen_fields(), "key_commitment": "ab" * 32})
    ledger.start_session({})
    ledger.intent(1, 0, [{"name": "gradient", "std": 0.0, "sensitivity": 1.0}])
    assert ledger.epsilon() is None and ledger.num_charged == 1


# Ledger and key together


def _state(tmp_path, plan=PLAN, data=b"manifest", **more):
    return open_run_state(tmp_path / "ledger.jsonl", tmp_path / "sampling.key", plan, data_manifest=data, **more)


def test_run_state_is_created_once_and_reopened(tmp_path):
    ledger, key = _state(tmp_path)
    ledger.release()
    again, same = _state(tmp_path)
    assert same.commitment() == key.commitment() == again.key_commitment
    content = (tmp_path / "ledger.jsonl").read_bytes()
    assert (tmp_path / "sampling.key").read_bytes().hex().encode() not in content and b"manifest" not in content


def test_run_state_refuses_what_does_not_fit(tmp_path):
    ledger, _ = _state(tmp_path)
    ledger.release()
    other = make_plan(num_examples=2000, expected_batch_size=100, num_steps=6, noise_multiplier=5.0)
    with pytest.raises(PrivacyConfigError, match="frozen: noise_multiplier was 4"):
        _state(tmp_path, plan=make_plan_like(noise_multiplier=5.0))
    with pytest.raises(PrivacyConfigError, match="frozen"):
        _state(tmp_path, plan=other)
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


def make_plan_like(**changes):
    own = {name: getattr(PLAN, name) for name in ("num_examples", "expected_batch_size", "num_steps", "target_delta")}
    more = {name: getattr(PLAN, name) for name in ("reserved_attempts", "sensitivity_slack")}
    return make_plan(**own | more | changes)


@pytest.mark.parametrize("crash", ["before ledger", "before publish"])
def test_run_state_survives_a_crash_while_it_is_created(tmp_path, monkeypatch, crash):
    owner, name = (Ledger, "create") if crash == "before ledger" else (SamplingKey, "publish")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _state(tmp_path)
    ledger, key = _state(tmp_path)
    assert ledger.key_commitment == key.commitment()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["ledger.jsonl", "sampling.key"]
