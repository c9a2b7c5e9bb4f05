"""The layer from hidden states to the scores of all words, and its cross-entropy by chunks.

Shapes: B batch, L text tokens, D width, V vocabulary, v words of one chunk.

The scores of a large micro-batch are its largest tensor by far: 64 captions of 39 tokens and 30,522
words take 305 MB in fp32, and cross-entropy keeps several tensors of that size. Above `max_logits`
scores the forward pass keeps two numbers per token, log-sum-exp and the target's score; every later
use computes the scores of a chunk again, as in cut cross-entropy (Wijmans et al. 2024,
https://arxiv.org/abs/2411.09009).

In units of one matrix product with the weights (2 B L D V FLOPs) a step then costs 5 instead of 3
(scores, hidden gradient, weight gradient), with clipping 6 instead of 3 (scores again for hidden
gradient, norm and weighted sum), in two passes 9 instead of 4, each plus its Gram matrices. So the
head works in one piece where it can: `VocabularyHead.num_chunks`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class VocabularyHead(nn.Linear):
    """A linear layer to the scores of all words: weight (V, D), bias (V,).

    `head(hidden_BLD)` gives the scores (B, L, V). `head(hidden_BLD, targets_BL)` gives (B, L, 2) in
    float32 (or float64): log-sum-exp over the vocabulary and the target's score, whose difference
    is the cross-entropy. It holds about `max_logits` scores at a time.

    The rule of clipping for this layer calls `operands` and `logit_gradients`
    (privacy/gradients/rules.py).
    """

    def __init__(self, width: int, vocab_size: int, *, max_logits: int, bias: bool = True) -> None:
        super().__init__(width, vocab_size, bias=bias)
        self.max_logits = max_logits

    def forward(self, hidden_BLD: Tensor, targets_BL: Tensor | None = None) -> Tensor:
        """Returns the scores (B, L, V), or (B, L, 2) with targets (see the class)."""
        if targets_BL is None:
            return super().forward(hidden_BLD)
        hidden_BLD, *weights = self.operands(hidden_BLD)
        num_chunks = self.num_chunks(hidden_BLD)
        scores_BL2: Tensor = _Scores.apply(targets_BL, num_chunks, hidden_BLD, *weights)
        return scores_BL2 + _WeightGradient.apply(
            targets_BL, num_chunks, scores_BL2.detach(), hidden_BLD.detach(), *weights
        )

    def token_losses(self, hidden_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        """Returns the cross-entropy (B, L) of the targets in float32 (or float64).

        The scores are held in one piece if they are at most `max_logits`.
        """
        if self.num_chunks(hidden_BLD) == 1:
            return token_losses(self(hidden_BLD), targets_BL)
        logsumexp_BL, target_BL = self(hidden_BLD, targets_BL).unbind(-1)
        return logsumexp_BL - target_BL

    def num_chunks(self, hidden_BLD: Tensor) -> int:
        """Returns the number of parts into which the vocabulary is cut.

        It is a function of shapes alone, so that time and memory stay public.
        """
        num_logits = hidden_BLD.shape[:-1].numel() * self.out_features
        return min(self.out_features, max(1, -(-num_logits // self.max_logits)))

    def operands(self, hidden_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns hidden states, weight and bias in the dtype of the matrix product.

        Autocast may have changed that dtype.
        """
        device = _autocast_device(hidden_BLD)
        is_autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else hidden_BLD.dtype
        bias_V = None if self.bias is None else self.bias.to(dtype)
        return hidden_BLD.to(dtype), self.weight.to(dtype), bias_V

    @staticmethod
    def logit_gradients(
        targets_BL: Tensor,
        num_chunks: int,
        logsumexp_BL: Tensor,
        gradient_BL2: Tensor,
        hidden_BLD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields (words, gradient of the loss by their scores (B, L, v)), chunk by chunk.

        Gradients are in the dtype of the hidden states, and have the same bits in every call with
        the same tensors.

        Args:
            logsumexp_BL: first half of the forward's output.
            gradient_BL2: gradient of the loss by the forward's output.
        """
        for words, logits_BLv in _chunks(num_chunks, hidden_BLD, weight_VD, bias_V):
            gradient_BLv = (logits_BLv - logsumexp_BL[..., None]).exp_().mul_(gradient_BL2[..., :1])
            local_BL, is_here_BL = _local(targets_BL, words)
            at_target_BL = gradient_BL2[..., 1].masked_fill(~is_here_BL, 0)
            gradient_BLv.scatter_add_(-1, local_BL[..., None], at_target_BL[..., None])
            yield words, gradient_BLv.to(hidden_BLD.dtype)


def token_losses(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Returns the cross-entropy (B, L) of the targets, in float32 (or float64)."""
    logits_NV = _wide(logits_BLV).flatten(0, 1)
    loss_N = F.cross_entropy(logits_NV, targets_BL.flatten(), reduction="none")
    return loss_N.view(targets_BL.shape)


class _Scores(torch.autograd.Function):
    """Computes log-sum-exp and target score (B, L, 2), with gradients to hidden states alone."""

    @staticmethod
    def forward(ctx: Any, targets_BL: Tensor, num_chunks: int, *operands: Any) -> Tensor:
        hidden_BLD, weight_VD, bias_V = operands
        logsumexp_BL = None
        target_BL = torch.zeros((), device=hidden_BLD.device)
        for words, logits_BLv in _chunks(num_chunks, hidden_BLD, weight_VD, bias_V):
            chunk_BL = logits_BLv.logsumexp(-1)
            if logsumexp_BL is None:
                logsumexp_BL = chunk_BL
            else:
                logsumexp_BL = torch.logaddexp(logsumexp_BL, chunk_BL)
            local_BL, is_here_BL = _local(targets_BL, words)
            score_BL = logits_BLv.gather(-1, local_BL[..., None]).squeeze(-1)
            target_BL = torch.where(is_here_BL, score_BL, target_BL)
        assert logsumexp_BL is not None
        ctx.save_for_backward(targets_BL, logsumexp_BL, *operands)
        ctx.num_chunks = num_chunks
        return torch.stack([logsumexp_BL, target_BL], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        targets_BL, logsumexp_BL, hidden_BLD, weight_VD, bias_V = ctx.saved_tensors
        total_BLD = torch.zeros_like(_wide(hidden_BLD))
        for words, gradient_BLv in VocabularyHead.logit_gradients(
            targets_BL, ctx.num_chunks, logsumexp_BL, gradients[0], hidden_BLD, weight_VD, bias_V
        ):
            total_BLD += gradient_BLv @ weight_VD[words]
        return None, None, total_BLD.to(hidden_BLD.dtype), None, None


class _WeightGradient(torch.autograd.Function):
    """Computes zeros (B, L, 2), through which the weights receive their gradient.

    It is separate from `_Scores`, and has no path to the hidden states, so that autograd skips it
    in a backward pass that needs no weight gradient, as in clipping.
    """

    @staticmethod
    def forward(
        ctx: Any, targets_BL: Tensor, num_chunks: int, scores_BL2: Tensor, *operands: Any
    ) -> Tensor:
        hidden_BLD, weight_VD, bias_V = operands
        ctx.save_for_backward(targets_BL, scores_BL2, hidden_BLD, weight_VD, bias_V)
        ctx.num_chunks = num_chunks
        return torch.zeros_like(scores_BL2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        targets_BL, scores_BL2, hidden_BLD, weight_VD, bias_V = ctx.saved_tensors
        weight_gradient = torch.empty_like(weight_VD)
        bias_gradient = None if bias_V is None else torch.empty_like(bias_V)
        for words, gradient_BLv in VocabularyHead.logit_gradients(
            targets_BL,
            ctx.num_chunks,
            scores_BL2[..., 0],
            gradients[0],
            hidden_BLD,
            weight_VD,
            bias_V,
        ):
            rows_Nv = gradient_BLv.flatten(0, -2)
            weight_gradient[words] = rows_Nv.t() @ hidden_BLD.flatten(0, -2)
            if bias_gradient is not None:
                bias_gradient[words] = rows_Nv.sum(0)
        return None, None, None, None, weight_gradient, bias_gradient


def _chunks(
    num_chunks: int, hidden_BLD: Tensor, weight_VD: Tensor, bias_V: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yields words and their scores (B, L, v), in float32 or float64, of equal chunks."""
    size = len(weight_VD)
    with torch.autocast(_autocast_device(hidden_BLD), enabled=False):
        for i in range(num_chunks):
            words = slice(size * i // num_chunks, size * (i + 1) // num_chunks)
            bias_v = None if bias_V is None else bias_V[words]
            yield words, _wide(F.linear(hidden_BLD, weight_VD[words], bias_v))


def _autocast_device(tensor: Tensor) -> str:
    """Returns the device type for autocast, which does not know meta tensors."""
    return "cpu" if tensor.is_meta else tensor.device.type


def _local(targets_BL: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Returns each target's place within the chunk, and whether the chunk has it.

    The place of a target in another chunk is a valid one without meaning.
    """
    local_BL = targets_BL - words.start
    size = words.stop - words.start
    return local_BL.clamp(0, size - 1), (local_BL >= 0) & (local_BL < size)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
