"""What held-out pictures show, and where."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batch import Batch
from trainer.config.recipe import load_config
from trainer.tasks import make_task
from trainer.tasks.base import pixels
from trainer.tasks.masked_autoencoding import MaskedAutoencodingTask
from trainer.tasks.pictures import GAP, SIDE, picture_grid

ROOT = Path(__file__).resolve().parents[2]
TOP = 28
SMALL = ["data.image_size=32", "model.size=pico", "model.overrides={encoder_depth = 1, decoder_depth = 1}"]


def cell(picture_HWC: np.ndarray, row: int, column: int) -> np.ndarray:
    top, left = TOP + row * (SIDE + GAP), GAP + column * (SIDE + GAP)
    return picture_HWC[top : top + SIDE, left : left + SIDE]


def test_rows_columns_titles_and_borders() -> None:
    shades = np.arange(6).reshape(2, 3) * 40
    rows = [[np.full((40, 40, 3), shade, np.uint8) for shade in row] for row in shades]
    picture = picture_grid(("masked", "predicted", "original"), rows)
    assert picture.dtype == np.uint8 and picture.shape == (TOP + 2 * (SIDE + GAP), GAP + 3 * (SIDE + GAP), 3)
    for row in range(2):
        for column in range(3):
            assert (cell(picture, row, column) == shades[row, column]).all()
    assert (picture[:, :GAP] == 255).all() and (picture[TOP + SIDE : TOP + SIDE + GAP] == 255).all()
    titles = [picture[:TOP, GAP + c * (SIDE + GAP) :][:, :SIDE] for c in range(3)]
    assert all((title < 128).any() for title in titles) and (titles[0] != titles[2]).any()
    assert picture_grid(("a",), []).shape == (0, 0, 3)
    small = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    assert (cell(picture_grid(("a",), [[small]]), 0, 0) == small.repeat(5, 0).repeat(5, 1)).all(), (
        "small ones keep pixels"
    )


@pytest.mark.parametrize("normalise", [False, True])
def test_a_perfect_prediction_looks_like_the_original(normalise: bool) -> None:
    """In pixels, also where the model predicts normalised ones; masked patches are gray, visible ones the original's."""
    overrides = [*SMALL, f"model.overrides.normalise_pixels={str(normalise).lower()}"]
    task = make_task(load_config(ROOT / "recipes/synthetic_vip_base.toml", overrides), ROOT)
    assert isinstance(task, MaskedAutoencodingTask)
    model = task.build(torch.Generator().manual_seed(0))
    assert model.config.normalise_pixels is normalise
    inputs = task.synthetic_inputs(3)
    inputs["images_BCHW"] = inputs["images_BCHW"].clamp(-1.5, 1.5)

    def perfect(images_BCHW: Tensor, mask_BP: Tensor, output: str) -> Tensor:
        assert output == "patches"
        return torch.where(mask_BP[:, :, None], model.targets(images_BCHW), torch.tensor(99.0))

    engine: Any = SimpleNamespace(module=perfect, device=torch.device("cpu"), compute_dtype=torch.float32)
    batch = Batch(inputs, torch.tensor([False, True, False]))
    shown = task.samples(engine, [batch])
    assert shown.lines == [] and shown.picture_HWC.shape[0] == TOP + 2 * (SIDE + GAP), "padding is not shown"
    for row, index in enumerate((0, 2)):
        original = pixels(inputs["images_BCHW"][index]).repeat(5, 0).repeat(5, 1).astype(int)
        masked, predicted, last = (cell(shown.picture_HWC, row, column).astype(int) for column in range(3))
        assert (last == original).all() and abs(predicted - original).max() <= 1
        is_masked = inputs["mask_BP"][index].view(4, 4).numpy().repeat(40, 0).repeat(40, 1)
        assert (masked[~is_masked] == original[~is_masked]).all()
        assert (masked[is_masked] == pixels(torch.zeros(3, 1, 1))[0, 0]).all()
