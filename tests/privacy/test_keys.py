import os
import pickle

import pytest

from privacy.errors import PrivacyStateRefused
from privacy.sampling.keys import SamplingKey

NONCE = bytes(range(16))


def test_contract_1_key_is_32_random_bytes_in_a_0600_file(tmp_path):
    path = tmp_path / "sampling.key"
    key = SamplingKey.create(path)
    assert path.stat().st_size == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert SamplingKey.load(path).commitment() == key.commitment()
    assert SamplingKey.create(tmp_path / "other.key").commitment() != key.commitment()
    assert list(tmp_path.glob("*.creating")) == []


def test_contract_1_key_never_shows_or_travels(tmp_path):
    path = tmp_path / "sampling.key"
    key = SamplingKey.create(path)
    assert path.read_bytes().hex() not in repr(key) + str(key) + str(vars(key).keys())
    with pytest.raises(TypeError):
        pickle.dumps(key)


def test_key_refused_when_wrong(tmp_path):
    path = tmp_path / "sampling.key"
    with pytest.raises(PrivacyStateRefused, match="cannot read"):
        SamplingKey.load(path)
    key = SamplingKey.create(path)
    with pytest.raises(PrivacyStateRefused, match="never overwritten"):
        SamplingKey.create(path)
    with pytest.raises(PrivacyStateRefused, match="committed"):
        SamplingKey.load(path, "0" * 64)
    assert SamplingKey.load(path, key.commitment()).commitment() == key.commitment()
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(PrivacyStateRefused):
        SamplingKey.load(link)
    for mode in (0o640, 0o604, 0o644, 0o620, 0o666):
        path.chmod(mode)
        with pytest.raises(PrivacyStateRefused, match="readable by others") as error:
            SamplingKey.load(path)
        assert error.value.exit_code == 4
    for size in (0, 31, 33):
        short = tmp_path / f"key{size}"
        short.write_bytes(bytes(size))
        short.chmod(0o600)
        with pytest.raises(PrivacyStateRefused, match="bytes"):
            SamplingKey.load(short)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_key_refused_when_owned_by_another_user(tmp_path):
    path = tmp_path / "sampling.key"
    SamplingKey.create(path)
    os.chown(path, 12345, -1)
    with pytest.raises(PrivacyStateRefused, match="owned by"):
        SamplingKey.load(path)


def test_contract_1_derived_keys_differ_by_purpose_nonce_and_attempt(tmp_path):
    key = SamplingKey.create(tmp_path / "k")
    other = SamplingKey.create(tmp_path / "l")
    nonces = [NONCE, bytes(16)]
    derived = [
        derive(nonce, attempt)
        for source in (key, other)
        for derive in (source.coin_key, source.example_key)
        for nonce in nonces
        for attempt in (0, 1, 256)
    ]
    assert len(set(derived)) == len(derived) and all(len(item) == 32 for item in derived)
    assert key.coin_key(NONCE, 3) == key.coin_key(NONCE, 3)


def test_known_answers_pin_the_derivation():
    """A change of any info string would change the coins of every existing run."""
    key = SamplingKey(bytes(32))
    assert key.commitment() == "889564b905a0496061356620774168b4c5650d85297572c9ebff4961c477568b"
    assert (
        key.coin_key(NONCE, 1).hex()
        == "bf81f094abf0891a74a914cc56e5c770a436ade6ac5b3cb5dbe67f1ceacd90c9"
    )
    assert (
        key.example_key(NONCE, 1).hex()
        == "8d13ac4e33d50508cd326cc99f1ae80ad028f99aac795fd42bd9fbe69e0f7b29"
    )
    assert key.hmac(b"data") == "337496fa799df2da7aacd9ed7ea4cec7802647c41572bfbcf860759158b68225"


def test_staged_key_survives_a_crash_at_every_point(tmp_path):
    path = tmp_path / "sampling.key"
    SamplingKey.stage(
        path
    )  # crash before the ledger: nothing has used it, the next start replaces it
    key = SamplingKey.stage(path)
    with pytest.raises(PrivacyStateRefused):
        SamplingKey.load(path)
    with pytest.raises(PrivacyStateRefused):
        SamplingKey.load(path, "0" * 64)  # a ledger that committed to another key
    loaded = SamplingKey.load(path, key.commitment())  # crash between ledger and publish
    assert loaded.commitment() == key.commitment() and not path.exists(), "reading gives no name"
    SamplingKey.publish(path)
    assert SamplingKey.load(path, key.commitment()).commitment() == key.commitment()
    SamplingKey.create(
        tmp_path / "sampling.key.staged"
    )  # of a start before this one, from a backup
    SamplingKey.publish(path)
    assert SamplingKey.load(path, key.commitment()).commitment() == key.commitment()
    with pytest.raises(PrivacyStateRefused, match="without its ledger"):
        SamplingKey.stage(path)
