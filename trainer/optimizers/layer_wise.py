"""Trust ratios per named parameter where the optimizer's tensors are shards, or flat runs that cut and join parameters.

LAMB and LARS scale each parameter's update by a ratio of two norms over the *whole* parameter. ZeRO steps flat partitions and
FSDP shards of single parameters, so each rank sums the squares of its segments by parameter, one small all-reduce adds them up,
and every rank scales its part by the same ratio.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trainer.engines.dtensor import is_dtensor
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
        segments: by optimizer tensor (the very objects that the optimizer steps).
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
        self._segments = {tensor: tuple(found) for tensor, found in segments.items()}
        for tensor, found in self._segments.items():
            end = max((segment.start + segment.length for segment in found), default=0)
            if end > local(tensor).numel():
                raise ValueError(f"a segment ends at {end}, behind the {local(tensor).numel()} coordinates")
        names = {segment.name for found in self._segments.values() for segment in found}
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
            (parameter, group, *self._direction(parameter, group))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        adapted = [update for update in updates if update[1]["layer_wise"]]
        if any(group["layer_wise"] and group["params"] for group in self.param_groups):
            self._scale(adapted)
        for parameter, group, direction, _ in updates:
            self._update(local(parameter).view(-1), direction, group, self.state[parameter])

    def _scale(self, updates: Sequence[tuple[Tensor, dict[str, Any], Tensor, Tensor]]) -> None:
        """Multiplies each segment of the directions by its parameter's ratio."""
        squares = self._squared_norms(updates)
        if self._sharded:
            distributed.all_reduce_sum(squares)
        weight_norms, measured_norms = squares.sqrt().unbind()
        for parameter, group, direction, _ in updates:
            ratios = self._ratios(weight_norms, measured_norms, group)
            for name, start, length in self._segments[parameter]:
                direction[start : start + length].mul_(ratios[self._index[name]])

    def _squared_norms(self, updates: Sequence[tuple[Tensor, dict[str, Any], Tensor, Tensor]]) -> Tensor:
        """(2, parameters) fp64: this rank's part of the squared norms of weights and measured tensors."""
        if not self._index:
            raise RuntimeError(f"{type(self).__name__} was not told which parameters it steps: call bind_segments")
        device = updates[0][2].device if updates else local(next(iter(self._segments))).device
        squares = torch.zeros(2, len(self._index), dtype=torch.float64, device=device)
        for parameter, _, _, measured in updates:
            if parameter not in self._segments:
                raise RuntimeError(f"{type(self).__name__} steps a tensor that bind_segments was not told about")
            weight = local(parameter).view(-1)
            for name, start, length in self._segments[parameter]:
                for row, tensor in enumerate((weight, measured)):
                    norm = torch.linalg.vector_norm(tensor[start : start + length], dtype=torch.float64)
                    squares[row, self._index[name]] += norm.square()
        return squares

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(direction before the ratio, tensor whose norm the ratio divides by), both flat; the direction is fresh memory."""
        raise NotImplementedError

    def _ratios(self, weight_norms: Tensor, measured_norms: Tensor, group: dict[str, Any]) -> Tensor:
        """Ratio of each parameter from its two norms."""
        raise NotImplementedError

    def _update(self, weight: Tensor, direction: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Applies a scaled direction to the flat weight, in place."""
        raise NotImplementedError
