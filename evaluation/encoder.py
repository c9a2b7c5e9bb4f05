"""Features of a frozen vision transformer: one vector per image, or a map of tokens at any size.

Shapes: B batch, C H W image, T tokens (the class token, then patches in row order), D width, K
blocks, h w patches per side.
"""

import torch
from torch import Tensor, nn

from evaluation.command_options import FeatureOptions
from models.captioner import Captioner
from models.layers import PositionEmbedding, resized_positions
from models.vit import VisionTransformer
from trainer.errors import ConfigError


def encoder_of(model: nn.Module) -> VisionTransformer:
    """Returns the encoder of a model.

    Raises:
        ConfigError: the model has no vision transformer as its `encoder`.
    """
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, VisionTransformer):
        raise ConfigError(
            f"a {type(model).__name__} has no vision transformer as its encoder, "
            "so it has no features here"
        )
    return encoder


def check_options(model: nn.Module, options: FeatureOptions) -> None:
    """Refuses options that this model cannot follow.

    Raises:
        ConfigError: names the option.
    """
    encoder = encoder_of(model)
    if options.features == "blocks" and not 1 <= options.num_blocks <= len(encoder.blocks):
        raise ConfigError(
            f"{options.num_blocks} blocks were asked for; the encoder has {len(encoder.blocks)}"
        )
    if options.features == "memory" and not isinstance(model, Captioner):
        raise ConfigError(
            f"only a captioner has an image memory, not a {type(model).__name__}; "
            "choose another kind"
        )
    size = options.image_size or encoder.config.image_size
    if options.resize is not None and options.resize < size:
        raise ConfigError(
            f"images are brought to {options.resize} pixels, "
            f"fewer than the {size} that are cut out of them"
        )
    if options.image_size is not None:
        _grid(encoder, options.image_size, options.image_size)
        if options.features == "memory" and options.image_size != encoder.config.image_size:
            raise ConfigError(
                "the image memory has trained positions: it exists at the model's image size only"
            )


def features(model: nn.Module, images_BCHW: Tensor, options: FeatureOptions) -> Tensor:
    """Returns one vector per image, float32 (B, D), or (B, K D) for "blocks".

    * "pooled": the mean of the normalised patch tokens;
    * "class_token": the normalised class token;
    * "blocks": the means of the patch tokens of each of the last `num_blocks` blocks, without the
      final norm, concatenated: ViP (Yu et al. 2023, https://arxiv.org/abs/2306.08842), whose linear
      probe takes all 12 blocks of ViT-B;
    * "memory": the mean over the image memory that a captioner's decoder attends to: DP-Cap's
      few-shot evaluation (Sander et al. 2024, https://arxiv.org/abs/2403.02506).

    Args:
        images_BCHW: normalised, at the size of `options`.
    """
    if options.features == "memory":
        assert isinstance(model, Captioner)
        return model.encode(images_BCHW).float().mean(dim=1)
    encoder = encoder_of(model)
    last_KBTD, normalised_BTD = tokens(encoder, images_BCHW, options.num_blocks)
    if options.features == "blocks":
        means_KBD = [x_BTD[:, 1:].float().mean(dim=1) for x_BTD in last_KBTD]
        return torch.cat(means_KBD, dim=1)
    if options.features == "class_token":
        return normalised_BTD[:, 0].float()
    return normalised_BTD[:, 1:].float().mean(dim=1)


def token_maps(encoder: VisionTransformer, images_BCHW: Tensor) -> Tensor:
    """Returns normalised patch tokens as a map, (B, D, h, w).

    Images have any height and width in whole patches.
    """
    grid = _grid(encoder, *images_BCHW.shape[2:])
    _, normalised_BTD = tokens(encoder, images_BCHW, 1)
    return normalised_BTD[:, 1:].transpose(1, 2).unflatten(2, grid)


def tokens(
    encoder: VisionTransformer, images_BCHW: Tensor, num_blocks: int
) -> tuple[list[Tensor], Tensor]:
    """Returns the outputs of the last `num_blocks` blocks, (B, T, D) each, and of the final norm.

    Image sizes are those of `token_maps`.
    """
    grid = _grid(encoder, *images_BCHW.shape[2:])
    images_BCHW = images_BCHW.to(encoder.patch_embedding.weight.dtype)
    patches_BPD = encoder.patch_embedding(images_BCHW).flatten(2).transpose(1, 2)
    class_token_B1D = encoder.class_token.expand(len(patches_BPD), -1, -1)
    x_BTD = torch.cat([class_token_B1D, patches_BPD], dim=1)
    assert isinstance(encoder.position, PositionEmbedding)
    trained_grid = encoder.config.grid_size, encoder.config.grid_size
    position_1TD = encoder.position.table
    if grid != trained_grid:
        position_1TD = resized_positions(position_1TD, trained_grid, grid)
    x_BTD = x_BTD + position_1TD.to(x_BTD.dtype)
    outputs = []
    for number, block in enumerate(encoder.blocks):
        x_BTD = block(x_BTD)
        if number >= len(encoder.blocks) - num_blocks:
            outputs.append(x_BTD)
    return outputs, encoder.norm(x_BTD)


def _grid(encoder: VisionTransformer, height: int, width: int) -> tuple[int, int]:
    """Returns the patches per side; refuses sizes that are no whole number of patches."""
    patch = encoder.config.patch_size
    if height < patch or width < patch or height % patch or width % patch:
        raise ConfigError(
            f"images of {height} x {width} pixels are no whole number of patches of {patch}"
        )
    return height // patch, width // patch
