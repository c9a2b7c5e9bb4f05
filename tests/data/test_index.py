"""The index: against tarfile and webdataset, in parallel, after a kill, with more shards, and what it refuses."""

import bz2
import fcntl
import gzip
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import tracemalloc
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data.errors import DataError, ReadError
from data.index import build as index_build
from data.index.build import build_index, verify_hashes
from data.index.shard import ROW
from data.index.shards import ShardSet, find_shards, require_a_shard
from data.index.tar_index import MANIFEST, ExampleTable
from data.reading.pool import run_all, worker_pool
from data.reading.reader import TarReader
from launch_scripts.prepare import main
from tests.data.conftest import ROOT, archive, picture, write_shard


def make_shards(folder: Path, count: int, *, first: int = 0) -> list[Path]:
    """Shards with 1, 2, 3, ... examples."""
    return [
        write_shard(
            folder / f"train-{number:03d}.tar",
            [
                {"__key__": f"{number}-{i}", "jpg": picture(i), "txt": b"x" * (i * 20)}
                for i in range(number % 5 + 1)
            ],
        )
        for number in range(first, first + count)
    ]


def contents(index: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in index.iterdir()}


def test_ids_count_over_sorted_shards_and_checksums_are_those_of_the_extents(
    table: ExampleTable, shards: list[Path]
) -> None:
    assert len(table) == 12 and [entry.count for entry in table.entries] == [7, 1, 4]
    ordinals, offsets, lengths, _ = table.extents([0, 6, 7, 8, 11, 0])
    assert ordinals.tolist() == [0, 0, 1, 2, 2, 0] and offsets[2] == 0 and (lengths > 0).all()
    for shard, offset, length, crc32 in zip(*table.extents(range(12)), strict=True):
        assert zlib.crc32(shards[shard].read_bytes()[offset : offset + length]) == crc32
    for bad in (-1, 12):
        with pytest.raises(DataError, match="from 0 to 11"):
            table.extents(bad)


def test_random_access_equals_webdataset_in_sequence(
    table: ExampleTable, shards: list[Path]
) -> None:
    reader = TarReader(table)
    expected = list(webdataset.WebDataset([str(path) for path in shards], shardshuffle=False))
    for example_id in np.random.default_rng(0).permutation(len(table)):
        raw, sample = reader.read(int(example_id)), expected[example_id]
        assert raw.fields == {
            name: value for name, value in sample.items() if not name.startswith("__")
        }
        assert raw.image == sample.get("jpg")
        assert raw.caption == (sample["txt"].decode() if "txt" in sample else None)


