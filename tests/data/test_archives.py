"""Archives by GNU tar and bsdtar in every format and order, and files that are no tar archive."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from data.index.repack import repack
from tests.data.test_whole_shards import archive, by_key, folder_of, indexed, members, outcome, streamed

ARCHIVES = [
    *[f"tar --format={fmt}" for fmt in ("v7", "oldgnu", "gnu", "ustar", "posix")],
    "tar --sparse --hole-detection=raw --format=gnu",
    *[f"tar --sparse --hole-detection=raw --format=posix --sparse-version={version}" for version in ("0.0", "0.1", "1.0")],
    *[f"bsdtar --format={fmt}" for fmt in ("v7", "ustar", "gnutar", "pax", "rpax")],
]  # fmt: skip
ORDERS = ("sorted", "pictures first", "shuffled", "a folder", "long names", "hard links", "holes")


@pytest.mark.parametrize("order", ORDERS)
def test_archives_of_every_format_and_order(order: str, tmp_path: Path) -> None:
    """Accepted archives give webdataset's examples, all others one line, and `repack` mends what is only in disorder."""
    rng = np.random.default_rng(len(order))
    content = members(4, rng, long_names=order == "long names")
    if order == "holes":
        content[1] = (content[1][0], b"x" + bytes(1 << 16) + b"x")
    names, path = folder_of(content, tmp_path / "files"), tmp_path / "s.tar"
    if order == "holes":
        with open(tmp_path / "files" / names[1], "wb") as file:
            file.write(b"x")
            file.seek((1 << 16) + 1)
            file.write(b"x")
    if order == "pictures first":
        names.sort(key=lambda name: name.split(".")[1])
    elif order == "shuffled":
        names = [names[i] for i in rng.permutation(len(names))]
    elif order == "a folder":
        names = ["."]
    elif order == "hard links":  # the same file under a second key: tar writes a link for the second
        for name in list(names):
            os.link(tmp_path / "files" / name, tmp_path / "files" / name.replace("d/", "d/x"))
            names.append(name.replace("d/", "d/x"))
    seen = set()
    for archive_of in ARCHIVES:
        tool, *options = archive_of.split()
        if shutil.which(tool) is None:
            continue
        made = subprocess.run(
            [tool, "-C", str(tmp_path / "files"), *options, "-cf", str(path), *names], capture_output=True
        )
        if made.stderr:  # v7 and ustar have no names this long
            assert order == "long names" and b"long" in made.stderr, (archive_of, made.stderr)
            continue
        found = outcome(path)
        seen.add(type(found))
        if order not in ("hard links", "holes") and isinstance(found, list):
            assert sorted(map(str, map(sorted, map(dict.items, found)))) == sorted(  # type: ignore[arg-type]
                str(sorted(fields.items())) for fields in by_key(content)
            )
        if order in ("pictures first", "shuffled"):
            assert isinstance(found, str) and "two places" in found
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            repack([path], tmp_path / "out", shard_bytes=1 << 20)
            mended = outcome(tmp_path / "out" / "train-00000.tar")
            assert sorted(map(str, map(sorted, map(dict.items, mended)))) == sorted(  # type: ignore[arg-type]
                str(sorted(fields.items())) for fields in by_key(content)
            )
        elif order == "holes" and ("--sparse" in archive_of or isinstance(found, str)):  # bsdtar finds holes unasked
            assert isinstance(found, str) and "sparse" in found
        elif order != "a folder":  # which is read in the order of the file system
            assert isinstance(found, list), archive_of
    assert seen


FOREIGN = {
    "bzip2": "tar --bzip2", "gzip": "tar --gzip", "xz": "tar --xz", "zstd": "bsdtar --zstd", "lz4": "bsdtar --lz4",
    "lzip": "bsdtar --lzip", "lzma": "bsdtar --lzma", "zip": "bsdtar --format=zip", "cpio": "bsdtar --format=cpio",
    "7z": "bsdtar --format=7zip",
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_another_format_is_told_by_its_name(what: str, tmp_path: Path) -> None:
    tool, *options = FOREIGN[what].split()
    names, path = folder_of(members(2, np.random.default_rng(0)), tmp_path / "files"), tmp_path / "s.tar"
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    command = [tool, "-C", str(tmp_path / "files"), *options, "-cf", str(path), *names]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"{tool} cannot write {what}: {made.stderr[:100]}")
    one, two = indexed(path), streamed(path)
    assert one == two and isinstance(one, str) and what in one and str(path) in one and "\n" not in one


def test_a_web_page_saved_as_a_shard_is_told(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(b"<!DOCTYPE html>" + b"x" * 2000)
    assert "is a web page" in indexed(tmp_path / "s.tar")


def test_a_member_named_like_another_format_is_a_member(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(archive([("070701.jpg", b"x"), ("070701.txt", b"y"), ("BZh.txt", b"z")]))
    assert outcome(path) == [{"jpg": b"x", "txt": b"y"}, {"txt": b"z"}]
