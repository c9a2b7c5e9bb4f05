import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.layers import image_sincos_table, text_sincos_table
from tests.models.released import attention
from tests.models.tiny import VOCAB, tiny_captioner

CASES = [
    {"decoder_norm_position": norm, "decoder_bias": bias, "decoder_position": position}
    for norm, bias, position in [
        ("post", False, "sincos"),
        ("pre", True, "sincos"),
        ("post", True, "learned"),
    ]
]


def plain_decoder(
    p: dict[str, Tensor], tokens_L: Tensor, image_TE: Tensor, config, *, parallel: bool = False
) -> Tensor:
    """Logits (L, V) of one example from the parameters by name, written down step by step."""
    decoder, heads = config.decoder, config.decoder.num_heads
    length, width = len(tokens_L), decoder.width

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), p[f"{name}.weight"], p[f"{name}.bias"], decoder.norm_eps)

    def branch(index: int, kind: int, x: Tensor) -> Tensor:
        block = f"decoder.blocks.{index}"
        if kind == 1:
            query, key, value = linear(f"{block}.self_attention.qkv", x).split(width, dim=1)
            seen = attention(query[None], key[None], value[None], heads, causal=not parallel)[0]
            return linear(f"{block}.self_attention.out", seen)
        if kind == 2:
            key, value = linear(f"{block}.cross_attention.key_value", memory_TD).split(width, dim=1)
            query = linear(f"{block}.cross_attention.query", x)
            return linear(
                f"{block}.cross_attention.out",
                attention(query[None], key[None], value[None], heads)[0],
            )
        return linear(f"{block}.mlp.down", F.gelu(linear(f"{block}.mlp.up", x)))

    learned = decoder.position == "learned"
    image_table = image_sincos_table(config.encoder.grid_size, width)
    text_table = text_sincos_table(config.num_tokens, width)
    image_positions = p["memory.position.table"][0] if learned else image_table.float().double()
    text_positions = p["decoder.position.table"][0] if learned else text_table.float().double()
    memory_TD = (
        linear("memory.projection", image_TE) + image_positions + p["memory.type_embedding"][0]
    )
    x = p["decoder.token_embedding.weight"][tokens_L]
    if parallel:
        x = p["decoder.mask_embedding.weight"].repeat(length, 1)
    x = x + text_positions[:length] + p["decoder.type_embedding"][0]
    for i in range(decoder.depth):
        for kind in (1, 2, 3):
            name = f"decoder.blocks.{i}.norm{kind}"
            if decoder.norm_position == "post":
                x = norm(name, x + branch(i, kind, x))
            else:
                x = x + branch(i, kind, norm(name, x))
    return linear("decoder.head", norm("decoder.head_norm", x))


@pytest.mark.parametrize("overrides", CASES)
@torch.no_grad()
def test_parallel_prediction_beside_causal_equals_plain_computation(
    overrides: dict[str, object],
) -> None:
    """Both kinds in one forward, with a tied head."""
    model = tiny_captioner(**overrides, parallel_share=0.5, tied_head=True).double()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for parameter in parameters.values():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    assert parameters["decoder.head.weight"] is parameters["decoder.token_embedding.weight"]
    tokens_BL = torch.randint(VOCAB, (4, 8))
    image_BTE = torch.randn(4, 5, 16, dtype=torch.float64)
    is_parallel_B = torch.tensor([True, False, False, True])
    logits_BLV = model.decoder(tokens_BL, model.memory(image_BTE), is_parallel_B=is_parallel_B)
    for i, parallel in enumerate(is_parallel_B.tolist()):
        expected = plain_decoder(
            parameters, tokens_BL[i], image_BTE[i], model.config, parallel=parallel
        )
        torch.testing.assert_close(logits_BLV[i], expected, atol=1e-9, rtol=1e-9)
