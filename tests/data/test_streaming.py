"""Streams of public shards: each example once an epoch, the same batches as the random-access reader makes of them."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data.batch import Batch
from data.errors import DataError, ReadError
from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.index.build import build_index
from data.index.shards import find_shards, local_shards
from data.reading.loader import eval_batches
from data.reading.streaming import Stream, StreamingLoader
from data.synthetic.write import Settings, write_synthetic
from privacy.step.batches import StepBatch

MAKE = CaptionExample(16, 12, EMBEDDED_TOKENIZER, train=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of 10, the last of 4."""
    root = tmp_path_factory.mktemp("synthetic")
    write_synthetic(root, Settings(44, 16, 0, "png", shard_examples=10))
    return root


@pytest.fixture(scope="module")
def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


def test_without_shuffling_it_is_the_order_of_the_index(
    folder: Path, shards: list[Path], tmp_path: Path
) -> None:
    table = build_index(find_shards(str(folder), folder), tmp_path / "index")
    expected = list(eval_batches(table, MAKE, 4))
    loader = StreamingLoader(
        Stream(shards, shuffle_buffer=0), MAKE, micro_batch_size=4, batch_size=44
    )
    [found] = [list(batches) for _, batches in loader.steps(plans(1))]
    assert len(found) == len(expected) == 11
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one.is_padding_B, two.is_padding_B)
        for name in one.inputs:
            assert torch.equal(one.inputs[name], two.inputs[name]), name


@pytest.mark.parametrize("num_readers", [1, 2, 3, 7])
def test_each_example_comes_once_an_epoch_in_an_order_of_the_seed(
    shards: list[Path], num_readers: int
) -> None:
    def captions(seed: int, epochs: int, reader: int) -> list[str | None]:
        stream = Stream(shards, seed=seed, shuffle_buffer=16)
        return [
            raw.caption for n in range(epochs) for _, raw in stream.epoch(n, reader, num_readers)
        ]

    everything = Counter(raw.caption for _, raw in Stream(shards).epoch(0))
    assert everything.total() == 44
    twice = [captions(4, 2, reader) for reader in range(num_readers)]
    assert Counter(itertools.chain(*twice)) == Counter(
        {text: 2 * count for text, count in everything.items()}
    )
    once = captions(4, 1, 0)
    assert once == twice[0][: len(once)] != captions(5, 1, 0) and twice[0][len(once) :] != once


def plans(count: int) -> Iterator[StepBatch]:
    return (
        StepBatch(step, np.zeros(0, np.int64), np.zeros(0, np.uint64), 1)
        for step in range(1, count + 1)
    )


@pytest.mark.parametrize("num_workers", [0, 2, pytest.param(3, marks=pytest.mark.full)])
def test_steps_hold_exactly_the_batch_and_go_on_where_they_were(
    shards: list[Path], num_workers: int
) -> None:
    def steps(start: int, count: int) -> list[list[Batch]]:
        make = CaptionExample(
            16, 12, EMBEDDED_TOKENIZER
        )  # random crops: the keys are the same, too
        loader = StreamingLoader(
            Stream(shards, seed=1, shuffle_buffer=12),
            make,
            micro_batch_size=4,
            batch_size=21,
            rank=1,
            world_size=2,
            num_workers=num_workers,
            start_step=start,
        )
        return [list(batches) for _, batches in loader.steps(plans(count))]

    whole = steps(0, 7)
    assert [[int((~batch.is_padding_B).sum()) for batch in step] for step in whole] == [
        [4, 4, 2]
    ] * 7
    again = steps(4, 3)
    for one, two in zip(itertools.chain(*whole[4:]), itertools.chain(*again), strict=True):
        assert torch.equal(one.inputs["images_BCHW"], two.inputs["images_BCHW"])
        assert torch.equal(one.inputs["tokens_BL"], two.inputs["tokens_BL"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_and_missing_shards_are_one_clear_error(
    shards: list[Path], tmp_path: Path, num_workers: int
) -> None:
    cut = tmp_path / "cut.tar"
    cut.write_bytes(shards[0].read_bytes()[:3000])

    def read(path: Path) -> None:
        stream = Stream([path, path])
        loader = StreamingLoader(
            stream, MAKE, micro_batch_size=4, batch_size=4, num_workers=num_workers
        )
        [list(batches) for _, batches in loader.steps(plans(9))]

    with pytest.raises(DataError, match=r"cut\.tar is cut off"):
        read(cut)
    with pytest.raises(ReadError, match=r"cannot read.*gone\.tar"):
        read(tmp_path / "gone.tar")


@pytest.mark.parametrize("shuffle_buffer", [0, 16])
def test_a_reader_that_finds_no_example_says_so(
    shards: list[Path], tmp_path: Path, shuffle_buffer: int
) -> None:
    """Instead of going round for ever: fewer examples than readers, and shards of which one has none."""
    hollow = tmp_path / "hollow.tar"
    hollow.write_bytes(bytes(1024))
    last = Stream(shards[-1:], shuffle_buffer=shuffle_buffer)  # four examples
    assert len(list(itertools.islice(last.examples(3, 9), 5))) == 5
    for stream, reader, readers, message in (
        (last, 4, 9, r"reader 5 of 9 .* finds no example in 1 shards.*lower data\.num_workers"),
        (
            Stream([hollow, hollow], shuffle_buffer=shuffle_buffer),
            0,
            1,
            r"reader 1 of 1 .* finds no example in 2 shards",
        ),
        (
            Stream([hollow], shuffle_buffer=shuffle_buffer),
            2,
            3,
            r"reader 3 of 3 .* finds no example in 1 shards",
        ),
    ):
        with pytest.raises(DataError, match=message):
            next(stream.examples(reader, readers))
    loader = StreamingLoader(last, MAKE, micro_batch_size=2, batch_size=18, rank=8, world_size=9)
    with pytest.raises(DataError, match="reader 9 of 9"):
        [list(batches) for _, batches in loader.steps(plans(1))]


def test_shards_that_are_not_there_are_named_before_they_are_read(
    shards: list[Path], tmp_path: Path
) -> None:
    assert local_shards(str(shards[0].parent), tmp_path) == shards
    (tmp_path / "empty.tar").touch()
    for pattern in ("gone.tar", "empty.tar", f"{shards[0]},gone.tar", "https://host/train-0.tar"):
        with pytest.raises(DataError, match=r"missing or empty shards.*(gone|empty|train-0)"):
            local_shards(pattern, tmp_path)
