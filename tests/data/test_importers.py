"""Imports from every source as a user runs them: what is dropped, bad input, a kill, the held-out share."""

import csv
import json
import os
import re
import shlex
import shutil
import stat
import tarfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from data.errors import DataError, ReadError
from data.importers.convert import Settings, perceptual_hash
from data.importers.pipeline import ALIKE_BITS, HELDOUT, PROVENANCE, REPORT, import_examples
from data.importers.sources import (
    Columns,
    Source,
    coco_source,
    folder_source,
    parquet_source,
    table_source,
)
from data.index.build import build_index
from data.index.shards import find_shards
from data.reading.pool import worker_pool
from launch_scripts.prepare import main
from tests.data.conftest import picture

COLUMNS = Columns()
Rows = list[dict[str, str]]


def pictures(folder: Path, count: int, *, with_texts: bool = False) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:03d}.jpg" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(picture(number, width=120, height=80))
        if with_texts:
            (folder / name).with_suffix(".txt").write_text(f"picture {number:03d}")
    return names


def rows_of(names: list[str]) -> Rows:
    return [
        {"image": name, "caption": f"picture {name[:3]}", "owner": f"o{n % 3}"}
        for n, name in enumerate(names)
    ]


def from_rows(folder: Path, rows: Rows, columns: Columns = COLUMNS, name: str = "t.csv") -> Source:
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return (
        folder_source(folder, columns)
        if name == "metadata.csv"
        else table_source(folder / name, columns, folder.resolve())
    )


