from math import cos, sin

import torch
from torch import Tensor

from models.layers import image_sincos_table, sincos_positions


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
