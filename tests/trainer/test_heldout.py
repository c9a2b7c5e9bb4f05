"""Held-out loss and sample captions on an untrained captioner; the picture that shows them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data.examples.examples import CaptionExample
from data.index.build import build_index
from data.index.shards import find_shards
from data.index.tar_index import ExampleTable
from data.reading.loader import eval_batches
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import OptimizerSection, load_config
from trainer.engines.local import LocalEngine
from trainer.loop.heldout import Heldout
from trainer.tasks import CaptioningTask, make_task
from trainer.tasks.base import contact_sheet
from trainer.tasks.baselines import caption_losses

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ExampleTable:
    return build_index(
        find_shards("data/demo/heldout-*.tar", ROOT), tmp_path_factory.mktemp("heldout") / "index"
    )


@pytest.fixture(scope="module")
def task() -> CaptioningTask:
    overrides = ["data.image_size=16", "data.num_tokens=8", "model.size=pico"]
    shape = "{patch_size = 8, encoder_depth = 1, decoder_depth = 1}"
    config = load_config(
        ROOT / "tests/trainer/clip_art.toml", [*overrides, f"model.overrides={shape}"]
    )
    made = make_task(config, ROOT)
    assert isinstance(made, CaptioningTask)
    return made


@pytest.fixture(scope="module")
def make_example(task: CaptioningTask) -> CaptionExample:
    return task.make_example(train=False)


@pytest.fixture(scope="module")
def engine(one_rank: torch.device, task: CaptioningTask) -> LocalEngine:
    machine = load_machine_settings(ROOT / "ds_configs" / "zero1.json")
    model = task.build(torch.Generator().manual_seed(0))
    return LocalEngine(model, OptimizerSection(peak_lr=1e-3), machine, one_rank)


def heldout(
    table: ExampleTable, task: CaptioningTask, num_examples: int | None, size: int
) -> Heldout:
    return Heldout(table, task, num_examples=num_examples, micro_batch_size=size)


def test_loss(
    table: ExampleTable, task: CaptioningTask, make_example: CaptionExample, engine: LocalEngine
) -> None:
    """The mean over captions, whatever the micro-batches; untrained it is about ln V."""
    loss = heldout(table, task, 10, 3).loss(engine)
    assert loss == pytest.approx(np.log(make_example.tokenizer.vocab_size), rel=0.1)
    assert heldout(table, task, 10, 10).loss(engine) == pytest.approx(loss, rel=1e-5)
    assert heldout(table, task, 9, 3).loss(engine) != pytest.approx(loss, rel=1e-7)
    by_hand = [
        float(engine.module(**batch.inputs)[0]) for batch in _one_by_one(table, make_example, 10)
    ]
    assert loss == pytest.approx(np.mean(by_hand), rel=1e-5)


def _one_by_one(table: ExampleTable, make_example: CaptionExample, count: int):  # type: ignore[no-untyped-def]
    with torch.no_grad():
        yield from eval_batches(table, make_example, 1, 0, 1, num_examples=count)


@pytest.mark.parametrize("count", [8, 9])
def test_baselines(
    table: ExampleTable,
    task: CaptioningTask,
    make_example: CaptionExample,
    engine: LocalEngine,
    count: int,
) -> None:
    """Examples that lie half of the data set apart exchange pictures, whatever the micro-batches; an odd one has no other."""
    examples = [batch.inputs for batch in _one_by_one(table, make_example, count)]
    captions = Counter(
        tuple(one["tokens_BL"][0][one["token_mask_BL"][0]][1:].tolist()) for one in examples
    )
    half = (count + 1) // 2
    others = {place: place + half if place < half else place - half for place in range(count)}
    with torch.no_grad():
        losses = [
            float(
                engine.module(**{**examples[place], "images_BCHW": examples[other]["images_BCHW"]})[
                    0
                ]
            )
            for place, other in others.items()
            if other < count
        ]
    assert len(losses) == 8
    for size in (1, 2, 5, 9, 16):
        means, found = heldout(table, task, count, size).means_and_baselines(engine)
        assert found["shuffled_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert found["blind_loss"] == min(
            caption_losses(captions, make_example.tokenizer.vocab_size).values()
        )
        assert means == {
            "loss": pytest.approx(heldout(table, task, count, 3).loss(engine), rel=1e-5)
        }


@pytest.mark.parametrize("count", [1, 5])
def test_captions(
    table: ExampleTable, task: CaptioningTask, engine: LocalEngine, count: int
) -> None:
    samples = heldout(table, task, None, 2).samples(engine, count)
    assert samples is not None and len(samples.lines) == count
    assert samples.picture_HWC.shape[0] == 168 * count and samples.picture_HWC.std() > 0
    references = {reference for _, reference in samples.lines}
    assert len(references) == count and all(r.strip() for r in references)


@pytest.mark.parametrize(
    "text", ["", " ", "\u732b \U0001f408 \u00e4\u00df\u0142", "a\nb\x00c\t", "x" * 500]
)
def test_a_contact_sheet_shows_whatever_a_model_says(text: str) -> None:
    sheet = contact_sheet([np.full((64, 64, 3), 128, np.uint8)], [(text, text)])
    assert sheet.shape == (168, 640, 3) and (sheet[:80, 160:] < 128).any()
