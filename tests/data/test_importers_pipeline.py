"""Imports from every source, bad input, resumption after a kill."""

import csv
import json
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.errors import DataError, ReadError
from data.importers.convert import Settings
from data.importers.pipeline import PROVENANCE, REPORT, import_examples
from data.importers.sources import Columns, ListedPart, Source, coco_source, folder_source, parquet_source, table_source
from data.index.build import build_index
from data.index.verify import verify_sample
from data.reading.pool import worker_pool
from data.reading.reader import TarReader
from tests.data.conftest import picture, write_shard

COLUMNS = Columns()


def pictures(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:03d}.jpg" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(picture(number, width=120, height=80))
    return names


def rows_of(names: list[str]) -> list[dict[str, str]]:
    return [{"image": name, "caption": f"picture {name[:3]}", "owner": f"o{n % 3}"} for n, name in enumerate(names)]


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def members(output: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(output.glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    return found


def captions(output: Path) -> list[str]:
    return [body.decode() for name, body in members(output).items() if name.endswith(".txt")]


def from_csv(folder: Path, names: list[str]) -> Source:
    return table_source(write_csv(folder / "t.csv", rows_of(names)), COLUMNS, None)


def from_folder(folder: Path, names: list[str]) -> Source:
    for row in rows_of(names):
        (folder / row["image"]).with_suffix(".txt").write_text(row["caption"])
    return folder_source(folder, COLUMNS)


def from_metadata(folder: Path, names: list[str]) -> Source:
    write_csv(folder / "metadata.csv", rows_of(names))
    return folder_source(folder, COLUMNS)


def from_coco(folder: Path, names: list[str]) -> Source:
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    notes = [{"image_id": n, "caption": c} for n, name in enumerate(names) for c in (f"picture {name[:3]}", "another")]
    (folder / "coco.json").write_text(json.dumps({"images": images, "annotations": notes}))
    return coco_source(folder / "coco.json", COLUMNS, None)


def from_parquet(folder: Path, names: list[str], how: str = "bytes") -> Source:
    import pyarrow
    import pyarrow.parquet

    images = {
        "bytes": [(folder / name).read_bytes() for name in names],
        "path": names,
        "struct": [{"bytes": (folder / name).read_bytes(), "path": name} for name in names],
    }[how]
    table = pyarrow.table({"image": images, "caption": [row["caption"] for row in rows_of(names)]})
    pyarrow.parquet.write_table(table, folder / "t.parquet", row_group_size=3)
    return parquet_source(folder / "t.parquet", COLUMNS, None)


SOURCES: dict[str, Callable[[Path, list[str]], Source]] = {
    "csv": from_csv,
    "folder": from_folder,
    "metadata": from_metadata,
    "coco": from_coco,
    "parquet bytes": from_parquet,
    "parquet paths": lambda folder, names: from_parquet(folder, names, "path"),
    "parquet structs": lambda folder, names: from_parquet(folder, names, "struct"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_examples(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path / "in", pictures(tmp_path / "in", 7))
    report = import_examples(source, tmp_path / "out", Settings(kind, size=40, shard_examples=3))
    assert (report["read"], report["written"], report["dropped"]) == (7, 7, {})
    assert captions(tmp_path / "out") == [f"picture {number:03d}" for number in range(7)]
    assert sorted(p.name for p in (tmp_path / "out").glob("*.tar")) == [f"train-0000{n}.tar" for n in range(3)]
    if kind == "coco":
        notes = [json.loads(body) for name, body in members(tmp_path / "out").items() if name.endswith(".json")]
        assert notes[0] == {"captions": ["picture 000", "another"]}


def test_what_is_dropped_is_counted_with_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    names = pictures(folder, 5)
    (tmp_path / "outside.jpg").write_bytes(picture(77))
    (folder / "link.jpg").symlink_to(tmp_path / "outside.jpg")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8 no")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "tiny.jpg").write_bytes(picture(8, width=3, height=3))
    (folder / "again.jpg").write_bytes((folder / "001.jpg").read_bytes())
    (folder / "similar.jpg").write_bytes(picture(2, width=118, height=80))
    rows = rows_of(names)
    for name, caption in [
        ("../outside.jpg", "x"),
        (str(tmp_path / "outside.jpg"), "x"),
        ("link.jpg", "x"),
        ("linked/outside.jpg", "x"),
        ("nul\\0.jpg", "x"),
        ("gone.jpg", "x"),
        ("linked", "x"),
        ("", "x"),
        ("broken.jpg", "x"),
        ("empty.jpg", "x"),
        ("tiny.jpg", "x"),
        ("004.jpg", " https://a.b "),
        ("again.jpg", "picture 001"),
        ("similar.jpg", "another text"),
    ]:
        rows.append({"image": name.replace("\\0", ""), "caption": caption, "owner": ""})
    source = table_source(write_csv(folder / "t.csv", rows), COLUMNS, None)
    report = import_examples(source, tmp_path / "out", Settings("csv"))
    assert report["dropped"] == {
        "unsafe_path": 5,
        "missing_image": 3,
        "undecodable_image": 2,
        "small_image": 1,
        "no_caption": 1,
        "exact_duplicate": 1,
        "near_duplicate": 1,
    }
    assert report["read"] == 19 == report["written"] + sum(report["dropped"].values())
    assert "../outside.jpg" in report["samples"]["unsafe_path"]
    assert captions(tmp_path / "out") == [f"picture {number:03d}" for number in range(5)]


@pytest.mark.parametrize(
    ("name", "shape", "image_format"), [("phone48.jpg", (8000, 6000), "JPEG"), ("scan36.png", (6000, 6000), "PNG")]
)
def test_the_limit_of_pixels_is_that_of_what_is_decoded(
    name: str, shape: tuple[int, int], image_format: str, tmp_path: Path
) -> None:
    """A JPEG at an eighth; anything else whole."""
    large_pictures(tmp_path / "in", [(name, shape, image_format)])
    report = import_examples(folder_source(tmp_path / "in", Columns()), tmp_path / "out", Settings("folder"))
    if image_format == "JPEG":
        assert report["written"] == 2 and report["dropped"] == {}
    else:
        assert report["dropped"] == {"large_image": 1} and report["samples"] == {"large_image": [name]}
        assert "more than 34 million pixels" in report["reasons"]["large_image"]
        settings = Settings("folder", max_megapixels=36)
        report = import_examples(folder_source(tmp_path / "in", Columns()), tmp_path / "more", settings)
        assert report["written"] == 2


def test_phones_write_more_than_one_picture_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Pillow calls MPO; and its own limit, here a small one, stays what it was for everybody else."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    large_pictures(tmp_path / "in", [("a.jpg", (2000, 1500), "MPO"), ("b.jpg", (2000, 1500), "JPEG")])
    settings = Settings("folder", size=100, max_megapixels=1)
    report = import_examples(folder_source(tmp_path / "in", Columns()), tmp_path / "out", settings)
    assert report["written"] == 3 and Image.MAX_IMAGE_PIXELS == 10_000


@pytest.mark.full
def test_a_picture_of_200_megapixels(tmp_path: Path) -> None:
    large_pictures(tmp_path / "in", [("s.jpg", (16_320, 12_240), "JPEG")])
    report = import_examples(folder_source(tmp_path / "in", Columns()), tmp_path / "out", Settings("folder"))
    assert report["written"] == 2


def large_pictures(folder: Path, which: list[tuple[str, tuple[int, int], str]]) -> None:
    """Gray pictures with captions, and a small one."""
    folder.mkdir()
    for number, (name, shape, image_format) in enumerate([*which, ("small.jpg", (50, 40), "JPEG")]):
        gray = np.random.default_rng(number).integers(0, 256, (5, 5), dtype=np.uint8)
        more = {"save_all": True, "append_images": [Image.new("L", (9, 9))]} if image_format == "MPO" else {}
        image = Image.fromarray(gray).resize(shape, Image.Resampling.NEAREST)
        image.save(folder / name, image_format, compress_level=1, **more)
        (folder / name).with_suffix(".txt").write_text(f"a picture {name}")


@pytest.mark.parametrize("suffix", ["jfif", "jpe", "JPE", "JFIF", "JPG"])
def test_a_jpeg_has_several_names(suffix: str, tmp_path: Path) -> None:
    """In a folder, in a table and as a member of a shard that is indexed."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / f"a.{suffix}").write_bytes(picture(1))
    (folder / "a.txt").write_text("a caption")
    write_shard(tmp_path / "s.tar", [{"__key__": "a", suffix: picture(1), "txt": b"a caption"}])
    write_csv(tmp_path / "t.csv", [{"image": f"a.{suffix}", "caption": "a caption", "owner": ""}])
    for number, source in enumerate((
        folder_source(folder, Columns()),
        table_source(tmp_path / "t.csv", COLUMNS, folder),
    )):  # fmt: skip
        report = import_examples(source, tmp_path / f"out{number}", Settings("folder"))
        assert (report["written"], dict(source.other_files)) == (1, {})
    [raw] = TarReader(build_index([tmp_path / "s.tar"], tmp_path / "index")).read_all([0])
    assert raw.image == picture(1)


def test_report_is_private_and_provenance_has_no_counts(tmp_path: Path) -> None:
    source = from_csv(tmp_path / "in", [*pictures(tmp_path / "in", 4), "000.jpg"])
    import_examples(source, tmp_path / "out", Settings("csv"))
    assert stat.S_IMODE((tmp_path / "out" / REPORT).stat().st_mode) == 0o600
    facts = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    assert "Debenedetti" in facts["deduplication"] and "at most 4 bits" in facts["deduplication"]
    text = (tmp_path / "out" / PROVENANCE).read_text()
    assert str(tmp_path) not in text and "written" not in text and "000.jpg" not in text


def test_owner_limit(tmp_path: Path) -> None:
    columns = Columns(owner="owner")
    rows = rows_of(pictures(tmp_path / "in", 10))
    rows[9]["owner"] = " "
    source = table_source(write_csv(tmp_path / "in" / "t.csv", rows), columns, None)
    settings = Settings("csv", owner_field="owner", max_per_owner=2)
    report = import_examples(source, tmp_path / "out", settings)
    assert report["dropped"] == {"no_owner": 1, "owner_limit": 3} and report["written"] == 6
    kept = [int(caption[-3:]) % 3 for caption in captions(tmp_path / "out")]
    assert sorted(kept) == [0, 0, 1, 1, 2, 2]
    facts = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    assert facts["settings"]["max_per_owner"] == 2 and "At most 2 examples" in facts["owners"]
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert b"o1" not in members(tmp_path / "out") and b'"o1"' not in everything


def test_duplicate_keys_in_folders(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    pictures(folder, 1)
    (folder / "000.png").write_bytes(picture(5, fmt="PNG"))
    (folder / "000.txt").write_text("a caption")
    report = import_examples(folder_source(folder, COLUMNS), tmp_path / "out", Settings("folder"))
    assert report["dropped"] == {"duplicate_key": 1} and report["written"] == 1


LABELS = [3, 0, 12, 3]


@pytest.mark.parametrize("kind", ["folder", "parquet", "csv"])
def test_labels_go_along(kind: str, tmp_path: Path) -> None:
    """And stand for a caption: data for classifiers have none."""
    folder = tmp_path / "in"
    names, columns = pictures(folder, 4), Columns(label="fine")
    rows = [{"image": name, "fine": label, "caption": None} for name, label in zip(names, LABELS, strict=True)]
    rows[0]["caption"] = "a caption too"
    if kind == "folder":
        for name, label in zip(names, LABELS, strict=True):
            (folder / name).with_suffix(".cls").write_text(f"{label}\n")
        (folder / names[0]).with_suffix(".txt").write_text("a caption too")
        source = folder_source(folder, COLUMNS)
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "t.parquet")
        source = parquet_source(folder / "t.parquet", columns, None)
    else:
        source = table_source(write_csv(folder / "t.csv", rows), columns, None)  # type: ignore[arg-type]
    report = import_examples(source, tmp_path / "out", Settings(kind, size=40))
    assert (report["written"], report["dropped"]) == (4, {})
    found = members(tmp_path / "out")
    assert [body.decode() for name, body in found.items() if name.endswith(".cls")] == [str(label) for label in LABELS]
    assert captions(tmp_path / "out") == ["a caption too"]
    index = build_index(sorted((tmp_path / "out").glob("*.tar")), tmp_path / "index")
    counts = verify_sample(index, 4, None, lambda items: items)
    assert {state: count for state, count in counts.items() if count} == {"usable": 1, "labelled without caption": 3}


def test_what_is_no_label_is_none_and_another_class_is_no_copy(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    pictures(folder, 1)
    for number, text in enumerate(("7", "-1", "a cat", "", "1.5", "\u0663", "9" * 30, " 8\n", "7")):
        (folder / f"{number:03d}.jpg").write_bytes(picture(0, width=120, height=80))
        (folder / f"{number:03d}.cls").write_text(text)
    settings = Settings("folder", size=40, duplicate_distance=None)
    report = import_examples(folder_source(folder, COLUMNS), tmp_path / "out", settings)
    assert report["dropped"] == {"no_caption": 6, "exact_duplicate": 1}
    assert sorted(body for name, body in members(tmp_path / "out").items() if name.endswith(".cls")) == [b"7", b"8"]


class Stop:
    """Ctrl-C after some units of a stage."""

    def __init__(self, stage: str, after: int):
        self._stage, self._left = stage, after

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._left -= done * (stage == self._stage)
        if not self._left:
            raise KeyboardInterrupt


def test_workers_and_interruptions_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    names = pictures(folder, 12)
    rows = rows_of(names + names[:3])
    source = table_source(write_csv(folder / "t.csv", rows), COLUMNS, None)
    source = Source([ListedPart((item,)) for item in source.parts[0].items()], source.fingerprint)
    settings = Settings("csv", size=40, shard_examples=5)
    import_examples(source, tmp_path / "plain", settings)
    with worker_pool(2) as pool:
        import_examples(source, tmp_path / "two", settings, executor=pool.executor)
    for stop_at in (("converting", 4), ("writing", 1)):
        output = tmp_path / f"stopped-{stop_at[0]}"
        with pytest.raises(KeyboardInterrupt):
            import_examples(source, output, settings, advance=Stop(*stop_at))
        assert not (output / PROVENANCE).exists() and (output / ".import").is_dir()
        import_examples(source, output, settings)
    contents = [
        {p.name: p.read_bytes() for p in sorted((tmp_path / name).iterdir())}
        for name in ("plain", "two", "stopped-converting", "stopped-writing")
    ]
    assert all(content == contents[0] for content in contents)
    assert ".import" not in contents[0]


def test_other_content_in_the_folder_is_refused(tmp_path: Path) -> None:
    names = pictures(tmp_path / "in", 3)
    source = from_csv(tmp_path / "in", names)
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "x").write_text("")
    with pytest.raises(DataError, match="not empty"):
        import_examples(source, tmp_path / "busy", Settings("csv"))
    first = import_examples(source, tmp_path / "out", Settings("csv"))
    assert import_examples(source, tmp_path / "out", Settings("csv")) == first  # done: nothing to do
    with pytest.raises(DataError, match="another import"):
        import_examples(source, tmp_path / "out", Settings("csv", size=9))
    (tmp_path / "in" / "t.csv").write_text((tmp_path / "in" / "t.csv").read_text() + "000.jpg,x,y\n")
    with pytest.raises(DataError, match="another import"):
        import_examples(table_source(tmp_path / "in" / "t.csv", COLUMNS, None), tmp_path / "out", Settings("csv"))


def test_a_file_that_cannot_be_read_is_an_error_and_no_bad_example(tmp_path: Path) -> None:
    source = from_csv(tmp_path / "in", pictures(tmp_path / "in", 2))
    (tmp_path / "in" / "001.jpg").unlink()
    (tmp_path / "in" / "001.jpg").symlink_to("/proc/self/mem")  # between listing and reading
    with pytest.raises(ReadError, match=r"cannot read .*001\.jpg"):
        import_examples(source, tmp_path / "out", Settings("csv"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("image,text\na.jpg,x\n", "no column caption; it has image, text"),
        ("", "no column image"),
        ('image,caption\n"a.jpg,x' + "y" * (1 << 21), "line"),
        ("image,caption\n\xff.jpg,x\n", "not UTF-8"),
    ],
)
def test_bad_tables(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        table_source(tmp_path / "t.csv", COLUMNS, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "no COCO"),
        ("{", "no JSON"),
        ('{"images": [{"id": 1}, {"id": 1}], "annotations": []}', "occurs twice"),
        ('{"images": [], "annotations": [{"image_id": 3, "caption": "x"}]}', "of no image"),
    ],
)
def test_bad_coco_files(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(DataError, match=message):
        coco_source(tmp_path / "c.json", COLUMNS, None)


def test_json_lines_are_told_the_way(tmp_path: Path) -> None:
    pictures(tmp_path, 2)
    (tmp_path / "metadata.jsonl").write_text('{"image": "000.jpg", "caption": "x"}')
    with pytest.raises(DataError, match=r"metadata\.jsonl is not read; make it Parquet"):
        folder_source(tmp_path, COLUMNS)


def test_bad_parquet(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="as Parquet"):
        parquet_source(tmp_path / "t.parquet", COLUMNS, None)
    (tmp_path / "t.parquet").unlink()
    with pytest.raises(DataError, match="holds no"):
        parquet_source(tmp_path, COLUMNS, None)


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_row_with_more_fields_than_the_header_is_refused(suffix: str, tmp_path: Path) -> None:
    """Its caption holds the separator without quotes and would otherwise be cut there."""
    comma = {".csv": ",", ".tsv": "\t"}[suffix]
    rows = [["image", "caption"], ["a.png", "a red circle"], ["b.png", "a black star", " a purple oval"]]
    table = tmp_path / f"t{suffix}"
    table.write_text("".join(comma.join(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=f"t{suffix}, line 3 has more fields than the header"):
        table_source(table, COLUMNS, None)
