from math import cos, sin

import pytest
import torch
from torch import Tensor, nn

from models.layers import (
    CrossAttention,
    PositionEmbedding,
    SelfAttention,
    image_sincos_table,
    sincos_positions,
    text_sincos_table,
)


def plain_attention(query_LD: Tensor, key_SD: Tensor, value_SD: Tensor, num_heads: int, *, causal: bool) -> Tensor:
    """Softmax attention of one example, head by head."""
    head = query_LD.shape[1] // num_heads
    outputs = []
    for h in range(num_heads):
        part = slice(h * head, (h + 1) * head)
        scores_LS = query_LD[:, part] @ key_SD[:, part].T / head**0.5
        if causal:
            future = torch.arange(scores_LS.shape[1]) > torch.arange(scores_LS.shape[0])[:, None]
            scores_LS = scores_LS.masked_fill(future, float("-inf"))
        outputs.append(scores_LS.softmax(dim=1) @ value_SD[:, part])
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_plain_softmax(causal: bool) -> None:
    layer = SelfAttention(12, 3, qkv_bias=True, out_bias=True, causal=causal).double()
    x_BLD = torch.randn(2, 5, 12, dtype=torch.float64)
    for x_LD, out_LD in zip(x_BLD, layer(x_BLD), strict=True):
        query, key, value = layer.qkv(x_LD).split(12, dim=1)
        expected = layer.out(plain_attention(query, key, value, 3, causal=causal))
        torch.testing.assert_close(out_LD, expected)


def test_cross_attention_equals_plain_softmax() -> None:
    layer = CrossAttention(12, 3, bias=True).double()
    x_BLD, memory_BSD = (torch.randn(2, n, 12, dtype=torch.float64) for n in (5, 7))
    for x_LD, memory_SD, out_LD in zip(x_BLD, memory_BSD, layer(x_BLD, memory_BSD), strict=True):
        key, value = layer.key_value(memory_SD).split(12, dim=1)
        expected = layer.out(plain_attention(layer.query(x_LD), key, value, 3, causal=False))
        torch.testing.assert_close(out_LD, expected)


def test_sincos_by_hand() -> None:
    table = sincos_positions(torch.tensor([0, 3]), 4)
    expected = [[0, 0, 1, 1], [sin(3), sin(0.03), cos(3), cos(0.03)]]
    torch.testing.assert_close(table, torch.tensor(expected, dtype=torch.float64))


def test_image_table_is_class_token_then_rows() -> None:
    table = image_sincos_table(3, 8)
    assert table.shape == (10, 8) and not table[0].any()
    axis = sincos_positions(torch.arange(3), 4)
    for row in range(3):
        for column in range(3):
            torch.testing.assert_close(table[1 + 3 * row + column], torch.cat([axis[column], axis[row]]))


def test_fixed_positions_are_a_buffer_outside_the_state_dict() -> None:
    position = PositionEmbedding("sincos", 6, 8, lambda: text_sincos_table(6, 8))
    assert not list(position.parameters()) and not position.state_dict()
    x_BTD = torch.randn(2, 4, 8)
    torch.testing.assert_close(position(x_BTD) - x_BTD, text_sincos_table(6, 8)[:4].float().expand(2, -1, -1))


def test_learned_positions_are_a_raw_parameter() -> None:
    position = PositionEmbedding("learned", 6, 8, lambda: text_sincos_table(6, 8))
    nn.init.normal_(position.table)
    x_BTD = torch.randn(2, 4, 8)
    torch.testing.assert_close(position(x_BTD), x_BTD + position.table[:, :4])


def test_too_many_tokens_are_refused() -> None:
    position = PositionEmbedding("learned", 3, 8, lambda: text_sincos_table(3, 8))
    with pytest.raises(ValueError, match="4 tokens, but the model was built for at most 3"):
        position(torch.zeros(1, 4, 8))