def members(output: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(output.glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    return found


def captions(output: Path) -> list[str]:
    return [body.decode() for name, body in members(output).items() if name.endswith(".txt")]


def contents(*folders: Path) -> list[dict[str, bytes]]:
    return [
        {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}
        for folder in folders
    ]


def from_coco(folder: Path, names: list[str]) -> Source:
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    notes = [
        {"image_id": n, "caption": c}
        for n, name in enumerate(names)
        for c in (f"picture {name[:3]}", "another")
    ]
    (folder / "coco.json").write_text(json.dumps({"images": images, "annotations": notes}))
    return coco_source(folder / "coco.json", COLUMNS, folder)


def from_parquet(folder: Path, rows: list[dict[str, object]], columns: Columns = COLUMNS) -> Source:
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "t.parquet", row_group_size=3
    )
    return parquet_source(folder / "t.parquet", columns, folder)


def with_images(
    folder: Path, names: list[str], image: Callable[[Path], object]
) -> list[dict[str, object]]:
    return [{**row, "image": image(folder / row["image"])} for row in rows_of(names)]


SOURCES: dict[str, Callable[[Path, list[str]], Source]] = {
    "csv": lambda folder, names: from_rows(folder, rows_of(names)),
    "folder": lambda folder, names: folder_source(folder, COLUMNS),
    "metadata": lambda folder, names: from_rows(folder, rows_of(names), name="metadata.csv"),
    "coco": from_coco,
    "parquet bytes": lambda folder, names: from_parquet(
        folder, with_images(folder, names, Path.read_bytes)
    ),
    "parquet paths": lambda folder, names: from_parquet(
        folder, with_images(folder, names, lambda path: path.name)
    ),
    "parquet structs": lambda folder, names: from_parquet(
        folder,
        with_images(folder, names, lambda path: {"bytes": path.read_bytes(), "path": path.name}),
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_examples(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path / "in", pictures(tmp_path / "in", 7, with_texts=True))
    report = import_examples(source, tmp_path / "out", Settings(kind, size=40, shard_examples=3))
    assert (report["read"], report["written"], report["dropped"]) == (7, 7, {})
    assert captions(tmp_path / "out") == [f"picture {number:03d}" for number in range(7)]
    assert sorted(p.name for p in (tmp_path / "out").glob("*.tar")) == [
        f"train-0000{n}.tar" for n in range(3)
    ]
    if kind == "coco":
        notes = [
            json.loads(body)
            for name, body in members(tmp_path / "out").items()
            if name.endswith(".json")
        ]
        assert notes[0] == {"captions": ["picture 000", "another"]}


def test_what_is_dropped_is_counted_with_its_reason(tmp_path: Path) -> None:
    """In the private report; the provenance has no counts and no names."""
    folder = tmp_path / "in"
    rows = rows_of(pictures(folder, 5))
    (tmp_path / "outside.jpg").write_bytes(picture(77))
    (folder / "link.jpg").symlink_to(tmp_path / "outside.jpg")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8 no")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "tiny.jpg").write_bytes(picture(8, width=3, height=3))
    for name in ("again.jpg", "again2.jpg"):
        (folder / name).write_bytes((folder / "001.jpg").read_bytes())
    (folder / "similar.jpg").write_bytes(picture(2, width=118, height=80))
    unsafe = [
        "../outside.jpg",
        str(tmp_path / "outside.jpg"),
        "link.jpg",
        "linked/outside.jpg",
        "linked",
    ]
    bad = [*unsafe, "nul.jpg", "gone.jpg", "", "broken.jpg", "empty.jpg", "tiny.jpg"]
    rows += [{"image": name, "caption": "x", "owner": ""} for name in bad]
    (folder / "bare.jpg").write_bytes(picture(78))
    copies = (
        ("again.jpg", "picture 001"),
        ("again2.jpg", "another text"),
        ("similar.jpg", "another text"),
    )
    for name, caption in (("bare.jpg", " https://a.b "), *copies):
        rows.append({"image": name, "caption": caption, "owner": ""})
    report = import_examples(from_rows(folder, rows), tmp_path / "out", Settings("csv"))
    assert report["dropped"] == {
        "unsafe_path": 5,
        "missing_image": 3,
        "undecodable_image": 2,
        "small_image": 1,
        "no_caption": 1,
        "exact_duplicate": 1,
        "same_picture": 1,
        "near_duplicate": 1,
    }
    assert report["read"] == 20 == report["written"] + sum(report["dropped"].values())
    assert report["samples"]["unsafe_path"] == [f"t.csv, line {line}" for line in (7, 8, 9)], (
        "places, not what cells hold"
    )
    assert captions(tmp_path / "out") == [f"picture {number:03d}" for number in range(5)]
    assert stat.S_IMODE((tmp_path / "out" / REPORT).stat().st_mode) == 0o600
    text = (tmp_path / "out" / PROVENANCE).read_text()
    facts = json.loads(text)
    assert "Debenedetti" in facts["deduplication"] and "at most 4 bits" in facts["deduplication"]
    assert str(tmp_path) not in text and "written" not in text and "000.jpg" not in text


def test_the_limit_of_pixels_is_that_of_what_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JPEG at an eighth, also where a phone wrote several into a file (MPO); anything else whole. Pillow's own limit stays."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    (folder := tmp_path / "in").mkdir()
    sizes = {
        "phone48.jpg": ("JPEG", 8000, 6000),
        "phone.jpg": ("MPO", 2000, 1500),
        "scan36.png": ("PNG", 6000, 6000),
    }
    for number, (name, (image_format, width, height)) in enumerate(sizes.items()):
        gray = np.random.default_rng(number).integers(0, 256, (5, 5), dtype=np.uint8)
        more = (
            {"save_all": True, "append_images": [Image.new("L", (9, 9))]}
            if image_format == "MPO"
            else {}
        )
        image = Image.fromarray(gray).resize((width, height), Image.Resampling.NEAREST)
        image.save(folder / name, image_format, compress_level=1, **more)
        (folder / name).with_suffix(".txt").write_text(f"a picture {name}")
    report = import_examples(
        folder_source(folder, COLUMNS), tmp_path / "out", Settings("folder", size=100)
    )
    assert report["dropped"] == {"undecodable_image": 1} and report["samples"] == {
        "undecodable_image": ["scan36.png"]
    }
    assert (
        report["written"] == 2
        and "more than 34 million pixels" in report["reasons"]["undecodable_image"]
    )
    assert Image.MAX_IMAGE_PIXELS == 10_000


def test_owner_limit(tmp_path: Path) -> None:
    rows = rows_of(pictures(tmp_path / "in", 10))
    rows[9]["owner"] = " "
    source = from_rows(tmp_path / "in", rows, Columns(owner="owner"))
    report = import_examples(
        source, tmp_path / "out", Settings("csv", owner_field="owner", max_per_owner=2)
    )
    assert report["dropped"] == {"no_owner": 1, "owner_limit": 3} and report["written"] == 6
    assert sorted(int(caption[-3:]) % 3 for caption in captions(tmp_path / "out")) == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    facts = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    assert facts["settings"]["max_per_owner"] == 2 and "At most 2 examples" in facts["owners"]
    assert b'"o1"' not in b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())


LABELS = (7, 0, 7, 3)


@pytest.mark.parametrize("kind", ["folder", "parquet", "csv"])
def test_labels_go_along(kind: str, tmp_path: Path) -> None:
    """And stand for a caption: data for classifiers have none."""
    folder, columns = tmp_path / "in", Columns(label="fine")
    rows = [
        {"image": name, "fine": label, "caption": None}
        for name, label in zip(pictures(folder, 4), LABELS, strict=True)
    ]
    rows[0]["caption"] = "a caption too"
    if kind == "folder":
        for row in rows:
            (folder / str(row["image"])).with_suffix(".cls").write_text(f"{row['fine']}\n")
        (folder / "000.txt").write_text("a caption too")
        source = folder_source(folder, COLUMNS)
    else:
        source = (from_parquet if kind == "parquet" else from_rows)(folder, rows, columns)  # type: ignore[operator]
    report = import_examples(source, tmp_path / "out", Settings(kind, size=40))
    assert (report["written"], report["dropped"]) == (4, {})
    found = members(tmp_path / "out")
    assert [body.decode() for name, body in found.items() if name.endswith(".cls")] == [
        str(label) for label in LABELS
    ]
    assert captions(tmp_path / "out") == ["a caption too"]


def test_every_file_of_a_folder_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    pictures(folder, 3, with_texts=True)
    (folder / "000.png").write_bytes(picture(5, fmt="PNG"))
    for name in ("drawing.svg", "raw.CR2", "README", "orphan.txt", ".hidden", "000.txt.bak"):
        (folder / name).write_text("<svg/>")
    report = import_examples(folder_source(folder, COLUMNS), tmp_path / "out", Settings("folder"))
    assert report["other_files"] == {".svg": 1, ".cr2": 1, "none": 2, ".txt": 1, ".bak": 1}
    assert (report["read"], report["written"], report["dropped"]) == (4, 3, {"duplicate_key": 1})


def test_what_a_walk_does_not_enter_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linked folders, also in themselves; links among pictures and texts; hidden folders and files are read like others."""
    folder, disk = tmp_path / "in", tmp_path / "disk"
    pictures(folder / "cats", 3, with_texts=True)
    pictures(disk / "dogs", 4, with_texts=True)
    pictures(folder / ".hidden", 1, with_texts=True)
    (folder / "dogs").symlink_to(disk / "dogs")
    (folder / "cats/again").symlink_to(folder)
    (folder / "cats/gone").symlink_to(tmp_path / "gone")
    (folder / "cats/loop.jpg").symlink_to(folder / "cats/loop.jpg")
    (folder / "cats/linked.jpg").symlink_to(disk / "dogs/000.jpg")
    (folder / "cats/002.txt").unlink()
    (folder / "cats/002.txt").symlink_to(disk / "dogs/000.txt")
    os.mkfifo(folder / "cats/pipe.jpg")
    (folder / ".hidden/000.txt").write_text("a hidden thing")
    (folder / ".hidden/000.jpg").write_bytes(picture(50))
    assert (
        main(
            [
                "import",
                "--from",
                "folder",
                str(folder),
                "--output",
                str(tmp_path / "out"),
                "--workers",
                "1",
            ]
        )
        == 0
    )
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["other_folders"] == ["cats/again", "dogs"] and report["other_files"] == {
        "none": 1,
        ".txt": 1,
    }
    assert report["dropped"] == {"unsafe_path": 2, "missing_image": 1, "no_caption": 1}
    assert captions(tmp_path / "out") == ["a hidden thing", "picture 000", "picture 001"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "linked folders, not followed" in shown and "cats/again; dogs" in shown


def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not fewer examples. Root can read everything, so the system call fails."""
    pictures(tmp_path / "cats", 1, with_texts=True)
    pictures(tmp_path / "dogs", 1, with_texts=True)
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("dogs"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ReadError, match=r"cannot read the folder .*/dogs: Permission denied"
    ) as caught:
        folder_source(tmp_path, COLUMNS)
    assert caught.value.exit_code == 1


def test_suffixes_of_any_case_are_read(tmp_path: Path) -> None:
    """Of two texts that differ in the case of their suffix the one in small letters; the other is counted."""
    names = pictures(tmp_path / "in", 6)
    for name, suffix in zip(names, (".JPG", ".JPEG", ".Jpe", ".jpg", ".PnG", ".jpg"), strict=True):
        (tmp_path / "in" / name).rename((tmp_path / "in" / name).with_suffix(suffix))
    texts = {
        "000.TXT": "zero",
        "001.Json": '{"caption": "one"}',
        "002.Txt": "two",
        "003.CLS": "7",
        "004.JSON": '{"caption": "four"}',
    }
    texts |= {"005.TXT": "SHOUTED", "005.txt": "five", "006.TXT": "orphan"}
    for name, text in texts.items():
        (tmp_path / "in" / name).write_text(text)
    report = import_examples(
        folder_source(tmp_path / "in", COLUMNS), tmp_path / "out", Settings("folder")
    )
    assert captions(tmp_path / "out") == ["zero", "one", "two", "four", "five"]
    assert [body for name, body in members(tmp_path / "out").items() if name.endswith(".cls")] == [
        b"7"
    ]
    assert report["other_files"] == {".txt": 2} and report["dropped"] == {}


TEXTS: dict[str, tuple[dict[str, bytes], dict[str, int]]] = {
    "all of use": ({"000.txt": b"a cat", "000.cls": b" 7\n", "000.json": b'{"owner": "x"}'}, {}),
    "byte order marks": ({"000.txt": b"\xef\xbb\xbfa cat", "000.cls": b"\xef\xbb\xbf7"}, {}),
    "the same caption in both": ({"000.txt": b"a cat", "000.json": b'{"caption": "a cat"}'}, {}),
    "a caption in Latin-1": ({"000.txt": b"Zo\xe9", "000.cls": b"7"}, {".txt": 1}),
    "a caption in UTF-16": ({"000.txt": "a cat".encode("utf-16"), "000.cls": b"7"}, {".txt": 1}),
    "a caption without end": ({"000.txt": b"x" * (1 + (1 << 20)), "000.cls": b"7"}, {".txt": 1}),
    "a caption of two bytes that end nowhere": (
        {"000.txt": b"a \xc3", "000.json": b'{"caption": "b"}'},
        {".txt": 1},
    ),
    "a caption with zero bytes": (
        {"000.txt": "a cat".encode("utf-16-le"), "000.cls": b"7"},
        {".txt": 1},
    ),
    "JSON with two captions": ({"000.json": b'{"caption": "a", "caption": "b"}'}, {".json": 1}),
    "a label that is no number": ({"000.txt": b"a cat", "000.cls": b"cat"}, {".cls": 1}),
    "a label of ten digits": ({"000.txt": b"a cat", "000.cls": b"1234567890"}, {".cls": 1}),
    "an empty label": ({"000.txt": b"a cat", "000.cls": b""}, {".cls": 1}),
    "a label in UTF-16": ({"000.txt": b"a cat", "000.cls": "7".encode("utf-16")}, {".cls": 1}),
    "JSON that is broken": ({"000.txt": b"a cat", "000.json": b'{"caption": "b'}, {".json": 1}),
    "JSON that is a list": ({"000.txt": b"a cat", "000.json": b'["b"]'}, {".json": 1}),
    "JSON in Latin-1": ({"000.txt": b"a cat", "000.json": b'{"caption": "Zo\xe9"}'}, {".json": 1}),
    "JSON with another caption": (
        {"000.txt": b"a cat", "000.json": b'{"caption": "b"}'},
        {".json": 1},
    ),
    "everything at once": (
        {"000.txt": b"\xff", "000.cls": b"x", "000.json": b"x", "001.TXT": b"a"},
        {".cls": 1, ".json": 1, ".txt": 2},
    ),
}
"""Files beside a picture -> those that are counted as not read."""


@pytest.mark.parametrize("what", TEXTS)
def test_a_text_beside_a_picture_is_used_or_counted(what: str, tmp_path: Path) -> None:
    texts, counted = TEXTS[what]
    pictures(folder := tmp_path / "in", 1)
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    source = folder_source(folder, COLUMNS)
    assert source.other_files == counted
    [[item]] = source.parts
    used = {
        f"000.{kind}"
        for kind, value in (("txt", item.captions), ("cls", item.label))
        if value not in ((), None)
    }
    assert used >= {
        name
        for name in texts
        if name in ("000.txt", "000.cls") and Path(name).suffix not in counted
    }


def test_labels_beside_pictures_are_counted_where_a_field_has_the_labels(tmp_path: Path) -> None:
    pictures(folder := tmp_path / "in", 2, with_texts=True)
    for number in range(2):
        (folder / f"00{number}.cls").write_text("1")
        (folder / f"00{number}.json").write_text('{"fine": 5}')
    source = folder_source(folder, Columns(label="fine"))
    assert source.other_files == {".cls": 2} and [item.label for item in source.parts[0]] == [5, 5]


UNUSABLE = ("cat", "1.5", "-1", "1234567890", "one", "７")


@pytest.mark.parametrize("kind", ["csv", "parquet", "folder"])
def test_a_cell_that_is_neither_used_nor_empty_drops_its_record(kind: str, tmp_path: Path) -> None:
    """A label that is no whole number, and in Parquet and JSON a caption that is no text."""
    names = pictures(folder := tmp_path / "in", 4 + len(UNUSABLE))
    labels = ["", " ", "3", " 4 ", *UNUSABLE]
    rows = [
        {"image": name, "caption": f"thing {name}", "fine": label}
        for name, label in zip(names, labels, strict=True)
    ]
    wrong = len(UNUSABLE)
    columns = Columns(label="fine")
    if kind == "csv":
        source = from_rows(folder, rows, columns)
    elif kind == "parquet":
        source = from_parquet(folder, rows, columns)  # type: ignore[arg-type]
    else:
        for row in rows:
            (folder / row["image"]).with_suffix(".json").write_text(
                json.dumps({**row, "caption": [row["caption"], None]})
            )
        (folder / "010.jpg").write_bytes(picture(10))
        (folder / "010.json").write_text('{"caption": ["text", 7], "fine": 1}')
        source, wrong = folder_source(folder, columns), wrong + 1
    report = import_examples(source, tmp_path / "out", Settings(kind))
    assert report["dropped"] == {"unusable_value": wrong} and report["written"] == 4
    found = members(tmp_path / "out")
    assert [body for name, body in found.items() if name.endswith(".cls")] == [b"3", b"4"]
    assert captions(tmp_path / "out") == [f"thing {name}" for name in names[:4]]
    pyarrow.parquet.write_table(
        pyarrow.table({"image": ["000.jpg"], "caption": [7], "fine": [2]}), folder / "n.parquet"
    )
    [[item]] = parquet_source(folder / "n.parquet", columns, folder.resolve()).parts
    assert item.problem == "unusable_value"


def test_pictures_beside_tables_are_counted_where_no_row_names_them(tmp_path: Path) -> None:
    names = pictures(folder := tmp_path / "in", 4)
    named, stored = tmp_path / "in/a.parquet", tmp_path / "b"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_of(names[:3])), named)  # type: ignore[arg-type]
    assert parquet_source(folder, COLUMNS, folder.resolve()).other_files == {".jpg": 1}
    pictures(stored, 2)
    row = {"image": picture(7), "caption": "x"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), stored / "b.parquet")
    assert parquet_source(stored, COLUMNS, stored.resolve()).other_files == {".jpg": 2}


