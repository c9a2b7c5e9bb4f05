"""Greedy captions by a script; kept keys and values change nothing: trees of tokens and beam search against whole forwards."""

import itertools

import pytest
import torch
from torch import Tensor

from models.captioner import Captioner
from models.generation import IncrementalDecoder, beam_captions, greedy_captions
from tests.models.tiny import VOCAB, tiny_captioner

VARIANTS = [
    {},
    {
        "decoder_norm_position": "pre",
        "decoder_bias": True,
        "decoder_position": "learned",
        "decoder_activation": "relu",
    },
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
            whole = model(images_BCHW, tokens_N[paths[number]].expand(2, -1), output="logits")[
                :, -1
            ]
            torch.testing.assert_close(logits_BnV[:, place], whole, atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="room for 9"):
        decoder.step(tokens_N[:1].expand(2, -1), torch.zeros(2, 1, 2, dtype=torch.int64))


@pytest.mark.parametrize("overrides", VARIANTS)
def test_one_beam_is_greedy(overrides: dict[str, object]) -> None:
    """A token a call, whatever ends when: ranks that gather weights in each call make equally many."""
    model, images_BCHW, calls = peaked(**overrides), images(40), list[int]()
    model.register_forward_hook(lambda _model, arguments, _out: calls.append(arguments[1].shape[1]))
    expected_BL = greedy_captions(model, images_BCHW, max_tokens=8)
    assert calls == list(range(1, 9))
    found = beam_captions(model, images_BCHW, max_tokens=8)
    torch.testing.assert_close(found.tokens_BL, expected_BL)
    assert (expected_BL == model.config.pad_id).any(), (
        "no caption ended: the test shows less than it should"
    )
    with torch.no_grad():
        model.decoder.head.bias[model.config.eos_id] += 1e4
    only_ends_BL = greedy_captions(model, images_BCHW, max_tokens=8)
    assert (
        len(calls) == 16
        and (only_ends_BL[:, 0] == model.config.eos_id).all()
        and not only_ends_BL[:, 1:].any()
    )


@pytest.mark.parametrize(
    ("rows", "length_penalty"), [(1, 0.0), pytest.param(3, 1.0, marks=pytest.mark.full)]
)
@torch.no_grad()
def test_beams_as_wide_as_the_tree_find_the_best_caption(rows: int, length_penalty: float) -> None:
    """Against all 1 + 4 + 16 + ... captions of up to four tokens of a five-word language, each by a whole forward."""
    model = peaked(vocab_size=5, bos_id=1, eos_id=2, num_tokens=6)
    images_BCHW = images(rows)
    found = beam_captions(
        model, images_BCHW, max_tokens=4, num_beams=150, length_penalty=length_penalty
    )
    for row in range(rows):
        scores: dict[tuple[int, ...], tuple[float, float]] = {}
        for tokens in itertools.product(range(5), repeat=4):
            end = tokens.index(2) + 1 if 2 in tokens else 4
            caption = tokens[:end]
            if caption not in scores:
                ids = torch.tensor([[1, *caption]])
                logits = model(
                    images_BCHW[row : row + 1], ids[:, :-1], output="logits"
                ).log_softmax(-1)
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
