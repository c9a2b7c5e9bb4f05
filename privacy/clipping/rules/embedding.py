"""Embeddings: y_t = E[id_t], so that row id_t receives g_t; no one-hot vector is ever formed."""

from torch import Tensor, nn

from privacy.clipping.contributions import Contribution, Rows
from privacy.clipping.rules.registry import rule, tokens


@rule(nn.Embedding)
def embedding(module: nn.Module, ids: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight (V, p) for ids (B, ...), g (B, ..., p); the row of padding_idx receives nothing."""
    assert isinstance(module, nn.Embedding)
    ids_BT, g_BTp = ids.reshape(len(ids), -1), tokens(g)
    if module.padding_idx is not None:
        g_BTp = g_BTp.masked_fill((ids_BT == module.padding_idx)[:, :, None], 0)
    return {"weight": Rows(ids_BT, g_BTp)}
