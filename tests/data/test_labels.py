"""Labels: where they are looked for, and that a bad one is a zero row that leaves others alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import DecodeError
from data.examples.examples import LabelledImageExample, read_label
from data.index.build import build_index
from data.reading.loader import eval_batches
from data.reading.reader import RawExample
from tests.data.conftest import picture, write_shard

MAKE = LabelledImageExample(image_size=16, num_classes=10, train=False)


def raw(**fields: bytes) -> RawExample:
    return RawExample(picture(1), fields)


GOOD = [
    (raw(cls=b"3"), None, 3),
    (raw(cls=b" 09\n"), None, 9),
    (raw(cls=b"0", json=b'{"y": 4}'), None, 0),
    (raw(cls=b"0", json=b'{"y": 4}'), "y", 4),
    (raw(json=b'{"y": "7"}'), "y", 7),
]
BAD = [
    (raw(), None), (raw(cls=b""), None), (raw(cls=b"10"), None), (raw(cls=b"-1"), None), (raw(cls=b"1.0"), None),
    (raw(cls=b"cat"), None), (raw(cls=b"\xff"), None), (raw(cls="\u0663".encode()), None), (raw(cls=b"1" * 5000), None),
    (raw(cls=b"0" * 5000), None), (raw(cls=b"3" + b" " * 100), None), (raw(cls=b"3", txt=b"3"), "y"), (raw(json=b"{"), "y"),
    (raw(json=b'{"y": true}'), "y"), (raw(json=b'{"y": 1.0}'), "y"), (raw(json=b'{"y": [1]}'), "y"),
    (raw(json=b'{"y": -1}'), "y"), (raw(json=b'{"y": ' + b"9" * 5000 + b"}"), "y"), (raw(json=b"[" * 100_000), "y"),
    (raw(json=b'{"y": "\\u00a07"}'), "y"),
]  # fmt: skip


@pytest.mark.parametrize(("example", "field", "label"), GOOD)
def test_labels(example: RawExample, field: str | None, label: int) -> None:
    assert read_label(example, 10, field) == label


@pytest.mark.parametrize(("example", "field"), BAD)
def test_bad_labels(example: RawExample, field: str | None) -> None:
    with pytest.raises(DecodeError, match="label"):
        read_label(example, 10, field)


def test_bad_examples_are_zero_rows_counted_and_leave_others_alone(tmp_path: Path) -> None:
    """Through webdataset's writer, the real index and the loader."""
    members: list[dict[str, object]] = [
        {"jpg": picture(1), "cls": b"1"}, {"jpg": picture(2), "cls": b"10"}, {"jpg": picture(3)}, {"cls": b"4"},
        {"jpg": b"no image", "cls": b"5"}, {"jpg": picture(6), "cls": b"6", "txt": b"a caption is not looked at"},
    ]  # fmt: skip
    samples = [{"__key__": f"e{i}", **fields} for i, fields in enumerate(members)]
    table = build_index([write_shard(tmp_path / "s.tar", samples)], tmp_path / "index")
    (batch,) = eval_batches(table, MAKE, 8)
    assert batch.is_padding_B.tolist() == [False, True, True, True, True, False, True, True]
    assert batch.num_undecodable == 4
    assert (
        batch.inputs["labels_B"].tolist() == [1, 0, 0, 0, 0, 6, 0, 0] and batch.inputs["labels_B"].dtype == torch.int64
    )
    assert batch.inputs["images_BCHW"][1:5].abs().max() == 0
    alone = MAKE(RawExample(picture(6), {"cls": b"6"}), 0)["images_CHW"]
    assert np.array_equal(batch.inputs["images_BCHW"][5].numpy(), alone)


def test_augmentation_comes_from_the_key() -> None:
    train = LabelledImageExample(image_size=16, num_classes=10)
    as_they_are = LabelledImageExample(image_size=16, num_classes=10, augment=False)
    example = raw(cls=b"3")
    first, again, other = (train(example, key)["images_CHW"] for key in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert np.array_equal(as_they_are(example, 1)["images_CHW"], MAKE(example, 0)["images_CHW"])
