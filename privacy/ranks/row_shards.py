"""Weights that torch's FSDP2 (`fully_shard`) holds in rows: who owns which coordinates, for the trainer's engine and for loops.

A parameter is cut along its first dimension, evenly or not. Replicas of a shard (HSDP) divide its coordinates among themselves.
Each coordinate is thus reduced to one rank, which alone draws its noise; the replicas then exchange what they noised, so that
all take the same step from the same bits (contract 7).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from . import collectives
from .engine import Piece, ShardLayout, flat_part, runs
from .fsdp import is_dtensor


def row_shard(shape: torch.Size, index: int, num_shards: int) -> tuple[int, int]:
    """(offset, length) of a shard of FSDP2: a run of rows, as `torch.chunk` cuts them."""
    rows, row = (shape[0], shape[1:].numel()) if len(shape) > 0 else (1, 1)
    offset = min(index * -(-rows // num_shards), rows)
    return offset * row, min(-(-rows // num_shards), rows - offset) * row


def row_layout(
    shapes: Mapping[str, torch.Size], num_shards: int, num_replicas: int = 1
) -> ShardLayout:
    """The pieces of each rank; shards of the first replica come first, then those of the second."""
    pieces: list[list[Piece]] = [[] for _ in range(num_shards * num_replicas)]
    for index in range(num_shards):
        shard = [
            Piece(name, *row_shard(shape, index, num_shards)) for name, shape in shapes.items()
        ]
        part = _replica_cut(sum(piece.length for piece in shard), num_replicas)
        for replica, run in enumerate(runs(shard, [part * r for r in range(num_replicas + 1)])):
            pieces[replica * num_shards + index] = run
    return ShardLayout(tuple(map(tuple, pieces)))


def _replica_cut(num_coordinates: int, num_replicas: int) -> int:
    """Coordinates of a shard that each of its replicas owns; the last replica owns fewer."""
    return -(-num_coordinates // num_replicas)


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a DTensor, as a view of their memory, and the coordinate that they begin with; else the whole tensor.

    Raises:
        RuntimeError: the rows are not those that `row_shard` says, so that sums would go to a rank that does not hold them.
    """
    if not is_dtensor(tensor):
        return tensor.detach(), 0
    (dim,) = (number for number, placement in enumerate(tensor.placements) if placement.is_shard(0))
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    offset, length = row_shard(tensor.shape, mesh.get_local_rank(dim), mesh.size(dim))
    if local.numel() != length:
        raise RuntimeError(
            f"FSDP has {local.numel()} coordinates of a shard, where {length} were expected"
        )
    return local, offset


def own_part(tensor: Tensor, piece: Piece) -> Tensor:
    """Returns the coordinates of a piece that lies in this rank's rows, or in a whole tensor: never to be written to.

    Coordinates count in the order of a contiguous tensor, whatever the strides; of another one it is a copy.
    """
    rows, start = own_rows(tensor)
    return flat_part(rows.contiguous(), piece.offset - start, piece.length)


def set_own_part(tensor: Tensor, piece: Piece, values: Tensor) -> None:
    """Writes what `own_part` returns, whatever the strides."""
    rows, start = own_rows(tensor)
    in_order = rows.contiguous()
    flat_part(in_order, piece.offset - start, piece.length).copy_(values)
    if not rows.is_contiguous():
        rows.copy_(in_order)


def in_shards(rows: Tensor, like: Tensor) -> Tensor:
    """This rank's rows, flat, as a DTensor that is sharded as another."""
    from torch.distributed.tensor import DTensor

    assert is_dtensor(like)
    local = rows.view(like.to_local().shape)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class RowShards:
    """All trainable parameters of a model in rows, on one mesh: (shards), or (replicas, shards).

    Args:
        parameters: sharded ones by name, in the model's order.
        device: where what is exchanged lies.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        first = next(iter(parameters.values()))
        assert is_dtensor(first)
        mesh = first.device_mesh
        self._group = mesh.get_group(0) if mesh.ndim == 2 else None
        self._num_replicas, self._replica = (
            (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim == 2 else (1, 0)
        )
        self._device = device
        self.layout = row_layout(
            {n: p.shape for n, p in parameters.items()}, mesh.size(-1), self._num_replicas
        )
        rows = {name: own_rows(p) for name, p in parameters.items()}
        self.starts = {name: start for name, (_, start) in rows.items()}
        self._sizes = {name: local.numel() for name, (local, _) in rows.items()}
        self._kind = rows[next(iter(rows))][0]

    def exchange(self, owned: Sequence[Tensor]) -> dict[str, Tensor]:
        """This rank's rows by name, flat, from what it and its replicas own of them; bit for bit equal on all replicas.

        Args:
            owned: values of this rank's pieces, in its layout's order.
        """
        total = sum(self._sizes.values())
        cut = _replica_cut(total, self._num_replicas)
        flat = torch.zeros(self._num_replicas, cut, dtype=self._kind.dtype, device=self._device)
        position = 0
        for values in owned:
            flat[self._replica, position : position + values.numel()] = values
            position += values.numel()
        if self._num_replicas > 1:
            collectives.all_gather_rows(flat, flat[self._replica].clone(), self._group)
        parts = flat.view(-1)[:total].to(self._kind.device).split(list(self._sizes.values()))
        return dict(zip(self._sizes, parts, strict=True))
