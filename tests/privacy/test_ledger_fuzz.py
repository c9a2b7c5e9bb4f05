"""Every field of every record with a value of another type or range: refused in one line that names its line, never a traceback.

The forger has the signing key and makes all numbers, hashes and signatures fit again.
"""

import copy
import json
from dataclasses import replace

import pytest

from privacy.errors import PrivacyStateRefused
from privacy.ledger.chain import encode_line, hash_line, read_chain
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerState
from privacy.ledger.shared import SharedLedger
from privacy.ledger.shared_records import SharedState
from privacy.ledger.signature import SigningKey
from tests.privacy.ledger_files import ENVIRONMENT, PLAN, RELEASE, open_fields, take_step

SIGNER = SigningKey(bytes(range(32)))
VALUES = (
    None, True, False, 0, 1, -1, 7, 10**400, 0.5, -0.5, 1.5, 1e308, -1e308, "", "x", "00" * 32, "00" * 16, "FF" * 32,
    [], [[]], [1], ["x"], {}, {"a": 1}, {"name": "x"},
)  # fmt: skip
FREE = {"environment", "head"}
"""Objects whose content is nobody's business here."""
MAY_LACK = {
    "data_hmac", "commit", "accountant", "unit", "shared_ledger", "max_examples_per_owner", "restarted_from_step_0",
    "informal_runs", "mirror", "signer",
}  # fmt: skip
OPTIONAL = {
    "rdp_order",
    "target_epsilon",
    "cap",
    "adaptive_clipping",
    "shared_ledger",
    "max_examples_per_owner",
    "num_examples",
}


@pytest.fixture
def run(tmp_path, no_fsync):
    """A run's ledger with a record of every type."""
    fields = open_fields() | {
        "data_hmac": "cd" * 32, "commit": "abc", "accountant": "dp 1", "unit": "one example", "shared_ledger": "ef" * 32,
        "max_examples_per_owner": 3,
    }  # fmt: skip
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, fields, signer=SIGNER) as ledger:
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 1)
        ledger.checkpoint(1, "step-1", "cd" * 32)
    path.write_bytes(path.read_bytes() + b"torn")
    with Ledger.open(path, signer=SIGNER) as ledger:
        ledger.start_session(ENVIRONMENT, restarted=True)
        ledger.intent(1, 1, [RELEASE])
        ledger.done(1, 1)
        ledger.close("stopped")
    return path


def reserve(shared, run, plan):
    with shared.joined(run, "run", plan):
        pass


@pytest.fixture
def owner(tmp_path, no_fsync):
    """A shared ledger with a record of every type."""
    path = tmp_path / "owner.jsonl"
    shared = SharedLedger.create(
        path, epsilon=2.0, delta=1e-5, informal_runs=True, rdp_order=8.0, mirror=tmp_path / "mirror.jsonl"
    )
    shared.freeze_grid("study", {"point": "12"}, begun=False)
    reserve(shared, "a" * 64, PLAN)
    reserve(shared, "b" * 64, replace(PLAN, informal_reasons=("a test",)))
    with shared.locked() as chain:
        for kind in ("start", "at", "close"):
            chain.append(kind, "2026-01-01T00:00:00", {"run": "a" * 64, "position": 3, "hash": "ab" * 32})
    return path


def places(value, path=()):
    """Every path to a value inside a record, the record's own fields first."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("seq", "type", "previous"):
                yield (*path, name)
                if name not in FREE:
                    yield from places(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield (*path, index)
            yield from places(inner, (*path, index))


def inside(record, path):
    for name in path:
        record = record[name]
    return record


def kind_of(value):
    return "number" if type(value) in (int, float) else type(value).__name__


def forgeries(lines):
    """(line number from 1, path, old value, new value, bytes up to that line) for every field and value, "removed" among them."""
    for number, line in enumerate(lines):
        if line.endswith(b"#torn"):
            continue
        record = json.loads(line)
        changes = [(("unheard",), None, 1)]
        changes += [(path, inside(record, path), new) for path in places(record) for new in (*VALUES, "removed")]
        for path, old, new in changes:
            if kind_of(new) == kind_of(old) and new == old:
                continue
            fields = copy.deepcopy(record)
            if new == "removed":
                del inside(fields, path[:-1])[path[-1]]
            else:
                inside(fields, path[:-1])[path[-1]] = new
            kind, time_utc, previous = record["type"], fields.pop("time_utc", None), record["previous"]
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


@pytest.mark.parametrize("which", ["run", "owner"])
def test_no_record_is_accepted_with_a_value_of_another_type_or_raises_another_error(run, owner, which):
    path, state_of = (run, LedgerState) if which == "run" else (owner, SharedState)
    lines, refused = path.read_bytes().splitlines(), 0
    for number, kind, place, old, new, data in forgeries(lines):
        state, honest = state_of(), state_of()
        try:
            read_chain(data, state, "it")
        except PrivacyStateRefused as error:
            assert str(error).startswith(f"it: line {number}: ") and "\n" not in str(error) and error.exit_code == 4  # noqa: PT017
            refused += 1
            continue
        assert may_be_accepted(kind, place, old, new), (kind, place, old, new)
        assert which == "run" or place != ("unheard",)
        if which == "run":
            read_chain(b"\n".join(lines[:number]) + b"\n", honest, "it")
            assert state.num_charged >= honest.num_charged
    assert refused > 800


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("grid", {"study": [], "points": {}}),
        ("grid", {"study": "x", "points": {"a": 1}}),
        ("reserve", {"noise_tail_delta": -1e-6}),
        (
            "reserve",
            {"group": {"sample_rate": 0.1, "noise_multiplier": -1.0, "count": 1, "num_examples": None, "cap": None}},
        ),
        ("start", {"run": [], "position": 1, "hash": "ab" * 32}),
    ],
)
def test_a_forged_line_of_a_shared_ledger_is_refused_by_every_reader(tmp_path, kind, fields):
    path = tmp_path / "owner.jsonl"
    shared = SharedLedger.create(path, epsilon=2.0, delta=1e-5)
    reserve(shared, "a" * 64, PLAN)
    lines = path.read_bytes().splitlines()
    record = {} if kind != "reserve" else json.loads(lines.pop())
    fields = {
        name: value for name, value in (record | fields).items() if name not in ("seq", "type", "time_utc", "previous")
    }
    lines.append(encode_line(len(lines), kind, "2026-01-01", hash_line(lines[-1]), fields))
    path.write_bytes(b"\n".join(lines) + b"\n")
    before = path.read_bytes()
    for read in (shared.read, shared.summary, lambda: reserve(shared, "b" * 64, PLAN)):
        with pytest.raises(PrivacyStateRefused, match=rf"line {len(lines)}: "):
            read()
    assert path.read_bytes() == before
