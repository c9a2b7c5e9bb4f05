"""Tables are read strictly, records of one picture become one example, and no message holds what a cell holds."""

import base64
import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data.errors import DataError, ReadError
from data.importers.convert import Settings
from data.importers.pipeline import import_examples
from data.importers.sources import (
    Columns,
    Source,
    SourceExample,
    coco_source,
    folder_source,
    parquet_source,
    table_source,
)
from launch_scripts.prepare import main
from tests.data.conftest import picture
from tests.data.test_importers import members, pictures

Pairs = list[tuple[str, tuple[str, ...]]]


def items_of(source: Source) -> list[SourceExample]:
    return [item for part in source.parts for item in part]


def read(folder: Path, content: str, name: str = "t.csv", columns: Columns = Columns()) -> Pairs:  # noqa: B008
    """Names of images and captions of a table."""
    (folder / name).write_text(content, encoding="utf-8", newline="")
    return [
        (item.image.name if isinstance(item.image, Path) else "", item.captions)
        for item in items_of(table_source(folder / name, columns, folder.resolve()))
    ]


A, B = ("a.png", ("a cat",)), ("b.png", ("a dog",))
SOUND: dict[str, tuple[str, Pairs]] = {
    "plain": ("image,caption\na.png,a cat\nb.png,a dog\n", [A, B]),
    "no line end at the end": ("image,caption\na.png,a cat\nb.png,a dog", [A, B]),
    "CRLF": ("image,caption\r\na.png,a cat\r\nb.png,a dog\r\n", [A, B]),
    "lone CR": ("image,caption\ra.png,a cat\rb.png,a dog\r", [A, B]),
    "byte order mark": ("\ufeffimage,caption\na.png,a cat\nb.png,a dog\n", [A, B]),
    "all quoted": ('"image","caption"\n"a.png","a cat"\n"b.png","a dog"\n', [A, B]),
    "empty lines": ("image,caption\n\na.png,a cat\n   \nb.png,a dog\n\n", [A, B]),
    "another order, more columns": (
        "id,caption,image,x\n7,a cat,a.png,\n8,a dog,b.png,y\n",
        [A, B],
    ),
    "an index without a name": (",image,caption\n0,a.png,a cat\n1,b.png,a dog\n", [A, B]),
    "inch marks": (
        'image,caption\na.png,a 5" pipe and a 6" pipe\n',
        [("a.png", ('a 5" pipe and a 6" pipe',))],
    ),
    "quotes at the end": ('image,caption\na.png,she said "hi"\n', [("a.png", ('she said "hi"',))]),
    "doubled quotes": ('image,caption\na.png,"she said ""hi"""\n', [("a.png", ('she said "hi"',))]),
    "only quotes": ('image,caption\na.png,""\nb.png,""""\n', [("a.png", ("",)), ("b.png", ('"',))]),
    "separators": (
        'image,caption\na.png,"a cat, a dog, a cow"\n',
        [("a.png", ("a cat, a dog, a cow",))],
    ),
    "a line break": (
        'image,caption\na.png,"a cat\nsits"\nb.png,a dog\n',
        [("a.png", ("a cat\nsits",)), B],
    ),
    "a CRLF inside": (
        'image,caption\na.png,"a cat\r\nsits"\r\nb.png,a dog\r\n',
        [("a.png", ("a cat\r\nsits",)), B],
    ),
    "a separator in the first line": (
        'image,caption\na.png,"a cat, a dog\na cow"\n',
        [("a.png", ("a cat, a dog\na cow",))],
    ),
    "a separator in the last line": (
        'caption,image\n"a cat\na dog, a cow",a.png\n',
        [("a.png", ("a cat\na dog, a cow",))],
    ),
    "a poem": (
        'id,image,caption,by\n7,a.png,"a, b\nc, d\ne, f",me\n',
        [("a.png", ("a, b\nc, d\ne, f",))],
    ),
    "a poem first": (
        'caption,image,by\n"a, b\nc, d\ne",a.png,me\n',
        [("a.png", ("a, b\nc, d\ne",))],
    ),
    "words of pandas": (
        "image,caption\na.png,NA\nb.png,null\n",
        [("a.png", ("NA",)), ("b.png", ("null",))],
    ),
    "a blank and quotes": ('image,caption\na.png, "a cat"\n', [("a.png", (' "a cat"',))]),
    "other line separators": (
        "image,caption\na.png,a\u2028cat\x0band\x85dog\n",
        [("a.png", ("a\u2028cat\x0band\x85dog",))],
    ),
    "a header with a line break": (
        'image,caption,"two\nlines"\na.png,a cat,x\nb.png,a dog,y\n',
        [A, B],
    ),
}


