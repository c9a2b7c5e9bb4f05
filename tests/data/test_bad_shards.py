"""Bad shards: every byte of a shard is accounted for. What is accepted is read as webdataset reads it, all else is one line.

Archives come from every writer that is installed, in all of its formats; then they are cut, zeroed, joined, shuffled and mutated.
"""

import gzip
import io
import itertools
import os
import re
import shutil
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data.errors import DataError
from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.index.build import build_index
from data.index.tar_index import MANIFEST
from data.reading.loader import stack_examples
from data.reading.reader import TarReader, read_in_order
from launch_scripts.prepare import main
from tests.data.conftest import Content, archive, members, picture

BLOCK = 512
RECORD = 20 * BLOCK
Fields = dict[str, bytes]


def end_of_members(content: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        last = tar.getmembers()[-1]
    return last.offset_data + -(-last.size // BLOCK) * BLOCK


def without_padding(content: bytes) -> bytes:
    """As bsdtar, Go and Rust end a file: two blocks of zeros and nothing else."""
    return content[: end_of_members(content) + 2 * BLOCK]


def by_webdataset(path: Path) -> list[Fields]:
    samples = webdataset.WebDataset([str(path)], shardshuffle=False)
    own = ("__key__", "__url__", "__local_path__")
    return [{name: body for name, body in sample.items() if name not in own} for sample in samples]


def by_key(content: Content) -> list[Fields]:
    runs = itertools.groupby(content, key=lambda member: member[0].split(".")[0])
    return [{name.split(".", 1)[1]: body for name, body in run} for _, run in runs]


def shard_of(path: Path, names: list[str]) -> Path:
    """A shard of pictures, each another, and texts that say their names."""
    content = []
    for number, name in enumerate(names):
        is_picture = name.rpartition(".")[2].lower() in ("jpg", "jpe", "jfif", "png")
        content.append(
            (name, picture(number) if is_picture else b'{"caption": "%s"}' % name.encode())
        )
    path.write_bytes(archive(content))
    return path


def pairs(*stems: str, text: str = "txt") -> list[str]:
    return [f"{stem}.{extension}" for stem in stems for extension in ("jpg", text)]


def indexed(path: Path) -> list[Fields] | str:
    """The examples of the index, or why there is none; what is in no example is a folder, a link or nameless."""
    shutil.rmtree(path.parent / "index", ignore_errors=True)
    try:
        table = build_index([path], path.parent / "index")
    except DataError as error:
        return str(error)
    _, offsets, lengths, _ = table.extents(range(len(table)))
    assert (offsets[1:] >= offsets[:-1] + lengths[:-1]).all()
    with tarfile.open(path) as tar:
        for member in tar:
            is_in = ((offsets <= member.offset) & (member.offset < offsets + lengths)).any()
            assert (
                is_in or not member.isreg() or "." not in member.name.rpartition("/")[2].lstrip(".")
            )
    return [raw.fields for raw in TarReader(table).read_all(range(len(table)))]


def streamed(path: Path) -> list[Fields] | str:
    try:
        return [raw.fields for _, raw in read_in_order(path)]
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
        assert "fetch it again" in one or "unpack it into a folder" in one, one
    return one


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.full) for s in (1, 2)), 3])
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
        telling = max(
            m.offset_data for m in tar if m.offset_data + m.size < len(good) - RECORD - 3 * BLOCK
        )

    def check(damaged: bytes, *, may_pass: bool) -> bool:
        path.write_bytes(damaged)
        found = outcome(path)
        assert isinstance(found, str) or (may_pass and found == expected)
        return isinstance(found, list)

    assert check(good, may_pass=True)
    for header in headers:  # of members, long names and pax records alike
        check(good[:header] + bytes(BLOCK) + good[header + BLOCK :], may_pass=False)
        check(good[:header] + bytes(2 * BLOCK) + good[header:], may_pass=False)
    for cut in [
        *rng.integers(1, end, 25).tolist(),
        end,
        end - BLOCK,
        end + 1,
        end + BLOCK,
        end + 2 * BLOCK,
    ]:
        check(good[:cut], may_pass=cut >= end + BLOCK)
    assert check(good[: end + BLOCK], may_pass=True) and check(
        good[: end + 2 * BLOCK], may_pass=True
    )
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
    [size] = re.findall(r"truncate -s (\d+)", str(outcome(path)))
    os.truncate(path, int(size))
    assert outcome(path) == by_key(content)


