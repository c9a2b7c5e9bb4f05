"""Held-out loss and sample captions on an untrained captioner; the picture that shows them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data.examples import CaptionExample
from data.shards import common_root, expand_shards
from data.tar_index import ExampleTable, build_index
from data.tokenizer import EMBEDDED_TOKENIZER
from models.captioner import build_captioner
from models.config import captioner_config
from trainer.config import OptimizerSection
from trainer.ds_config import load_machine_settings
from trainer.engines.local import LocalEngine
from trainer.heldout import Heldout, SampleCaption, contact_sheet

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ExampleTable:
    shards = expand_shards("data/demo/heldout-*.tar", ROOT)
    index = tmp_path_factory.mktemp("heldout") / "index"
    build_index(shards, index)
    return ExampleTable.open(index, common_root(shards))


@pytest.fixture(scope="module")
def make_example() -> CaptionExample:
    return CaptionExample(image_size=16, num_tokens=8, tokenizer_path=EMBEDDED_TOKENIZER, train=False)


@pytest.fixture(scope="module")
def engine(one_rank: torch.device, make_example: CaptionExample) -> LocalEngine:
    tokenizer = make_example.tokenizer
    config = captioner_config(
        "pico", image_size=16, patch_size=8, vocab_size=tokenizer.vocab_size, num_tokens=8, encoder_depth=1,
        decoder_depth=1, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id,
    )  # fmt: skip
    model = build_captioner(config, generator=torch.Generator().manual_seed(0))
    machine = load_machine_settings(ROOT / "ds_configs" / "zero1.json")
    return LocalEngine(model, OptimizerSection(peak_lr=1e-3), machine, torch.device("cpu"))


def heldout(table: ExampleTable, make_example: CaptionExample, num_examples: int | None, size: int) -> Heldout:
    return Heldout(table, make_example, num_examples=num_examples, micro_batch_size=size)


def test_loss(table: ExampleTable, make_example: CaptionExample, engine: LocalEngine) -> None:
    """The mean over captions, whatever the micro-batches; untrained it is about ln V."""
    loss = heldout(table, make_example, 10, 3).loss(engine)
    assert loss == pytest.approx(np.log(make_example.tokenizer.vocab_size), rel=0.1)
    assert heldout(table, make_example, 10, 10).loss(engine) == pytest.approx(loss, rel=1e-5)
    assert heldout(table, make_example, 9, 3).loss(engine) != pytest.approx(loss, rel=1e-7)
    by_hand = [float(engine.module(**batch.inputs)[0]) for batch in _one_by_one(table, make_example, 10)]
    assert loss == pytest.approx(np.mean(by_hand), rel=1e-5)


def _one_by_one(table: ExampleTable, make_example: CaptionExample, count: int):  # type: ignore[no-untyped-def]
    from data.loader import eval_batches

    with torch.no_grad():
        yield from eval_batches(table, make_example, 1, 0, 1, num_examples=count)


def test_the_mode_of_the_model_is_restored(
    table: ExampleTable, make_example: CaptionExample, engine: LocalEngine
) -> None:
    for training in (True, False):
        engine.module.train(training)
        heldout(table, make_example, 2, 2).loss(engine)
        assert engine.module.training is training


@pytest.mark.parametrize("count", [0, 1, 5])
def test_captions(table: ExampleTable, make_example: CaptionExample, engine: LocalEngine, count: int) -> None:
    samples = heldout(table, make_example, None, 2).captions(engine, count)
    assert len(samples) == count
    for sample in samples:
        assert sample.image_HWC.shape == (16, 16, 3) and sample.image_HWC.dtype == np.uint8
        assert sample.image_HWC.std() > 0
        assert sample.reference.strip()
    assert len({sample.reference for sample in samples}) == count


def sample(reference: str, generated: str, shade: int = 128) -> SampleCaption:
    return SampleCaption(np.full((64, 64, 3), shade, np.uint8), reference, generated)


class TestContactSheet:
    def test_size_and_pictures(self) -> None:
        sheet = contact_sheet([sample("a red apple", "an apple", shade) for shade in (10, 200)])
        assert sheet.shape == (2 * 168, 640, 3) and sheet.dtype == np.uint8
        assert (sheet[:160, :160] == 10).all() and (sheet[168:328, :160] == 200).all()

    def test_both_captions_are_there(self) -> None:
        """Ink in the upper half is the model's caption, in the lower half the reference."""
        full = contact_sheet([sample("a red apple", "an apple")])
        other = contact_sheet([sample("a red apple", "a green pear")])
        reference = contact_sheet([sample("a ship", "an apple")])
        assert (full[:80] != other[:80]).any() and (full[80:] == other[80:]).all()
        assert (full[:80] == reference[:80]).all() and (full[80:] != reference[80:]).any()

    def test_long_captions_stay_inside_of_their_half(self) -> None:
        long = " ".join(["wide"] * 80)
        sheet, short = contact_sheet([sample("a", long)]), contact_sheet([sample("a", "a")])
        assert (sheet[88:] == short[88:]).all(), "the reference is not written over"
        assert (sheet[:, -4:] == 255).all(), "nothing is cut off at the right"

    @pytest.mark.parametrize("text", ["", " ", "\u732b \U0001f408 \u00e4\u00df\u0142", "a\nb\x00c\t", "x" * 500])
    def test_any_text(self, text: str) -> None:
        """A model says anything."""
        sheet = contact_sheet([sample(text, text)])
        assert sheet.shape == (168, 640, 3) and (sheet[:80, 160:] < 128).any()
