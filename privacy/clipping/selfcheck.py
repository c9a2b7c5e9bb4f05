"""Before training: do the clipping rules see the whole gradient of this model, and book it to the right example?

Coverage (contract 3) knows who owns a parameter, not how the forward uses it: a weight that is read without calling its layer
would silently miss that part of its gradient, and a layer called on a tensor whose first dimension is not the examples would
book it to the wrong one. So a few made-up examples go through the model, each alone, and torch's own gradient of each is the
truth. Then they go through it together, and a weighted sum of their per-example gradients must be the same weighted sum of
the truth. The weights all differ, so a gradient that is missed, counted twice or booked to another example changes the sum.
Two batch sizes are tried, so that no other dimension (tokens, channels) can pass for the examples in both.

The check must not pass for lack of a gradient. Examples must differ, weights near zero (new heads, adapters, layer scales)
are replaced by random ones meanwhile, and a parameter without any gradient is refused by name.
"""

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from privacy.clipping.checked import note_passed
from privacy.clipping.clipped_sum import ClippedSum
from privacy.clipping.functions import ClippingFunction
from privacy.clipping.recorder import plain_words
from privacy.errors import PrivacyConfigError

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Relative difference of a parameter's gradient, by the dtype of the model."""
FLOOR = 0.01
"""Differences below FLOOR * TOLERANCE of the largest gradient count as rounding, whatever the parameter's own gradient is."""
MOST_EXAMPLES = 16
"""Further examples are not looked at."""
SMALL = 1e-3
"""Weights with a root mean square below it hide the gradients of the layers before them."""


def check_against_autograd(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    task: Callable[..., Tensor] | None = None,
    *,
    unreached: Collection[str] = (),
) -> None:
    """Compares, on an unsharded model and made-up inputs, per-example gradients with torch's own; `ClippedSum` asks for it.

    In float32 a part of a gradient below about 1e-5 of the largest gradient cannot be told from rounding. A model and inputs
    in float64 (`model.double()`) show parts of 1e-11. What the made-up inputs do not reach is not checked, such as a branch
    that depends on values.

    Args:
        model: in the mode and with the parameters frozen as in training; its `.grad` fields are left empty.
        inputs: two or more examples that differ, made up, never private data. Names as in training, tensors with B rows.
        task: `task(**inputs)` returns loss_B, where loss i depends on example i alone; the model itself by default.
        unreached: parameters that are trained although the loss never reaches them; all others must get a gradient.

    Raises:
        PrivacyConfigError: naming the parameter whose gradient differs most, or that no example reaches; or the loss of an
            example depends on the others or on chance; or the forward changes a buffer; or the inputs or dtypes do not do.
    """
    task = task or model
    _require_wide(model)
    rows = range(_require_different(inputs))
    share_of = [1 / (1 + row) for row in rows]  # what example i's gradient counts for, in both batches
    batches = [
        (list(rows), share_of),
        # In another order, and one more row: the first example's share is split between two copies.
        ([*reversed(rows), 0], [*share_of[:0:-1], 0.7 * share_of[0], 0.3 * share_of[0]]),
    ]
    with nothing_is_small(model), _buffers_stay(model):
        loss_N, expected = _truth(model, task, inputs, share_of)
        for chosen, weights in batches:
            loss_B, sums = _clipped(model, task, {name: x[chosen] for name, x in inputs.items()}, weights)
            _compare_losses(loss_N[chosen], loss_B)
            _require_gradients([name for name in sums if name not in unreached], expected)
            _compare(expected, sums)
    note_passed(model, task, inputs)