def test_copies_of_a_whole_pair_stay_examples(tmp_path: Path) -> None:
    """A copy is counted and protected like any other example; only parts are refused. Neighbours of one key are one example."""
    content, other, path = (
        members(2, np.random.default_rng(0))[:2],
        [("d/x.jpg", b"x")],
        tmp_path / "s.tar",
    )
    path.write_bytes(archive([*content, *other, *content[::-1]]))
    assert len(outcome(path)) == 3
    assert build_index([path], tmp_path / "index").entries[0].repeated_keys == 1
    for part in content:
        for order in ([*content, *other, part], [part, *other, *content]):
            path.write_bytes(archive(order))
            assert isinstance(outcome(path), str)
    path.write_bytes(archive([*content, (content[0][0], b"second"), (content[1][0], b"second")]))
    assert indexed(path) == by_key(content), "the first member of an extension counts"


def test_names_are_grouped_as_webdataset_does(tmp_path: Path) -> None:
    """Random names; hidden files are left aside, because webdataset takes the folder of one for its key."""
    rng = np.random.default_rng(0)
    pieces = ["a", "b", ".", "/", "__", "_", "A", "é", "-", "__a__/"]
    path = tmp_path / "s.tar"
    accepted = refused = 0
    for _ in range(100):
        names = {"".join(rng.choice(pieces, rng.integers(1, 9))) for _ in range(6)}
        chosen = sorted(
            n for n in names if n.rstrip("/") == n and not re.search(r"(^|/)\.", n) and n.strip("/")
        )
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
        assert [raw.fields for raw in TarReader(table).read_all(range(len(table)))] == expected, (
            chosen
        )
        accepted += len(expected)
    assert accepted > 100 and refused < 10


ARCHIVES = [
    *[f"tar --format={fmt}" for fmt in ("v7", "oldgnu", "gnu", "ustar", "posix")],
    "tar --sparse --hole-detection=raw --format=gnu",
    *[
        f"tar --sparse --hole-detection=raw --format=posix --sparse-version={version}"
        for version in ("0.0", "0.1", "1.0")
    ],
    *[f"bsdtar --format={fmt}" for fmt in ("v7", "ustar", "gnutar", "pax", "rpax")],
]
ORDERS = ("sorted", "pictures first", "shuffled", "a folder", "long names", "hard links", "holes")


@pytest.mark.parametrize("order", ORDERS)
def test_archives_of_every_format_and_order(order: str, tmp_path: Path) -> None:
    """Accepted archives give webdataset's examples, all others one line."""
    rng = np.random.default_rng(len(order))
    content = members(4, rng, long_names=order == "long names")
    if order == "holes":
        content[1] = (content[1][0], b"x" + bytes(1 << 16) + b"x")
    names, path = [name for name, _ in content], tmp_path / "s.tar"
    for name, body in content:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(body)
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
    elif (
        order == "hard links"
    ):  # the same file under a second key: tar writes a link for the second
        for name in list(names):
            os.link(tmp_path / "files" / name, tmp_path / "files" / name.replace("d/", "d/x"))
            names.append(name.replace("d/", "d/x"))
    seen = set()
    for archive_of in ARCHIVES:
        tool, *options = archive_of.split()
        if shutil.which(tool) is None:
            continue
        made = subprocess.run(
            [tool, "-C", str(tmp_path / "files"), *options, "-cf", str(path), *names],
            capture_output=True,
        )
        if made.stderr:  # v7 and ustar have no names this long
            assert order == "long names" and b"long" in made.stderr, (archive_of, made.stderr)
            continue
        found = outcome(path)
        seen.add(type(found))
        if order not in ("hard links", "holes") and isinstance(found, list):
            one, two = (
                sorted(sorted(fields.items()) for fields in some)
                for some in (found, by_key(content))
            )
            assert one == two
        if order in ("pictures first", "shuffled"):
            assert isinstance(found, str) and "two places" in found and "tar --sort=name" in found
        elif order == "holes" and (
            "--sparse" in archive_of or isinstance(found, str)
        ):  # bsdtar finds holes unasked
            assert isinstance(found, str) and "sparse" in found
        elif order != "a folder":  # which is read in the order of the file system
            assert isinstance(found, list), archive_of
    assert seen


def with_global_path() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", pax_headers={"path": "evil.jpg"}) as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
    return buffer.getvalue()


