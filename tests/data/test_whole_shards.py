"""Every byte of a shard is accounted for: what is accepted is read as webdataset reads it, and nothing of it is missing.

Archives come from every writer that is installed, in all of its formats; then they are cut, zeroed, joined and shuffled.
"""

import io
import itertools
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data.errors import DataError
from data.index.build import build_index
from data.reading.reader import TarReader
from data.reading.streaming import Stream

BLOCK = 512
RECORD = 20 * BLOCK
METADATA = ("__key__", "__url__", "__local_path__")
Fields = dict[str, bytes]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def members(num_examples: int, rng: np.random.Generator, *, long_names: bool = False) -> list[tuple[str, bytes]]:
    """Pairs in order, some with a third member; no payload is empty or holds a zero."""
    folder = "long" * 40 + "/" if long_names else "d/"
    found = []
    for number in range(num_examples):
        for extension in ("jpg", "txt", "json")[: 2 + number % 2]:
            body = rng.integers(1, 256, rng.integers(1, 3000), dtype=np.uint8).tobytes()
            found.append((f"{folder}{number:03d}.{extension}", body))
    return found


def archive(content: list[tuple[str, bytes]], fmt: int = tarfile.GNU_FORMAT, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=fmt) as tar:
        for name, body in content:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def without_padding(content: bytes) -> bytes:
    """As bsdtar, Go and Rust end a file: two blocks of zeros and nothing else."""
    return content[: end_of_members(content) + 2 * BLOCK]


