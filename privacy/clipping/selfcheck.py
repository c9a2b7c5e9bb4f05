"""Before training: do the clipping rules see the whole gradient of this model?

Coverage (contract 3) knows who owns a parameter, not how the forward uses it: a weight that is read without calling its layer
would silently miss that part of its gradient. With clipping switched off the clipped sum must equal torch's own gradient, so
one backward on made-up inputs finds out.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from privacy.clipping.clipped_sum import ClippedSum
from privacy.errors import PrivacyConfigError

TOLERANCE = 1e-3


def check_against_autograd(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Compares, on an unsharded model and synthetic inputs, the unclipped sum with `backward`.

    Args:
        model: returns loss_B when called with `**inputs`; its `.grad` fields are left empty.
        inputs: made up, never private data.

    Raises:
        PrivacyConfigError: naming the parameter whose gradient differs most.
    """
    batch_size = len(next(iter(inputs.values())))
    clipped = ClippedSum(model, float("inf"))
    clipped.add_micro_batch(model, inputs, torch.zeros(batch_size, dtype=torch.bool, device=_device(inputs)))
    clipped.detach()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(model(**inputs).sum(), list(parameters.values()), allow_unused=True)
    scale = max(float(g.norm()) for g in gradients if g is not None)
    for (name, total), gradient in zip(clipped.sums(), gradients, strict=True):
        difference = float((total if gradient is None else total - gradient).norm())
        if not difference <= TOLERANCE * scale:
            raise PrivacyConfigError(
                f"the clipping rules miss a part of the gradient of {name} (difference {difference:.1e} of {scale:.1e}): "
                "is the parameter used without calling the layer that owns it?"
            )


def _device(inputs: Mapping[str, Tensor]) -> torch.device:
    return next(iter(inputs.values())).device