@pytest.mark.parametrize("excess", [0, 1])
def test_an_example_at_the_limit_leaves_others_their_bytes(
    excess: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest one has as many bytes as a reader takes, or one more: then it alone is empty."""
    samples = [{"__key__": f"{i}", "txt": b"x" * size} for i, size in enumerate((1, 2, 999, 3, 4))]
    table = build_index([write_shard(tmp_path / "s.tar", samples)], tmp_path / "index")
    longest = int(table.extents([2]).lengths[0])
    monkeypatch.setattr("data.reading.reader.MAX_EXAMPLE_BYTES", longest - excess)
    fields = [example.fields for example in TarReader(table).read_all(range(5))]
    stored = [{"txt": sample["txt"]} for sample in samples]
    assert fields == (stored if excess == 0 else [*stored[:2], {}, *stored[3:]])


def test_files_are_private_and_hold_few_bytes_and_no_name_of_an_example(
    shards: list[Path], tmp_path: Path
) -> None:
    """Whatever the order of the shards; the digest follows their bytes."""
    one, two = build_index(shards, tmp_path / "one"), build_index(shards[::-1], tmp_path / "two")
    assert one.manifest_digest() == two.manifest_digest() and len(one.manifest_digest()) == 32
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert [name.partition("-")[0] for name in names] == ["extents", MANIFEST]
    assert (tmp_path / "one" / names[0]).stat().st_size == 12 * 11 + 192
    for name, body in contents(tmp_path / "one").items():
        assert (
            stat.S_IMODE((tmp_path / "one" / name).stat().st_mode) == 0o600
            and b"folder/ex0000" not in body
        )
    build_index(shards[:1], tmp_path / "one")  # is replaced whole
    assert (
        len(ExampleTable.open(tmp_path / "one", shards[0].parent)) == 7
        and len(contents(tmp_path / "one")) == 2
    )


def test_table_and_reader_travel_small_and_refuse_an_index_that_was_replaced(
    shards: list[Path], tmp_path: Path
) -> None:
    reader = TarReader(build_index(shards[:2], tmp_path / "index"))
    payload = pickle.dumps(reader)
    assert len(payload) < 2000 and pickle.loads(payload).read(3) == reader.read(3)
    build_index(shards, tmp_path / "index")
    with pytest.raises(DataError, match="was replaced while it was in use"):
        pickle.loads(payload)


@pytest.fixture
def copied(shards: list[Path], tmp_path: Path) -> tuple[Path, Path]:
    """A shard that may be spoiled, and its index."""
    copy = tmp_path / "copy.tar"
    copy.write_bytes(shards[0].read_bytes())
    build_index([copy], tmp_path / "index")
    return copy, tmp_path / "index"


def test_changed_and_vanished_shards(copied: tuple[Path, Path], tmp_path: Path) -> None:
    copy, index = copied
    reader = TarReader(ExampleTable.open(index, tmp_path))
    with open(copy, "ab") as file:
        file.write(bytes(512))
    with pytest.raises(DataError, match=r"bytes, its index says"):
        ExampleTable.open(index, tmp_path)
    with pytest.raises(ReadError, match="its index says"):
        reader.read(0)
    copy.unlink()
    with pytest.raises(DataError, match="missing or empty shards"):
        ExampleTable.open(index, tmp_path)
    with pytest.raises(ReadError, match="cannot read"):
        reader.read(0)


def test_a_missing_or_damaged_index(copied: tuple[Path, Path], tmp_path: Path) -> None:
    _, index = copied
    with pytest.raises(DataError, match="there is no index"):
        ExampleTable.open(tmp_path / "none", tmp_path)
    manifest = json.loads((index / MANIFEST).read_text())
    for damage in (
        {"format_version": 99},
        {"shards": []},
        {"extents": "gone.npy"},
        {"shards": [{"x": 1}]},
    ):
        (index / MANIFEST).write_text(json.dumps({**manifest, **damage}))
        with pytest.raises(DataError, match="build it again"):
            ExampleTable.open(index, tmp_path)


def test_bytes_that_do_not_fit_the_index_are_a_read_error(
    copied: tuple[Path, Path], tmp_path: Path
) -> None:
    """Never a zero gradient: also where the checksum fits and members do not."""
    copy, index = copied
    content = copy.read_bytes()
    table = ExampleTable.open(index, tmp_path)
    copy.write_bytes(os.urandom(len(content)))
    with pytest.raises(ReadError, match="the bytes changed"):
        TarReader(table).read(2)
    copy.write_bytes(content)
    examples = TarReader(table).read_all([0, 1, 2])
    next(examples)
    os.truncate(copy, 100)
    with pytest.raises(ReadError, match="short read"):
        list(examples)
    copy.write_bytes(content)
    rows = np.array(table._rows_N)
    rows[2]["first_block"] += 1
    start, blocks = int(rows[2]["first_block"]) * 512, int(rows[2]["low"])
    rows[2]["crc32"] = zlib.crc32(content[start : start + blocks * 512])
    table._rows_N = rows
    with pytest.raises(
        ReadError, match=r"copy\.tar at byte \d+ does not fit its index .*index again"
    ):
        TarReader(table).read(2)


def test_verify_accepts_copies_with_new_times_and_the_digest_follows_content(
    copied: tuple[Path, Path], tmp_path: Path
) -> None:
    copy, index = copied
    table = ExampleTable.open(index, tmp_path)
    os.utime(copy, (1, 1))
    with pytest.raises(DataError, match=r"copy\.tar was written after it was indexed"):
        ExampleTable.open(index, tmp_path)
    assert build_index([copy], tmp_path / "index2").manifest_digest() == table.manifest_digest()
    verify_hashes(table, None, lambda items: items)
    assert ExampleTable.open(index, tmp_path).manifest_digest() == table.manifest_digest()
    data = bytearray(copy.read_bytes())
    data[700] ^= 1
    copy.write_bytes(data)
    with pytest.raises(DataError, match="is not what was indexed"):
        verify_hashes(table, None, lambda items: items)
    assert build_index([copy], tmp_path / "index3").manifest_digest() != table.manifest_digest()


def test_processes_and_small_pieces_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make_shards(tmp_path / "shards", 7)
    build_index(shards, tmp_path / "one")
    with worker_pool(2) as pool:
        build_index(shards, tmp_path / "two", executor=pool.executor)
    monkeypatch.setattr("data.index.shard._HASH_CHUNK", 700)
    build_index(shards, tmp_path / "three")
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "three")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_bad_shards_are_said_at_once(num_workers: int, tmp_path: Path) -> None:
    """Four bad shards, each in its way, and one that is missing."""
    shards = make_shards(tmp_path / "shards", 6)
    shards[0].write_bytes(shards[0].read_bytes() * 2)
    shards[1].write_bytes(shards[1].read_bytes()[:3000])
    write_shard(
        shards[2],
        [{"__key__": key, part: b"x"} for key, part in (("a", "jpg"), ("b", "jpg"), ("a", "txt"))],
    )
    shards[3].write_bytes(b"")
    index, pattern = (
        tmp_path / "index",
        f"{tmp_path}/shards/train-{{000..006}}.tar",
    )  # 006 is missing
    found = find_shards(pattern, tmp_path)
    with (
        worker_pool(num_workers) as pool,
        pytest.raises(DataError, match="joined by cat") as caught,
    ):
        build_index(found, index, executor=pool.executor)
    message = str(caught.value)
    assert "\n" not in message and all(
        f"train-{number:03d}.tar" in message for number in (0, 1, 2, 3, 6)
    )
    table = build_index(shards[4:], index)
    with pytest.raises(DataError, match="is of other shards"):
        table.require_shards(found)
    # Mended shards come in by the same command.
    make_shards(tmp_path / "shards", 7)
    assert [entry.count for entry in build_index(found, index).entries] == [1, 2, 3, 4, 5, 1, 2]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that builds in this process read."""
    names: list[str] = []
    original = index_build.index_file

    def note(path: Path, name: str, *more: str):  # type: ignore[no-untyped-def]
        names.append(name)
        return original(path, name, *more)

    monkeypatch.setattr(index_build, "index_file", note)
    return names


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
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


def test_a_killed_build_goes_on(read: list[str], tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", 7)
    build_index(shards, tmp_path / "whole")
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(ROOT),
        str(tmp_path / "shards"),
        str(tmp_path / "index"),
    ]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    with pytest.raises(DataError, match="there is no index"):
        ExampleTable.open(tmp_path / "index", tmp_path / "shards")
    parts = sorted((tmp_path / "index" / "parts").glob("?" * 32))
    assert len(parts) == 4
    parts[0].write_bytes(parts[0].read_bytes()[:-1])  # a file system that lost its end
    read.clear()
    build_index(shards, tmp_path / "index")
    assert len(read) == 4  # three that were never read, and the spoiled one
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")


def test_more_shards_are_appended(read: list[str], tmp_path: Path) -> None:
    old = make_shards(tmp_path / "shards", 3)
    before = build_index(old, tmp_path / "index").manifest_digest()
    new = make_shards(tmp_path / "shards", 2, first=3)
    read.clear()
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


@pytest.mark.parametrize("folder", ["/sys/kernel/index", "FILE/index"])
def test_a_folder_that_cannot_be_written_is_known_before_any_reading(
    folder: str, read: list[str], tmp_path: Path
) -> None:
    shards = make_shards(tmp_path / "shards", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the index to") as caught:
        build_index(shards, Path(folder.replace("FILE", str(tmp_path / "file"))))
    assert "\n" not in str(caught.value) and not read


def test_one_build_at_a_time(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "shards", 1)
    (tmp_path / "index" / "parts").mkdir(parents=True)
    with open(tmp_path / "index" / "parts" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another build is at work"):
            build_index(shards, tmp_path / "index")
    assert len(build_index(shards, tmp_path / "index")) == 1


def test_a_dead_worker_is_one_line() -> None:
    with (
        ProcessPoolExecutor(1) as executor,
        pytest.raises(ReadError, match="a worker process died"),
    ):
        list(run_all(executor, signal.raise_signal, [(signal.SIGKILL,), (signal.SIGKILL,)]))


def test_shard_patterns(tmp_path: Path) -> None:
    for name in (*(f"train-{number:03d}.tar" for number in range(12)), "heldout.tar"):
        write_shard(tmp_path / "data" / name, [{"__key__": "k", "txt": b"x"}])
    (tmp_path / "hollow").mkdir()
    for pattern, count in {
        "data/train-{000..011}.tar": 12,
        "data/train-{009..010}.tar,data/heldout.tar": 3,
        "data/{heldout,train-001}.tar": 2,
        "data/train-*.tar": 12,
        "data": 13,
        f"{tmp_path}/data/heldout.tar, data/heldout.tar": 1,
    }.items():
        assert len(find_shards(pattern, tmp_path).names) == count
    for pattern, message in {
        "data/train-{012..014}.tar": r"train-012.tar is missing \(and 2 more\)",
        "data/nothing-*.tar": "no shards match",
        "hollow": "no \\*.tar",
        "": "no shards given",
        "data/train-{003..001}.tar": "empty range",
        "data/{a,b": "unbalanced",
    }.items():
        with pytest.raises(DataError, match=message):
            require_a_shard(pattern, tmp_path)
    require_a_shard("data/train-{010..012}.tar", tmp_path)  # the index names those that are missing


@pytest.mark.parametrize(
    "name", ["odd, dir", "odd {x} [1]", "one,two.tar", "a{1,2}.tar", "{0..3}, [a]/x.tar"]
)
def test_a_name_that_is_there_is_no_pattern(name: str, tmp_path: Path) -> None:
    """A file or folder with commas, braces or brackets, by its name, its path, or with a pattern behind it."""
    path = tmp_path / name
    files = [path] if path.suffix else [path / "0.tar", path / "1.tar"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(512))
    patterns = [name, str(path)] + (
        [] if path.suffix else [f"{name}/*.tar", f"{path}/{{0..1}}.tar"]
    )
    for pattern in patterns:
        assert find_shards(pattern, tmp_path).locations() == [str(file) for file in files]
    if path.suffix and "/" not in name and name.count(",") < 2 and "{" in name:  # one of a list
        (tmp_path / "b.tar").write_bytes(bytes(512))
        assert find_shards(f"{name},b.tar", tmp_path).locations() == [
            str(path),
            str(tmp_path / "b.tar"),
        ]


def test_a_folder_of_shards_is_read_whole_or_says_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tars of any case; archives, folders with tars and files without a suffix that hold some are named, and nothing else is."""
    folder = tmp_path / "shards"
    for number, name in enumerate(
        ("00.tar", "01.TAR", "02.Tar", ".03.tar", "deeper/04.tar", "heldout/05.tar")
    ):
        write_shard(folder / name, [{"__key__": f"{number}", "jpg": picture(number), "txt": b"x"}])
    for name in (
        "README.md",
        "LICENSE",
        "00.tar.md5",
        "00.tar.idx",
        "provenance.json",
        "notes.txt",
        "empty/x.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("words about tar\n" * 30)
    assert list(find_shards("shards", tmp_path).remarks()) == [
        "1 files or folders beside the shards are not read (deeper): only uncompressed tars directly in a folder are; unpack "
        "archives, and name folders one by one"
    ]
    whole = (folder / "00.tar").read_bytes()
    archives = {
        "06.tar.gz": gzip.compress(whole),
        "07.TGZ": gzip.compress(whole),
        "08.tar.zst": b"x",
        "09.tar.bz2": bz2.compress(whole),
        "10.tar.xz": b"x",
        "11.zip": b"x",
        "12.tar.lz4": b"x",
        "13.tar.part": whole,
        "14.7z": b"x",
        "15.gz": b"x",
        "16": whole,
        "17": gzip.compress(whole),
        "18": b"PK\x03\x04x",
        "19.tar.gz.aa": b"x",
        "._00.tar": b"\0\5\x16\7",
        "20.tbz2": b"x",
        "21.tzst": b"x",
        "22.txz": b"x",
    }
    for name, content in archives.items():
        (folder / name).write_bytes(content)
    shards = find_shards("shards", tmp_path)
    assert shards.names == (".03.tar", "00.tar", "01.TAR", "02.Tar")
    assert sorted(shards.unread_names) == sorted([*archives, "deeper"])
    assert find_shards("shards,shards/deeper,shards/16", tmp_path).names == (
        *shards.names[:4],
        "16",
        "deeper/04.tar",
    )
    for command in (["index"], ["verify", "--index", str(folder / "index")]):
        assert main([command[0], str(folder), *command[1:], "--workers", "1"]) == 0
        assert (
            "19 files or folders beside the shards are not read (._00.tar, 06.tar.gz, 07.TGZ, ...)"
            in capsys.readouterr().err
        )
    with pytest.raises(
        DataError, match=r"_00\.tar holds attributes that macOS keeps beside a file; remove it"
    ):
        build_index([folder / "._00.tar"], tmp_path / "index")
    for path in folder.glob("*.[tT]*"):
        if path.name[-4:].lower() == ".tar" and not path.name.startswith("._"):
            path.unlink()
    with pytest.raises(DataError, match=r"has no \*\.tar files, but \._00\.tar, which is not read"):
        find_shards("shards", tmp_path)


def test_copies_over_shards_are_counted(tmp_path: Path) -> None:
    """Other cuts of the same examples; a whole shard again; copies within a shard are another line."""

    def shard(name: str, *numbers: int) -> Path:
        content = [(f"{n:03d}.{part}", b"%d" % n * 50) for n in numbers for part in ("jpg", "txt")]
        (tmp_path / name).write_bytes(archive(content))
        return tmp_path / name

    paths = [
        shard("a.tar", *range(10)),
        shard("b.tar", *range(5, 15)),
        shard("c.tar", *range(8, 11), 20, 21, 20, 21),
    ]
    table = build_index(paths, tmp_path / "index")
    copies, by_chance, pair = table.copies_in_other_shards()
    assert (copies, by_chance < 1, pair) == (5 + 3, True, ("a.tar", "b.tar"))
    [copied] = [line for line in table.remarks() if "byte for byte" in line]
    assert copied.startswith(
        "8 of 27 examples are those of an earlier shard byte for byte, as in a.tar and b.tar"
    )
    assert not [
        line
        for line in build_index(paths[:1], tmp_path / "one").remarks()
        if "byte for byte" in line
    ]
    again = build_index([paths[0], shard("d.tar", *range(10))], tmp_path / "two")
    assert again.copies_in_other_shards()[0] == 10
    # Of a large table a part is looked at, and what chance finds there is no copy.
    rng, count = np.random.default_rng(0), 60_000
    rows = np.zeros(count, dtype=ROW)
    rows["crc32"], rows["low"] = rng.integers(0, 2**32, count), 7
    entries = [replace(table.entries[0], name=str(number), count=count // 4) for number in range(4)]
    copies, by_chance, _ = ExampleTable(tmp_path, "", entries, rows).copies_in_other_shards(
        max_compared=20_000
    )
    assert copies <= by_chance
    rows[-6000:] = rows[:6000]
    copies, by_chance, pair = ExampleTable(tmp_path, "", entries, rows).copies_in_other_shards(
        max_compared=20_000
    )
    assert by_chance < 5000 < copies < 7000 and pair == ("0", "3")


HUGE = (
    "{000000..999999999999}.tar",
    "{0..999999}{0..999999}.tar",
    "{0..%s}.tar" % ("9" * 5000),
    "{a,{b,{0..9999999}}}",
)


def test_huge_patterns_are_refused_before_they_take_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    for pattern in HUGE:
        with pytest.raises(DataError, match="names more than") as caught:
            find_shards(pattern, tmp_path)
        assert "\n" not in str(caught.value)
    assert tracemalloc.get_traced_memory()[1] < 500e6
    tracemalloc.stop()


@pytest.mark.parametrize("how", ["the same name", "a detour", "a link"])
def test_a_shard_that_is_named_by_two_paths_is_refused(how: str, tmp_path: Path) -> None:
    """Every example of it would have two copies, and epsilon is for one."""
    shard = tmp_path / "d" / "s.tar"
    shard.parent.mkdir()
    shard.write_bytes(b"")
    second = {"the same name": shard, "a detour": tmp_path / "d/../d/s.tar"}.get(how)
    if second is None:
        second = tmp_path / "d" / "t.tar"
        second.symlink_to(shard)
    with pytest.raises(DataError, match=r"s\.tar is listed twice, also as .*\.tar: name each"):
        ShardSet.of_files([shard, second])
    assert ShardSet.of_files([shard]).names == ("s.tar",)
