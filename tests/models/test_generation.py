"""Greedy captions by a script; kept keys and values change nothing: trees of tokens and beam search against whole forwards."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from models.captioner import Captioner
from models.generation import IncrementalDecoder, beam_captions, greedy_captions
from tests.models.tiny import VOCAB, tiny_captioner, tiny_config

VARIANTS = [
    {},
    {"decoder_norm_position": "pre", "decoder_bias": True, "decoder_position": "learned", "decoder_activation": "relu"},
    {"tied_head": True, "parallel_share": 0.5},
]
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 6)
"""A tree of nine tokens by the number of each one's parent."""


def peaked(**overrides: object) -> Captioner:
    """With scores far from uniform, as after training."""
    model = tiny_captioner(**overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.decoder.head.bias[model.config.eos_id] += 4.0
    return model.eval()


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 16, 16)


@pytest.mark.parametrize("overrides", VARIANTS)
@torch.no_grad()
def test_every_token_of_a_tree_is_what_its_path_alone_gives(overrides: dict[str, object]) -> None:
    model = peaked(**overrides)
    images_BCHW, tokens_N = images(2), torch.randint(VOCAB, (len(PARENTS),))
    paths: list[list[int]] = []
    for number, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else []), number])
    decoder = IncrementalDecoder(model.decoder, model.encode(images_BCHW), len(PARENTS))
    levels = [(0,), (1, 2), (3,), (4, 5), (6, 7), (8,)]  # one level in two parts
    for numbers in levels:
        before = torch.tensor([paths[n][:-1] for n in numbers], dtype=torch.int64).expand(2, -1, -1)
        hidden_BnD = decoder.step(tokens_N[list(numbers)].expand(2, -1), before)
        logits_BnV = model.decoder.head(hidden_BnD)
        for place, number in enumerate(numbers):
            whole = model(images_BCHW, tokens_N[paths[number]].expand(2, -1), output="logits")[:, -1]
            torch.testing.assert_close(logits_BnV[:, place], whole, atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="room for 9"):
        decoder.step(tokens_N[:1].expand(2, -1), torch.zeros(2, 1, 2, dtype=torch.int64))


@pytest.mark.parametrize("overrides", VARIANTS)
def test_one_beam_is_greedy(overrides: dict[str, object]) -> None:
    model, images_BCHW = peaked(**overrides), images(40)
    expected_BL = greedy_captions(model, images_BCHW, max_tokens=8)
    found = beam_captions(model, images_BCHW, max_tokens=8)
    torch.testing.assert_close(found.tokens_BL, expected_BL)
    assert (expected_BL == model.config.pad_id).any(), "no caption ended: the test shows less than it should"


@pytest.mark.parametrize("length_penalty", [0.0, pytest.param(1.0, marks=pytest.mark.full)])
@torch.no_grad()
def test_beams_as_wide_as_the_tree_find_the_best_caption(length_penalty: float) -> None:
    """Against all 1 + 4 + 16 + ... captions of up to four tokens of a five-word language, each by a whole forward."""
    model = peaked(vocab_size=5, bos_id=1, eos_id=2, num_tokens=6)
    images_BCHW = images(3)
    found = beam_captions(model, images_BCHW, max_tokens=4, num_beams=150, length_penalty=length_penalty)
    for row in range(3):
        scores: dict[tuple[int, ...], tuple[float, float]] = {}
        for tokens in itertools.product(range(5), repeat=4):
            end = tokens.index(2) + 1 if 2 in tokens else 4
            caption = tokens[:end]
            if caption not in scores:
                ids = torch.tensor([[1, *caption]])
                logits = model(images_BCHW[row : row + 1], ids[:, :-1], output="logits").log_softmax(-1)
                log_prob = logits[0].gather(1, ids[0, 1:, None]).sum().item()
                scores[caption] = (log_prob / end**length_penalty, log_prob)
        best = max(scores, key=lambda caption: scores[caption][0])
        assert tuple(found.tokens_BL[row, : len(best)].tolist()) == best
        assert not found.tokens_BL[row, len(best) :].any()
        assert found.log_probs_B[row].item() == pytest.approx(scores[best][1], abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 9])
def test_numbers_out_of_range_are_refused(max_tokens: int) -> None:
    model, images_BCHW = peaked(), images(1)
    with pytest.raises(ValueError, match="max_tokens must be between 1 and 8"):
        greedy_captions(model, images_BCHW, max_tokens=max_tokens)
    with pytest.raises(ValueError, match="max_tokens"):
        beam_captions(model, images_BCHW, max_tokens=9)
    with pytest.raises(ValueError, match="num_beams"):
        beam_captions(model, images_BCHW, max_tokens=3, num_beams=0)


class Scripted(nn.Module):
    """Says `script[i]` to image i, one token per call, and counts its calls."""

    def __init__(self, script: list[list[int]]) -> None:
        super().__init__()
        self.script_BL = torch.tensor(script)
        self.num_calls = 0
        self.config = tiny_config()

    def forward(self, images_BCHW: torch.Tensor, tokens_BL: torch.Tensor, output: str) -> torch.Tensor:
        self.num_calls += 1
        assert output == "logits" and tokens_BL.shape[1] == self.num_calls
        return nn.functional.one_hot(self.script_BL[:, : self.num_calls], VOCAB).float()


def test_padding_follows_the_end_and_calls_do_not_depend_on_it() -> None:
    for script in ([[4, 5, 2, 9, 9], [2, 9, 9, 9, 9]], [[4, 4, 4, 4, 4], [5, 5, 5, 5, 2]], [[2] * 5, [2] * 5]):
        model = Scripted(script)
        tokens_BL = greedy_captions(model, torch.zeros(2, 3, 16, 16), max_tokens=5)
        expected = [row[: row.index(2) + 1] if 2 in row else row for row in script]
        assert tokens_BL.tolist() == [row + [0] * (5 - len(row)) for row in expected]
        assert model.num_calls == 5
