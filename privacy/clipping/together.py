"""Made-up examples in one batch, among neighbours that count for nothing, as the clipping rules see them (selfcheck.py)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .apart import LARGE, NotTaken, must_take, shortened
from .clipped_sum import ClippedSum
from .functions import ClippingFunction
from .untouched import no_chance

Inputs = dict[str, Tensor]

KINDS = {"not finite": ("not finite", "others"), "large": ("large", "one other", "the last")}
"""Kinds of hostile neighbours, and those for models that raise an error on them; the last of each are whole examples."""
_PLACES = [0, -2]
"""Rows of neighbours, so that work that is sorted by length, up or down, puts one of them between the examples."""


@dataclass(frozen=True)
class _ByPlace(ClippingFunction):
    """Weights that are given, whatever the norms."""

    weights: tuple[float, ...] = ()

    def weight(self, norm_B: Tensor, bound: float) -> Tensor:
        return norm_B.new_tensor(self.weights)


@dataclass(frozen=True)
class Together:
    """What the clipping rules make of examples that are together.

    Attributes:
        loss_N: of those that count.
        sums: by parameter, sum_i share_i grad_i.
        num_calls: by parameter, of its layers.
    """

    loss_N: Tensor
    sums: dict[str, Tensor]
    num_calls: Mapping[str, int]


def with_neighbours(
    model: nn.Module, task: Callable[..., Tensor], inputs: Inputs, shares: Sequence[float], neighbours: str
) -> Together:
    """All made-up examples among two neighbours of a kind, or tamer ones where the model raises an error on those.

    Raises:
        NotTaken: it raises one among whole examples too.
    """
    *hostile, whole = KINDS[neighbours]
    for kind in hostile:
        with (
            suppress(NotTaken),
            _tables_give_nan(model, len(shares) + 2) if kind == "not finite" else nullcontext(),
        ):
            return together(model, task, inputs, shares, _neighbours(inputs, kind))
    return together(model, task, inputs, shares, _neighbours(inputs, whole))


def together(
    model: nn.Module,
    task: Callable[..., Tensor],
    inputs: Inputs,
    shares: Sequence[float],
    neighbours: Inputs | None = None,
) -> Together:
    """One batch of examples; neighbours, which count for nothing, are its first row and its last but one."""
    seen: list[Tensor] = []
    is_mine_B = torch.ones(len(shares) + (0 if neighbours is None else 2), dtype=torch.bool)
    if neighbours is not None:
        is_mine_B[_PLACES] = False
    weight_B = torch.zeros(len(is_mine_B), dtype=torch.float64)
    weight_B[is_mine_B] = torch.tensor(shares, dtype=torch.float64)
    batch = {}
    for name, x in inputs.items():
        batch[name] = x.new_empty(len(is_mine_B), *x.shape[1:])
        batch[name][is_mine_B] = x
        if neighbours is not None:
            batch[name][~is_mine_B] = neighbours[name]

    def watched(**inputs: Tensor) -> Tensor:
        with no_chance():
            loss_B = task(**inputs)
        seen.append(loss_B.detach())
        return loss_B

    def by_place(names: list[str], bound: float) -> ClippingFunction:
        return _ByPlace(dict.fromkeys(names, 0), (bound,), weights=tuple(weight_B.tolist()))

    clipped = ClippedSum(model, 1.0, function=by_place, self_check=False)
    try:
        device = next(iter(inputs.values())).device
        with must_take(f"{len(is_mine_B)} examples together"):
            clipped.add_micro_batch(watched, batch, (~is_mine_B).to(device))
        return Together(seen[0][is_mine_B.to(device)], dict(clipped.sums()), clipped.num_calls)
    finally:
        clipped.detach()


def _neighbours(inputs: Inputs, kind: str) -> Inputs:
    """Two rows of a kind; what is not floating is of other rows."""
    made = {}
    for name, x in inputs.items():
        is_floating, first, last = x.is_floating_point(), x[:1], x[-1:]
        match kind:
            case "not finite":
                made[name] = torch.cat([first * torch.nan, last * torch.inf]) if is_floating else x[[0, -1]]
            case "large":
                made[name] = torch.cat(
                    [last * -LARGE, shortened(last) * LARGE] if is_floating else [last, shortened(last)]
                )
            case "others":
                made[name] = x[[0, -1]]
            case "the last":
                made[name] = x[[-1, -1]]
            case _:
                made[name] = torch.cat([last, shortened(last)])
    return made


@contextmanager
def _tables_give_nan(model: nn.Module, size: int) -> Iterator[None]:
    """Trained tables return NaN for the neighbours in a batch: inputs that are ids cannot be made hostile themselves."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.dim() == 0 or output.shape[0] != size:
            return None
        is_hostile_B = torch.zeros(size, dtype=torch.bool, device=output.device)
        is_hostile_B[_PLACES] = True
        return torch.where(is_hostile_B.view(-1, *[1] * (output.dim() - 1)), torch.nan, output)

    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad]
    handles = [table.register_forward_hook(hook) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
