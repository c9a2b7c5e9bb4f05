"""The released weights: one line of transformers opens them, they name colours of unseen scenes, and their claim is rechecked."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.small_world import HELD_OUT, normalised
from data.synthetic.scenes import COLOURS, WORDS, Scenes, pools
from models.converters.native import load_model
from models.generation import greedy_captions
from privacy.accounting.rounding import rounded_up

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ROOT / "released/scenes_dpcap"


def test_released_weights_open_in_transformers_and_name_the_colours_of_unseen_scenes() -> None:
    transformers = pytest.importorskip("transformers")
    images, tokens = Scenes().pairs(np.arange(HELD_OUT, HELD_OUT + 100), pools()["new"])
    pixels = normalised(images)
    encoder = transformers.ViTModel.from_pretrained(RELEASED, add_pooling_layer=False)
    captioner = transformers.AutoModel.from_pretrained(
        RELEASED / "captioner", trust_remote_code=True
    )
    native = load_model(RELEASED / "captioner").eval()
    with torch.no_grad():
        assert torch.allclose(encoder(pixels).last_hidden_state, native.encoder(pixels), atol=1e-4)
        said = captioner.generate(pixel_values=pixels, max_new_tokens=8)
    assert (said == greedy_captions(native, pixels, max_tokens=8)[:, : said.shape[1]]).all()
    is_colour = torch.isin(tokens[:, 1:], torch.tensor([WORDS.index(colour) for colour in COLOURS]))
    assert (greedy_captions(native, pixels, max_tokens=8) == tokens[:, 1:])[
        is_colour
    ].float().mean() > 0.8


@pytest.mark.full
def test_the_claim_of_the_released_weights_is_that_of_their_ledger(tmp_path: Path) -> None:
    """As version 0.1 wrote both."""
    run = Path(shutil.copytree(RELEASED / "run", tmp_path / "run"))
    (run / "report").mkdir()
    shutil.copy(RELEASED / "privacy_card.json", run / "report")
    check = [sys.executable, RELEASED / "verify.py", run]
    done = subprocess.run(check, capture_output=True, text=True, cwd=ROOT)
    card = json.loads((RELEASED / "privacy_card.json").read_text())
    assert done.returncode == 0 and card["formal_guarantee"] and 0 < card["epsilon"] <= 8
    assert "fields agree with the ledger" in done.stdout
    assert f"consistent: epsilon {rounded_up(card['epsilon'])} " in done.stdout.splitlines()[-1]