@pytest.mark.parametrize("what", SOUND)
def test_sound_tables_are_read_as_they_are(what: str, tmp_path: Path) -> None:
    content, expected = SOUND[what]
    assert read(tmp_path, content) == expected
    tabs = content.replace("\t", " ").replace(",", "\t")
    assert read(tmp_path, tabs, "t.TSV") == [
        (name, tuple(t.replace(",", "\t") for t in texts)) for name, texts in expected
    ]


def rows(count: int, **changed: str) -> str:
    """A table of `NUMBER.png,thing NUMBER,web`; `_3="..."` is another line for row 3, which stands in line 5."""
    lines = [
        changed.get(f"_{number}", f"{number}.png,thing {number},web") for number in range(count)
    ]
    return "\n".join(["image,caption,source", *lines]) + "\n"


MALFORMED: dict[str, tuple[str, int, str]] = {
    "opened and opened again": (
        rows(9, _3='3.png,"thing 3,web', _6='6.png,"thing 6,web'),
        5,
        "text follows",
    ),
    "opened and closed in the same column": (
        rows(9, _3='3.png,"thing 3,web', _6='6.png,thing 6",web'),
        5,
        "holds whole rows",
    ),
    "closed in the next row": (
        rows(9, _3='3.png,"thing 3,web', _4='4.png,thing 4",web'),
        5,
        "holds whole rows",
    ),
    "closed in a later column": (
        rows(9, _3='3.png,"thing 3,web', _6='6.png,thing 6,web"'),
        5,
        "holds whole rows",
    ),
    "opened in the first column": (
        rows(9, _3='"3.png,thing 3,web', _6='6.png",thing 6,web'),
        5,
        "holds whole rows",
    ),
    "opened in the last column": (
        rows(9, _3='3.png,thing 3,"web', _6='6.png,thing 6,web"'),
        5,
        "holds whole rows",
    ),
    "an empty row swallowed too": (
        rows(9, _3='3.png,"thing 3,web', _4="", _6='6.png,thing 6",web'),
        5,
        "holds whole rows",
    ),
    "a short row swallowed too": (
        rows(9, _3='3.png,"thing 3,web', _4="4.png", _6='6.png,thing 6",web'),
        5,
        "holds whole rows",
    ),
    "never closed": (rows(9, _3='3.png,"thing 3,web'), 5, "never closed"),
    "never closed in the last line": (rows(9, _8='8.png,"thing 8,web'), 10, "never closed"),
    "a lone quote": (rows(9, _3='3.png,",web'), 5, "never closed"),
    "opened in the header": (
        rows(9, _3='3.png,thing 3",web').replace("source", '"source'),
        1,
        "holds whole rows|text follows",
    ),
    "swallowed by the header": (
        'image,caption,"x\n0.png,thing 0,web"\n1.png,thing 1,web\n',
        1,
        "holds whole rows",
    ),
    "text behind a quote": (rows(9, _3='3.png,"thing" 3,web'), 5, "text follows"),
    "quoted twice": (rows(9, _3='3.png,""thing 3"",web'), 5, "text follows"),
    "a backslash": (rows(9, _3='3.png,"a \\"thing\\" 3",web'), 5, "text follows"),
    "a blank behind the closing quote": (rows(9, _3='3.png,"thing 3" ,web'), 5, "text follows"),
    "one field of two": (rows(9, _3='"3.png"",thing 3",web'), 5, "fewer fields"),
    "a separator too many": (rows(9, _3="3.png,thing 3, red,web"), 5, "more fields"),
    "a line break without quotes": (rows(9, _3="3.png,thing\n3,web"), 5, "fewer fields"),
    "half of a row": (rows(9, _3="3.png"), 5, "fewer fields"),
    "a blank before the opening quote": (rows(9, _3='3.png, "thing, 3",web'), 5, "more fields"),
    "zero bytes": (rows(9, _3="\0\0\0\0"), 5, "zero bytes"),
    "a zero byte in a text": (rows(9, _3="3.png,pic\0ture,web"), 5, "zero bytes"),
    "a text without end": (
        rows(9, _3='3.png,"' + "x" * (1 + (1 << 20)) + '",web'),
        5,
        "1,048,576 characters",
    ),
    "no suffixes": (
        "image,caption\n"
        + "".join(
            f"file{n},{q}thing {n}{e}\n"
            for n, q, e in ((0, "", ""), (1, '"', ""), (2, "", ""), (3, "", '"'))
        ),
        3,
        "holds whole rows",
    ),
    "kinds of pictures that no import reads": (
        rows(9, _3='3.tif,"thing 3,web', _4="4.heic,thing 4,web", _6='6.tif,thing 6",web'),
        5,
        "whole rows",
    ),
    "folders": ('caption,image\nx,"d/0.png\ny,d/1.png"\n', 2, "holds whole rows"),
    "names that are like no file's": (
        'image,caption\npic a,"thing 1\npic b,thing 2\npic c,thing 3"\n',
        2,
        "holds whole rows",
    ),
    "such names, one row": (
        'image,caption\npic a,"thing 1\npic b,thing 2"\n',
        2,
        "holds whole rows",
    ),
    "such names, captions first": (
        'caption,image\n"thing 1,pic a\nthing 2",pic b\n',
        2,
        "holds whole rows",
    ),
    "such names, more columns": (
        'x,caption,image\n1,"thing 1,pic a\n2,thing 2,pic b\n3,thing 3",pic c\n',
        2,
        "holds whole rows",
    ),
    "such names, rows with blanks": (
        'image,caption\npic a,"thing 1\npic b, thing 2\npic c, thing 3"\n',
        2,
        "holds whole rows",
    ),
    "such names, a short row too": (
        'image,caption\npic a,"thing 1\npic b,thing 2\nthing 3"\n',
        2,
        "holds whole rows",
    ),
    "such names, behind the header": (
        'image,caption,"x\npic a,thing 1,web"\npic b,thing 2,web\n',
        1,
        "holds whole rows",
    ),
    "addresses": (
        'image,caption\na.png,"thing 1\nhttp://x.org/1?a=b,thing 2\nhttp://x.org/2,thing 3"\n',
        2,
        "holds whole rows",
    ),
    "numbers": ('caption,image\n"thing 1,17\nthing 2,18\nthing 3",19\n', 2, "holds whole rows"),
    "a blank before a quote": (rows(9, _3='3.png, "thing 3, red"'), 5, "blank before a quote"),
    "two blanks of other kinds before a quote": (
        rows(9, _3='3.png,\u3000\xa0"thing 3, red"'),
        5,
        "blank before a quote",
    ),
    "a blank before a quote with quotes inside": (
        rows(9, _3='3.png, "thing ""3"", red"'),
        5,
        "blank before a quote",
    ),
    "a blank before the first column's quote": (
        rows(9, _3=' "3, red.png",thing'),
        5,
        "blank before a quote",
    ),
    "a blank before a quote in the header": (
        'image,caption, "a, b"\na.png,thing,x,y\n',
        1,
        "blank before a quote",
    ),
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_tables_are_refused_with_their_line(
    what: str, line_end: str, tmp_path: Path
) -> None:
    """Whether the pictures are there or not; nothing of the cells is said."""
    content, line, problem = MALFORMED[what]
    for number in range(4):
        (tmp_path / f"file{number}").write_bytes(b"x")
    for separator, name in ((",", "t.csv"), ("\t", "t.tsv")):
        text = content.replace(",", separator).replace("\n", line_end)
        with pytest.raises(DataError, match=rf"t\.[ct]sv, line {line}\b.*({problem})") as caught:
            read(tmp_path, text, name)
        message = str(caught.value)
        assert (
            not any(cell in message for cell in ("\n", "thing", ".png", ".tif"))
            and caught.value.exit_code == 2
        )


def test_random_tables_are_read_as_python_reads_them_strictly(tmp_path: Path) -> None:
    """Rows of five columns with quotes, separators, blanks, other letters and line breaks, in every style of quoting."""
    rng = np.random.default_rng(0)
    pieces = [
        "a",
        "cat",
        " ",
        ",",
        '"',
        "'",
        "\t",
        "猫",
        ";",
        "\\",
        "0.5",
        "\n",
        "\r\n",
        "”",
        "#",
        "=",
    ]
    names = ["n", "caption", "image", "x", "y"]
    for style, count in (
        (csv.QUOTE_MINIMAL, 5000),
        (csv.QUOTE_ALL, 500),
        (csv.QUOTE_NONNUMERIC, 500),
    ):
        ids, lengths = rng.integers(0, len(pieces), (count, 2, 8)), rng.integers(0, 9, (count, 2))
        texts = [
            ["".join(pieces[i] for i in ids[n, c, : lengths[n, c]]) for c in range(2)]
            for n in range(count)
        ]
        # Line breaks and separators in one text can look like rows, and a quote behind leading blanks like a wrong one.
        left_out = [",", r"[\r\n]"]
        texts = [
            [re.sub(left_out[n % 2], "", text).lstrip() for text in row]
            for n, row in enumerate(texts)
        ]
        table = [[*texts[number], f"{number}.png", "x y", '"'] for number in range(count)]
        buffer = io.StringIO(newline="")
        csv.writer(buffer, quoting=style).writerows([names, *table])
        strict = list(csv.reader(io.StringIO(buffer.getvalue(), newline=""), strict=True))
        assert strict == [names, *table]
        assert read(tmp_path, buffer.getvalue()) == [(row[2], (row[1],)) for row in strict[1:]]


@pytest.mark.parametrize("seed", range(4))
def test_a_stray_quote_never_puts_another_row_into_an_example(seed: int, tmp_path: Path) -> None:
    """Quotes put before or behind fields of random rows: refused, or every row is there with its own text alone."""
    rng = np.random.default_rng(seed)
    outcomes = set()
    for trial in range(200):
        name = ("{}.png", "pic {}", "http://x.org/{}?a=b", "{}")[trial % 4]
        fields = [[name.format(number), f"thing {number}", "web"] for number in range(8)]
        for row, column, side in zip(
            rng.integers(0, 8, 2), rng.integers(0, 3, 2), rng.integers(0, 2, 2), strict=True
        ):
            fields[row][column] = '"' + fields[row][column] if side else fields[row][column] + '"'
        order = rng.permutation(3)
        lines = [
            ",".join(row[column] for column in order)
            for row in [["image", "caption", "source"], *fields]
        ]
        try:
            found = read(tmp_path, "\n".join(lines))
        except DataError as error:
            outcomes.add(re.sub(r"[\d,]+|.*csv", "", str(error))[:40])
            continue
        outcomes.add("read")
        assert [text.strip('"') for _, [text] in found] == [
            f"thing {number}" for number in range(8)
        ], lines
    assert len(outcomes) > 3


RECORDS = [
    {"image": "000.jpg", "caption": "view one of 0", "label": 4, "owner": "x"},
    {"image": "001.jpg", "caption": "view one of 1", "label": 5, "owner": "y"},
    {"image": "./000.jpg", "caption": "view two of 0", "label": 4, "owner": "x"},
    {"image": "002.jpg", "caption": "view one of 2", "label": 6, "owner": "x"},
    {"image": ".//001.jpg", "caption": "view two of 1", "label": 5, "owner": "y"},
    {"image": "000.jpg", "caption": "view one of 0", "label": 4, "owner": "x"},
    {"image": "000.jpg", "caption": "view three of 0", "label": 4, "owner": "x"},
]
JOINED = ["view one of 0", "view one of 1", "view one of 2"]
Make = Callable[[Path, list[dict[str, object]], Columns], Source]


def from_table(name: str) -> Make:
    def make(folder: Path, records: list[dict[str, object]], columns: Columns) -> Source:
        separator = "\t" if name.endswith("tsv") else ","
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(records[0]), delimiter=separator)
            writer.writeheader()
            writer.writerows(records)
        if name == "metadata.csv":
            return folder_source(folder, columns)
        return table_source(folder / name, columns, folder.resolve())

    return make


