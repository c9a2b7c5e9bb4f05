"""Text decoder with cross-attention to the image, and the bridge from the encoder to it.

Shapes: B batch, L text tokens, T image tokens, E encoder width, D decoder width, V vocabulary.
Sources: Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762); used as an image captioner as in
Cap (Tschannen et al. 2023, https://arxiv.org/abs/2306.07915) and DP-Cap (Sander et al. 2024,
https://arxiv.org/abs/2403.02506). Unlike DP-Cap, whose clipping could not handle them, the type
embeddings are trained. Parallel prediction is CapPa of the same publication as Cap (section 3.1).
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
    """The memory that the decoder attends to: projected encoder tokens, positions, image type.

    `type_embedding` is a raw parameter.
    """

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__()
        encoder = config.encoder
        width = config.decoder.width
        self.projection = nn.Linear(encoder.width, width)
        fixed_table = partial(image_sincos_table, encoder.grid_size, width)
        self.position = PositionEmbedding(
            config.decoder.position, encoder.num_image_tokens, width, fixed_table
        )
        self.type_embedding = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, tokens_BTE: Tensor) -> Tensor:
        """Returns the memory (B, T, D) of tokens (B, T, E), class token included."""
        return self.position(self.projection(tokens_BTE)) + self.type_embedding


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention and an MLP, each in a residual sum with a norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.width
        heads = config.num_heads
        bias = config.bias
        self.post_norm = config.norm_position == "post"
        self.self_attention = SelfAttention(width, heads, qkv_bias=bias, out_bias=bias, causal=True)
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.cross_attention = CrossAttention(width, heads, bias=bias)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        hidden_width = int(width * config.mlp_ratio)
        self.mlp = Mlp(width, hidden_width, bias=bias, activation=config.activation)
        self.norm3 = nn.LayerNorm(width, eps=config.norm_eps)

    def forward(
        self, x_BLD: Tensor, memory_BTD: Tensor, visible_BLL: Tensor | None = None
    ) -> Tensor:
        """Returns the text tokens after the block.

        Args:
            visible_BLL: bool, True where one text token sees another, in place of the causal mask;
                see `SelfAttention`.
        """
        return self.residuals(
            x_BLD,
            lambda x_BLD: self.self_attention(x_BLD, visible_BLL),
            lambda x_BLD: self.cross_attention(x_BLD, memory_BTD),
        )

    def residuals(self, x_BLD: Tensor, to_text: Branch, to_image: Branch) -> Tensor:
        """Returns the text tokens after the block, with the two attentions as functions.

        models/generation.py passes attentions that keep keys and values.
        """
        if self.post_norm:
            x_BLD = self.norm1(x_BLD + to_text(x_BLD))
            x_BLD = self.norm2(x_BLD + to_image(x_BLD))
            return self.norm3(x_BLD + self.mlp(x_BLD))
        x_BLD = x_BLD + to_text(self.norm1(x_BLD))
        x_BLD = x_BLD + to_image(self.norm2(x_BLD))
        return x_BLD + self.mlp(self.norm3(x_BLD))


class TextDecoder(nn.Module):
    """Embedded text tokens, decoder blocks, and a head (LayerNorm, VocabularyHead).

    `type_embedding` is a raw parameter. With `tied_head` the head's weight is the token
    embedding's, one parameter with two names in the state dict. `mask_embedding`, where it exists,
    is the one input token of parallel prediction.
    """

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__()
        decoder = config.decoder
        width = decoder.width
        self.num_tokens = config.num_tokens
        # `nn.Embedding` would draw torch's own random numbers, which `init_weights` overwrites: on
        # the meta device they import torch's compiler.
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
        """Returns the scores of the next tokens, or the cross-entropy of the targets.

        Args:
            tokens_BL: integer tokens; padding comes after the caption, where causal attention does
                not see it.
            memory_BTD: output of `ImageMemory`.
            targets_BL: the token that follows each of `tokens_BL`, for the loss.
            is_parallel_B: bool, True for examples whose tokens are all hidden: mask embeddings at
                every place, each of which sees all others (CapPa). All examples are causal by
                default.

        Returns:
            Logits (B, L, V): entry t scores the token that follows tokens 0 to t. With targets
            their cross-entropy (B, L).

        Raises:
            ValueError: parallel prediction without a mask embedding, or of captions that are not
                padded to the full length: the number of masks would tell an example how long the
                other captions of its micro-batch are.
        """
        x_BLD = self.token_embedding(tokens_BL)
        visible_BLL = None
        if is_parallel_B is not None:
            length = tokens_BL.shape[1]
            if self.mask_embedding is None:
                raise ValueError(
                    "parallel prediction needs a model with parallel_share > 0, which has a mask "
                    "embedding"
                )
            if length != self.num_tokens - 1:
                raise ValueError(
                    f"parallel prediction of {length} tokens: captions must be padded to "
                    f"num_tokens = {self.num_tokens}"
                )
            # One look-up per example, so that the gradient of the mask embedding is the example's
            # own.
            mask_B1D = self.mask_embedding(torch.zeros_like(tokens_BL[:, :1]))
            x_BLD = torch.where(is_parallel_B[:, None, None], mask_B1D, x_BLD)
            causal_LL = torch.ones(length, length, dtype=torch.bool, device=tokens_BL.device).tril()
            # Parallel examples see every token.
            visible_BLL = causal_LL | is_parallel_B[:, None, None]
        x_BLD = self.position(x_BLD) + self.type_embedding
        inputs = (memory_BTD,) if visible_BLL is None else (memory_BTD, visible_BLL)
        for block in self.blocks:
            x_BLD = block(x_BLD, *inputs)
        hidden_BLD = self.head_norm(x_BLD)
        if targets_BL is None:
            return self.head(hidden_BLD)
        return self.head.token_losses(hidden_BLD, targets_BL)