def end_of_members(content: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        last = tar.getmembers()[-1]
    return last.offset_data + -(-last.size // BLOCK) * BLOCK


def by_webdataset(path: Path) -> list[Fields]:
    samples = webdataset.WebDataset([str(path)], shardshuffle=False)
    return [{name: body for name, body in sample.items() if name not in METADATA} for sample in samples]


def indexed(path: Path) -> list[Fields] | str:
    """The examples of the index, or why there is none; every byte of the file is found in one of three places."""
    shutil.rmtree(path.parent / "index", ignore_errors=True)
    try:
        table = build_index([path], path.parent / "index")
    except DataError as error:
        return str(error)
    [entry] = table.entries
    # The index itself says so without reading the archive again.
    assert int(table.extents(range(len(table))).lengths.sum()) + entry.other_bytes + entry.padding_bytes == entry.size
    content = path.read_bytes()
    left = np.ones(len(content), dtype=bool)
    for offset, length in zip(*table.extents(range(len(table)))[1:3], strict=True):
        assert left[offset : offset + length].all()
        left[offset : offset + length] = False
    end = end_of_members(content)
    assert not any(content[end:]) and BLOCK <= len(content) - end < RECORD + 2 * BLOCK
    left[end:] = False
    # What is in no example is a member that belongs to none: a folder, a link, a file without an extension.
    with tarfile.open(path) as tar:
        skipped = [m for m in tar if left[m.offset]]
        for member, after in itertools.zip_longest(skipped, [m.offset for m in skipped[1:]]):
            assert not member.isreg() or "." not in member.name.rpartition("/")[2].lstrip(".")
            stop = member.offset_data + (-(-member.size // BLOCK) * BLOCK if member.isreg() else 0)
            assert after is None or stop <= after
            left[member.offset : stop] = False
    assert not left.any()
    return [raw.fields for raw in TarReader(table).read_all(range(len(table)))]


def streamed(path: Path) -> list[Fields] | str:
    try:
        return [raw.fields for raw, _ in Stream([path], shuffle_buffer=0, epochs=1).examples()]
    except DataError as error:
        return str(error)


def outcome(path: Path) -> list[Fields] | str:
    """What both ways of reading agree on."""
    one, two = indexed(path), streamed(path)
    assert one == two or (isinstance(one, str) and isinstance(two, str)), (one, two)
    if isinstance(one, list):
        assert one == by_webdataset(path)
    else:
        assert str(path) in one and re.search(r"byte \d+", one) and "\n" not in one, one
        assert re.search("fetch it again|--sort=name", one) and f"prepare.py repack {path}" in one, one
    return one


def folder_of(content: list[tuple[str, bytes]], root: Path) -> list[str]:
    for name, body in content:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
    return [name for name, _ in content]


def foreign_archives(root: Path, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Command lines that write the files `names` of `root` to standard output, and the last byte that may be cut off."""
    tar = ["tar", "-C", str(root), "-cf", "-"]
    for fmt in ("v7", "oldgnu", "gnu", "ustar", "posix"):
        yield f"tar {fmt}", [*tar, f"--format={fmt}", *names]
    for blocks in (1, 2, 3, 8, 20):
        yield f"tar -b {blocks}", [*tar, "-b", str(blocks), *names]
    yield "tar --sort=name", [*tar, "--sort=name", "."]
    yield "tar with times and owners", [*tar, "--format=posix", "--pax-option=comment=x", "--xattrs", *names]
    for bsdtar in filter(None, [shutil.which("bsdtar")]):
        for fmt in ("ustar", "pax", "gnutar", "v7", "rpax"):
            yield f"bsdtar {fmt}", [bsdtar, "-C", str(root), f"--format={fmt}", "-cf", "-", *names]


@pytest.mark.parametrize("count", [1, 7, 25])
def test_every_writer_is_accepted(count: int, tmp_path: Path) -> None:
    content = members(count, np.random.default_rng(count))
    names = folder_of(content, tmp_path / "files")
    expected = by_key(content)
    path = tmp_path / "s.tar"
    for fmt, mode in itertools.product(FORMATS.values(), ("w", "w|")):
        for end in (archive(content, fmt, mode), without_padding(archive(content, fmt, mode))):
            path.write_bytes(end)
            assert outcome(path) == expected, (fmt, mode)
    for what, command in foreign_archives(tmp_path / "files", names):
        path.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        assert outcome(path) == expected, what
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for (key, run), fields in zip(
            itertools.groupby(content, key=lambda m: m[0].split(".")[0]), expected, strict=True
        ):
            assert len(list(run)) == len(fields)
            writer.write({"__key__": key, **fields})
    # webdataset writes the members of an example by name
    assert [sorted(fields.items()) for fields in outcome(path)] == [sorted(fields.items()) for fields in expected]  # type: ignore[union-attr]


def by_key(content: list[tuple[str, bytes]]) -> list[Fields]:
    runs = itertools.groupby(content, key=lambda member: member[0].split(".")[0])
    return [{name.split(".", 1)[1]: body for name, body in run} for _, run in runs]


def test_tar_appends_and_joins(tmp_path: Path) -> None:
    """tar itself adds to archives so that they stay one; cat does not."""
    content = members(12, np.random.default_rng(0))
    names = folder_of(content, tmp_path)
    half = names.index("d/006.jpg")
    one, two, path = tmp_path / "one.tar", tmp_path / "two.tar", tmp_path / "s.tar"
    for part, chosen in ((one, names[:half]), (two, names[half:])):
        subprocess.run(["tar", "-C", str(tmp_path), "-cf", str(part), *chosen], check=True)
    shutil.copy(one, path)
    subprocess.run(["tar", "-C", str(tmp_path), "-rf", str(path), *names[half:]], check=True)
    assert outcome(path) == by_key(content)
    shutil.copy(one, path)
    subprocess.run(["tar", "--concatenate", "-f", str(path), str(two)], check=True)
    assert outcome(path) == by_key(content)
    path.write_bytes(one.read_bytes() + two.read_bytes())
    assert "archives were joined by cat" in outcome(path)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_without_a_word(seed: int, tmp_path: Path) -> None:
    """Cuts, zeros in the tail, zeroed headers, blocks put in between: refused, or every example is there."""
    rng = np.random.default_rng(seed)
    content = members(12, rng, long_names=seed % 2 == 1)
    good = archive(content, [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT][seed // 2])
    if seed % 2:
        good = without_padding(good)
    expected, end, path = by_key(content), end_of_members(good), tmp_path / "s.tar"
    with tarfile.open(fileobj=io.BytesIO(good)) as tar:
        headers = [at for m in tar for at in range(m.offset, m.offset_data, BLOCK)]
        # Zeros from a member on that ends in the last record look like its padding; docs/data.md says so.
        telling = max(m.offset_data for m in tar if m.offset_data + m.size < len(good) - RECORD - 3 * BLOCK)

    def check(damaged: bytes, *, may_pass: bool) -> bool:
        path.write_bytes(damaged)
        found = outcome(path)
        assert isinstance(found, str) or (may_pass and found == expected)
        return isinstance(found, list)

    assert check(good, may_pass=True)
    for header in headers:  # of members, long names and pax records alike
        check(good[:header] + bytes(BLOCK) + good[header + BLOCK :], may_pass=False)
        check(good[:header] + bytes(2 * BLOCK) + good[header:], may_pass=False)
    for cut in [*rng.integers(1, end, 25).tolist(), end, end - BLOCK, end + 1, end + BLOCK, end + 2 * BLOCK]:
        check(good[:cut], may_pass=cut >= end + BLOCK)
    assert check(good[: end + BLOCK], may_pass=True) and check(good[: end + 2 * BLOCK], may_pass=True)
    for first in rng.integers(0, telling, 25).tolist():
        check(good[:first] + bytes(len(good) - first), may_pass=False)
    check(good + good, may_pass=False)
    check(without_padding(good) + good, may_pass=False)
    for more in (BLOCK, RECORD, 2 * RECORD, 1 << 20):
        check(good[: end + 2 * BLOCK] + bytes(more) + b"x" * BLOCK, may_pass=False)
    check(good[: end + 2 * BLOCK] + bytes(4 * RECORD), may_pass=False)
    check(good[:-1] + b"x", may_pass=False)


def test_a_preallocated_download_is_refused_wherever_it_stopped(tmp_path: Path) -> None:
    """Whole records of zeros at the end; the message says what mends it, and that does."""
    content = members(25, np.random.default_rng(1))
    good, path = archive(content), tmp_path / "s.tar"
    for stopped in range(0, len(good) - 2 * RECORD, RECORD):
        path.write_bytes(good[:stopped] + bytes(len(good) - stopped))
        assert isinstance(outcome(path), str), stopped
    path.write_bytes(good + bytes(5 * RECORD))  # all members are there
    found = outcome(path)
    [size] = re.findall(r"truncate -s (\d+)", found)  # type: ignore[arg-type]
    os.truncate(path, int(size))
    assert outcome(path) == by_key(content)


def test_members_in_another_order(tmp_path: Path) -> None:
    """Accepted if and only if the members of each key are neighbours."""
    path = tmp_path / "s.tar"
    kinds = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        content = members(int(rng.integers(1, 5)), rng)
        shuffled = [content[i] for i in rng.permutation(len(content))]
        path.write_bytes(archive(shuffled))
        keys = [key for key, _ in itertools.groupby(name.split(".")[0] for name, _ in shuffled)]
        found = outcome(path)
        if len(set(keys)) == len(keys):
            assert found == by_key(shuffled)
        else:
            assert isinstance(found, str) and "two places" in found and "tar --sort=name" in found
            [key] = re.findall("of the key '(.*?)'", found)
            assert keys.count(key) > 1
        kinds.add(type(found))
    assert kinds == {list, str}


def test_a_folder_in_directory_order_is_refused_until_it_is_sorted(tmp_path: Path) -> None:
    content = members(20, np.random.default_rng(3))
    names = folder_of(content, tmp_path / "files")
    path = tmp_path / "s.tar"
    mixed = sorted(names, key=lambda name: hash_of(name))  # as a file system with hashed folders lists them
    subprocess.run(["tar", "-C", str(tmp_path / "files"), "-cf", str(path), *mixed], check=True)
    assert isinstance(outcome(path), str)
    subprocess.run(["tar", "-C", str(tmp_path / "files"), "--sort=name", "-cf", str(path), "."], check=True)
    found = outcome(path)
    assert isinstance(found, list) and sorted(map(str, found)) == sorted(
        str(dict(sorted(fields.items()))) for fields in by_key(content)
    )


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "big") * 2654435761 % (1 << 32)


def test_copies_of_a_whole_pair_stay_examples(tmp_path: Path) -> None:
    """A copy is counted and protected like any other example; only parts are refused."""
    content = members(2, np.random.default_rng(0))[:2]
    other = [("d/x.jpg", b"x")]
    path = tmp_path / "s.tar"
    path.write_bytes(archive([*content, *other, *content[::-1]]))
    assert len(outcome(path)) == 3
    for part in content:
        for order in ([*content, *other, part], [part, *other, *content]):
            path.write_bytes(archive(order))
            assert isinstance(outcome(path), str)


def test_names_are_grouped_as_webdataset_does(tmp_path: Path) -> None:
    """Random names; hidden files are left aside, because webdataset takes the folder of one for its key."""
    rng = np.random.default_rng(0)
    pieces = ["a", "b", ".", "/", "__", "_", "A", "é", "-", "__a__/"]
    path = tmp_path / "s.tar"
    accepted = refused = 0
    for _ in range(100):
        names = {"".join(rng.choice(pieces, rng.integers(1, 9))) for _ in range(6)}
        chosen = sorted(n for n in names if n.rstrip("/") == n and not re.search(r"(^|/)\.", n) and n.strip("/"))
        path.write_bytes(archive([(name, b"x") for name in [*chosen, "z.txt"]]))
        try:
            expected = by_webdataset(path)
        except ValueError:
            continue  # the same name twice but for its case
        shutil.rmtree(tmp_path / "index", ignore_errors=True)
        try:
            table = build_index([path], tmp_path / "index")
        except DataError:
            refused += 1  # sorting by name alone does not bring the keys a and a/b together
            continue
        assert [raw.fields for raw in TarReader(table).read_all(range(len(table)))] == expected, chosen
        accepted += len(expected)
    assert accepted > 100 and refused < 10