def test_what_a_folder_of_tables_has_beside_them_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    names = pictures(folder, 4)
    for name, rows in (
        ("a.parquet", names[:2]),
        ("B.PARQUET", names[2:]),
        ("deeper/c.parquet", names),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_of(rows)), folder / name)  # type: ignore[arg-type]
    for name in ("._a.parquet", "d.jsonl", "e.csv.gz", "_SUCCESS"):
        (folder / name).write_bytes(b"\0\x05\x16\x07")
    report = import_examples(
        parquet_source(folder, COLUMNS, folder), tmp_path / "out", Settings("parquet")
    )
    assert report["written"] == 4 and report["other_folders"] == ["deeper"]
    assert report["other_files"] == {".parquet": 1, ".jsonl": 1, ".gz": 1, "none": 1}
    shutil.rmtree(folder / "deeper")
    (folder / "data/train").mkdir(parents=True)
    (folder / "a.parquet").rename(folder / "data/train/a.parquet")
    assert parquet_source(folder, COLUMNS, folder).other_folders == ["data"]


def test_what_a_table_of_a_folder_does_not_name_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    pictures(folder, 5, with_texts=True)
    (folder / "more").mkdir()
    for number in range(2):
        (folder / f"more/00{number}.jpg").write_bytes(picture(50 + number))
    (folder / "metadata.csv").write_text(
        "image,caption\n000.jpg,one\n001.jpg,two\nmore/000.jpg,three\n"
    )
    (folder / "captions.csv").write_text("image,caption\n001.jpg,two\n")
    (folder / "more.zip").write_bytes(b"PK")
    (folder / "linked").symlink_to(tmp_path)
    report = import_examples(folder_source(folder, COLUMNS), tmp_path / "out", Settings("folder"))
    assert report["other_files"] == {".jpg": 4, ".txt": 5, ".csv": 1, ".zip": 1} and report[
        "other_folders"
    ] == ["linked"]
    assert (report["read"], report["written"]) == (3, 3)


