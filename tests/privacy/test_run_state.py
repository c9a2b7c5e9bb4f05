"""Key and ledger of a run folder, made once and reopened."""

from dataclasses import replace

import pytest

from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.run_state import open_run_state
from privacy.sampling.keys import SamplingKey
from tests.privacy.ledger_files import PLAN


def _state(tmp_path, plan=PLAN, data=b"manifest", **more):
    return open_run_state(tmp_path / "ledger.jsonl", tmp_path / "sampling.key", plan, data_manifest=data, **more)


def test_run_state_is_created_once_and_reopened(tmp_path):
    ledger, key = _state(tmp_path)
    ledger.release()
    again, same = _state(tmp_path)
    assert same.commitment() == key.commitment() == again.state.opened["key_commitment"]
    content = (tmp_path / "ledger.jsonl").read_bytes()
    assert (tmp_path / "sampling.key").read_bytes().hex().encode() not in content and b"manifest" not in content


def test_run_state_refuses_what_does_not_fit(tmp_path):
    ledger, _ = _state(tmp_path)
    ledger.release()
    with pytest.raises(
        PrivacyConfigError, match="frozen, so give the old value or another run folder: noise_multiplier was 4"
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
