"""Prefix-tree scores against one whole forward per caption, in float64 and float32."""

import pytest
import torch
from torch import Tensor

from data.errors import DataError
from evaluation.scoring import log_probs_per_image, tree_log_probs
from models.captioner import Captioner
from tests.models.tiny import tiny_captioner

CAPTIONS = [
    *[
        (1, 5, 6, 2),
        (1, 5, 6, 7, 2),
        (1, 5, 2),
        (1, 2),
        (1, 8, 6, 7, 2),
        (1, 5, 6, 7, 9, 4, 2),
        (1, 16, 2),
    ],
    *[(1, 5, 6, 2), (1, 8, 8, 8, 8, 8, 8, 8, 2), (1, 5, 6), (1, 5)],  # some begin others
]


def peaked(**overrides: object) -> Captioner:
    """With scores far from uniform, as after training."""
    torch.manual_seed(0)
    model = tiny_captioner(**overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def plain(model: Captioner, images_BCHW: Tensor, captions: list[tuple[int, ...]]) -> Tensor:
    """One forward of the whole model per caption, in float64."""
    model = model.double()
    rows = []
    for caption in captions:
        tokens_BL = torch.tensor(caption).expand(len(images_BCHW), -1)
        log_probs = model(images_BCHW.double(), tokens_BL[:, :-1], output="logits").log_softmax(-1)
        rows.append(log_probs.gather(2, tokens_BL[:, 1:, None])[:, :, 0].sum(1))
    model.float()
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("overrides", [{}, {"decoder_norm_position": "pre", "tied_head": True}])
@pytest.mark.parametrize("max_numbers", [2**26, 2000, 1])
def test_the_tree_scores_as_one_forward_per_caption(
    overrides: dict[str, object], max_numbers: int
) -> None:
    """Also in parts: of images and of nodes, down to one of each."""
    model, images = peaked(**overrides), torch.randn(5, 3, 16, 16)
    expected = plain(model, images, CAPTIONS)
    found = tree_log_probs(model, images, CAPTIONS, max_numbers=max_numbers)
    lengths = torch.tensor([len(caption) - 1 for caption in CAPTIONS])
    assert found.shape == (5, len(CAPTIONS)) and expected.std() > 1
    assert ((found - expected) / lengths).abs().max() < 1e-5
    exact = tree_log_probs(model.double(), images.double(), CAPTIONS, max_numbers=max_numbers)
    model.float()
    torch.testing.assert_close(exact, expected, atol=1e-10, rtol=0)


def test_own_captions_score_as_one_forward_per_caption() -> None:
    model, images = peaked(), torch.randn(3, 3, 16, 16)
    own = [CAPTIONS[:4], CAPTIONS[4:5], CAPTIONS[5:]]
    for max_numbers in (2**26, 1):
        found = log_probs_per_image(model, images, own, max_numbers=max_numbers)
        for row, captions in enumerate(own):
            expected = plain(model, images[row : row + 1], captions)[0]
            torch.testing.assert_close(found[row], expected, atol=5e-5, rtol=0)


def test_scores_that_are_no_numbers_are_refused() -> None:
    """NaN loses no comparison: such a model would retrieve everything at rank one."""
    model = peaked()
    with torch.no_grad():
        model.decoder.token_embedding.weight.fill_(torch.nan)
    images_BCHW = torch.zeros(
        1, 3, model.config.encoder.image_size, model.config.encoder.image_size
    )
    caption = (model.config.bos_id, 5, model.config.eos_id)
    with pytest.raises(DataError, match="non-finite"):
        tree_log_probs(model, images_BCHW, [caption])
    with pytest.raises(DataError, match="non-finite"):
        log_probs_per_image(model, images_BCHW, [[caption]])