def test_a_text_holds_one_caption_or_one_per_line(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    pictures(folder, 2)
    (folder / "000.txt").write_text("A red chair.\nde.utf8=Ein roter Stuhl.\n")
    (folder / "001.txt").write_text("\n  \nA long\ndress.")
    for lines, expected in (
        (False, ["A red chair. de.utf8=Ein roter Stuhl.", "A long dress."]),
        (True, ["A red chair.", "A long"]),
    ):
        source = folder_source(folder, COLUMNS, lines_are_captions=lines)
        import_examples(source, tmp_path / f"out-{lines}", Settings("folder"))
        assert captions(tmp_path / f"out-{lines}") == expected


def test_workers_change_nothing_and_other_content_in_the_folder_is_refused(tmp_path: Path) -> None:
    names = pictures(tmp_path / "in", 12)
    source = from_rows(tmp_path / "in", rows_of(names + names[:3]))
    source = Source([[item] for item in source.parts[0]])
    settings = Settings("csv", size=40, shard_examples=5, heldout_share=0.4)
    import_examples(source, tmp_path / "plain", settings)
    with worker_pool(2) as pool:
        import_examples(source, tmp_path / "two", settings, executor=pool.executor)
    plain, two = contents(tmp_path / "plain", tmp_path / "two")
    assert two == plain and f"{HELDOUT}/{HELDOUT}-00000.tar" in plain
    with pytest.raises(DataError, match="not empty"):
        import_examples(source, tmp_path / "plain", settings)


BAD = {
    "t.csv": {
        b"image,text\na.jpg,x\n": "no column caption among its 2",
        b"image, caption\na.jpg,x\n": "no column caption among its 2",
        b"image,caption,caption\na.jpg,x,y\n": "two columns caption",
        b"a.jpg,x\nb.jpg,y\n": "no column image among its 2",
        b"": "no column image",
        b'image,caption\n"a.jpg,x' + b"y" * (1 << 21): "line",
        b"image,caption\n\xff.jpg,x\n": "not UTF-8",
    },
    "coco.json": {
        b"[]": "not a COCO",
        b"{": "line 1, column 2: no JSON",
        b'{"images": [],\n "annotations": x}': "line 2, column 17: no JSON",
        b'{"images": [], "annotations": [{"caption": "Zo\xe9"}]}': "not UTF-8 .byte 46.",
        b'{"images": [{"id": ' + b"9" * 5000 + b'}], "annotations": []}': "not read as JSON",
        b"[" * 100_000: "not read as JSON",
        b'{"images": [{"id": 1}, {"id": 1}], "annotations": []}': r"images\[1\] has the id of images\[0\].* occurs twice",
        b'{"images": [], "annotations": [{"image_id": 3, "caption": "x"}]}': r"annotations\[0\] is of no image",
        b'{"images": [{"id": 1}], "annotations": [{"image_id": [1], "caption": "x"}]}': r"annotations\[0\] has no image_id that",
        b'{"images": [{"id": 1}], "annotations": [{"image_id": 1, "caption": ["x"]}]}': r"annotations\[0\] has a caption that",
        b'{"images": [{"id": 1}], "annotations": [{"image_id": 1, "caption": 7}]}': r"annotations\[0\] has a caption that",
        b'{"images": [], "annotations": [{"image_id": 3, "caption": null}]}': r"annotations\[0\] is of no image",
        b'{"images": [{"id": 1}], "images": [{"id": 2}], "annotations": []}': "two values of one name",
        b'{"images": [{"id": 1, "id": 2}], "annotations": []}': "two values of one name",
    },
    "t.parquet": {b"PAR1 no": "as Parquet"},
    "metadata.jsonl": {
        b'{"image": "000.jpg", "caption": "x"}': r"jsonl is not read; make it Parquet \(docs/importing\.md"
    },
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sources(name: str, tmp_path: Path) -> None:
    readers = {
        "json": coco_source,
        "parquet": parquet_source,
        "jsonl": lambda path, *_: folder_source(path.parent, COLUMNS),
    }
    for content, message in BAD[name].items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            readers.get(name.rpartition(".")[2], table_source)(tmp_path / name, COLUMNS, tmp_path)
        assert "0x" not in str(caught.value) and "codec" not in str(caught.value)


USABLE = "that is a whole number or a text"
IDS = {
    "{}": f"images[1] has no id {USABLE}",
    '{"ID": 1}': f"images[1] has no id {USABLE}",
    '{"id": null}': f"images[1] has no id {USABLE}",
    '{"id": true}': f"images[1] has no id {USABLE}",
    '{"id": 2.0}': f"images[1] has no id {USABLE}",
    '{"id": NaN}': f"images[1] has no id {USABLE}",
    '{"id": {"a": 1}}': f"images[1] has no id {USABLE}",
    '{"caption": "x"}': f"annotations[0] has no image_id {USABLE}",
    '{"image_id": null, "caption": "x"}': f"annotations[0] has no image_id {USABLE}",
    '{"image_id": true, "caption": "x"}': f"annotations[0] has no image_id {USABLE}",
    '{"image_id": 1.0, "caption": "x"}': f"annotations[0] has no image_id {USABLE}",
    '{"image_id": 9007199254740993.0, "caption": "x"}': f"annotations[0] has no image_id {USABLE}",
    '{"image_id": 1e0, "caption": "x"}': f"annotations[0] has no image_id {USABLE}",
    '{"image_id": 9007199254740993, "caption": "x"}': "annotations[0] is of no image",
    '{"image_id": "1", "caption": "x"}': "annotations[0] is of no image",
    '{"image_id": "", "caption": "x"}': "annotations[0] is of no image",
}
"""An entry of a COCO file -> what is said of it."""


@pytest.mark.parametrize("entry", IDS)
def test_a_coco_caption_goes_to_the_image_of_exactly_its_id(entry: str, tmp_path: Path) -> None:
    """Of the same type: in Python True equals 1, and a float equals whole numbers near it."""
    first, second, notes = '{"id": 1}', '{"id": 9007199254740992}', ""
    if IDS[entry].startswith("images"):
        second = entry
    else:
        notes = entry
    (tmp_path / "c.json").write_text(f'{{"images": [{first}, {second}], "annotations": [{notes}]}}')
    with pytest.raises(DataError, match=re.escape(IDS[entry])):
        coco_source(tmp_path / "c.json", COLUMNS, tmp_path)
    images = [
        {"id": number, "file_name": f"{number!r}.png"} for number in (1, "1", 2**53, 2**53 + 1, "")
    ]
    notes = [{"image_id": image["id"], "caption": image["file_name"]} for image in reversed(images)]
    (tmp_path / "c.json").write_text(json.dumps({"images": images, "annotations": notes}))
    [items] = coco_source(tmp_path / "c.json", COLUMNS, tmp_path).parts
    assert [item.captions for item in items] == [(image["file_name"],) for image in images]


def test_the_next_command_is_said_with_the_number_of_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And training shards are what the folder names; all is private."""
    folder, out = tmp_path / "in", tmp_path / "my pictures"
    pictures(folder, 30, with_texts=True)
    (folder / "copy.jpg").write_bytes((folder / "000.jpg").read_bytes())
    (folder / "copy.txt").write_text("looks like another")
    options = ["--heldout_share", "0.3", "--workers", "1", "--output", str(out)]
    assert main(["import", "--from", "folder", str(folder), *options]) == 0
    said = capsys.readouterr().out
    pairs = len(build_index(find_shards(str(out), tmp_path), tmp_path / "index"))
    last = said.splitlines()[-1]
    assert 5 < pairs < 30 and last.startswith(
        f"{pairs} training pairs; next: python launch_scripts/plan.py "
    )
    assert {f"data.shards={out}", f"data.num_examples={pairs}"} < set(shlex.split(last))
    assert "the picture is that of an earlier example" in said and "private" in said
    assert (
        find_shards(str(out), tmp_path).root == str(out)
        and find_shards(str(out / HELDOUT), tmp_path).names
    )
    for number, text in enumerate(folder.glob("*.txt")):  # labels alone train no captioner
        text.with_suffix(".cls").write_text(str(number % 3))
        text.unlink()
    options[-1] = str(tmp_path / "labelled")
    assert main(["import", "--from", "folder", str(folder), *options]) == 0
    assert (
        "labelled training pictures; next: docs/own_pictures.md"
        in capsys.readouterr().out.splitlines()[-1]
    )
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.glob("**/*.tar")} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (out, out / HELDOUT)} == {0o700}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_pictures_that_look_alike_and_an_owner_are_on_one_side(seed: int, tmp_path: Path) -> None:
    """Families of pictures that differ by their size and quality alone; nobody is no owner."""
    folder, rows = tmp_path / "in", []
    folder.mkdir()
    for family in range(60):
        (folder / "whole.jpg").write_bytes(picture(1000 + family, width=80, height=60))
        for member in range(3):
            name = f"{family:03d}-{member}.jpg"
            Image.open(folder / "whole.jpg").resize((80 - member, 60)).save(
                folder / name, quality=95 - member
            )
            rows.append(
                {
                    "image": name,
                    "caption": f"a {name}",
                    "owner": f"o{family // 2}" if family < 20 else "",
                }
            )
    source = from_rows(folder, rows, Columns(owner="owner"))
    settings = Settings(
        "csv", size=80, image_format="png", duplicate_distance=None, heldout_share=0.3, seed=seed
    )
    report = import_examples(source, tmp_path / "out", settings)
    trained, held_out = set(captions(tmp_path / "out")), set(captions(tmp_path / "out" / HELDOUT))
    assert (
        report["held_out"] == len(held_out)
        and len(trained) + len(held_out) == report["written"] == 180
    )
    hashes = {row["image"]: perceptual_hash(Image.open(folder / row["image"])) for row in rows}
    near = [
        (a, b)
        for a, b in combinations(hashes, 2)
        if (hashes[a] ^ hashes[b]).bit_count() <= ALIKE_BITS
    ]  # type: ignore[operator]
    assert len(near) > 100
    assert not [pair for pair in near if len({f"a {name}" in held_out for name in pair}) == 2]
    owners = [
        {row["owner"] for row in rows if row["caption"] in side} for side in (trained, held_out)
    ]
    assert owners[0] & owners[1] == {""}
    assert 15 <= len(held_out) <= 95  # 54 expected, in about 50 groups