def from_parquet(image: Callable[[Path, str], object], *, adjacent: bool = False) -> Make:
    """Row groups of three, in two files."""

    def make(folder: Path, records: list[dict[str, object]], columns: Columns) -> Source:
        (folder / "tables").mkdir()
        changed = [{**record, "image": image(folder, str(record["image"]))} for record in records]
        if adjacent:
            changed.sort(key=lambda record: str(record["caption"])[-1])
        size = 10 if adjacent else 3
        middle = len(changed) if adjacent else (len(changed) + 1) // 2
        for number, part in enumerate(filter(None, (changed[:middle], changed[middle:]))):
            table = pyarrow.Table.from_pylist(part)
            if (
                isinstance(part[0]["image"], dict) and number
            ):  # one file has no type for bytes that are not there
                field = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
                table = table.set_column(0, "image", table["image"].cast(field))
            pyarrow.parquet.write_table(
                table, folder / "tables" / f"{number}.PARQUET", row_group_size=size
            )
        return parquet_source(folder / "tables", columns, folder.resolve())

    return make


def from_json_lines(folder: Path, records: list[dict[str, object]], columns: Columns) -> Source:
    """As docs/importing.md says."""
    import pyarrow.json

    (folder / "t.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pyarrow.parquet.write_table(pyarrow.json.read_json(folder / "t.jsonl"), folder / "t.parquet")
    return parquet_source(folder / "t.parquet", columns, folder.resolve())


def from_coco(folder: Path, records: list[dict[str, object]], columns: Columns) -> Source:
    """An entry of `images` for each record, also where the file is that of another."""
    images = [
        {"id": n, "file_name": record["image"], "owner": record["owner"]}
        for n, record in enumerate(records)
    ]
    notes = [
        {"image_id": number, "caption": record["caption"]} for number, record in enumerate(records)
    ]
    (folder / "c.json").write_text(json.dumps({"images": images, "annotations": notes}))
    return coco_source(folder / "c.json", columns, folder.resolve())


def stored(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


MAKERS: dict[str, Make] = {
    "csv": from_table("t.csv"),
    "tsv": from_table("t.tsv"),
    "metadata": from_table("metadata.csv"),
    "parquet": from_parquet(lambda _, name: name),
    "parquet structs": from_parquet(lambda _, name: {"bytes": None, "path": name}),
    "parquet bytes": from_parquet(stored, adjacent=True),
    "parquet bytes and names": from_parquet(
        lambda at, name: {"bytes": stored(at, name), "path": name}, adjacent=True
    ),
    "JSON lines": from_json_lines,
    "coco": from_coco,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_all_records_of_a_picture_are_one_example(kind: str, tmp_path: Path) -> None:
    """By whatever spelling of its name, in other row groups and files; captions come in their order, each once."""
    pictures(folder := tmp_path / "in", 3)
    columns = Columns(owner="owner", label=None if kind == "coco" else "label")
    source = MAKERS[kind](folder, RECORDS, columns)
    settings = Settings("x", size=40, owner_field="owner", max_per_owner=5, duplicate_distance=None)
    report = import_examples(source, tmp_path / "out", settings)
    assert (report["read"], report["written"], report["joined_records"], report["dropped"]) == (
        3,
        3,
        4,
        {},
    )
    found = members(tmp_path / "out")
    assert [body.decode() for name, body in found.items() if name.endswith(".txt")] == JOINED
    texts = [json.loads(body)["captions"] for name, body in found.items() if name.endswith(".json")]
    assert texts == [
        ["view one of 0", "view two of 0", "view three of 0"],
        ["view one of 1", "view two of 1"],
    ]
    labels = [body.decode() for name, body in found.items() if name.endswith(".cls")]
    assert labels == ([] if kind == "coco" else ["4", "5", "6"])


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, "owner") for kind in MAKERS] + [(kind, "label") for kind in MAKERS if kind != "coco"],
)
def test_records_that_contradict_each_other_are_refused(
    kind: str, field: str, tmp_path: Path
) -> None:
    """With both places, and without what stands there."""
    pictures(folder := tmp_path / "in", 3)
    records = [dict(record) for record in RECORDS]
    records[6][field] = 77 if field == "label" else "SECRET"
    columns = Columns(owner="owner", label=None if kind == "coco" else "label")
    with pytest.raises(
        DataError, match=rf"(line 8|row \d|images\[6\]), and .*, give one picture two {field}s"
    ) as caught:
        import_examples(MAKERS[kind](folder, records, columns), tmp_path / "out", Settings("x"))
    assert (
        "SECRET" not in str(caught.value)
        and "77" not in str(caught.value)
        and "000" not in str(caught.value)
    )


