"""Every kind of bad input of docs/data.md: each alone, among good examples, through the real index and loader."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DecodeError
from data.examples.examples import CaptionExample, read_label
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.examples.transforms import denormalize
from data.index.build import build_index
from data.reading.loader import Loader
from data.reading.reader import MAX_CAPTION_BYTES, RawExample, TarReader
from privacy.step.batches import StepBatch
from tests.data.conftest import ROOT, archive, bomb, encode, picture

MAKE = CaptionExample(image_size=16, num_tokens=12, tokenizer_path=EMBEDDED_TOKENIZER, train=False)
GOOD = {"jpg": picture(1), "txt": b"good"}


RED, GREEN = (200, 0, 0), (0, 200, 0)
FRAMES = [Image.new("RGB", (30, 30), RED), Image.new("RGB", (30, 30), GREEN)]
PNG, OTHER_PNG = (encode(frame, "PNG") for frame in FRAMES)
ANIMATED = encode(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:], lossless=True)

UNDECODABLE: dict[str, dict[str, bytes]] = {
    "zero-byte image": {"jpg": b"", "txt": b"x"},
    "no image bytes": {"jpg": b"no image", "txt": b"x"},
    "image cut off": {"jpg": picture(1)[:300], "txt": b"x"},
    "decompression bomb": {"png": bomb(60_000, 60_000), "txt": b"x"},
    "other format under a known name": {"jpg": encode(FRAMES[0], "TIFF"), "txt": b"x"},
    "JPEG with more than 64 scans": {
        "jpg": picture(1)[:-2] + b"\xff\xda" * 65 + b"\xff\xd9",
        "txt": b"x",
    },
    "missing image": {"txt": b"x"},
    "missing caption": {"jpg": picture(1)},
    "empty caption": {"jpg": picture(1), "txt": b""},
    "blank caption": {"jpg": picture(1), "txt": b" \n\t "},
    "caption not UTF-8": {"jpg": picture(1), "txt": b"caf\xe9"},
    "caption over 1 MiB": {"jpg": picture(1), "txt": b"x" * (MAX_CAPTION_BYTES + 1)},
    "caption field of another type": {"jpg": picture(1), "json": b'{"caption": 7}'},
    "broken JSON": {"jpg": picture(1), "json": b'{"caption": '},
    "deep JSON": {"jpg": picture(1), "json": b"[" * 200_000},
    "image of another extension": {"bmp": encode(FRAMES[0], "BMP"), "txt": b"x"},
}

DECODABLE: dict[str, tuple[dict[str, bytes], tuple[int, int, int], str]] = {
    "1-pixel image": ({"png": encode(Image.new("RGB", (1, 1), RED), "PNG"), "txt": b"x"}, RED, "x"),
    "CMYK": (
        {"jpg": encode(Image.new("CMYK", (30, 30), (0, 255, 255, 55)), "JPEG"), "txt": b"x"},
        RED,
        "x",
    ),
    "alpha": (
        {"png": encode(Image.new("RGBA", (30, 30), (*RED, 0)), "PNG"), "txt": b"x"},
        (255, 255, 255),
        "x",
    ),
    "animated": ({"webp": ANIMATED, "txt": b"x"}, RED, "x"),
    "huge caption": ({"png": PNG, "txt": b"word " * 150_000}, RED, "word " * 4),
    "caption with control characters": ({"png": PNG, "txt": b"a\x00\x07b"}, RED, "a"),
    "byte order mark before a caption": ({"png": PNG, "txt": b"\xef\xbb\xbfx"}, RED, "x"),
    "byte order mark before JSON": (
        {"png": PNG, "json": b'\xef\xbb\xbf{"caption": "j"}'},
        RED,
        "j",
    ),
    "caption in JSON": ({"png": PNG, "json": b'{"caption": "j"}'}, RED, "j"),
    "two images": ({"left.png": PNG, "right.png": OTHER_PNG, "txt": b"x"}, RED, "x"),
    "jpeg": ({"jpeg": encode(FRAMES[0], "JPEG"), "txt": b"x"}, RED, "x"),
    "upper case": ({"PNG": PNG, "TXT": b"x"}, RED, "x"),
}


def write(path: Path, examples: list[tuple[str, dict[str, bytes]]]) -> Path:
    path.write_bytes(
        archive(
            [(f"{key}.{name}", body) for key, members in examples for name, body in members.items()]
        )
    )
    return path


def batch_of(path: Path, tmp_path: Path, make: CaptionExample = MAKE):  # type: ignore[no-untyped-def]
    table = build_index([path], tmp_path / "index")
    ids = np.arange(len(table))
    loader = Loader(table, make, micro_batch_size=len(ids), num_workers=0)
    [batch] = [
        batch
        for _, batches in loader.steps(iter([StepBatch(0, ids, ids.astype(np.uint64), 1)]))
        for batch in batches
    ]
    return table, batch


@pytest.mark.parametrize("kind", UNDECODABLE)
def test_undecodable_examples_are_zero_rows_counted_and_leave_others_alone(
    kind: str, tmp_path: Path
) -> None:
    bad = UNDECODABLE[kind]
    table, batch = batch_of(
        write(tmp_path / "s.tar", [("a", GOOD), ("b", bad), ("c", GOOD)]), tmp_path
    )
    assert len(table) == 3  # n does not depend on what can be decoded
    assert batch.is_padding_B.tolist() == [False, True, False] and batch.num_undecodable == 1
    assert not batch.inputs["images_BCHW"][1].any()
    for name, value in batch.inputs.items():
        assert torch.equal(value[0], value[2]), name
        assert torch.equal(value[1], torch.from_numpy(MAKE.padding()[name.replace("_B", "_")])), (
            name
        )


@pytest.mark.parametrize("kind", DECODABLE)
def test_odd_examples_are_decoded_as_documented(kind: str, tmp_path: Path) -> None:
    members, colour, caption = DECODABLE[kind]
    _, batch = batch_of(write(tmp_path / "s.tar", [("a", GOOD), ("b", members)]), tmp_path)
    assert batch.num_undecodable == 0
    shown = denormalize(batch.inputs["images_BCHW"][1].numpy())[8, 8].astype(int)
    assert np.abs(shown - colour).max() <= 6
    assert MAKE.tokenizer.decode(batch.inputs["tokens_BL"][1].tolist()).startswith(caption.strip())


def test_several_captions_belong_to_one_example(tmp_path: Path) -> None:
    record = json.dumps({"caption": "no", "all": ["x", "y", 3]}).encode()
    captions = {"0.txt": b"zero", "1.txt": b"one", "2.txt": b"\xff", "json": record}
    members = {"png": PNG, **captions}
    path = write(tmp_path / "s.tar", [("a", members)])
    table, _ = batch_of(path, tmp_path)
    raw = TarReader(table).read(0)
    assert (
        raw.captions() == ["zero", "one"]
        and raw.captions("all") == ["x", "y"]
        and raw.captions("none") == []
    )
    train = CaptionExample(16, 12, EMBEDDED_TOKENIZER)
    one, two = (
        [train.tokenizer.decode(train(raw, key)["tokens_L"]) for key in range(20)] for _ in range(2)
    )
    assert set(one) == {"zero", "one"} and one == two
    fielded = CaptionExample(16, 12, EMBEDDED_TOKENIZER, train=False, caption_field="all")
    assert fielded.tokenizer.decode(fielded(raw, 1)["tokens_L"].tolist()) == "x"


def test_the_documentation_lists_every_kind() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    listed = {part.strip() for row in rows for part in row.split(";")}
    for kind in [*UNDECODABLE, *DECODABLE]:
        assert kind in listed, kind


def raw(**fields: bytes) -> RawExample:
    return RawExample(picture(1), fields)


GOOD_LABELS = [
    (raw(cls=b"3"), None, 3),
    (raw(cls=b" 09\n"), None, 9),
    (raw(cls=b"0", json=b'{"y": 4}'), None, 0),
    (raw(cls=b"0", json=b'{"y": 4}'), "y", 4),
    (raw(json=b'{"y": "7"}'), "y", 7),
]
BAD_LABELS = [
    (raw(), None),
    (raw(cls=b""), None),
    (raw(cls=b"10"), None),
    (raw(cls=b"-1"), None),
    (raw(cls=b"1.0"), None),
    (raw(cls=b"cat"), None),
    (raw(cls=b"\xff"), None),
    (raw(cls="\u0663".encode()), None),
    (raw(cls=b"1" * 5000), None),
    (raw(cls=b"0" * 5000), None),
    (raw(cls=b"3" + b" " * 100), None),
    (raw(cls=b"3", txt=b"3"), "y"),
    (raw(json=b"{"), "y"),
    (raw(json=b'{"y": true}'), "y"),
    (raw(json=b'{"y": 1.0}'), "y"),
    (raw(json=b'{"y": [1]}'), "y"),
    (raw(json=b'{"y": -1}'), "y"),
    (raw(json=b'{"y": ' + b"9" * 5000 + b"}"), "y"),
    (raw(json=b"[" * 100_000), "y"),
    (raw(json=b'{"y": "\\u00a07"}'), "y"),
]


@pytest.mark.parametrize(("example", "field", "label"), GOOD_LABELS)
def test_labels(example: RawExample, field: str | None, label: int) -> None:
    assert read_label(example, 10, field) == label


@pytest.mark.parametrize(("example", "field"), BAD_LABELS)
def test_bad_labels(example: RawExample, field: str | None) -> None:
    with pytest.raises(DecodeError, match="label"):
        read_label(example, 10, field)
