"""Full, read-only and changing disks; the mirror in a second place."""

import errno
import os
import shutil
import subprocess
import threading

import pytest

import privacy.ledger.ledger
from privacy.errors import PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from tests.privacy.ledger_files import (
    ENVIRONMENT,
    PLAN,
    RELEASE,
    create,
    open_fields,
    refused,
    take_step,
    written,
)


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


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        ledger = create(disk)
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 1)
        with pytest.raises(PrivacyStateRefused, match=r"bytes were written|No space"):  # noqa: PT012
            (disk / "filler").write_bytes(b"x" * 56 * 1024)
            while True:
                ledger.checkpoint(1, "p" * 500, "cd" * 32)
        ledger.release()
        (disk / "filler").unlink()
        with Ledger.open(disk / "ledger.jsonl") as ledger:
            ledger.start_session(ENVIRONMENT)
            take_step(ledger, 2)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_interrupted_write_blocks_further_records(tmp_path, monkeypatch):
    path = written(tmp_path)
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
    refused(tmp_path / "none.jsonl", match="No such file")
    path = written(tmp_path)
    original = os.open

    def read_only(name, flags, *rest):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        return original(name, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    refused(path, match="Read-only file system")
    with pytest.raises(PrivacyStateRefused, match="Read-only"):
        Ledger.create(tmp_path / "new.jsonl", open_fields())
    assert read_ledger(path).num_charged == 3


def test_file_changed_behind_our_back(tmp_path):
    path = written(tmp_path)
    with Ledger.open(path) as ledger:
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(PrivacyStateRefused, match="bytes where this process"):
            ledger.start_session(ENVIRONMENT)
    with Ledger.open(path) as ledger:
        copy = tmp_path / "copy"
        shutil.copy(path, copy)
        os.replace(copy, path)
        with pytest.raises(PrivacyStateRefused, match="taken its name"):
            ledger.start_session(ENVIRONMENT)


def test_a_ledger_that_another_program_has_open_is_refused_after_some_patience(tmp_path, monkeypatch):
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


# Creation and mirror


def test_create_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    for name in ("write", "fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            with pytest.raises(PrivacyStateRefused, match="cannot create"):
                Ledger.create(path, open_fields())
        assert not path.exists()
    Ledger.create(path, open_fields()).release()
    assert [item.name for item in tmp_path.iterdir()] == ["ledger.jsonl"]
    with pytest.raises(PrivacyStateRefused, match="never overwritten"):
        Ledger.create(path, open_fields())


def test_open_record_must_be_complete(tmp_path):
    for fields in ({}, {"plan": PLAN.frozen_fields()}, {"plan": {}, "key_commitment": "ab" * 32}):
        with pytest.raises(PrivacyStateRefused):
            Ledger.create(tmp_path / "ledger.jsonl", fields)
    contradiction = open_fields() | {"plan": PLAN.frozen_fields() | {"sample_rate": 0.01}}
    with pytest.raises(PrivacyStateRefused, match="sample_rate"):
        Ledger.create(tmp_path / "ledger.jsonl", contradiction)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_mirror_shorter_by_any_number_of_bytes_is_completed(tmp_path, no_fsync):
    mirror = tmp_path / "mirror.jsonl"
    path = written(tmp_path, steps=1, mirror=mirror)
    whole = path.read_bytes()
    assert mirror.read_bytes() == whole
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in (*range(0, last, 50), *range(last, len(whole), 4), len(whole) - 1):
        half = (len(whole) - end) // 2
        for copied in (whole[:end], whole[:end] + bytes(half), whole[:end] + bytes(half) + whole[end + half :]):
            mirror.write_bytes(copied)
            if copied == whole or end >= last:  # a crash may leave zeros where the last write had come to nothing
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


def test_mirror_and_torn_ledger_end_equal(tmp_path):
    mirror = tmp_path / "mirror.jsonl"
    path = written(tmp_path, steps=1, mirror=mirror)
    path.write_bytes(path.read_bytes() + b'{"seq":5,"ty')
    Ledger.open(path, mirror).release()
    assert mirror.read_bytes() == path.read_bytes()
    Ledger.open(path, mirror).release()


def test_mirror_longer_different_missing_or_left_out_is_refused(tmp_path):
    mirror = tmp_path / "mirror.jsonl"
    path = written(tmp_path, mirror=mirror)
    whole = path.read_bytes()
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


def test_mirror_can_be_added_later(tmp_path):
    path, mirror = written(tmp_path), tmp_path / "mirror.jsonl"
    with Ledger.open(path, mirror) as ledger:
        ledger.start_session(ENVIRONMENT)
    assert mirror.read_bytes() == path.read_bytes()
    refused(path, match="has had a mirror")


# Epsilon
