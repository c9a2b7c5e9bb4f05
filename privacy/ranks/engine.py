"""The contract of every engine with the training loop, and the layout of coordinates over ranks.

An engine shards parameters, master weights and optimizer states in its own way and steps its own
optimizer. The gradient path is ours on every engine: clipped sums are reduced, in whole numbers, to
the owner of each coordinate, by default once per logical batch (`privacy/sums/reduction.py`); that
rank adds noise and divides; the engine takes the result.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from .fsdp import is_dtensor


class Piece(NamedTuple):
    """A run of `length` coordinates of a flattened parameter, from `offset`."""

    name: str
    offset: int
    length: int


class GradShard(NamedTuple):
    """This rank's part of one parameter's reduced sum, one value per coordinate of the piece.

    Values are int64 in units of the sums' step until the noise is added, then fp64. In a run
    without noise they are fp64 from the start.
    """

    name: str
    offset: int
    values: Tensor


@dataclass(frozen=True)
class ShardLayout:
    """Holds the owner of every coordinate: `pieces[rank]`, in the order of that rank's buffers.

    It is equal on every rank.
    """

    pieces: tuple[tuple[Piece, ...], ...]

    def owned_by(self, rank: int) -> tuple[Piece, ...]:
        return self.pieces[rank]

    def count(self, rank: int) -> int:
        """Returns the number of coordinates that `rank` owns."""
        return sum(p.length for p in self.pieces[rank])

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Refuses a coordinate without exactly one owner: each is noised exactly once (contract 7).

        Raises:
            PrivacyConfigError: naming the parameter that is owned twice or not at all.
        """
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
        for piece in itertools.chain.from_iterable(self.pieces):
            if piece.name not in spans:
                raise PrivacyConfigError(
                    f"shard layout: {piece.name} is owned, and is not a trained parameter"
                )
            spans[piece.name].append((piece.offset, piece.offset + piece.length))
        for name, named_spans in spans.items():
            end = 0
            for start, stop in sorted(named_spans):
                if start != end:
                    fault = "is owned twice" if start < end else "has no owner"
                    raise PrivacyConfigError(f"shard layout: {name} {fault} at {end}")
                end = stop
            if end != shapes[name].numel():
                raise PrivacyConfigError(f"shard layout: {name} has no owner from {end} on")


def even_layout(shapes: Mapping[str, torch.Size], world_size: int) -> ShardLayout:
    """Cuts the concatenation of all parameters into one run per rank, of like length.

    Lengths differ by at most one coordinate.
    """
    total = sum(shape.numel() for shape in shapes.values())
    cuts = [total * rank // world_size for rank in range(world_size + 1)]
    parameters = [Piece(name, 0, shape.numel()) for name, shape in shapes.items()]
    return ShardLayout(tuple(map(tuple, runs(parameters, cuts))))


def parts_within(
    pieces: Iterable[Piece], start: int, stop: int
) -> Iterator[tuple[int, Piece, slice, slice]]:
    """Yields the pieces that overlap [start, stop) of the concatenation of `pieces`.

    Yields:
        (number, piece, part, place): coordinates `part` of the flattened parameter are at `place`
        in a buffer of [start, stop).
    """
    position = 0
    for number, piece in enumerate(pieces):
        first = max(position, start)
        last = min(position + piece.length, stop)
        if first < last:
            offset = piece.offset - position
            part = slice(offset + first, offset + last)
            yield number, piece, part, slice(first - start, last - start)
        position += piece.length


def runs(pieces: Sequence[Piece], cuts: Sequence[int]) -> list[list[Piece]]:
    """Cuts the concatenation of `pieces`: run r is [cuts[r], cuts[r + 1]); cuts ascend."""
    all_runs = []
    for start, stop in itertools.pairwise(cuts):
        run = []
        for _, piece, part, _ in parts_within(pieces, start, stop):
            run.append(Piece(piece.name, part.start, part.stop - part.start))
        all_runs.append(run)
    return all_runs


def split(owned: Tensor, pieces: tuple[Piece, ...]) -> list[GradShard]:
    """Returns views of an owner's buffer, one per piece."""
    shards = []
    position = 0
    for piece in pieces:
        values = owned[position : position + piece.length]
        shards.append(GradShard(piece.name, piece.offset, values))
        position += piece.length
    return shards


class ShardState(NamedTuple):
    """The fp32 tensors of one owned piece, for checkpoints: master weights and moments."""

    piece: Piece
    tensors: dict[str, Tensor]


def flat_part(tensor: Tensor, start: int, length: int) -> Tensor:
    """Returns a view of `length` coordinates of a flattened tensor, from `start`."""
    return tensor.detach().view(-1)[start : start + length]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the model's repeated units, which its attribute or method `blocks` lists, if any."""
    blocks = getattr(module, "blocks", [])
    return list(blocks if isinstance(blocks, nn.ModuleList | list) else blocks())


def holds_whole_weights(engine: "Engine") -> bool:
    """Returns whether this rank's module has all weights, so that a forward needs no other rank."""
    num_held = 0
    for p in engine.module.parameters():
        if p.requires_grad and not is_dtensor(p):
            num_held += p.numel()
    return num_held == sum(shape.numel() for shape in engine.shapes.values())


class Engine(Protocol):
    """Steps a model on noised gradients, see the module docstring; all methods are collective."""

    module: nn.Module
    """Runs the forward pass; sharded engines gather weights in its module hooks."""
    shapes: dict[str, torch.Size]
    """Full shapes of the trainable parameters."""
    layout: ShardLayout
    replicated: bool
    """Whether every rank holds all coordinates; `load_state` then needs all of them."""
    compute_dtype: torch.dtype
    device: torch.device

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Hands the owned gradient shards to the optimizer and takes one step.

        Args:
            shards: in the layout's order; the engine may free each once it has taken its values.
        """
        ...

    def state(self) -> Iterable[ShardState]:
        """Yields the state of this rank's pieces, as views or copies, for a checkpoint."""
        ...

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Sets master weights and moments of the owned pieces, as after `num_steps` steps."""
        ...


def to_device(inputs: Mapping[str, Tensor], engine: Engine) -> dict[str, Tensor]:
    """Returns the model's inputs on the engine's device; floats take its compute dtype."""
    on_device = {}
    for name, tensor in inputs.items():
        dtype = engine.compute_dtype if tensor.is_floating_point() else None
        on_device[name] = tensor.to(engine.device, dtype, non_blocking=True)
    return on_device
