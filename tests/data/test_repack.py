"""prepare.py repack: whatever an index refuses comes out whole, or the command says what is missing."""

import hashlib
import io
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.index.build import build_index
from data.index.repack import CHECKSUMS, Repacked, repack
from data.reading.reader import TarReader
from launch_scripts.prepare import main
from tests.data.test_whole_shards import BLOCK, Fields, archive, by_key, members, without_padding

MIB = 1 << 20


def repacked(shards: list[Path], output: Path, *, shard_bytes: int = MIB) -> tuple[Repacked, list[Fields]]:
    """What the command says it wrote, and what an index of it holds."""
    report = repack(shards, output, shard_bytes=shard_bytes)
    paths = sorted(output.glob("*.tar"))
    table = build_index(paths, output.parent / f"{output.name}-index")
    lines = (output / CHECKSUMS).read_text().splitlines()
    assert lines == [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in paths]
    assert (report.shards, report.examples) == (len(paths), len(table))
    return report, [raw.fields for raw in TarReader(table).read_all(range(len(table)))]


def as_sets(examples: list[Fields]) -> list[tuple[tuple[str, bytes], ...]]:
    return sorted(tuple(sorted(fields.items())) for fields in examples)


@pytest.mark.parametrize("seed", range(12))
def test_members_in_any_order_and_in_any_shard_come_together(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    content = members(12, rng, long_names=seed % 3 == 0)
    mixed = [content[i] for i in rng.permutation(len(content))] if seed % 2 else content
    cuts = np.sort(rng.integers(0, len(mixed), 3))
    shards = []
    for number, part in enumerate(np.split(np.arange(len(mixed)), cuts)):
        if len(part):
            shards.append(tmp_path / f"{number}.tar")
            shards[-1].write_bytes(archive([mixed[i] for i in part], 1 + seed % 2))
    report, examples = repacked(shards, tmp_path / "out")
    assert as_sets(examples) == as_sets(by_key(content))
    assert report.skipped == 0
    if seed % 2 == 0:  # the order stays
        assert examples == by_key(content)


def test_shards_are_as_large_as_asked(tmp_path: Path) -> None:
    content = members(40, np.random.default_rng(0))
    path = tmp_path / "one.tar"
    path.write_bytes(archive(content))
    report, examples = repacked([path], tmp_path / "out", shard_bytes=20 << 10)
    sizes = [shard.stat().st_size for shard in sorted((tmp_path / "out").glob("*.tar"))]
    assert examples == by_key(content) and max(sizes) <= 20 << 10 < sizes[0] + sizes[1] and len(sizes) > 4
    assert report.joined == 0
    report, examples = repacked([path], tmp_path / "small", shard_bytes=10_240)
    assert examples == by_key(content)


def test_keys_that_every_shard_counts_anew_stay_examples_of_their_own(tmp_path: Path) -> None:
    """Also where two of them would become neighbours: an index would take them for one."""
    shards, expected = [], []
    for number in range(4):
        content = members([1, 2, 1, 3][number], np.random.default_rng(number))
        shards.append(tmp_path / f"{number}.tar")
        shards[-1].write_bytes(archive(content))
        expected += by_key(content)
    report, examples = repacked(shards, tmp_path / "out")
    assert examples == expected and report.joined == 0 and report.shards > 1


def test_joined_archives_are_whole(tmp_path: Path) -> None:
    content = members(10, np.random.default_rng(0))
    path = tmp_path / "s.tar"
    for one, two in ((archive(content[:7]), archive(content[7:])), (without_padding(archive(content[:7])),) * 2):
        path.write_bytes(one + two)
        expected = content if two != one else content[:7]
        output = tmp_path / f"out{len(one)}"
        _, examples = repacked([path], output)
        assert as_sets(examples) == as_sets(by_key(expected) * (1 if two != one else 2))


def test_copies_that_follow_each_other_stay_two(tmp_path: Path) -> None:
    """An index takes neighbours of one key for one example, so they go into shards of their own."""
    content = members(1, np.random.default_rng(0))
    path = tmp_path / "s.tar"
    path.write_bytes(archive(content) + archive(content))
    report, examples = repacked([path], tmp_path / "out")
    assert examples == by_key(content) * 2 and report.joints == 1 and report.shards == 2


@pytest.mark.parametrize("seed", range(10))
def test_what_is_damaged_is_never_lost_in_silence(seed: int, tmp_path: Path) -> None:
    """Zeros, noise and cuts over headers are refused."""
    rng = np.random.default_rng(seed)
    content = members(20, rng)
    good = bytearray(archive(content))
    path = tmp_path / "s.tar"
    with tarfile.open(fileobj=io.BytesIO(good)) as tar:
        start = int(rng.choice([member.offset for member in tar][2:-2]))
    kind = seed % 3
    if kind == 0:
        good[start : start + 6 * BLOCK] = bytes(6 * BLOCK)
    elif kind == 1:
        good[start : start + 6 * BLOCK] = rng.bytes(6 * BLOCK)
    else:
        del good[start:]  # between two members, where nothing but the missing end marker tells
    path.write_bytes(good)
    with pytest.raises(DataError, match=r"is damaged behind .*fetch it again, or leave it out") as caught:
        repack([path], tmp_path / "refused", shard_bytes=MIB)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_members_of_which_nobody_knows_the_example_are_refused(tmp_path: Path) -> None:
    picture, text = ("a.jpg", b"1"), ("a.txt", b"2")
    path, two = tmp_path / "s.tar", tmp_path / "t.tar"
    for content in ([picture, ("b.jpg", b"x"), picture, text], [picture, ("b.jpg", b"x"), text, ("c.jpg", b"y"), text]):
        path.write_bytes(archive(content))
        with pytest.raises(DataError, match="'a' comes back with parts of an example"):
            repack([path], tmp_path / "out", shard_bytes=MIB)
    three = tmp_path / "u.tar"
    for content, place in (([picture], path), ([picture, text], two), ([text], three)):
        place.write_bytes(archive(content))
    with pytest.raises(DataError, match="'a' comes back"):
        repack([path, two, three], tmp_path / "out", shard_bytes=MIB)
    path.write_bytes(archive([picture, picture]))
    two.write_bytes(archive([text, ("b.txt", b"3"), text]))
    with pytest.raises(DataError, match="'a' comes back"):
        repack([path, two], tmp_path / "out", shard_bytes=MIB)


def test_the_command_counts_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = members(5, np.random.default_rng(0))
    path = tmp_path / "s.tar"
    path.write_bytes(archive([*content[::2], *content[1::2], ("folder/README", b"x")]))
    assert main(["repack", str(path), "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    expected = (
        r"5 examples in 1 shards, of which [1-5] were apart; 0 places where archives were joined,"
        r" 1 members that belong to no example"
    )
    assert re.match(expected, said), said
    with pytest.raises(DataError, match="not empty"):
        main(["repack", str(path), "--output", str(tmp_path / "out")])
