"""Weights that torch's FSDP2 (`fully_shard`) holds in rows: their layout for trainer and loops.

A parameter is cut along its first dimension, evenly or not. Replicas of a shard (HSDP) divide its
coordinates among themselves. Each coordinate is thus reduced to one rank, which alone draws its
noise; the replicas then exchange the noised values, so that all take the same step from the same
bits (contract 7).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from . import collectives
from .engine import Piece, ShardLayout, flat_part, runs
from .fsdp import is_dtensor


def row_shard(shape: torch.Size, index: int, num_shards: int) -> tuple[int, int]:
    """Returns (offset, length) of a shard of FSDP2: a run of rows, as `torch.chunk` cuts them."""
    # A scalar is one row of one coordinate.
    num_rows = shape[0] if len(shape) > 0 else 1
    row_length = shape[1:].numel()
    rows_per_shard = -(-num_rows // num_shards)
    first_row = min(index * rows_per_shard, num_rows)
    shard_rows = min(rows_per_shard, num_rows - first_row)
    return first_row * row_length, shard_rows * row_length


def row_layout(
    shapes: Mapping[str, torch.Size], num_shards: int, num_replicas: int = 1
) -> ShardLayout:
    """Returns the pieces of each rank; all shards of the first replica come before the second's."""
    pieces: list[list[Piece]] = [[] for _ in range(num_shards * num_replicas)]
    for index in range(num_shards):
        shard = [
            Piece(name, *row_shard(shape, index, num_shards)) for name, shape in shapes.items()
        ]
        part = _replica_cut(sum(piece.length for piece in shard), num_replicas)
        cuts = [part * replica for replica in range(num_replicas + 1)]
        for replica, run in enumerate(runs(shard, cuts)):
            pieces[replica * num_shards + index] = run
    return ShardLayout(tuple(map(tuple, pieces)))


def _replica_cut(num_coordinates: int, num_replicas: int) -> int:
    """Returns how many coordinates of a shard a replica owns; the last replica owns fewer."""
    return -(-num_coordinates // num_replicas)


def own_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Returns this rank's rows of a DTensor, as a view of their memory, and their first coordinate.

    Any other tensor is returned whole.

    Raises:
        RuntimeError: the rows contradict `row_shard`, so sums would go to a rank without them.
    """
    if not is_dtensor(tensor):
        return tensor.detach(), 0
    (dim,) = (number for number, placement in enumerate(tensor.placements) if placement.is_shard(0))
    mesh = tensor.device_mesh
    rows = tensor.to_local().detach()
    offset, length = row_shard(tensor.shape, mesh.get_local_rank(dim), mesh.size(dim))
    if rows.numel() != length:
        raise RuntimeError(
            f"FSDP has {rows.numel()} coordinates of a shard, where {length} were expected"
        )
    return rows, offset


def own_part(tensor: Tensor, piece: Piece) -> Tensor:
    """Returns the coordinates of a piece of this rank's rows or of a whole tensor, for reading.

    Coordinates count in the order of a contiguous tensor, whatever the strides; those of a tensor
    that is not contiguous are a copy.
    """
    rows, start = own_rows(tensor)
    return flat_part(rows.contiguous(), piece.offset - start, piece.length)


def set_own_part(tensor: Tensor, piece: Piece, values: Tensor) -> None:
    """Writes the coordinates that `own_part` returns, whatever the strides."""
    rows, start = own_rows(tensor)
    contiguous_rows = rows.contiguous()
    flat_part(contiguous_rows, piece.offset - start, piece.length).copy_(values)
    if not rows.is_contiguous():
        rows.copy_(contiguous_rows)


def in_shards(rows: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's rows, which come flat, as a DTensor that is sharded as `like`."""
    from torch.distributed.tensor import DTensor

    assert is_dtensor(like)
    return DTensor.from_local(
        rows.view(like.to_local().shape),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


class RowShards:
    """Lays out trainable parameters in rows, on a mesh (shards) or (replicas, shards).

    Args:
        parameters: sharded ones by name, in the model's order.
        device: of the buffers that replicas exchange.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        first_parameter = next(iter(parameters.values()))
        assert is_dtensor(first_parameter)
        mesh = first_parameter.device_mesh
        has_replicas = mesh.ndim == 2
        self._group = mesh.get_group(0) if has_replicas else None
        self._num_replicas = mesh.size(0) if has_replicas else 1
        self._replica = mesh.get_local_rank(0) if has_replicas else 0
        self._device = device
        shapes = {name: p.shape for name, p in parameters.items()}
        self.layout = row_layout(shapes, mesh.size(-1), self._num_replicas)
        self.starts: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        for name, p in parameters.items():
            rows, start = own_rows(p)
            self.starts[name] = start
            self._sizes[name] = rows.numel()
        self._first_rows, _ = own_rows(first_parameter)

    def exchange(self, owned: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns this rank's rows by name, flat, joined from its part and those of its replicas.

        They are equal on all replicas, bit for bit.

        Args:
            owned: values of this rank's pieces, in its layout's order.
        """
        total = sum(self._sizes.values())
        cut = _replica_cut(total, self._num_replicas)
        dtype = self._first_rows.dtype
        flat = torch.zeros(self._num_replicas, cut, dtype=dtype, device=self._device)
        position = 0
        for values in owned:
            flat[self._replica, position : position + values.numel()] = values
            position += values.numel()
        if self._num_replicas > 1:
            collectives.all_gather_rows(flat, flat[self._replica].clone(), self._group)
        coordinates = flat.view(-1)[:total].to(self._first_rows.device)
        parts = coordinates.split(list(self._sizes.values()))
        return dict(zip(self._sizes, parts, strict=True))
