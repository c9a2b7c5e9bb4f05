"""The index against tarfile and webdataset, and which shards a pattern means."""

import contextlib
import io
import json
import os
import pickle
import stat
import tarfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data.errors import DataError, ReadError
from data.index.build import build_index
from data.index.shard import walk_shard
from data.index.shards import expand_shards, find_shards
from data.index.tar_format import split_key
from data.index.tar_index import MANIFEST, ExampleTable
from data.reading.reader import TarReader
from launch_scripts.prepare import main
from tests.data.conftest import write_shard

NAMES = [
    "a.jpg",
    "a.txt",
    "dir/sub/b.jpg",
    "dir/sub/b.txt",
    "x" * 150 + ".jpg",
    "x" * 150 + ".txt",
    "d" * 90 + "/" + "e" * 80 + ".jpg",
    "d" * 90 + "/" + "e" * 80 + ".txt",
    "bücher/größe 日本.jpg",
    "bücher/größe 日本.txt",
    "k.left.jpg",
    "k.txt",
]


def tar_bytes(names: list[str], fmt: int = tarfile.PAX_FORMAT, size: int = 700) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=fmt) as tar:
        for index, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = size + index
            tar.addfile(info, io.BytesIO(bytes([index % 251]) * info.size))
    return buffer.getvalue()


