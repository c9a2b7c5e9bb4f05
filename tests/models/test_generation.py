import pytest
import torch
from torch import nn

from models.generation import greedy_captions
from tests.models.tiny import VOCAB, tiny_batch, tiny_captioner


class Scripted(nn.Module):
    """Says `script[i]` to image i, one token per call, and counts its calls."""

    def __init__(self, script: list[list[int]]) -> None:
        super().__init__()
        self.script_BL = torch.tensor(script)
        self.num_calls = 0

    def forward(self, images_BCHW: torch.Tensor, tokens_BL: torch.Tensor, output: str) -> torch.Tensor:
        self.num_calls += 1
        assert output == "logits" and tokens_BL.shape[1] == self.num_calls
        return nn.functional.one_hot(self.script_BL[:, : self.num_calls], VOCAB).float()


def test_padding_follows_the_end_and_calls_do_not_depend_on_it() -> None:
    config = tiny_captioner().config
    for script in ([[4, 5, 2, 9, 9], [2, 9, 9, 9, 9]], [[4, 4, 4, 4, 4], [5, 5, 5, 5, 2]], [[2] * 5, [2] * 5]):
        model = Scripted(script)
        tokens_BL = greedy_captions(model, torch.zeros(2, 3, 16, 16), max_tokens=5, config=config)
        expected = [row[: row.index(2) + 1] if 2 in row else row for row in script]
        assert tokens_BL.tolist() == [row + [0] * (5 - len(row)) for row in expected]
        assert model.num_calls == 5


def test_each_token_is_the_most_likely_one() -> None:
    model = tiny_captioner()
    images_BCHW = tiny_batch()[0]
    tokens_BL = greedy_captions(model, images_BCHW, max_tokens=8)
    assert tokens_BL.shape == (4, 8) and tokens_BL.dtype == torch.int64
    assert torch.equal(tokens_BL, greedy_captions(model, images_BCHW, max_tokens=8))
    whole_BL = torch.cat([torch.full((4, 1), model.config.bos_id), tokens_BL], dim=1)
    best_BL = model.logits(images_BCHW, whole_BL[:, :-1]).argmax(-1)
    for row, best in zip(tokens_BL.tolist(), best_BL.tolist(), strict=True):
        length = row.index(2) + 1 if 2 in row else len(row)
        assert row[:length] == best[:length]


def test_captions_are_made_one_by_one_or_together() -> None:
    model = tiny_captioner()
    images_BCHW = tiny_batch()[0]
    together = greedy_captions(model, images_BCHW, max_tokens=4)
    alone = torch.cat([greedy_captions(model, image[None], max_tokens=4) for image in images_BCHW])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("max_tokens", [0, 9])
def test_length_beyond_the_model_is_refused(max_tokens: int) -> None:
    model = tiny_captioner()
    with pytest.raises(ValueError, match="max_tokens must be between 1 and 8"):
        greedy_captions(model, tiny_batch()[0], max_tokens=max_tokens)
