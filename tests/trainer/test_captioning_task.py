"""What the captioning task makes of a recipe's options."""

from pathlib import Path
from typing import Any

import torch

from models.captioner import Captioner
from privacy.clipping.selfcheck import check_against_autograd
from trainer.config.recipe import load_config
from trainer.tasks import make_task

ROOT = Path(__file__).resolve().parents[2]
SMALL = "model.overrides={patch_size = 8, encoder_depth = 1, decoder_depth = 1}"


def task(*overrides: str) -> Any:
    small = ["data.image_size=16", "data.num_tokens=8", SMALL]
    return make_task(load_config(ROOT / "tests/trainer/clip_art.toml", [*small, *overrides]), ROOT)


def test_a_recipe_override_makes_cappa() -> None:
    """From one key on the command line to coins in the training examples, and none in evaluation."""
    cappa = task("model.overrides.parallel_share=0.75", "model.overrides.tied_head=true")
    make = cappa.make_example(train=True)
    assert make.padding()["is_parallel"].dtype == bool and make.parallel_share == 0.75
    assert "is_parallel" not in cappa.make_example(train=False).padding()
    inputs = cappa.synthetic_inputs(2)
    assert inputs["is_parallel_B"].tolist() == [False, True]
    model = cappa.build(torch.Generator().manual_seed(0))
    assert isinstance(model, Captioner) and model.decoder.head.weight is model.decoder.token_embedding.weight
    check_against_autograd(model, inputs)
    stated = cappa.facts()["model"]
    assert (stated["parallel_share"], stated["tied_head"]) == (0.75, True)


def test_without_it_nothing_changes() -> None:
    plain = task()
    assert "is_parallel" not in plain.make_example(train=True).padding()
    assert "is_parallel_B" not in plain.synthetic_inputs(2)
    names = dict(plain.build(torch.Generator().manual_seed(0)).named_parameters())
    assert "decoder.mask_embedding.weight" not in names and "decoder.head.weight" in names