@pytest.mark.parametrize("kind", ["parquet", "parquet structs"])
def test_row_groups_stay_parts(kind: str, tmp_path: Path) -> None:
    """So that tables without such records give the same bytes as ever: keys count over parts."""
    pictures(folder := tmp_path / "in", 7)
    records = [{**RECORDS[0], "image": f"{number:03d}.jpg"} for number in range(7)]
    source = MAKERS[kind](folder, records, Columns())
    assert [[item.records for item in part] for part in source.parts] == [[1, 1, 1], [1], [1, 1, 1]]
    (folder / "tables").rename(folder / "other")
    source = MAKERS[kind](folder, [*records[:3], records[1], *records[3:6]], Columns())
    assert [[item.records for item in part] for part in source.parts] == [[1, 2, 1], [], [1, 1, 1]]


def test_a_label_or_an_owner_that_is_not_given_contradicts_nothing(tmp_path: Path) -> None:
    """A record without an owner lends its caption to nobody."""
    pictures(folder := tmp_path / "in", 1)
    content = "image,caption,label,owner\n000.jpg,one,,x\n./000.jpg,two,7,x\n000.jpg,three,,\n000.jpg,four,7,x\n"
    (folder / "t.csv").write_text(content)
    source = table_source(folder / "t.csv", Columns(owner="owner", label="label"), folder.resolve())
    [joined, unowned] = items_of(source)
    assert joined.captions == ("one", "two", "four") and (
        joined.label,
        joined.owner,
        joined.records,
    ) == (7, "x", 3)
    assert unowned.captions == ("three",) and unowned.owner is None


