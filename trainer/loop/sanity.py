"""Checks around the step that compare ranks with each other (`train.sanity_checks = true`; tests run with them).

Replicas are compared by hashes of their raw bytes, which every rank takes of its own memory: a collective over the values, such
as an average or a broadcast, would hide the very difference that is looked for. Hashes of noise travel between the ranks and are
kept in memory only.
"""

import hashlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from privacy.clipping.sharded import is_dtensor
from privacy.noise import NoiseSource
from privacy.step import collectives
from privacy.step.engine import Engine, Piece
from trainer.errors import RemoteError

T = TypeVar("T")


class SanityError(RuntimeError):
    """The ranks disagree, or a part of the model or of the noise does not do what it should: a defect."""

    exit_code = 1


class SanityChecks:
    """The checks of one run. All methods are collective, and an error is raised on all ranks."""

    def __init__(self, engine: Engine, noise: NoiseSource) -> None:
        self._engine = engine
        self.noise = _WatchedNoise(noise)
        """The source to draw from, instead of the one that was given."""
        self._seen: set[bytes] = set()
        self._initial: dict[Piece, Tensor] | None = None
        self._has_stepped = False
        self._count = 0

    def before_step(self, step: int, micro_batches: Iterator[T], planned: int) -> Iterator[T]:
        """Compares planned numbers of micro-batches, before a collective could hang; returns the micro-batches, counted."""
        _same(step, "planned number of micro-batches", planned)
        self._count = 0
        self.noise.hashes.clear()
        if not self._has_stepped:
            self._initial = {s.piece: s.tensors["param"].detach().clone() for s in self._engine.state()}

        def counted() -> Iterator[T]:
            for micro_batch in micro_batches:
                self._count += 1
                yield micro_batch

        return counted()

    def after_step(self, step: int) -> None:
        """Compares what the ranks did, after the optimizer's step.

        Raises:
            SanityError: replicas or numbers of micro-batches differ, noise was drawn twice, a parameter did not move.
        """
        _same(step, "number of micro-batches", self._count)
        # No two draws are equal: neither two ranks' nor two steps' nor two parameters'.
        for rank, hashes in enumerate(collectives.gather_objects(list(self.noise.hashes))):
            for drawn in hashes:
                if drawn in self._seen:
                    _raise(step, f"rank {rank} drew noise that was drawn before, by this or another rank")
                self._seen.add(drawn)
        first: dict[tuple[str, tuple[int, ...]], tuple[int, bytes]] = {}
        for rank, digests in enumerate(collectives.gather_objects(_replica_digests(self._engine))):
            for key, digest in digests.items():
                other, expected = first.setdefault(key, (rank, digest))
                if digest != expected:
                    _raise(step, f"{key[0]} differs between the replicas of ranks {other} and {rank}")
        if self._initial is not None:
            after = {s.piece: s.tensors["param"].detach() for s in self._engine.state()}
            mine = {piece.name for piece, weights in after.items() if not torch.equal(weights, self._initial[piece])}
            moved = set[str]().union(*collectives.gather_objects(mine))
            still = [name for name in self._engine.shapes if name not in moved]
            if still:
                _raise(
                    step, f"{len(still)} trainable parameters did not move in their first step; the first is {still[0]}"
                )
            self._initial = None
        self._has_stepped = True


class _WatchedNoise:
    """A source with a hash of the first two values of each draw: equal streams start alike, whatever the lengths."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source
        self.hashes: list[bytes] = []

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return self._seen(self._source.standard_normal(count, device))

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return self._seen(self._source.rounded_normal(deviation, count, device))

    def _seen(self, draw: Tensor) -> Tensor:
        if len(draw) > 0:
            self.hashes.append(hashlib.sha256(draw[:2].cpu().numpy().tobytes()).digest()[:16])
        return draw


def _replica_digests(engine: Engine) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """SHA-256 of the raw bytes of what this rank holds, by (parameter, which shard of it); equal keys must hold equal bytes.

    Under ZeRO-3 a rank's part is nobody else's, and nothing is compared.
    """
    digests = {}
    for name, parameter in engine.module.named_parameters():
        if is_dtensor(parameter):
            coordinate = parameter.device_mesh.get_coordinate()
            assert coordinate is not None
            shard = tuple(c for c, how in zip(coordinate, parameter.placements, strict=True) if how.is_shard())
            local = parameter.to_local()
        else:
            shard, local = (), parameter
        if local.numel() > 0:
            raw = local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            digests[name, shard] = hashlib.sha256(raw).digest()
    return digests


def _same(step: int, what: str, value: int) -> None:
    values = collectives.gather_objects(value)
    if len(set(values)) > 1:
        _raise(step, f"the {what} differs between ranks: {values}")


def _raise(step: int, message: str) -> None:
    """Raises on all ranks alike; rank 0 prints the message."""
    error = f"sanity check after step {step}: {message}"
    raise SanityError(error) if collectives.rank() == 0 else RemoteError(error, SanityError.exit_code)
