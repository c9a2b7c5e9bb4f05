"""Ledgers that were edited, cut, reordered or torn by a crash."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privacy.errors import PrivacyStateRefused
from privacy.ledger.chain import TORN_MARK, encode_line
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.ledger_files import ENVIRONMENT, RELEASE, create, refused, take_step, written


def test_every_edited_byte_is_refused(tmp_path):
    path = written(tmp_path, steps=1)
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
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for index in range(len(lines)):
        variants = [lines[: index + 1] + lines[index:], [*lines[:index], b"\n", *lines[index:]]]
        if index < len(lines) - 1:
            swapped = [*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]]
            variants += [lines[:index] + lines[index + 1 :], swapped, [*lines[:index], b"{}\n", *lines[index:]]]
        for variant in variants:
            path.write_bytes(b"".join(variant))
            refused(path, match=r"line \d+: ")


def test_non_canonical_lines_are_refused(tmp_path):
    path = written(tmp_path, steps=0)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    line = path.read_bytes()
    for changed in (line.replace(b":0,", b": 0,", 1), line[:-2] + b" }\n", b" " + line, line.replace(b"\n", b"\r\n")):
        path.write_bytes(changed)
        refused(path, match="line 1")
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
        refused(path, match="line 1")


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


# Torn writes


def _last_line_kinds(tmp_path):
    """Ledgers whose last line is of each type that can follow others."""
    ledger = create(tmp_path)
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


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
def test_contract_9_torn_writes_at_every_byte_of_the_last_line(every, tmp_path, no_fsync):
    path, cases = _last_line_kinds(tmp_path)
    for kind, data, charged_before in cases:
        start = data.rindex(b"\n", 0, -1) + 1
        # Whatever its bytes: it is charged where an intent could have been written, which is not so before `session` and `done`.
        torn_charged = kind not in ("session", "done")
        for end in (*range(start + 1, len(data) - 1, every), len(data) - 1):
            path.write_bytes(data[:end])
            assert read_ledger(path).num_charged == charged_before + torn_charged, (kind, end - start)
            with Ledger.open(path) as ledger:
                assert ledger.num_charged == charged_before + torn_charged
                ledger.start_session(ENVIRONMENT)
                step = ledger.state.last_done_step + 1
                ledger.intent(step, ledger.next_attempt(step), [RELEASE])
            # Nothing that was on the disk has changed, and the whole verifies again.
            content = path.read_bytes()
            assert content.startswith(data[:end] + TORN_MARK + b"\n")
            with Ledger.open(path) as ledger:
                assert ledger.num_charged == charged_before + torn_charged + 1
            assert path.read_bytes() == content


def test_contract_9_torn_repairs_at_every_byte(tmp_path, no_fsync):
    path = written(tmp_path, steps=1)
    data = path.read_bytes() + b'{"seq":5,"type":"intent","time'
    path.write_bytes(data)
    Ledger.open(path).release()
    repaired = path.read_bytes()
    assert read_ledger(path).num_charged == 2
    for end in range(len(data), len(repaired)):
        path.write_bytes(repaired[:end])
        with Ledger.open(path) as ledger:
            assert ledger.num_charged == 2  # a torn repair follows a torn line, where no intent can be
            ledger.start_session(ENVIRONMENT)
            take_step(ledger, 2)
        if end % 40 == 0:
            assert recompute(path)[0] == read_ledger(path).num_charged
        assert path.read_bytes().startswith(repaired[: len(data)] + TORN_MARK + b"\n" if end > len(data) + 6 else data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(min_size=1, max_size=60).filter(lambda tail: b"\n" not in tail))
def test_contract_9_any_garbage_tail_is_kept_and_charged(tmp_path, tail):
    directory = tmp_path / "fresh"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    path = written(directory, steps=1)
    before = path.read_bytes()
    path.write_bytes(before + tail)
    with Ledger.open(path) as ledger:
        assert ledger.num_charged == 2
    assert path.read_bytes().startswith(before + tail + TORN_MARK + b"\n")
    Ledger.open(path).release()


def test_contract_9_an_edited_last_line_forgets_no_charge(tmp_path, no_fsync):
    """Its bytes may be those of any record, with or without its newline or the mark of a torn line, or those of none."""
    with create(tmp_path) as ledger:
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 1)
        ledger.intent(2, 0, [RELEASE])
    path = ledger.path
    data = path.read_bytes()
    start = data.rindex(b"\n", 0, -1) + 1
    line = data[start:-1]
    kinds = [
        line.replace(b'"intent"', b'"%s"' % kind)
        for kind in (b"session", b"done", b"checkpoint", b"repair", b"open", b"close")
    ]
    for torn in (*kinds, line, b"x", b"\0" * 99, b"\0" * 9 + line[9:], line[:30], b"d", b'{"seq":4,"type":"done"'):
        for end in (b"", TORN_MARK, TORN_MARK + b"\n", b"\n"):
            path.write_bytes(data[:start] + torn + end)
            try:
                assert read_ledger(path).num_charged == 2, (torn, end)
                with Ledger.open(path) as ledger:
                    assert ledger.num_charged == 2
            except PrivacyStateRefused as error:
                assert end == b"\n" and "line 5: " in str(error)  # noqa: PT017


def test_a_torn_line_where_the_budget_is_spent_or_no_step_remains_costs_nothing(tmp_path, no_fsync):
    """No intent can have been written there, so an honest crash never takes a run beyond its budget."""
    path = written(tmp_path, steps=6)
    path.write_bytes(path.read_bytes() + b"torn")
    assert read_ledger(path).num_charged == 6
    with Ledger.open(path) as ledger:
        ledger.start_session(ENVIRONMENT)
        for _ in range(4):
            ledger.intent(5, ledger.next_attempt(5), [RELEASE])
            ledger.start_session(ENVIRONMENT)
    assert ledger.num_charged == ledger.plan.max_intents == 10
    path.write_bytes(path.read_bytes() + b"torn")
    assert read_ledger(path).num_charged == 10


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
        refused(path)
    path.write_bytes(b"".join([*lines[:-2], torn]))  # the crash between the torn line's end and its repair
    Ledger.open(path).release()


# Disks that fail
