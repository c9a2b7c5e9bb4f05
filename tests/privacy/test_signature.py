"""The ledger's signature: after every checkpoint and at the end, with a key that lies in private/ alone."""

import hashlib
import json
import pickle
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from privacy.errors import PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.ledger.run_state import open_run_state
from privacy.ledger.signature import SigningKey, fingerprint
from tests.privacy.ledger_files import ENVIRONMENT, PLAN, open_fields, rechained, take_step


def opened(folder):
    return open_run_state(folder / "ledger.jsonl", folder / "sampling.key", PLAN, data_manifest=b"x")[0]


@pytest.fixture
def run(tmp_path):
    """A finished run with a checkpoint after each of three steps."""
    with opened(tmp_path) as ledger:
        ledger.start_session(ENVIRONMENT)
        for step in (1, 2, 3):
            take_step(ledger, step)
            ledger.checkpoint(step, f"step-{step}", "cd" * 32)
        ledger.close("finished")
    return tmp_path


def records(run):
    return [json.loads(line) for line in (run / "ledger.jsonl").read_bytes().splitlines()]


def test_every_checkpoint_and_the_end_are_signed_in_the_documented_form(run):
    lines, found = (run / "ledger.jsonl").read_bytes().splitlines(), records(run)
    public = bytes.fromhex(found[0]["signer"])
    assert len(public) == 32
    for number, record in enumerate(found):
        assert (record["type"] == "signature") == (found[number - 1]["type"] in ("checkpoint", "close"))
        if record["type"] == "signature":
            message = b"dp-trainer ledger head v1\n" + hashlib.sha256(lines[number - 1]).hexdigest().encode()
            Ed25519PublicKey.from_public_bytes(public).verify(bytes.fromhex(record["signature"]), message)
    assert fingerprint(found[0]["signer"]) == hashlib.sha256(public).hexdigest()
    state = read_ledger(run / "ledger.jsonl")
    assert state.num_signed == len(found) - 1 and state.is_final


def test_the_key_lies_in_one_file_for_its_owner_alone_and_is_never_shown(run):
    secret = (run / "signing.key").read_bytes()
    assert len(secret) == 32 and stat.S_IMODE((run / "signing.key").stat().st_mode) == 0o600
    content = (run / "ledger.jsonl").read_bytes()
    assert secret not in content and secret.hex().encode() not in content
    key = SigningKey.load(run / "signing.key", records(run)[0]["signer"])
    assert secret.hex() not in repr(key) and key.public in repr(key)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)


def test_a_ledger_without_its_signing_key_or_with_another_or_open_one_is_refused_unchanged(run):
    before, secret = (run / "ledger.jsonl").read_bytes(), (run / "signing.key").read_bytes()
    (run / "signing.key").chmod(0o644)
    with pytest.raises(PrivacyStateRefused, match="readable by others"):
        opened(run)
    (run / "signing.key").unlink()
    with pytest.raises(PrivacyStateRefused, match="cannot read the signing key"):
        opened(run)
    SigningKey.create(run / "signing.key")
    with pytest.raises(PrivacyStateRefused, match="not the signing key that the ledger names"):
        opened(run)
    (run / "signing.key").write_bytes(secret[:20])
    with pytest.raises(PrivacyStateRefused, match="20 bytes; a signing key has 32"):
        opened(run)
    assert (run / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("number", range(12))
def test_an_edit_before_a_signature_is_refused_in_the_signatures_line_though_every_hash_fits(run, number):
    """The forger changes the time of one record and chains all lines anew."""
    found = records(run)
    found[number]["time_utc"] = "2026-01-01T00:00:00+00:00"
    (run / "ledger.jsonl").write_bytes(rechained(found))
    following = next(n for n in range(number + 1, len(found)) if found[n]["type"] == "signature")
    with pytest.raises(PrivacyStateRefused, match=rf"line {following + 1}: the signature is not the signer's"):
        read_ledger(run / "ledger.jsonl")


def test_a_signature_that_is_edited_or_moved_or_of_another_key_is_refused(run, tmp_path):
    found = records(run)
    places = [number for number, record in enumerate(found) if record["type"] == "signature"]
    other = SigningKey.create(tmp_path / "other.key")
    last = found[places[0]]["signature"]
    for changed in ("00" * 64, last[:-2], last.upper(), 5, None, other.sign("ab" * 32), found[places[1]]["signature"]):
        found[places[0]]["signature"] = changed
        (run / "ledger.jsonl").write_bytes(rechained(found[: places[0] + 1]))
        with pytest.raises(PrivacyStateRefused, match=rf"line {places[0] + 1}: "):
            read_ledger(run / "ledger.jsonl")


def test_a_ledger_that_names_no_signer_carries_no_signature(tmp_path, run):
    unsigned = Ledger.create(tmp_path / "unsigned.jsonl", open_fields())
    unsigned.release()
    assert read_ledger(unsigned.path).num_lines == 1
    found = records(run)
    del found[0]["signer"]
    (run / "ledger.jsonl").write_bytes(rechained(found))
    with pytest.raises(PrivacyStateRefused, match="names no signer"):
        read_ledger(run / "ledger.jsonl")


def test_a_crash_between_close_and_its_signature_is_signed_by_the_next_start(run):
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    for end in (0, 1, 40, len(lines[-1]) - 1):
        (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:end])
        charged = read_ledger(run / "ledger.jsonl").num_charged
        assert charged == 3 and not read_ledger(run / "ledger.jsonl").is_final
        opened(run).release()
        state = read_ledger(run / "ledger.jsonl")
        assert state.is_final and state.num_charged == 3 and state.num_signed == state.num_lines - 1
        opened(run).release()
        assert read_ledger(run / "ledger.jsonl").hashes == state.hashes


def test_nothing_follows_the_signature_of_the_end(run):
    whole = (run / "ledger.jsonl").read_bytes()
    found = records(run)
    (run / "ledger.jsonl").write_bytes(whole + b"x")
    with pytest.raises(PrivacyStateRefused, match="bytes after the end"):
        opened(run)
    (run / "ledger.jsonl").write_bytes(rechained([*found, found[-1]]))
    with pytest.raises(PrivacyStateRefused, match="a record after the end"):
        opened(run)


def test_a_key_that_a_crash_left_before_the_ledger_is_replaced(tmp_path):
    (tmp_path / "signing.key").write_bytes(b"torn")
    opened(tmp_path).release()
    opened(tmp_path).release()
