"""Bucketed captions: the same examples with less padding, the same gradients, and timings that stay private."""

import itertools

import numpy as np
import pytest
import torch

from data.batch import Batch
from data.errors import DataError
from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.index.build import build_index
from data.index.tar_index import ExampleTable
from data.reading.bucketing import by_caption_length
from data.reading.loader import Loader, StepPlan
from data.reading.reader import RawExample
from models.captioner import build_captioner
from models.config import captioner_config
from privacy.clipping import ClippedSum
from tests.data.conftest import picture, write_shard

MAKE = CaptionExample(image_size=32, num_tokens=40, tokenizer_path=EMBEDDED_TOKENIZER)
WORDS = ["a", "red", "dog", "and", "blue", "cat", "sitting", "under", "the", "big", "tree"]
IDS = np.arange(24)
PLAN = StepPlan(3, IDS, IDS.astype(np.uint64) * 7919, 7)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ExampleTable:
    """24 examples with captions of 1 to 48 words in no order; the last one has no image."""
    folder = tmp_path_factory.mktemp("bucketing")
    lengths = np.random.default_rng(0).permutation(np.arange(1, 25) * 2)
    samples = []
    for number, length in enumerate(lengths.tolist()):
        words = [WORDS[i % len(WORDS)] for i in range(length)]
        sample: dict[str, object] = {"__key__": f"{number:03d}", "txt": " ".join(words).encode()}
        samples.append(sample if number == 23 else {**sample, "jpg": picture(number)})
    return build_index([write_shard(folder / "s.tar", samples)], folder / "index")


def batches(table: ExampleTable, *, bucketed: bool, num_workers: int = 0) -> list[Batch]:
    loader = Loader(table, MAKE, micro_batch_size=4, num_workers=num_workers, bucket_captions=bucketed)
    [(_, found)] = [(plan, list(batches)) for plan, batches in loader.steps(iter([PLAN]))]
    return found


def rows(found: list[Batch]) -> set[tuple[bytes, bytes]]:
    """Image and caption of every example, whatever the padding."""
    return {
        (image.numpy().tobytes(), tokens[mask].numpy().tobytes())
        for batch in found
        for image, tokens, mask, padding in zip(
            batch.inputs["images_BCHW"],
            batch.inputs["tokens_BL"],
            batch.inputs["token_mask_BL"],
            batch.is_padding_B,
            strict=True,
        )
        if not padding
    }


def test_the_same_examples_with_less_padding(table: ExampleTable) -> None:
    plain, bucketed = batches(table, bucketed=False), batches(table, bucketed=True)
    assert rows(plain) == rows(bucketed) and len(rows(plain)) == 23
    assert len(plain) == len(bucketed) == 7 and sum(batch.num_undecodable for batch in bucketed) == 1
    lengths = [batch.inputs["tokens_BL"].shape[1] for batch in bucketed]
    assert lengths[:6] == sorted(lengths[:6]) and lengths[0] <= 16 and lengths[5] == 40
    assert lengths[6] == 8  # padding alone
    assert sum(lengths) < 0.7 * sum(batch.inputs["tokens_BL"].shape[1] for batch in plain)


def test_the_order_is_a_permutation_that_reads_forwards(table: ExampleTable) -> None:
    ids = np.random.default_rng(1).choice(24, 15, replace=False)
    order = by_caption_length(table, ids, 4)
    assert sorted(order.tolist()) == list(range(15))
    pieces = [ids[order[start : start + 4]] for start in range(0, 15, 4)]
    assert all((np.diff(piece) > 0).all() for piece in pieces)
    classes = [table.caption_classes(piece) for piece in pieces]
    assert all(one.max() <= two.min() for one, two in itertools.pairwise(classes))
    assert by_caption_length(table, np.empty(0, np.int64), 4).tolist() == []


def test_workers_bucket_alike(table: ExampleTable) -> None:
    for one, two in zip(batches(table, bucketed=True), batches(table, bucketed=True, num_workers=2), strict=True):
        assert all(torch.equal(one.inputs[name], two.inputs[name]) for name in one.inputs)


def test_no_gradient_changes(table: ExampleTable) -> None:
    """In float64, clipped sums and the sum of norms: equal up to the order of summation."""
    config = captioner_config(
        "pico", image_size=32, num_tokens=40, vocab_size=MAKE.tokenizer.vocab_size, pad_id=MAKE.tokenizer.pad_id,
        bos_id=MAKE.tokenizer.bos_id, eos_id=MAKE.tokenizer.eos_id,
    )  # fmt: skip
    model = build_captioner(config, generator=torch.Generator().manual_seed(0)).double()
    found = []
    for bucketed in (False, True):
        clipped = ClippedSum(model, 0.1)
        norms = torch.zeros((), dtype=torch.float64)
        for batch in batches(table, bucketed=bucketed):
            inputs = {n: v.double() if v.is_floating_point() else v for n, v in batch.inputs.items()}
            norms += clipped.add_micro_batch(model, inputs, batch.is_padding_B).norm_sum.double()
        found.append(({name: value.double().clone() for name, value in clipped.sums()}, norms))
        clipped.detach()
    (plain, norms), (bucketed_sums, bucketed_norms) = found
    assert float(norms) > 1 and torch.isclose(norms, bucketed_norms, rtol=1e-9)
    for name, value in plain.items():
        assert torch.allclose(value, bucketed_sums[name], rtol=1e-6, atol=1e-9), name


class ImagesOnly:
    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        return self.padding()

    def padding(self) -> dict[str, np.ndarray]:
        return {"images_CHW": np.zeros((3, 8, 8), dtype=np.float32)}


def test_what_has_no_captions_cannot_be_bucketed(table: ExampleTable) -> None:
    with pytest.raises(DataError, match="bucket_captions needs captions"):
        Loader(table, ImagesOnly(), micro_batch_size=4, num_workers=0, bucket_captions=True)


def test_memory_of_prefetched_micro_batches_is_limited(table: ExampleTable) -> None:
    """A micro-batch of 4 is 4 (3 x 512 x 512 x 4 + 40 x 9) bytes: 12 MiB."""
    large = CaptionExample(image_size=512, num_tokens=40, tokenizer_path=EMBEDDED_TOKENIZER)
    factors = {
        limit: Loader(table, large, micro_batch_size=4, num_workers=2, memory_limit_mib=limit).prefetch_factor
        for limit in (4096, 80, 50, 25)
    }
    assert factors == {4096: 4, 80: 3, 50: 2, 25: 1}
    with pytest.raises(DataError, match="memory_limit_mib is 20, but a micro-batch of 4 takes 12 MiB"):
        Loader(table, large, micro_batch_size=4, num_workers=2, memory_limit_mib=20)
