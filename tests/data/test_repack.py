"""`prepare.py repack`: members in disorder come together, dotted names come apart, damage is refused."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.index.build import build_index
from data.index.repack import CHECKSUMS, Repacked, repack
from data.reading.reader import TarReader
from tests.data.support.archives import BLOCK, Content, Fields, archive, as_sets, by_key, members, pairs, shard_of

MIB = 1 << 20


def repacked(shards: list[bytes], work: Path, *, shard_bytes: int = MIB) -> tuple[Repacked, list[Fields], list[int]]:
    """What the command says it wrote, what an index of it holds, and the sizes of its shards."""
    paths = [work / f"{number}.tar" for number in range(len(shards))]
    for path, content in zip(paths, shards, strict=True):
        path.write_bytes(content)
    output = work / f"out-{shard_bytes}"
    report = repack(paths, output, shard_bytes=shard_bytes)
    written = sorted(output.glob("*.tar"))
    table = build_index(written, work / f"index-{shard_bytes}")
    lines = (output / CHECKSUMS).read_text().splitlines()
    assert lines == [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in written]
    assert (report.shards, report.examples) == (len(written), len(table))
    sizes = [path.stat().st_size for path in written]
    return report, [raw.fields for raw in TarReader(table).read_all(range(len(table)))], sizes


@pytest.mark.parametrize("seed", range(6))
def test_members_in_any_order_come_together(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    content = members(12, rng, long_names=seed % 3 == 0)
    mixed = [content[i] for i in rng.permutation(len(content))] if seed % 2 else content
    report, examples, _ = repacked([archive(mixed, 1 + seed % 2)], tmp_path)
    assert as_sets(examples) == as_sets(by_key(content)) and report.skipped == 0
    if seed % 2 == 0:  # the order stays
        assert examples == by_key(content) and report.joined == 0


def test_shards_are_as_large_as_asked(tmp_path: Path) -> None:
    content = members(40, np.random.default_rng(0))
    for size in (20 << 10, 15_000):
        _, examples, sizes = repacked([archive(content)], tmp_path, shard_bytes=size)
        assert examples == by_key(content) and max(sizes) <= size < sizes[0] + sizes[1] and len(sizes) > 4


@pytest.mark.parametrize("kind", ["zeros", "noise", "cut"])
def test_what_is_damaged_is_never_lost_in_silence(kind: str, tmp_path: Path) -> None:
    path, good = tmp_path / "s.tar", archive(members(20, np.random.default_rng(0)))
    with tarfile.open(fileobj=io.BytesIO(good)) as tar:
        headers = [member.offset for member in tar][2:-2]
    for start in headers[::5]:
        over = bytes(6 * BLOCK) if kind == "zeros" else np.random.default_rng(start).bytes(6 * BLOCK)
        # Cut between two members, nothing but the missing end marker tells.
        path.write_bytes(good[:start] if kind == "cut" else good[:start] + over + good[start + len(over) :])
        with pytest.raises(DataError, match=r"is damaged behind .*fetch it again, or leave it out") as caught:
            repack([path], tmp_path / "refused", shard_bytes=MIB)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("order", ["jxjt", "jxtyt"])
def test_members_of_which_nobody_knows_the_example_are_refused(order: str, tmp_path: Path) -> None:
    named = {"j": "a.jpg", "t": "a.txt", "x": "b.jpg", "y": "c.jpg"}
    content: Content = [(named[letter], letter.encode()) for letter in order]
    (tmp_path / "s.tar").write_bytes(archive(content))
    with pytest.raises(DataError, match="'a' comes back with parts of an example"):
        repack([tmp_path / "s.tar"], tmp_path / "out", shard_bytes=MIB)


DOTTED = {
    "dates": pairs(*(f"2024.01.{day:02d}" for day in range(6))),
    "long names": pairs(*(f"{'x' * 150}.é{number}" for number in range(3))),
    "fields": pairs("v1.1", "v1.2", text="json"),
    "captions of .jpg": [f"v1.{number}.{extension}" for number in range(3) for extension in ("jpg", "jpg.txt")],
    "pictures first": [f"v1.{n}.jpg" for n in range(3)] + ["w.jpg", "w.txt"] + [f"v1.{n}.txt" for n in range(3)],
}


@pytest.mark.parametrize("what", DOTTED)
def test_names_with_dots_join_no_pairs(what: str, tmp_path: Path) -> None:
    """Refused with the command that takes them apart, also by the other command; afterwards nothing is lost."""
    shard = shard_of(tmp_path / "s.tar", DOTTED[what])
    for refused in (
        lambda: build_index([shard], tmp_path / "index"),
        lambda: repack([shard], tmp_path / "out", shard_bytes=MIB),
    ):
        with pytest.raises(DataError, match=r"joins \d pairs .*prepare.py repack .*--key_until_last_dot") as caught:
            refused()
        assert "\n" not in str(caught.value) and not [*(tmp_path / "out").glob("*.tar")]
    repack([shard], tmp_path / "out", shard_bytes=MIB, key_until_last_dot=True)
    table = build_index(sorted((tmp_path / "out").glob("*.tar")), tmp_path / "index")
    raws = [*TarReader(table).read_all(range(len(table)))]
    assert len(raws) == len([name for name in DOTTED[what] if name.endswith(".jpg")])
    assert [*table.remarks()] == [] and len({raw.image for raw in raws} - {None}) == len(raws)
    with tarfile.open(shard) as tar:
        bodies = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    for raw in raws:  # each picture beside the text of its own name
        [text] = [body for name, body in raw.fields.items() if not name.endswith("jpg")]
        stem = json.loads(text)["caption"].rpartition(".")[0].removesuffix(".jpg")
        assert raw.image == bodies[f"{stem}.jpg"]


def test_dots_that_join_nothing_are_let_alone(tmp_path: Path) -> None:
    shard_of(tmp_path / "s.tar", pairs(*(f"{number}.{number}" for number in range(5)), "IMG.2 (1)"))
    table = build_index([tmp_path / "s.tar"], tmp_path / "index")
    assert len(table) == 6 and [*table.remarks()] == []
