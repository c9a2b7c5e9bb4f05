"""LAMB and LARS: trust ratios per named parameter, where an optimizer steps shards, or flat runs that cut and join parameters.

LAMB and LARS scale each parameter's update by a ratio of two norms over the *whole* parameter. ZeRO steps flat partitions and
FSDP shards of single parameters, so each rank sums the squares of its segments by parameter, one small all-reduce adds them up,
and every rank scales its part by the same ratio.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from privacy.clipping.sharded import is_dtensor
from trainer.ranks import distributed

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class Segment(NamedTuple):
    """`length` consecutive coordinates of an optimizer's flattened (local) tensor, from `start`: a part of parameter `name`."""

    name: str
    start: int
    length: int


def bind_segments(
    optimizer: torch.optim.Optimizer, segments: Mapping[AnyTensor, Sequence[Segment]], *, sharded: bool
) -> None:
    """Tells a layer-wise optimizer which named parameter each coordinate belongs to; nothing for element-wise ones.

    Call it once, after the engine has made its tensors and before the first step. Collective if `sharded`. Coordinates outside
    of all segments are padding and take no part in norms. Ranks that replicate each other's shards may all take part: the
    two norms of a ratio grow alike.

    Args:
        segments: the segments of each optimizer tensor (the very objects that the optimizer steps).
        sharded: whether norms are summed over ranks; False where every rank steps whole parameters.
    """
    if isinstance(optimizer, LayerWise):
        optimizer.bind(segments, sharded=sharded)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


class LayerWise(torch.optim.Optimizer):
    """Base of LAMB and LARS: step = direction, times a ratio of norms per parameter, then the update.

    Groups with `layer_wise` False (biases, norms) take a ratio of 1.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._segments: dict[Tensor, tuple[Segment, ...]] = {}
        self._index: dict[str, int] = {}
        self._sharded = False

    def bind(self, segments: Mapping[AnyTensor, Sequence[Segment]], *, sharded: bool) -> None:
        """See `bind_segments`."""
        self._segments = {tensor: tuple(parts) for tensor, parts in segments.items()}
        for tensor, parts in self._segments.items():
            end = max((segment.start + segment.length for segment in parts), default=0)
            if end > local(tensor).numel():
                raise ValueError(f"a segment ends at {end}, behind the {local(tensor).numel()} coordinates")
        names = {segment.name for parts in self._segments.values() for segment in parts}
        if sharded:  # a rank may own no part of a parameter
            names = set[str]().union(*distributed.gather_objects(names))
        self._index = {name: i for i, name in enumerate(sorted(names))}
        self._sharded = sharded

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update. Collective if sharded: every rank steps the same groups."""
        if closure is not None:
            raise ValueError("a closure would evaluate the loss again; gradients are set before the step")
        updates = [
            (parameter, group, *self.direction(parameter, group))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if any(group["layer_wise"] and group["params"] for group in self.param_groups):
            self._scale([update for update in updates if update[1]["layer_wise"]])
        for parameter, group, direction, _ in updates:
            self.update(local(parameter).view(-1), direction, group, self.state[parameter])

    def _scale(self, updates: Sequence[tuple[Tensor, dict[str, Any], Tensor, Tensor]]) -> None:
        """Multiplies each segment of the directions by its parameter's ratio."""
        if not self._index:
            raise RuntimeError(f"{type(self).__name__} does not know which parameters it steps: call bind_segments")
        device = updates[0][2].device if updates else local(next(iter(self._segments))).device
        # (2, parameters) fp64: this rank's part of the squared norms of weights and measured tensors.
        squares = torch.zeros(2, len(self._index), dtype=torch.float64, device=device)
        for parameter, _, _, measured in updates:
            if parameter not in self._segments:
                raise RuntimeError(f"{type(self).__name__} steps a tensor that bind_segments was not given")
            weight = local(parameter).view(-1)
            for name, start, length in self._segments[parameter]:
                for row, tensor in enumerate((weight, measured)):
                    norm = torch.linalg.vector_norm(tensor[start : start + length], dtype=torch.float64)
                    squares[row, self._index[name]] += norm.square()
        if self._sharded:
            distributed.all_reduce_sum(squares)
        weight_norms, measured_norms = squares.sqrt().unbind()
        for parameter, group, direction, _ in updates:
            ratios = self.ratios(weight_norms, measured_norms, group)
            for name, start, length in self._segments[parameter]:
                direction[start : start + length].mul_(ratios[self._index[name]])

    def direction(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(direction before the ratio, tensor whose norm the ratio divides by), both flat; the direction is fresh memory."""
        raise NotImplementedError

    def ratios(self, weight_norms: Tensor, measured_norms: Tensor, group: dict[str, Any]) -> Tensor:
        """Ratio of each parameter from its two norms."""
        raise NotImplementedError

    def update(self, weight: Tensor, direction: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Applies a scaled direction to the flat weight, in place."""
        raise NotImplementedError


class Lamb(LayerWise):
    """Layer-wise adaptive moments for batch training (You et al. 2020, arXiv:1904.00962, algorithm 2).

    x <- x - lr * ||x|| / ||u|| * u, where u = m_hat / (sqrt(v_hat) + eps) + weight_decay * x, and phi is the identity.
    The ratio is 1 where a norm is zero, and in groups that are not `layer_wise`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def direction(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert parameter.grad is not None
        state, weight, gradient = self.state[parameter], local(parameter).view(-1), local(parameter.grad).view(-1)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        m, v = local(state["exp_avg"]).view(-1), local(state["exp_avg_sq"]).view(-1)
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction = (m / (1 - beta1**step)).div_(denominator).add_(weight, alpha=group["weight_decay"])
        return direction, direction

    def ratios(self, weight_norms: Tensor, measured_norms: Tensor, group: dict[str, Any]) -> Tensor:
        usable = (weight_norms > 0) & (measured_norms > 0)
        return torch.where(usable, weight_norms / measured_norms, 1.0)

    def update(self, weight: Tensor, direction: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        weight.add_(direction, alpha=-group["lr"])


class Lars(LayerWise):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888, algorithm 1).

    v <- momentum * v + lr * ratio * (g + weight_decay * x); x <- x - v, where
    ratio = trust_coefficient * ||x|| / (||g|| + weight_decay * ||x||); 1 where a norm is zero, and in groups that are not
    `layer_wise`, which is SGD with momentum there.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float, trust_coefficient: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust_coefficient": trust_coefficient})

    def direction(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local(parameter.grad).view(-1)
        if group["momentum"] > 0 and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return gradient.add(local(parameter).view(-1), alpha=group["weight_decay"]), gradient

    def ratios(self, weight_norms: Tensor, measured_norms: Tensor, group: dict[str, Any]) -> Tensor:
        usable = (weight_norms > 0) & (measured_norms > 0)
        scaled = group["trust_coefficient"] * weight_norms
        return torch.where(usable, scaled / (measured_norms + group["weight_decay"] * weight_norms), 1.0)

    def update(self, weight: Tensor, direction: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        direction.mul_(group["lr"])
        if group["momentum"] > 0:
            direction = local(state["momentum_buffer"]).view(-1).mul_(group["momentum"]).add_(direction)
        weight.sub_(direction)
