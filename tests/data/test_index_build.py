"""Building an index: in parallel, under MPI, after a kill, again with more shards; and what it refuses."""

import fcntl
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.synthetic_shards import write_tiny_shards
from data.errors import DataError, ReadError
from data.index import build as index_build
from data.index.build import BAD_SHARDS, build_index
from data.index.repack import repack
from data.index.shard import ROW
from data.index.shards import find_shards, read_shard_list
from data.index.tar_index import FORMAT_VERSION, MANIFEST, ExampleTable
from data.index.verify import verify_hashes
from data.reading.pool import worker_pool
from data.reading.reader import TarReader
from launch_scripts.prepare import main
from tests.data.conftest import ROOT, picture, write_shard

PREPARE = str(ROOT / "launch_scripts" / "prepare.py")


def make_shards(folder: Path, count: int, *, first: int = 0) -> list[Path]:
    """Shards with 1, 2, 3, ... examples."""
    return [
        write_shard(
            folder / f"train-{number:03d}.tar",
            [{"__key__": f"{number}-{i}", "jpg": picture(i), "txt": b"x" * (i * 20)} for i in range(number % 5 + 1)],
        )
        for number in range(first, first + count)
    ]


def contents(index: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in index.iterdir()}


def test_few_bytes_and_no_name_of_an_example(table: ExampleTable) -> None:
    assert ROW.itemsize == 11
    [extents] = table.index_dir.glob("extents-*.npy")
    assert extents.stat().st_size == 12 * ROW.itemsize + 192
    manifest = json.loads((table.index_dir / MANIFEST).read_text())
    first = manifest["shards"][0]
    assert set(first) >= {"name", "size", "sha256", "count", "keys_sha256"}
    assert not any(b"folder/ex0000" in path.read_bytes() for path in (table.index_dir / MANIFEST, extents))


def test_processes_give_the_same_bytes(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", 7)
    build_index(shards, tmp_path / "one")
    with worker_pool(2) as pool:
        build_index(shards, tmp_path / "two", executor=pool.executor)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def mpirun(count: int, *arguments: object, expected: int = 0) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "mpirun"), "-n", str(count), sys.executable, PREPARE]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM"))}
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT
    )
    assert done.returncode == expected, done.stderr
    return done