BAD = {
    "text": (b"no tar at all " * 100, "not a tar archive"),
    "compressed": (
        gzip.compress(archive([("a.jpg", b"x")])) + bytes(1024),
        "compressed or not a tar archive",
    ),
    "short": (b"x", "cut off"),
    "header": (b"\xff" + archive([("a.jpg", b"x")])[1:], "checksum"),
    "global path": (with_global_path(), "global"),
    "empty": (b"", "missing or empty shards"),
    "no examples": (archive([("README", b"x"), ("LICENSE", b"x")]), "no example"),
    "only an end": (bytes(1024), "no example"),
    "a gif beside a jpg": (
        archive([(f"v1.{name}", b"x") for name in ("1.gif", "1.txt", "2.jpg", "2.txt")]),
        "joins 2 pairs of picture and text",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_shards_are_one_line_that_names_the_file(kind: str, tmp_path: Path) -> None:
    content, message = BAD[kind]
    path = tmp_path / "shard.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        build_index([path], tmp_path / "index")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "index" / MANIFEST).exists()


DOTTED = {
    "dates": pairs(*(f"2024.01.{day:02d}" for day in range(6))),
    "long names": pairs(*(f"{'x' * 150}.é{number}" for number in range(3))),
    "fields": pairs("v1.1", "v1.2", text="json"),
    "captions of .jpg": [
        f"v1.{number}.{extension}" for number in range(3) for extension in ("jpg", "jpg.txt")
    ],
    "pictures first": [f"v1.{n}.jpg" for n in range(3)]
    + ["w.jpg", "w.txt"]
    + [f"v1.{n}.txt" for n in range(3)],
}


@pytest.mark.parametrize("what", DOTTED)
def test_names_with_dots_join_no_pairs(what: str, tmp_path: Path) -> None:
    """Refused with the way out, which the dates take."""
    shard = shard_of(tmp_path / "s.tar", DOTTED[what])
    with pytest.raises(
        DataError, match=r"joins \d pairs .*unpack it into a folder and import that"
    ) as caught:
        build_index([shard], tmp_path / "index")
    assert "\n" not in str(caught.value)
    if what == "dates":
        with tarfile.open(shard) as tar:
            tar.extractall(tmp_path / "files", filter="data")
        arguments = [
            "import",
            "--from",
            "folder",
            str(tmp_path / "files"),
            "--output",
            str(tmp_path / "out"),
        ]
        assert main([*arguments, "--workers", "1", "--keep_near_duplicates"]) == 0
        assert len(build_index([tmp_path / "out" / "train-00000.tar"], tmp_path / "index")) == 6


def test_a_header_that_tar_reads_and_this_does_not_is_said_with_its_way_out(tmp_path: Path) -> None:
    """Comments of 3 MB beside each member; the way out is taken."""
    path, buffer = tmp_path / "s.tar", io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, body in members(2, np.random.default_rng(0)):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(body), {"comment": "x" * 3_000_000}
            tar.addfile(info, io.BytesIO(body))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(
        DataError, match=r"is not read: an extended header .* 3,000,\d+ bytes.*--format=gnu"
    ) as caught:
        build_index([path], tmp_path / "index")
    assert "fetch it again" not in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "files").mkdir()
    subprocess.run(["tar", "-C", str(tmp_path / "files"), "-xf", str(path)], check=True)
    subprocess.run(
        [
            "tar",
            "-C",
            str(tmp_path / "files"),
            "--format=gnu",
            "--sort=name",
            "-cf",
            str(path),
            ".",
        ],
        check=True,
    )
    assert len(build_index([path], tmp_path / "index")) == 2


def test_dots_that_join_nothing_are_let_alone(tmp_path: Path) -> None:
    shard_of(tmp_path / "s.tar", pairs(*(f"{number}.{number}" for number in range(5)), "IMG.2 (1)"))
    table = build_index([tmp_path / "s.tar"], tmp_path / "index")
    assert len(table) == 6 and [*table.remarks()] == []


def seeds() -> list[bytes]:
    """Good shards of each tar format and image format."""
    made = []
    for fmt in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        content = []
        for number, image in enumerate(("JPEG", "PNG", "WEBP", "JPEG")):
            key = f"folder/{number}" if fmt == tarfile.USTAR_FORMAT else f"{'long' * 40}/{number}-é"
            caption = (
                {"txt": b"a caption"}
                if number % 2
                else {"json": b'{"caption": "in json", "x": [1, 2]}'}
            )
            parts = {image.lower(): picture(number, fmt=image), **caption}
            content += [(f"{key}.{extension}", body) for extension, body in parts.items()]
        made.append(archive(content, fmt))
    return made


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Flips bytes, cuts, repeats and swaps blocks, or writes numbers into headers whose checksum is then mended."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        start = BLOCK * int(rng.integers(0, max(1, len(changed) // BLOCK)))
        headers = [
            at
            for at in range(0, len(changed) - 511, BLOCK)
            if changed[at + 257 : at + 262] == b"ustar"
        ]
        match rng.integers(6):
            case 0:
                for position in rng.integers(0, len(changed), rng.integers(1, 20)):
                    changed[position] = rng.integers(256)
            case 1:
                del changed[rng.integers(1, len(changed)) :]
            case 2:
                changed[start:start] = changed[start : start + BLOCK * rng.integers(1, 6)]
            case 3:
                del changed[start : start + BLOCK * rng.integers(1, 4)]
            case _ if headers:
                at = int(rng.choice(headers))
                field, length = [(0, 100), (124, 12), (156, 1), (345, 155), (100, 8)][
                    rng.integers(5)
                ]
                kinds = b"LKxgSV015"[rng.integers(9) :]
                choices = [
                    rng.bytes(length),
                    b"7" * length,
                    b"\x80" + rng.bytes(length),
                    b"\xff" * length,
                    kinds,
                ]
                value = choices[rng.integers(len(choices))][:length]
                changed[at + field : at + field + len(value)] = value
                changed[at + 148 : at + 156] = b" " * 8
                changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + BLOCK])
        if not changed:
            changed = bytearray(b"\0")
    return bytes(changed)


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.full)])
def test_mutated_shards(count: int, tmp_path: Path) -> None:
    """No crash, no hang, bounded memory; every one is refused in one line or read to its end."""
    good, path = seeds(), tmp_path / "shard.tar"
    make = CaptionExample(image_size=16, num_tokens=12, tokenizer_path=EMBEDDED_TOKENIZER)
    make.padding()  # loads the tokenizer
    refused = indexed_shards = undecodable = 0
    tracemalloc.start()
    for number in range(count):
        path.write_bytes(mutate(good[number % len(good)], np.random.default_rng(number)))
        try:
            table = build_index([path], tmp_path / f"index-{number % 2}")
        except DataError as error:
            refused += "\n" not in str(error)
            continue
        ids = np.arange(len(table))
        batch = stack_examples(
            zip(TarReader(table).read_all(ids), ids, strict=True), make, len(table)
        )
        assert all(np.isfinite(value.float().numpy()).all() for value in batch.inputs.values()), (
            number
        )
        indexed_shards += 1
        undecodable += batch.num_undecodable
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused + indexed_shards == count and peak < 256 << 20
    assert min(refused, indexed_shards, undecodable) > count // 10


