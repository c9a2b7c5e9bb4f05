"""Image captioner: vision transformer, bridge and text decoder; one loss per example.

Shapes: B batch, C H W image, L text tokens, T image tokens, D decoder width, V vocabulary.
Sources: Cap (Tschannen et al. 2023, https://arxiv.org/abs/2306.07915) and DP-Cap (Sander et al.
2024, https://arxiv.org/abs/2403.02506), whose loss is the mean cross-entropy over each caption's
own tokens.

    >>> import torch
    >>> from models.config import captioner_config
    >>> config = captioner_config("pico")
    >>> model = build_captioner(config, generator=torch.Generator().manual_seed(0))
    >>> images_BCHW, tokens_BL = torch.zeros(2, 3, 64, 64), torch.tensor([[1, 5, 2], [1, 6, 2]])
    >>> token_mask_BL = torch.ones(2, 3, dtype=torch.bool)
    >>> model(images_BCHW, tokens_BL, token_mask_BL).shape  # one loss per example
    torch.Size([2])

With `parallel_share` a share of the training examples is predicted in parallel (CapPa, the first
publication): the caller, who makes the examples, draws their coins and passes `is_parallel_B`.
Evaluation, scoring and generation pass none and are causal.
"""

from typing import Literal

from torch import Tensor

from models.base import VisionModel
from models.config import CaptionerConfig
from models.decoder import ImageMemory, TextDecoder
from models.vit import VisionTransformer


def caption_loss(loss_BL: Tensor, target_mask_BL: Tensor) -> Tensor:
    """Returns each example's mean loss over its own target tokens.

    Args:
        loss_BL: cross-entropy of the tokens to predict.
        target_mask_BL: True where a target counts.

    Returns:
        (B,); a row without target tokens has loss 0 and gradient 0.
    """
    count_B = target_mask_BL.sum(dim=1).clamp(min=1)
    return loss_BL.masked_fill(~target_mask_BL, 0.0).sum(dim=1) / count_B


class Captioner(VisionModel):
    """Predicts each caption token from the image and the tokens before it.

    Parameters live in `encoder`, `memory` and `decoder`. Row i of every output depends on row i of
    the inputs alone. Sharded models must be called through `forward`, where an engine's hooks
    gather the parameters.
    """

    config: CaptionerConfig

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer(config.encoder)
        self.memory = ImageMemory(config)
        self.decoder = TextDecoder(config)
        self.token_std = config.decoder.embedding_std
        self._init_unless_meta()

    def encode(self, images_BCHW: Tensor) -> Tensor:
        """Returns the image memory (B, T, D) that the decoder attends to, the class token first."""
        return self.memory(self.encoder(images_BCHW))

    def logits(self, images_BCHW: Tensor, tokens_BL: Tensor) -> Tensor:
        """Returns the scores (B, L, V) of the token after each of `tokens_BL`.

        L is at most `config.num_tokens`.
        """
        return self.decoder(tokens_BL, self.encode(images_BCHW))

    def forward(
        self,
        images_BCHW: Tensor,
        tokens_BL: Tensor,
        token_mask_BL: Tensor | None = None,
        output: Literal["loss", "logits"] = "loss",
        is_parallel_B: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss of each caption, or the scores of its tokens.

        Args:
            images_BCHW: normalised pixels, floating.
            tokens_BL: int64 captions, from the first token (`bos_id`) to the last (`eos_id`), then
                padding.
            token_mask_BL: bool, True for the caption's own tokens; needed for the loss only.
            output: "loss", or "logits" for generation through the same entry point.
            is_parallel_B: bool, True for examples that are predicted from the image alone, all
                tokens at once; then captions must be padded to `config.num_tokens`. The loss only.

        Returns:
            Loss (B,) in float32: mean cross-entropy of tokens 1 to L-1, each given the image and
            (unless parallel) the tokens before it; 0 with zero gradient for a row that has no such
            token. Or logits (B, L, V).
        """
        if output == "logits":
            return self.logits(images_BCHW, tokens_BL)
        if token_mask_BL is None:
            raise ValueError("the loss needs token_mask_BL")
        memory_BTD = self.encode(images_BCHW)
        loss_BL = self.decoder(tokens_BL[:, :-1], memory_BTD, tokens_BL[:, 1:], is_parallel_B)
        return caption_loss(loss_BL, token_mask_BL[:, 1:].bool())


build_captioner = Captioner.build
