"""The head of a language model that goes straight to the cross-entropy, by chunks of the vocabulary.

Its class is not imported, only known by name, like those of optional libraries: what the rule uses of it is the arithmetic of
`operands` and `logit_gradients` (models/vocabulary_head.py). The output gradients (B, T, V) are computed three times, for the
hidden states (by the module), here for Gram matrix and bias, and for the weighted sum, and never held as a whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from privacy.clipping.chunked import ChunkedOuterProducts
from privacy.clipping.contributions import Contribution, Dense
from privacy.clipping.rules.linear import linear
from privacy.clipping.rules.registry import lazy_rule, wide


def _keep(module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> tuple[Tensor, ...]:
    """(targets, log-sum-exp, weight, bias): copies, because sharded engines take the weights away after the forward."""
    if len(inputs) == 1:
        return ()
    head: Any = module
    _, weight_VD, bias_V = head.operands(inputs[0])
    return inputs[1], output[..., 0].detach(), *(p.detach().clone() for p in (weight_VD, bias_V) if p is not None)


@lazy_rule("models.vocabulary_head", "VocabularyHead", keep=_keep)
def vocabulary_head(module: nn.Module, x: Tensor, g: Tensor, *kept: Tensor) -> dict[str, Contribution]:
    """weight (V, d), bias (V,). Called for scores, it is a Linear; with targets x is (B, T, d) and g is (B, T, 2)."""
    if not kept:
        return linear(module, x, g)
    head: Any = module
    targets_BT, logsumexp_BT, weight_Vd, *biases = kept
    a_BTd = x.to(weight_Vd.dtype)
    bias_V = biases[0] if biases else None
    num_chunks = head.num_chunks(x)

    def gradients() -> Iterator[tuple[slice, Tensor]]:
        chunks: Iterator[tuple[slice, Tensor]] = head.logit_gradients(
            targets_BT, num_chunks, logsumexp_BT, g, a_BTd, weight_Vd, bias_V
        )
        return chunks

    num_rows, tokens = len(weight_Vd), x.shape[1]
    gram_BTT = wide(g).new_zeros(len(x), tokens, tokens)
    bias_BV = gram_BTT.new_empty(len(x), num_rows)
    for rows, g_BTv in gradients():
        g_BTv = wide(g_BTv)
        gram_BTT += torch.bmm(g_BTv, g_BTv.transpose(1, 2))
        bias_BV[:, rows] = g_BTv.sum(1)
    out: dict[str, Contribution] = {"weight": ChunkedOuterProducts(a_BTd, gram_BTT, num_rows, gradients)}
    if bias_V is not None:
        out["bias"] = Dense(bias_BV)
    return out