@pytest.mark.full
def test_mpi_ranks_give_the_same_bytes(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", 7)
    build_index(shards, tmp_path / "one")
    done = mpirun(2, "index", tmp_path / "shards", "--output", tmp_path / "two")
    assert done.stdout.startswith("18 examples in 7 shards")  # said once
    assert done.stdout.count("\n") == 1
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    done = mpirun(2, "verify", tmp_path / "shards", "--index", tmp_path / "two")
    assert done.stdout == "7 shards with 18 examples are what was indexed\n"
    shards[3].write_bytes(b"no tar" * 100)
    done = mpirun(2, "index", tmp_path / "shards", "--output", tmp_path / "three", expected=2)
    assert done.stderr.count("error: ") == 1 and "train-003.tar is no tar archive" in done.stderr
    said = spoil(shards)
    done = mpirun(2, "index", tmp_path / "shards", "--output", tmp_path / "four", expected=2)
    assert done.stderr.count("error: ") == 1 and all(name in done.stderr for name in said)
    listed = tmp_path / "four" / BAD_SHARDS
    done = mpirun(2, "index", tmp_path / "shards", "--output", tmp_path / "four", "--exclude", listed)
    assert done.stdout.startswith("8 examples in 3 shards") and "4 shards are excluded" in done.stderr


def spoil(shards: list[Path]) -> dict[str, str]:
    """Makes four of five shards bad, each in its way; returns what is said about each."""
    content = shards[0].read_bytes()
    shards[0].write_bytes(content + content)
    shards[1].write_bytes(shards[1].read_bytes()[:3000])
    write_shard(shards[2], [{"__key__": key, part: b"x"} for key, part in (("a", "jpg"), ("b", "jpg"), ("a", "txt"))])
    shards[3].write_bytes(b"")
    return dict(zip([path.name for path in shards], ["cat", "is cut off", "two places", "empty"], strict=False))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_bad_shards_are_said_at_once_and_may_be_excluded(num_workers: int, tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", 6)
    said = spoil(shards[:5])
    index, pattern = tmp_path / "index", f"{tmp_path}/shards/train-{{000..006}}.tar"  # 006 is missing
    found = find_shards(pattern, tmp_path)
    with worker_pool(num_workers) as pool, pytest.raises(DataError, match=said["train-000.tar"]) as caught:
        build_index(found, index, executor=pool.executor)
    message = str(caught.value)
    assert "\n" not in message and all(name in message for name in [*said, "train-006.tar", BAD_SHARDS])
    lines = (index / BAD_SHARDS).read_text().splitlines()
    assert lines[1::2] == [*said, "train-006.tar"] and stat.S_IMODE((index / BAD_SHARDS).stat().st_mode) == 0o600
    for name, reason in zip(lines[1::2], lines[::2], strict=True):
        assert reason.startswith("# ") and name in reason and said.get(name, "missing") in reason
    exclude = read_shard_list(index / BAD_SHARDS, found)
    table = build_index(found, index, exclude=exclude)
    assert [entry.name for entry in table.entries] == ["train-004.tar", "train-005.tar"] and table.excluded == (
        *said,
        "train-006.tar",
    )
    assert table.manifest_digest() == build_index(shards[4:], tmp_path / "good").manifest_digest()
    # The data set may still be called by its whole pattern; a shard that nobody excluded must be there.
    table.require_shards(found)
    make_shards(tmp_path / "shards", 1, first=7)
    with pytest.raises(DataError, match="is of other shards"):
        table.require_shards(find_shards(f"{tmp_path}/shards/train-{{000..007}}.tar", tmp_path))
    # Mended shards come in by the same command without the list, which goes when it is of no more use.
    make_shards(tmp_path / "shards", 7)
    assert [entry.count for entry in build_index(found, index).entries] == [1, 2, 3, 4, 5, 1, 2]
    assert not (index / BAD_SHARDS).exists()


def test_a_list_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards(tmp_path / "shards", 4)
    found, listed = find_shards(f"{tmp_path}/shards", tmp_path), tmp_path / "list"
    monkeypatch.chdir(tmp_path)
    for names in (["train-001.tar"], ["shards/train-001.tar"], [f"{tmp_path}/shards/train-001.tar", "", "# no shard"]):
        listed.write_text("\n".join(names))
        assert read_shard_list(listed, found) == {"train-001.tar"}
    listed.write_text("train-001.tar\ntrain-100.tar\n")
    with pytest.raises(DataError, match=r"lists train-100\.tar, which is none"):
        read_shard_list(listed, found)
    with pytest.raises(DataError, match="cannot read the list"):
        read_shard_list(tmp_path / "nowhere", found)
    with pytest.raises(DataError, match="every shard is excluded"):
        build_index(found, tmp_path / "index", exclude=found.names)


def test_an_index_and_parts_of_another_format_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be of shards that are refused now."""
    shards = make_shards(tmp_path / "shards", 3)
    spoil_last = shards[2].read_bytes()
    shards[2].write_bytes(b"no tar" * 100)
    with pytest.raises(DataError, match="no tar archive"):
        build_index(shards, tmp_path / "index")  # its parts stay
    shards[2].write_bytes(spoil_last)
    build_index(shards, tmp_path / "whole")
    monkeypatch.setattr("data.index.tar_index.FORMAT_VERSION", FORMAT_VERSION + 1)
    monkeypatch.setattr("data.index.build.FORMAT_VERSION", FORMAT_VERSION + 1)
    read = count_reads(monkeypatch)
    for folder in ("index", "whole"):
        build_index(shards, tmp_path / folder)
    assert read == [path.name for path in shards] * 2


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from benchmarks.synthetic_shards import write_tiny_shards
from data.index import build as index_build
written = []
def kill_after_four(path, shard, write=index_build._write_part):
    write(path, shard)
    written.append(path)
    if len(written) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
index_build._write_part = kill_after_four
index_build.build_index(sorted(Path(sys.argv[2]).glob("*.tar")), Path(sys.argv[3]))
"""


def test_a_killed_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards(tmp_path / "shards", 7)
    build_index(shards, tmp_path / "whole")
    command = [sys.executable, "-c", KILLED, str(ROOT), str(tmp_path / "shards"), str(tmp_path / "index")]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    with pytest.raises(DataError, match="there is no index"):
        ExampleTable.open(tmp_path / "index", tmp_path / "shards")
    parts = sorted((tmp_path / "index" / "parts").glob("?" * 32))
    assert len(parts) == 4
    parts[0].write_bytes(parts[0].read_bytes()[:-1])  # a file system that lost its end
    read = count_reads(monkeypatch)
    build_index(shards, tmp_path / "index")
    assert len(read) == 4  # three that were never read, and the spoiled one
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    original = index_build.index_file

    def note(path: Path, name: str, *more: str):  # type: ignore[no-untyped-def]
        read.append(name)
        return original(path, name, *more)

    monkeypatch.setattr(index_build, "index_file", note)
    return read


def test_more_shards_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_shards(tmp_path / "shards", 3)
    before = build_index(old, tmp_path / "index").manifest_digest()
    new = make_shards(tmp_path / "shards", 2, first=3)
    read = count_reads(monkeypatch)
    table = build_index([*old, *new], tmp_path / "index")
    assert read == ["train-003.tar", "train-004.tar"] and len(table) == 15
    assert table.manifest_digest() != before  # a run on the old index refuses the new one
    build_index([*old, *new], tmp_path / "whole")
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")
    read.clear()
    write_shard(old[1], [{"__key__": "other", "jpg": picture(9), "txt": b"x"}])
    assert len(build_index([*old, *new], tmp_path / "index")) == 14
    assert read == ["train-001.tar"]
    read.clear()
    assert len(build_index(new, tmp_path / "index")) == 9 and read == []


def test_workers_refuse_an_index_that_was_replaced(shards: list[Path], tmp_path: Path) -> None:
    table = build_index(
        shards[:2],
        tmp_path / "index",
    )
    reopen, arguments = table.__reduce__()
    assert len(reopen(*arguments)) == 8
    build_index(shards, tmp_path / "index")
    with pytest.raises(DataError, match="was replaced while it was in use"):
        reopen(*arguments)


def test_verify_accepts_copies_with_new_times(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", 2)
    table = build_index(shards, tmp_path / "index")
    os.utime(shards[0], (1, 1))
    with pytest.raises(DataError, match=r"train-000\.tar was written after it was indexed"):
        ExampleTable.open(tmp_path / "index", tmp_path / "shards")
    verify_hashes(table, None, lambda items: items)
    assert ExampleTable.open(tmp_path / "index", tmp_path / "shards").manifest_digest() == table.manifest_digest()
    data = bytearray(shards[1].read_bytes())
    data[700] ^= 1
    shards[1].write_bytes(data)
    with pytest.raises(DataError, match="is not what was indexed"):
        verify_hashes(table, None, lambda items: items)


@pytest.mark.parametrize("folder", ["/sys/kernel/index", "FILE/index"])
def test_a_folder_that_cannot_be_written_is_known_before_any_reading(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make_shards(tmp_path / "shards", 1)
    (tmp_path / "file").write_text("")
    read = count_reads(monkeypatch)
    with pytest.raises(DataError, match="cannot write the index to") as caught:
        build_index(shards, Path(folder.replace("FILE", str(tmp_path / "file"))))
    assert "\n" not in str(caught.value) and not read


def test_a_read_only_index_folder_serves_reading(tmp_path: Path) -> None:
    """Training needs no more than that; only another build is refused."""
    shards = make_shards(tmp_path / "shards", 2)
    index = tmp_path / "index"
    table = build_index(shards, index)
    mount = ["mount", "--bind", "-o", "ro", str(index), str(index)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no permission to mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(index)], check=True)
        assert ExampleTable.open(index, tmp_path / "shards").manifest_digest() == table.manifest_digest()
        with pytest.raises(DataError, match="Read-only file system"):
            build_index(shards, index)
    finally:
        subprocess.run(["umount", str(index)], check=True)


def test_one_build_at_a_time(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", 1)
    (tmp_path / "index" / "parts").mkdir(parents=True)
    with open(tmp_path / "index" / "parts" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another build is at work"):
            build_index(shards, tmp_path / "index")
    assert len(build_index(shards, tmp_path / "index")) == 1


def test_a_dead_worker_is_one_line(tmp_path: Path) -> None:
    from concurrent.futures import ProcessPoolExecutor

    from data.reading.pool import run_all

    with ProcessPoolExecutor(1) as executor, pytest.raises(ReadError, match="a worker process died"):
        list(run_all(executor, signal.raise_signal, [(signal.SIGKILL,), (signal.SIGKILL,)]))


def test_repeated_keys_and_passed_over_members_are_counted(tmp_path: Path) -> None:
    path = write_shard(
        tmp_path / "s.tar",
        [{"__key__": key, "txt": b"x"} for key in ("a", "b", "a", "../../etc/passwd", "/abs", "a")],
    )
    [entry] = build_index([path], tmp_path / "index").entries
    assert (entry.count, entry.repeated_keys, entry.skipped) == (6, 2, 0)


def shard_of(path: Path, names: Sequence[str]) -> Path:
    """A shard of pictures and captions, which say their names."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            is_picture = name.rpartition(".")[2].lower() in ("jpg", "jpe", "jfif", "png")
            body = picture(zlib.crc32(name.encode())) if is_picture else json.dumps({"caption": name}).encode()
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return path


def bodies_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def pairs(*stems: str, text: str = "txt") -> list[str]:
    return [f"{stem}.{extension}" for stem in stems for extension in ("jpg", text)]


DOTTED = {
    "dates": [pairs(*(f"2024.01.{day:02d}" for day in range(6)))],
    "versions, the first without a dot": [pairs("v1", "v1.1", "v1.2")],
    "browsers' copies": [pairs("IMG_2.0 (1)", "IMG_2.0 (2)", "other")],
    "addresses": [pairs("a/www.example.org_1.png", "a/www.example.org_2.png")],
    "long names": [pairs(*(f"{'x' * 150}.é{number}" for number in range(3)))],
    "fields and labels": [pairs("v1.1", "v1.2", text="json"), pairs("w1.1", "w1.2", text="cls")],
    "captions of .jpg": [[f"v1.{number}.{extension}" for number in range(3) for extension in ("jpg", "jpg.txt")]],
    "neighbours of other keys": [pairs("a.1", "b.1", "a.2", "b.2")],
    "pictures first": [[f"v1.{n}.jpg" for n in range(3)] + ["w.jpg", "w.txt"] + [f"v1.{n}.txt" for n in range(3)]],
}


def test_a_picture_that_no_example_is_read_from_makes_a_pair_too(tmp_path: Path) -> None:
    shard = shard_of(tmp_path / "a.tar", ["v1.1.gif", "v1.1.txt", "v1.2.jpg", "v1.2.txt"])
    with pytest.raises(DataError, match="joins 2 pairs of picture and text"):
        build_index([shard], tmp_path / "index")


@pytest.mark.parametrize("what", DOTTED)
def test_names_with_dots_join_no_pairs(what: str, tmp_path: Path) -> None:
    """Refused with the command that takes them apart, also by the other command; afterwards nothing is lost."""
    shards = [shard_of(tmp_path / f"{number}.tar", names) for number, names in enumerate(DOTTED[what])]
    for refused in (
        lambda: build_index(shards, tmp_path / "index"),
        lambda: repack(shards, tmp_path / "out", shard_bytes=1 << 20),
    ):
        with pytest.raises(DataError, match=r"joins \d pairs .*prepare.py repack .*--key_until_last_dot") as caught:
            refused()
        assert "\n" not in str(caught.value) and not [*(tmp_path / "out").glob("*.tar")]
    repack(shards, tmp_path / "out", shard_bytes=1 << 20, key_until_last_dot=True)
    table = build_index(sorted((tmp_path / "out").glob("*.tar")), tmp_path / "index")
    raws = [*TarReader(table).read_all(range(len(table)))]
    assert len(raws) == len([name for names in DOTTED[what] for name in names if name.endswith(".jpg")])
    assert [*table.remarks()] == [] and len({raw.image for raw in raws} - {None}) == len(raws)
    bodies = {name: body for path in shards for name, body in bodies_of(path).items()}
    for raw in raws:  # each picture beside the text of its own name
        [text] = [body for name, body in raw.fields.items() if not name.endswith("jpg")]
        stem = json.loads(text)["caption"].rpartition(".")[0].removesuffix(".jpg")
        assert raw.image == bodies[f"{stem}.jpg"]


REMARKS: dict[str, tuple[list[list[str]], str]] = {
    "two pictures": ([["0.a.jpg", "0.b.jpg", "0.txt", "1.jpg", "1.txt"]], r"1 of 2 examples hold more than one picture"),
    "a mask": ([["0.jpg", "0.mask.png", "0.txt"]], r"; 1 pictures are not used"),
    "dots that join pictures alone": ([[f"2024.{day}.jpg" for day in range(5)]], r"; 4 pictures are not used"),
    "folders": (
        [[f"images/{n}.jpg" for n in range(4)] + [f"captions/{n}.txt" for n in range(4)]],
        r"^4 of 8 examples have a picture without caption or label, 4 have no picture, in 1 of 1 shards.*same path and name",
    ),
    "./": ([pairs("a"), ["./b.jpg", "b.txt"]], r"^1 of 3 .* 1 have no picture, in 1 of 2 shards, first in 1\.tar"),
    "accents": ([[*pairs("a"), "\u00e9.jpg", "e\u0301.txt"]], r"^1 of 3 .* 1 have no picture"),
    "pax headers": ([["PaxHeaders.7/a.jpg", "b/PaxHeaders/a.txt", *pairs("a")]], r"; 2 members belong to no example"),
    "shards": (
        [["a.jpg", *pairs("b")], ["a.txt"]],
        r"^1 of 3 .* 1 have no picture, in 2 of 2 shards.*halves of a pair are two examples.*prepare.py repack",
    ),
    "pictures alone": ([["a.jpg", "b.jpe", "c.JFIF"]], r"^3 of 3 .* without caption or label, 0 have no picture"),
}  # fmt: skip


@pytest.mark.parametrize("what", REMARKS)
def test_what_is_not_used_and_what_lacks_a_part_is_said(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the index and when it is verified; such shards stay usable."""
    shards, said = REMARKS[what]
    (tmp_path / "shards").mkdir()
    for number, names in enumerate(shards):
        shard_of(tmp_path / "shards" / f"{number}.tar", names)
    for command in (["index"], ["verify", "--index", str(tmp_path / "shards" / "index")]):
        assert main([command[0], str(tmp_path / "shards"), *command[1:], "--workers", "1"]) == 0
        assert re.search(said, capsys.readouterr().err, re.MULTILINE)


def test_hard_links_and_dots_that_join_nothing(tmp_path: Path) -> None:
    with tarfile.open(shard_of(tmp_path / "s.tar", ["0.jpg", "0.txt", "1.txt", "2.txt"]), "a") as tar:
        for name in ("1.jpg", "2.jpg"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, "0.jpg"
            tar.addfile(link)
    unused, halves = build_index([tmp_path / "s.tar"], tmp_path / "index").remarks()
    assert "2 members belong to no example (links" in unused and halves.startswith("0 of 3 ") and "2 have no" in halves
    shard_of(tmp_path / "s.tar", pairs(*(f"{number}.{number}" for number in range(5)), "IMG.2 (1)"))
    table = build_index([tmp_path / "s.tar"], tmp_path / "index")
    assert len(table) == 6 and [*table.remarks()] == []


def test_checksums_are_those_of_the_extents(table: ExampleTable, shards: list[Path]) -> None:
    import zlib

    extents = table.extents(range(len(table)))
    for shard, offset, length, crc32 in zip(*extents, strict=True):
        assert zlib.crc32(shards[shard].read_bytes()[offset : offset + length]) == crc32


def test_checksums_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards(tmp_path / "shards", 5)
    whole = [build_index([s], tmp_path / f"whole{i}")._rows_N.tobytes() for i, s in enumerate(shards)]
    monkeypatch.setattr("data.index.shard._HASH_CHUNK", 700)
    monkeypatch.setattr("data.index.shard._WINDOW", 600)
    small = [build_index([s], tmp_path / f"small{i}")._rows_N.tobytes() for i, s in enumerate(shards)]
    assert whole == small


@pytest.mark.full
def test_the_build_is_fast_and_small(tmp_path: Path) -> None:
    """By CPU time, which other work on the machine changes little: at least 40,000 examples a second and core."""
    shards = write_tiny_shards(tmp_path / "shards", 200_000, examples_per_shard=50_000)
    start = time.process_time()
    table = build_index(shards, tmp_path / "index")
    assert len(table) / (time.process_time() - start) > 40_000
    assert sum(path.stat().st_size for path in table.index_dir.iterdir()) <= 12 * len(table)
    assert [raw.caption for raw in TarReader(table).read_all([0, 199_999])] == ["twenty bytes of data"] * 2


def test_a_million_rows_cost_no_memory_to_open(tmp_path: Path) -> None:
    """Opening maps; a worker that reads a few rows touches a few pages."""
    shard = make_shards(tmp_path / "shards", 1)[0]
    build_index([shard], tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / MANIFEST).read_text())
    manifest["shards"][0]["count"] = manifest["num_examples"] = 50_000_000
    extents = tmp_path / "index" / manifest["extents"]
    np.lib.format.open_memmap(extents, mode="w+", dtype=ROW, shape=(50_000_000,)).flush()
    (tmp_path / "index" / MANIFEST).write_text(json.dumps(manifest))
    start = time.perf_counter()
    table = ExampleTable.open(tmp_path / "index", tmp_path / "shards")
    assert table.extents([49_999_999]).lengths.tolist() == [0] and time.perf_counter() - start < 2