def expected_extents(path: Path) -> list[tuple[int, int]]:
    """What tarfile says, grouped by key."""
    extents: list[tuple[int, int]] = []
    current = None
    with tarfile.open(path) as tar:
        for member in tar:
            split = split_key(os.fsencode(member.name))
            if not member.isreg() or split is None:
                continue
            end = member.offset_data + -(-member.size // 512) * 512
            if split[0] == current:
                extents[-1] = (extents[-1][0], end - extents[-1][0])
            else:
                extents.append((member.offset, end - member.offset))
            current = split[0]
    return extents


@pytest.mark.parametrize("fmt", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_offsets_equal_tarfile_with_long_and_foreign_names(fmt: int, one_shard: Callable[[bytes], Path]) -> None:
    path = one_shard(tar_bytes(NAMES, fmt))
    bounds = walk_shard(path, "it").bounds_K2
    assert [(start, end - start) for start, end in bounds.tolist()] == expected_extents(path)
    assert len(bounds) == len(NAMES) // 2


def test_ids_count_over_sorted_shards(table: ExampleTable, shards: list[Path]) -> None:
    assert len(table) == 12
    assert [entry.count for entry in table.entries] == [7, 1, 4]
    ordinals, offsets, lengths, _ = table.extents([0, 6, 7, 8, 11, 0])
    assert ordinals.tolist() == [0, 0, 1, 2, 2, 0]
    assert offsets[2] == 0 and (lengths > 0).all()
    for shard, path in enumerate(shards):
        ids = [i for i in range(12) if table.extents(i).shards[0] == shard]
        got = list(zip(*(part.tolist() for part in table.extents(ids)[1:3]), strict=True))
        assert got == expected_extents(path)
    for bad in (-1, 12):
        with pytest.raises(DataError, match="from 0 to 11"):
            table.extents(bad)


def test_random_access_equals_webdataset_in_sequence(table: ExampleTable, shards: list[Path]) -> None:
    reader = TarReader(table)
    expected = list(webdataset.WebDataset([str(path) for path in shards], shardshuffle=False))
    for example_id in np.random.default_rng(0).permutation(len(table)):
        raw, sample = reader.read(int(example_id)), expected[example_id]
        assert raw.fields == {name: value for name, value in sample.items() if not name.startswith("__")}
        assert raw.image == sample.get("jpg")
        assert raw.caption == (sample["txt"].decode() if "txt" in sample else None)


def test_files_are_private_and_order_of_shards_does_not_matter(shards: list[Path], tmp_path: Path) -> None:
    one = build_index(shards, tmp_path / "one")
    two = build_index(shards[::-1], tmp_path / "two")
    assert one.manifest_digest() == two.manifest_digest() and len(one.manifest_digest()) == 32
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert [name.partition("-")[0] for name in names] == ["extents", "manifest.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        assert stat.S_IMODE((tmp_path / "one" / name).stat().st_mode) == 0o600


def test_digest_follows_content_not_time(shards: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.tar"
    copy.write_bytes(shards[0].read_bytes())
    before = build_index([copy], tmp_path / "index")
    os.utime(copy, (1, 1))
    with pytest.raises(DataError, match="written after it was indexed"):
        ExampleTable.open(tmp_path / "index", tmp_path)
    assert build_index([copy], tmp_path / "index2").manifest_digest() == before.manifest_digest()
    data = bytearray(copy.read_bytes())
    data[600] ^= 1
    copy.write_bytes(data)
    assert build_index([copy], tmp_path / "index3").manifest_digest() != before.manifest_digest()


def test_an_index_is_replaced_whole(shards: list[Path], tmp_path: Path) -> None:
    build_index(shards, tmp_path / "index")
    build_index(shards[:1], tmp_path / "index")
    assert len(ExampleTable.open(tmp_path / "index", shards[0].parent)) == 7
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_table_and_reader_travel_small(table: ExampleTable) -> None:
    reader = TarReader(table)
    first = reader.read(3)
    payload = pickle.dumps(reader)
    assert len(payload) < 2000
    assert pickle.loads(payload).read(3) == first


def test_directories_links_and_nameless_members_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in [("d", tarfile.DIRTYPE), ("a.jpg", tarfile.REGTYPE), ("a.png", tarfile.SYMTYPE)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("a.txt", "README", ".hidden.txt", "__meta__.x__"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    raw = TarReader(build_index([path], tmp_path / "index")).read(0)
    assert raw.fields == {"jpg": b"", "txt": b"abc"} and raw.caption == "abc"


def test_a_key_that_returns_whole_is_a_new_example(one_shard: Callable[[bytes], Path], tmp_path: Path) -> None:
    path = one_shard(tar_bytes(["a.jpg", "a.txt", "b.jpg", "a.txt", "a.jpg"]))
    reader = TarReader(build_index([path], tmp_path / "index"))
    assert [sorted(reader.read(i).fields) for i in range(3)] == [["jpg", "txt"], ["jpg"], ["jpg", "txt"]]


@pytest.mark.parametrize(
    ("fields", "caption"),
    [
        ({"txt": b"caf\xc3\xa9"}, "café"),
        ({"json": b'{"caption": "from json"}'}, "from json"),
        ({"json": b'{"caption": 3}'}, None),
        ({"json": b"{broken"}, None),
        ({"json": b"[" * 100_000}, None),
        ({"txt": b"\xff\xfe"}, None),
    ],
)
def test_captions(fields: dict[str, bytes], caption: str | None, tmp_path: Path) -> None:
    path = write_shard(tmp_path / "s.tar", [{"__key__": "k", **fields}])
    raw = TarReader(build_index([path], tmp_path / "index")).read(0)
    assert raw.caption == caption and raw.image is None


def test_open_complains_about_changed_shards_and_indexes(shards: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.tar"
    copy.write_bytes(shards[0].read_bytes())
    index = tmp_path / "index"
    build_index([copy], index)
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
    with pytest.raises(DataError, match="there is no index"):
        ExampleTable.open(tmp_path / "none", tmp_path)
    manifest = json.loads((index / MANIFEST).read_text())
    for damage in ({"format_version": 99}, {"shards": []}, {"extents": "gone.npy"}, {"shards": [{"x": 1}]}):
        (index / MANIFEST).write_text(json.dumps({**manifest, **damage}))
        with pytest.raises(DataError, match="build it again"):
            ExampleTable.open(index, tmp_path)


def test_bytes_that_do_not_fit_the_index_are_a_read_error(shards: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.tar"
    copy.write_bytes(shards[0].read_bytes())
    table = build_index([copy], tmp_path / "index")
    size = copy.stat().st_size
    copy.write_bytes(os.urandom(size))
    with pytest.raises(ReadError, match="does not fit its index"):
        TarReader(table).read(2)
    copy.write_bytes(shards[0].read_bytes())
    reader = TarReader(table)
    examples = reader.read_all([0, 1, 2])
    next(examples)
    os.truncate(copy, 100)
    with pytest.raises(ReadError, match="short read"):
        list(examples)


def test_shard_patterns(tmp_path: Path) -> None:
    for number in range(12):
        write_shard(tmp_path / "data" / f"train-{number:03d}.tar", [{"__key__": "k", "txt": b"x"}])
    write_shard(tmp_path / "data" / "heldout.tar", [{"__key__": "k", "txt": b"x"}])
    (tmp_path / "data" / "empty.tar.part").touch()
    (tmp_path / "hollow").mkdir()
    count = lambda pattern: len(expand_shards(pattern, tmp_path))  # noqa: E731
    assert count("data/train-{000..011}.tar") == 12
    assert count("data/train-{009..010}.tar,data/heldout.tar") == 3
    assert count("data/{heldout,train-001}.tar") == 2
    assert count("data/train-*.tar") == 12
    assert count("data") == 13
    assert count(f"{tmp_path}/data/heldout.tar, data/heldout.tar") == 1
    for pattern, message in {
        "data/train-{010..012}.tar": "train-012.tar is missing",
        "data/nothing-*.tar": "no shards match",
        "hollow": "no \\*.tar",
        "": "no shards given",
        "data/empty.tar.part": "empty",
        "data/train-{003..001}.tar": "range",
        "data/{a,b": "unbalanced",
    }.items():
        with pytest.raises(DataError, match=message):
            expand_shards(pattern, tmp_path)


HUGE = (
    "{000000..999999999999}.tar",
    "{0..999999}{0..999999}.tar",
    "{0..%s}.tar" % ("9" * 5000),
    "{a,{b,{0..9999999}}}",
)


ODD_NAMES = ["odd, dir", "odd {x} [1]", "one,two.tar", "a{1,2}.tar", "{0..3}, [a]/x.tar"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_that_is_there_is_no_pattern(name: str, tmp_path: Path) -> None:
    """A file or folder with commas, braces or brackets, by its name, its path, or with a pattern behind it."""
    path = tmp_path / name
    files = [path] if path.suffix else [path / "0.tar", path / "1.tar"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(512))
    patterns = [name, str(path)] + ([] if path.suffix else [f"{name}/*.tar", f"{path}/{{0..1}}.tar"])
    for pattern in patterns:
        assert expand_shards(pattern, tmp_path) == files
        assert find_shards(pattern, tmp_path).locations() == [str(file) for file in files]
    if path.suffix and "/" not in name and name.count(",") < 2 and "{" in name:  # one of a list
        (tmp_path / "b.tar").write_bytes(bytes(512))
        assert expand_shards(f"{name},b.tar", tmp_path) == [path, tmp_path / "b.tar"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("no, such", "commas separate shards"),
        ("no {such}", "braces expand"),
        ("there.tar, such/*.tar", "commas separate shards"),
        ("a.tar::b.tar", "commas separate shards: a.tar,b.tar"),
        ("s3://b/{0..1}.tar::s3://c/2.tar", r"commas separate shards: s3://b/\{0..1\}.tar,s3://c/2.tar"),
        ("pipe:aws s3 cp s3://b/{0..1}.tar -", r"is a command.* s3://b/\{0..1\}.tar"),
        ("pipe:cat there.tar", "is a command.* path or URL"),
        ("there.tar::pipe:cat there.tar", "is a command"),
        ("x" * 5000, "missing|other shards"),
    ],
)
@pytest.mark.parametrize("command", ["index", "verify", "repack"])
def test_habits_of_other_loaders_are_told_the_way(command: str, pattern: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "there.tar").write_bytes(bytes(1024))
    words = command.split()
    (tmp_path / "index").mkdir()
    write_shard(tmp_path / "ok.tar", [{"__key__": "a", "txt": b"x"}])
    build_index([tmp_path / "ok.tar"], tmp_path / "index")
    index = ["--index", "index"] if command == "verify" else ["--output", "out"]
    with contextlib.chdir(tmp_path), pytest.raises(DataError, match=message) as caught:
        main([words[0], pattern, *words[1:], *index])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", HUGE, ids=range(len(HUGE)))
def test_huge_patterns_are_refused_before_they_take_memory(pattern: str, tmp_path: Path) -> None:
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(DataError, match=r"too long|names more than|digits") as caught:
        find_shards(pattern, tmp_path)
    assert (
        tracemalloc.get_traced_memory()[1] < 500e6 and time.monotonic() - start < 20 and "\n" not in str(caught.value)
    )
    tracemalloc.stop()
