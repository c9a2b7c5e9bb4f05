"""Before training: do the clipping rules see the whole gradient of this model, and book it to the right example?

Coverage (contract 3) knows who owns a parameter, not how the forward uses it: a weight that is read without calling its layer
would silently miss that part of its gradient, and a layer called on a tensor whose first dimension is not the examples would
book it to the wrong one. With clipping switched off and some rows declared padding, the clipped sum must equal torch's own
gradient of the other rows' losses; a few backwards on made-up inputs find out. Two batch sizes are tried, so that no other
dimension (tokens, channels) can pass for the examples in both.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from privacy.clipping.clipped_sum import ClippedSum
from privacy.errors import PrivacyConfigError

TOLERANCE = 1e-3


def check_against_autograd(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Compares, on an unsharded model and synthetic inputs, the unclipped sum over some examples with `backward`.

    Args:
        model: returns loss_B when called with `**inputs`; its `.grad` fields are left empty.
        inputs: two or more examples that differ, made up, never private data.

    Raises:
        PrivacyConfigError: naming the parameter whose gradient differs most; or the loss of an example depends on the others.
    """
    num_examples = len(next(iter(inputs.values())))
    if num_examples < 2:
        raise ValueError("the self-check needs at least two made-up examples")
    rows = list(range(num_examples))
    clipped = ClippedSum(model, float("inf"))
    try:
        with nothing_is_zero(model):
            first = _check(model, clipped, inputs, [i == 0 for i in rows])
            with_one_more = {name: x[[*rows, 1]] for name, x in inputs.items()}
            again = _check(model, clipped, with_one_more, [i > 0 for i in [*rows, 1]])
    finally:
        clipped.detach()
    if not torch.allclose(first, again, rtol=TOLERANCE, atol=TOLERANCE):
        raise PrivacyConfigError(
            "the loss of an example changes with the other examples of its micro-batch, or with chance: every example's loss "
            "must depend on that example alone, and dropout must be off"
        )


@contextmanager
def nothing_is_zero(model: nn.Module) -> Iterator[None]:
    """Weights that are all zero are not, inside: one that starts at zero hides the gradients of the layers before it."""
    zeros = [p for p in model.parameters() if p.requires_grad and not p.any()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in zeros:
            std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.02
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()


def _check(model: nn.Module, clipped: ClippedSum, inputs: Mapping[str, Tensor], counted: list[bool]) -> Tensor:
    """Compares the sum over the counted examples; returns the first example's loss."""
    counted_B = torch.tensor(counted, device=next(iter(inputs.values())).device)
    clipped.zero_()
    clipped.add_micro_batch(model, inputs, ~counted_B)
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss_B = model(**inputs)
    gradients = torch.autograd.grad(loss_B[counted_B].sum(), parameters, allow_unused=True)
    scale = max((float(g.norm()) for g in gradients if g is not None), default=0.0)
    differences = [
        (name, float((total if gradient is None else total - gradient).norm()))
        for (name, total), gradient in zip(clipped.sums(), gradients, strict=True)
    ]
    name, worst = max(differences, key=lambda pair: pair[1] if pair[1] == pair[1] else float("inf"))
    if not worst <= TOLERANCE * scale:
        raise PrivacyConfigError(
            f"the clipping rules do not see the gradient of {name} as torch does (difference {worst:.1e} of {scale:.1e}): "
            "is the parameter used without calling the layer that owns it, is the first dimension of every layer's input the "
            "examples, and does every loss depend on its own example alone?"
        )
    loss: Tensor = loss_B[0].detach()
    return loss
