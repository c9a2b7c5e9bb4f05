"""Labels of classes go along with an import, from every source that has them, and stand for a caption."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.importers.convert import Conversion
from data.importers.items import Source
from data.importers.pipeline import Settings, import_examples
from data.importers.sources import Columns, folder_source, parquet_source, shard_source, table_source
from data.index.build import build_index
from data.index.shards import find_shards
from data.index.verify import verify_sample
from data.reading.records import RemoteOptions
from tests.data.conftest import picture, write_shard
from tests.data.test_importers_pipeline import COLUMNS, captions, members, pictures, write_csv

LABELS = [3, 0, 12, 3]


def labelled(kind: str, folder: Path) -> Source:
    """Four pictures with labels and without captions, but for the first, which has both."""
    names, columns = pictures(folder, 4), Columns(label="fine")
    if kind == "webdataset":
        samples: list[dict[str, Any]] = [
            {"__key__": name[:3], "jpg": (folder / name).read_bytes(), "cls": str(label).encode()}
            for name, label in zip(names, LABELS, strict=True)
        ]
        samples[0]["txt"] = b"a caption too"
        write_shard(folder / "a.tar", samples)
        return shard_source(str(folder / "*.tar"), COLUMNS, None)
    if kind == "folder":
        for name, label in zip(names, LABELS, strict=True):
            (folder / name).with_suffix(".cls").write_text(f"{label}\n")
        (folder / names[0]).with_suffix(".txt").write_text("a caption too")
        return folder_source(folder, COLUMNS)
    rows = [{"image": name, "fine": label, "caption": None} for name, label in zip(names, LABELS, strict=True)]
    rows[0]["caption"] = "a caption too"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "t.parquet")
        return parquet_source(folder / "t.parquet", columns, None)
    if kind == "csv":
        return table_source(write_csv(folder / "t.csv", rows), columns, None)  # type: ignore[arg-type]
    (folder / "t.jsonl").write_text(
        "\n".join(json.dumps({k: v for k, v in row.items() if v is not None}) for row in rows)
    )
    return table_source(folder / "t.jsonl", columns, None)


@pytest.mark.parametrize("kind", ["webdataset", "folder", "parquet", "csv", "jsonl"])
def test_labels_go_along(kind: str, tmp_path: Path) -> None:
    """And stand for a caption: data for classifiers have none."""
    source = labelled(kind, tmp_path / "in")
    report = import_examples(source, tmp_path / "out", Settings(kind, Conversion(size=40)))
    assert (report["written"], report["dropped"]) == (4, {})
    found = members(tmp_path / "out")
    assert [body.decode() for name, body in found.items() if name.endswith(".cls")] == [str(label) for label in LABELS]
    assert captions(tmp_path / "out") == ["a caption too"]
    index = build_index(find_shards(str(tmp_path / "out"), Path.cwd()), tmp_path / "index", remote=RemoteOptions())
    counts = verify_sample(index, 4, None, lambda items: items)
    assert {state: count for state, count in counts.items() if count} == {"usable": 1, "labelled without caption": 3}


def test_what_is_no_label_is_none(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    samples = [
        {"__key__": str(number), "jpg": picture(number, width=120, height=80), "cls": body}
        for number, body in enumerate((b"7", b"-1", b"a cat", b"", b"1.5", "\u0663".encode(), b"9" * 30, b" 8\n"))
    ]
    write_shard(tmp_path / "in/a.tar", samples)
    source = shard_source(str(tmp_path / "in/a.tar"), COLUMNS, None)
    report = import_examples(source, tmp_path / "out", Settings("webdataset", Conversion(size=40)))
    assert report["dropped"] == {"no_caption": 6}
    assert sorted(body for name, body in members(tmp_path / "out").items() if name.endswith(".cls")) == [b"7", b"8"]


def test_the_same_picture_of_another_class_is_no_exact_copy(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    samples = [
        {"__key__": str(n), "jpg": picture(1, width=99, height=80), "cls": c} for n, c in enumerate((b"1", b"2", b"1"))
    ]
    write_shard(tmp_path / "in/a.tar", samples)
    settings = Settings("webdataset", Conversion(size=40), duplicate_distance=None)
    report = import_examples(shard_source(str(tmp_path / "in/a.tar"), COLUMNS, None), tmp_path / "out", settings)
    assert report["dropped"] == {"exact_duplicate": 1}