def test_pictures_that_are_equal_under_other_names_have_a_reason_of_their_own(
    tmp_path: Path,
) -> None:
    """Not one that advises to keep both."""
    pictures(folder := tmp_path / "in", 1)
    (folder / "again.jpg").write_bytes((folder / "000.jpg").read_bytes())
    (folder / "t.csv").write_text("image,caption\n000.jpg,one\nagain.jpg,two\n")
    source = table_source(folder / "t.csv", Columns(), folder.resolve())
    report = import_examples(source, tmp_path / "out", Settings("csv"))
    assert (
        report["dropped"] == {"same_picture": 1}
        and "keep_near" not in report["reasons"]["same_picture"]
    )


def encoded_pictures() -> dict[str, str]:
    kinds = {
        fmt: base64.b64encode(picture(1, fmt=fmt)).decode()
        for fmt in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    }
    raw = picture(1)
    return {
        **kinds,
        "for URLs": base64.urlsafe_b64encode(raw).decode(),
        "in lines": base64.encodebytes(raw).decode(),
        "a data URL": f"data:image/jpeg;base64,{kinds['JPEG']}",
        "hexadecimal": raw.hex(),
        "Python's bytes": repr(raw),
        "numbers": str(list(raw)),
        "one long word": "x" * 300 + ".png",
        "a long path": "/".join(["folder"] * 700) + ".png",
        "a few bytes": base64.b64encode(raw)[:60].decode(),
    }


