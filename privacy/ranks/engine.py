"""What every engine promises to the training loop, and how coordinates are dealt out to ranks.

An engine shards parameters, master weights and optimizer states in its own way and steps its own optimizer. The gradient path
is ours on every engine: clipped sums are reduced, in whole numbers, to the owner of each coordinate, by default once per logical
batch (`privacy/sums/reduction.py`); that rank adds noise and divides; the engine takes the result.
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
    """`length` consecutive coordinates of a flattened parameter, from `offset`."""

    name: str
    offset: int
    length: int


class GradShard(NamedTuple):
    """This rank's part of one parameter's reduced sum, one value per coordinate of the piece.

    int64 in units of the sums' step until the noise is added, then fp64; all along fp64 where there is no noise.
    """

    name: str
    offset: int
    values: Tensor


@dataclass(frozen=True)
class ShardLayout:
    """Who owns which coordinates: `pieces[rank]` in the order of that rank's buffers. Equal on every rank."""

    pieces: tuple[tuple[Piece, ...], ...]

    def owned_by(self, rank: int) -> tuple[Piece, ...]:
        return self.pieces[rank]

    def count(self, rank: int) -> int:
        """Number of coordinates that `rank` owns."""
        return sum(p.length for p in self.pieces[rank])

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Requires that every coordinate has exactly one owner, so that it is noised exactly once (contract 7).

        Raises:
            PrivacyConfigError: naming the parameter that is owned twice or not at all.
        """
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
        for piece in (p for owned in self.pieces for p in owned):
            if piece.name not in spans:
                raise PrivacyConfigError(
                    f"shard layout: {piece.name} is owned, and is no parameter that is trained"
                )
            spans[piece.name].append((piece.offset, piece.offset + piece.length))
        for name, named_spans in spans.items():
            end = 0
            for start, stop in sorted(named_spans):
                if start != end:
                    raise PrivacyConfigError(
                        f"shard layout: {name} is owned {'twice' if start < end else 'by nobody'} at {end}"
                    )
                end = stop
            if end != shapes[name].numel():
                raise PrivacyConfigError(f"shard layout: {name} is owned by nobody from {end} on")


def even_layout(shapes: Mapping[str, torch.Size], world_size: int) -> ShardLayout:
    """The concatenation of all parameters cut into `world_size` runs that differ by at most one coordinate."""
    total = sum(s.numel() for s in shapes.values())
    cuts = [total * r // world_size for r in range(world_size + 1)]
    whole = [Piece(name, 0, shape.numel()) for name, shape in shapes.items()]
    return ShardLayout(tuple(map(tuple, runs(whole, cuts))))


def parts_within(
    pieces: Iterable[Piece], start: int, stop: int
) -> Iterator[tuple[int, Piece, slice, slice]]:
    """What of the concatenation of `pieces` lies in start..stop: (number, piece, part of the parameter, place behind start)."""
    position = 0
    for number, piece in enumerate(pieces):
        a, b = max(position, start), min(position + piece.length, stop)
        if a < b:
            offset = piece.offset - position
            yield number, piece, slice(offset + a, offset + b), slice(a - start, b - start)
        position += piece.length


def runs(pieces: Sequence[Piece], cuts: Sequence[int]) -> list[list[Piece]]:
    """The concatenation of `pieces`, cut at ascending positions: run r goes from cuts[r] to cuts[r + 1]."""
    return [
        [
            Piece(piece.name, some.start, some.stop - some.start)
            for _, piece, some, _ in parts_within(pieces, low, high)
        ]
        for low, high in itertools.pairwise(cuts)
    ]


def split(owned: Tensor, pieces: tuple[Piece, ...]) -> list[GradShard]:
    """Views of an owner's buffer, one per piece."""
    shards, position = [], 0
    for piece in pieces:
        shards.append(
            GradShard(piece.name, piece.offset, owned[position : position + piece.length])
        )
        position += piece.length
    return shards


class ShardState(NamedTuple):
    """fp32 tensors of one owned piece, for checkpoints: the master weights and the optimizer's moments."""

    piece: Piece
    tensors: dict[str, Tensor]


def flat_part(tensor: Tensor, start: int, length: int) -> Tensor:
    """A view of `length` coordinates of a flattened tensor, from `start`."""
    return tensor.detach().view(-1)[start : start + length]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The model's repeated units, which its attribute or method `blocks` lists; empty where it has none."""
    listed = getattr(module, "blocks", [])
    return list(listed if isinstance(listed, nn.ModuleList | list) else listed())


def holds_whole_weights(engine: "Engine") -> bool:
    """Whether this rank's module has all weights, so that a forward pass needs no other rank."""
    whole = [p for p in engine.module.parameters() if p.requires_grad and not is_dtensor(p)]
    return sum(p.numel() for p in whole) == sum(shape.numel() for shape in engine.shapes.values())


class Engine(Protocol):
    """See the module docstring. All methods are collective: every rank calls them in the same order."""

    module: nn.Module
    """Forward goes through it; sharded engines gather weights in its module hooks."""
    shapes: dict[str, torch.Size]
    """Full shapes of the trainable parameters."""
    layout: ShardLayout
    replicated: bool
    """Whether every rank holds everything; then `load_state` wants all coordinates, not only the owned ones."""
    compute_dtype: torch.dtype
    device: torch.device

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Hands the owned gradient shards to the optimizer and takes one step.

        Args:
            shards: in the layout's order; the engine may free each once it has taken its values.
        """
        ...

    def state(self) -> Iterable[ShardState]:
        """What this rank owns, as views or copies, for an engine-neutral checkpoint."""
        ...

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Sets master weights and moments of the owned pieces, after `num_steps` optimizer steps."""
        ...


def to_device(inputs: Mapping[str, Tensor], engine: Engine) -> dict[str, Tensor]:
    """The model's inputs on the engine's device; floating point ones in its compute dtype."""
    return {
        name: value.to(
            engine.device,
            engine.compute_dtype if value.is_floating_point() else None,
            non_blocking=True,
        )
        for name, value in inputs.items()
    }