REMARKS: dict[str, tuple[list[list[str]], str]] = {
    "two pictures": (
        [["0.a.jpg", "0.b.jpg", "0.txt", "1.jpg", "1.txt"]],
        r"1 of 2 examples hold more than one picture",
    ),
    "folders": (
        [[f"images/{n}.jpg" for n in range(4)] + [f"captions/{n}.txt" for n in range(4)]],
        r"^4 of 8 examples have a picture without caption or label, 4 have no picture, in 1 of 1 shards.*same path and name",
    ),
    "./": (
        [pairs("a"), ["./b.jpg", "b.txt"]],
        r"^1 of 3 .* 1 have no picture, in 1 of 2 shards, first in 1\.tar",
    ),
    "pax headers": (
        [["PaxHeaders.7/a.jpg", "b/PaxHeaders/a.txt", *pairs("a")]],
        r"; 2 members belong to no example",
    ),
    "shards": (
        [["a.jpg", *pairs("b")], ["a.txt"]],
        r"^1 of 3 .* 1 have no picture, in 2 of 2 shards.*halves of a pair are two examples.*one folder.*--sort=name",
    ),
}


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


def test_links_and_names_never_become_paths(tmp_path: Path) -> None:
    """Traversal, absolute and foreign names are keys; links, devices, folders, hidden and nameless files are passed over."""
    (tmp_path / "work").mkdir()
    path, pair = tmp_path / "work" / "s.tar", {"jpg": picture(1), "txt": b"abc"}
    keys = ("../../outside", "/etc/absolute", "b\udcff\udcfe", "sub/x")
    with tarfile.open(path, "w") as tar:
        named = [(f"{key}.{extension}", body) for key in keys for extension, body in pair.items()]
        for name, body in [*named, ("README", b"x"), (".hidden.txt", b"x"), ("__meta__.x__", b"x")]:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
        for kind in (
            tarfile.SYMTYPE,
            tarfile.LNKTYPE,
            tarfile.CHRTYPE,
            tarfile.FIFOTYPE,
            tarfile.DIRTYPE,
        ):
            info = tarfile.TarInfo("sub/x.png")  # of the last example's key
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    before = set(tmp_path.rglob("*"))
    table = build_index([path], tmp_path / "work" / "index")
    assert len(table) == 4 and table.entries[0].skipped == 8
    assert [raw.fields for raw in TarReader(table).read_all(range(4))] == [pair] * 4
    [unused] = table.remarks()
    assert "8 members belong to no example (links" in unused
    assert {p for p in tmp_path.rglob("*") if "index" not in p.parts} == before