@pytest.mark.parametrize("what", encoded_pictures())
@pytest.mark.parametrize("kind", ["tsv", "parquet structs", "coco"])
def test_pictures_in_the_place_of_names_are_refused_without_them(
    kind: str, what: str, tmp_path: Path
) -> None:
    pictures(folder := tmp_path / "in", 1)
    text = encoded_pictures()[what]
    records = [
        {"image": "000.jpg", "caption": "x", "owner": "y"},
        {"image": text, "caption": "x", "owner": "y"},
    ]
    with pytest.raises(DataError, match=r"column (image|file_name) has no file names") as caught:
        import_examples(MAKERS[kind](folder, records, Columns()), tmp_path / "out", Settings("x"))
    message = str(caught.value)
    assert (
        re.search(r"line 3|row [01]:|images\[1\]", message)
        and text[:40] not in message
        and len(message) < 250
    )


SECRET = "SECRET"


def leaks(folder: Path) -> dict[str, list[str]]:
    """Imports that end in an error, or drop rows; every cell of them says that it is secret. What they are -> arguments."""
    (folder / "SECRET.png").write_bytes(picture(3))
    for name in ("pipe/SECRET", "loop"):
        (folder / name).parent.mkdir(exist_ok=True)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    texts = {
        "headerless.csv": "SECRET.png,SECRET one\nSECRET2.png,SECRET two\n",
        "headerless.tsv": "SECRET1\tSECRET of a cat on a mat\n",
        "a usual word.csv": "SECRET Jones,picture\na.png,x\n",
        "usual words.csv": "url,text,SECRET\nid,caption,x\n",
        "a word of a header.tsv": "image\tSECRET\na.png\tx\n",
        "words.csv": "img,SECRET of a cat on a mat and more than a column\nx,y\n",
        "lines.csv": '{"image": "SECRET.png", "caption": "SECRET"}\n{"image": "SECRET.png", "caption": "SECRET"}\n',
        "missing.csv": "image,caption\nSECRET/gone.png?token=SECRET,SECRET\nhttps://h/SECRET?sig=SECRET,x\n",
        "unsafe.csv": "image,caption\n../SECRET.png,SECRET\n/SECRET/x.png,y\nloop.png,SECRET\n",
        "file.csv": "image,caption\nSECRET.png/SECRET.png,SECRET\n",
        "label.csv": "image,label\nSECRET.png,SECRET\n",
        "quote.csv": 'image,caption\nSECRET.png,"SECRET" SECRET\n',
        "long.csv": "image,caption\nSECRET.png,SECRET,SECRET\n",
        "short.csv": "image,caption\nSECRET.png\n",
        "rows.csv": 'image,caption\nSECRET.png,"SECRET\nSECRET.png,SECRET"\n',
        "owners.csv": "image,caption,owner\nSECRET.png,SECRET,SECRET1\nSECRET.png,SECRET,SECRET2\n",
        "surrogate.json": '{"images": [{"id": 1, "file_name": "SECRET\\ud800.png"}], "annotations": []}',
        "unknown.json": '{"images": [], "annotations": [{"image_id": "SECRET", "caption": "SECRET"}]}',
        "twice.json": '{"images": [{"id": "SECRET"}, {"id": "SECRET"}], "annotations": []}',
        "list.json": '{"images": [{"id": "SECRET", "file_name": ["SECRET"]}], "annotations": []}',
        "broken.json": '{"images": [{"id": "SECRET", "file_name": SECRET}], "annotations": []}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    tables = {
        "lists.parquet": [{"image": ["SECRET"], "caption": "SECRET"}],
        "structs.parquet": [{"image": {"url": "SECRET"}, "caption": "SECRET"}],
        "names.parquet": [{"image": "SECRET-gone.png", "caption": "SECRET"}],
        "first row.parquet": [{"SECRET": "a.png", "text": "x"}],
        "label.parquet": [{"image": "SECRET.png", "label": "SECRET", "caption": None}],
    }
    for name, records in tables.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / name)
    latin = pyarrow.StringArray.from_buffers(
        1, pyarrow.py_buffer(np.array([0, 7], np.int32)), pyarrow.py_buffer(b"SECRET\xe9")
    )
    table = pyarrow.table({"image": ["SECRET.png"], "caption": latin})
    pyarrow.parquet.write_table(table, folder / "latin.parquet")
    kinds = {"csv": "csv", "tsv": "csv", "json": "coco", "parquet": "parquet"}
    more = {
        "label.csv": ["--label_column", "label"],
        "owners.csv": ["--owner_field", "owner", "--max_per_owner", "3"],
        "label.parquet": ["--label_column", "label"],
    }
    return {
        name: ["--from", kinds[name.rpartition(".")[2]], str(folder / name), *more.get(name, [])]
        for name in (*texts, *tables, "latin.parquet")
    }


def test_no_line_and_no_report_holds_what_a_cell_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "in").mkdir()
    for name, arguments in leaks(folder).items():
        output = tmp_path / f"out-{name}"
        try:
            main(["import", *arguments, "--output", str(output), "--workers", "1"])
            message = ""
        except DataError as error:
            message = str(error)
        printed = capsys.readouterr()
        report = (
            (output / "import-report.json").read_text()
            if (output / "import-report.json").exists()
            else ""
        )
        for text in (message, printed.out, printed.err, report):
            assert SECRET not in text, (name, text)
        assert (message or report) and "\n" not in message


def test_a_disk_that_fails_is_said_with_the_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "SECRET.png").write_bytes(picture(3))
    (tmp_path / "t.csv").write_text("image,caption\nSECRET.png,x\n")
    source = table_source(tmp_path / "t.csv", Columns(), tmp_path.resolve())

    def fail(path: Path) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(
        ReadError, match=r"cannot read the picture of t\.csv, line 2: Input/output error$"
    ):
        import_examples(source, tmp_path / "out", Settings("csv"))
