"""Text decoder with cross-attention to the image, and the bridge from the encoder to it.

Shapes: B batch, L text tokens, T image tokens, E encoder width, D decoder width, V vocabulary.
Sources: Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762); used as an image captioner as in Cap (Tschannen et al.
2023, https://arxiv.org/abs/2306.07915) and DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506).
Unlike DP-Cap, whose clipping could not handle them, the type embeddings are trained. Parallel prediction is CapPa of the same
publication as Cap (section 3.1).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from models.config import CaptionerConfig, DecoderConfig
from models.layers import (
    CrossAttention,
    Mlp,
    PositionEmbedding,
    SelfAttention,
    image_sincos_table,
    text_sincos_table,
)
from models.vocabulary_head import VocabularyHead

Branch = Callable[[Tensor], Tensor]


class ImageMemory(nn.Module):
    """What the decoder attends to: Linear(encoder tokens) + image positions + image type embedding.

    `type_embedding` is a raw parameter.
    """

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__()
        encoder, width = config.encoder, config.decoder.width
        self.projection = nn.Linear(encoder.width, width)
        fixed_table = partial(image_sincos_table, encoder.grid_size, width)
        self.position = PositionEmbedding(
            config.decoder.position, encoder.num_image_tokens, width, fixed_table
        )
        self.type_embedding = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, tokens_BTE: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, D), class token included."""
        return self.position(self.projection(tokens_BTE)) + self.type_embedding


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention and MLP, each with a residual sum and a pre- or post-norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, heads, bias = config.width, config.num_heads, config.bias
        self.post_norm = config.norm_position == "post"
        self.self_attention = SelfAttention(width, heads, qkv_bias=bias, out_bias=bias, causal=True)
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.cross_attention = CrossAttention(width, heads, bias=bias)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(
            width, int(width * config.mlp_ratio), bias=bias, activation=config.activation
        )
        self.norm3 = nn.LayerNorm(width, eps=config.norm_eps)

    def forward(
        self, x_BLD: Tensor, memory_BTD: Tensor, visible_BLL: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            visible_BLL: which text tokens see which, in place of the causal mask; see `SelfAttention`.
        """
        return self.residuals(
            x_BLD,
            lambda x_BLD: self.self_attention(x_BLD, visible_BLL),
            lambda x_BLD: self.cross_attention(x_BLD, memory_BTD),
        )

    def residuals(self, x_BLD: Tensor, to_text: Branch, to_image: Branch) -> Tensor:
        """The block with its two attentions given, as whoever keeps keys and values computes them (models/generation.py)."""
        if self.post_norm:
            x_BLD = self.norm1(x_BLD + to_text(x_BLD))
            x_BLD = self.norm2(x_BLD + to_image(x_BLD))
            return self.norm3(x_BLD + self.mlp(x_BLD))
        x_BLD = x_BLD + to_text(self.norm1(x_BLD))
        x_BLD = x_BLD + to_image(self.norm2(x_BLD))
        return x_BLD + self.mlp(self.norm3(x_BLD))


class TextDecoder(nn.Module):
    """Token embedding + text positions + text type embedding, blocks, and a head (LayerNorm, VocabularyHead).

    `type_embedding` is a raw parameter. With `tied_head` the head's weight is the token embedding's, one parameter with two
    names in the state dict. `mask_embedding`, where it exists, is the one input token of parallel prediction.
    """

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__()
        decoder = config.decoder
        width = decoder.width
        self.num_tokens = config.num_tokens
        # Without torch's own random numbers, which `init_weights` overwrites: on the meta device they import its compiler.
        embedding = partial(nn.Embedding.from_pretrained, freeze=False)
        self.token_embedding = embedding(torch.empty(config.vocab_size, width))
        self.mask_embedding = (
            embedding(torch.empty(1, width)) if config.parallel_share > 0 else None
        )
        fixed_table = partial(text_sincos_table, config.num_tokens, width)
        self.position = PositionEmbedding(decoder.position, config.num_tokens, width, fixed_table)
        self.type_embedding = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.ModuleList([DecoderBlock(decoder) for _ in range(decoder.depth)])
        self.head_norm = nn.LayerNorm(width, eps=decoder.norm_eps)
        self.head = VocabularyHead(width, config.vocab_size, max_logits=config.max_logits)
        if config.tied_head:
            self.head.weight = self.token_embedding.weight

    def forward(
        self,
        tokens_BL: Tensor,
        memory_BTD: Tensor,
        targets_BL: Tensor | None = None,
        is_parallel_B: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            tokens_BL: integer tokens; padding comes after the caption, where causal attention never sees it.
            memory_BTD: output of `ImageMemory`.
            targets_BL: the token that follows each of them, for the loss.
            is_parallel_B: bool, True for examples of which no token is shown: mask embeddings at every place, each of which
                sees all others (CapPa). All are causal by default.

        Returns:
            Logits (B, L, V): entry t scores the token that follows tokens 0 to t. With targets their cross-entropy (B, L).

        Raises:
            ValueError: parallel prediction without a mask embedding, or of captions that are not padded to the full length:
                the number of masks would tell an example how long the others of its micro-batch are.
        """
        x_BLD, visible_BLL = self.token_embedding(tokens_BL), None
        if is_parallel_B is not None:
            length = tokens_BL.shape[1]
            if self.mask_embedding is None:
                raise ValueError(
                    "parallel prediction needs a model with parallel_share > 0, which has a mask embedding"
                )
            if length != self.num_tokens - 1:
                raise ValueError(
                    f"parallel prediction of {length} tokens: captions must be padded to num_tokens = {self.num_tokens}"
                )
            # One look-up per example, so that the gradient of the mask embedding is the example's own.
            mask_B1D = self.mask_embedding(torch.zeros_like(tokens_BL[:, :1]))
            x_BLD = torch.where(is_parallel_B[:, None, None], mask_B1D, x_BLD)
            causal_LL = torch.ones(length, length, dtype=torch.bool, device=tokens_BL.device).tril()
            visible_BLL = (
                causal_LL | is_parallel_B[:, None, None]
            )  # parallel examples see everything
        x_BLD = self.position(x_BLD) + self.type_embedding
        for block in self.blocks:
            x_BLD = (
                block(x_BLD, memory_BTD)
                if visible_BLL is None
                else block(x_BLD, memory_BTD, visible_BLL)
            )
        hidden_BLD = self.head_norm(x_BLD)
        return (
            self.head(hidden_BLD)
            if targets_BL is None
            else self.head.token_losses(hidden_BLD, targets_BL)
        )