def _require_wide(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype not in TOLERANCE:
            raise PrivacyConfigError(
                f"the self-check compares gradients in float32 or float64, and {name} is {p.dtype}: check a copy of the model "
                "before it is cast, and give ClippedSum self_check=False"
            )


def _require_different(inputs: Mapping[str, Tensor]) -> int:
    """The number of examples to look at."""
    sizes = {name: len(x) for name, x in inputs.items()}
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 2:
        raise PrivacyConfigError(
            f"the self-check needs two or more made-up examples, the same number in each input: {sizes}"
        )
    count = min(MOST_EXAMPLES, *sizes.values())
    for i in range(count):
        for j in range(i):
            if all(torch.equal(x[i], x[j]) for x in inputs.values()):
                raise PrivacyConfigError(
                    f"the made-up examples {j} and {i} are equal, so the self-check could not tell one's gradient from the "
                    "other's: make up examples that differ"
                )
    return count


def _truth(
    model: nn.Module, task: Callable[..., Tensor], inputs: Mapping[str, Tensor], share_of: Sequence[float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(N,) losses of examples that are alone, and sum_i share_i grad_i by torch's backward, where there is a gradient."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses: list[Tensor] = []
    total: dict[str, Tensor] = {}
    for i, share in enumerate(share_of):
        with torch.enable_grad(), _no_chance(), plain_words():
            loss_B = task(**{name: x[i : i + 1].clone() for name, x in inputs.items()})
        if loss_B.shape != (1,) or not bool(loss_B.isfinite()):
            raise PrivacyConfigError(
                f"the task must return one finite loss per example: for one made-up example alone it returned {loss_B.tolist()}"
            )
        losses.append(loss_B.detach())
        if not loss_B.requires_grad:
            continue
        with plain_words():
            gradients = torch.autograd.grad(loss_B.sum(), list(parameters.values()), allow_unused=True)
        for name, g in zip(parameters, gradients, strict=True):
            if g is not None and name in total:
                total[name].add_(g, alpha=share)
            elif g is not None:
                total[name] = share * g
    return torch.cat(losses), total


@dataclass(frozen=True)
class _ByPlace(ClippingFunction):
    """Weights that are given, whatever the norms."""

    weights: tuple[float, ...] = ()

    def weight(self, norm_B: Tensor, bound: float) -> Tensor:
        return norm_B.new_tensor(self.weights)


def _clipped(
    model: nn.Module, task: Callable[..., Tensor], inputs: Mapping[str, Tensor], weights: Sequence[float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_B of examples that are together, and sum_b weight_b grad_b by the clipping rules."""
    seen: list[Tensor] = []

    def watched(**inputs: Tensor) -> Tensor:
        with _no_chance():
            loss_B = task(**inputs)
        seen.append(loss_B.detach())
        return loss_B

    def by_place(names: list[str], bound: float) -> ClippingFunction:
        return _ByPlace(dict.fromkeys(names, 0), (bound,), weights=tuple(weights))

    clipped = ClippedSum(model, 1.0, function=by_place, self_check=False)
    try:
        device = next(iter(inputs.values())).device
        clipped.add_micro_batch(watched, inputs, torch.zeros(len(weights), dtype=torch.bool, device=device))
        return seen[0], dict(clipped.sums())
    finally:
        clipped.detach()


def _compare_losses(alone_B: Tensor, together_B: Tensor) -> None:
    tolerance = TOLERANCE.get(alone_B.dtype, max(TOLERANCE.values()))
    if not torch.allclose(alone_B, together_B, rtol=tolerance, atol=tolerance * float(alone_B.abs().max())):
        raise PrivacyConfigError(
            "the loss of an example changes with the other examples of its micro-batch: every example's loss must depend on "
            "that example alone (no mean over the batch, no contrast between examples, no state that the forward keeps)"
        )


def _require_gradients(names: Iterable[str], gradients: Mapping[str, Tensor]) -> None:
    idle = [name for name in names if name not in gradients or not gradients[name].any()]
    if idle:
        listed = ", ".join(idle[:5]) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
        raise PrivacyConfigError(
            f"no made-up example gives {listed} a gradient, so the self-check would say nothing about it: make up examples "
            "that reach it, or freeze it (requires_grad_(False)) if the loss never does"
        )


def _compare(expected: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    tolerance = max(TOLERANCE[g.dtype] for g in expected.values())
    truth = {name: expected.get(name, torch.zeros_like(total)) for name, total in sums.items()}
    scale = max(float(g.norm()) for g in truth.values())
    differences = {name: float((sums[name] - g).norm()) for name, g in truth.items()}
    allowed = {name: tolerance * (float(g.norm()) + FLOOR * scale) for name, g in truth.items()}
    # A difference that is not finite is the worst.
    name = max(truth, key=lambda n: differences[n] / allowed[n] if differences[n] < float("inf") else float("inf"))
    if not differences[name] <= allowed[name]:
        raise PrivacyConfigError(
            f"the clipping rules do not see the gradient of {name} as torch does (difference {differences[name]:.1e} of "
            f"{float(truth[name].norm()):.1e}): is the parameter used without calling the layer that owns it, is the first "
            "dimension of every layer's input the examples, and does every loss depend on its own example alone?"
        )


@contextmanager
def nothing_is_small(model: nn.Module) -> Iterator[None]:
    """Weights near zero are random inside: one that starts at zero hides the gradients of the layers before it."""
    small = {p: p.detach().clone() for p in model.parameters() if p.is_floating_point() and _is_small(p)}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in small:
                std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.02
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in small.items():
                parameter.copy_(before)


def _is_small(p: Tensor) -> bool:
    return float(p.detach().norm()) < SMALL * math.sqrt(p.numel())


@contextmanager
def _buffers_stay(model: nn.Module) -> Iterator[None]:
    """Refuses a forward that writes into a buffer or a frozen weight, which would leave the run in checkpoints, without noise."""
    before = {name: (x, x.detach().clone()) for name, x in _not_trained(model).items()}
    yield
    after = _not_trained(model)
    for name, (buffer, value) in before.items():
        if name in after and not torch.equal(after[name], value):
            buffer.copy_(value)
            raise PrivacyConfigError(
                f"the forward changes the buffer {name}: what it keeps of one micro-batch would reach others and leave the run "
                "without noise; keep no state in the forward"
            )


def _not_trained(model: nn.Module) -> dict[str, Tensor]:
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return {**dict(model.named_buffers()), **frozen}


@contextmanager
def _no_chance() -> Iterator[None]:
    """Refuses code that draws from a global generator: a mask or coin would depend on an example's place in the batch."""
    before = _generators()
    yield
    if _generators() != before:
        raise PrivacyConfigError(
            "the forward draws random numbers, so an example's gradient depends on its place in the micro-batch: switch "
            "dropout and random masks off (model.eval(), p = 0), or make them of an input that each example brings along"
        )


def _generators() -> list[bytes]:
    """The states of the generators that code draws from if it names none."""
    kind, numbers, *place = np.random.get_state(legacy=True)  # noqa: NPY002  # foreign models use it
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    return [*states, repr(random.getstate()).encode(), repr((kind, place)).encode(), np.asarray(numbers).tobytes()]
