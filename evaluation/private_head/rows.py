"""Training examples of a private head, gone through in blocks, and sums over all of them whose rounding is bounded.

Every statistic of a head is a sum over N examples, of which one adds a vector (a matrix, an array) no longer than its sensitivity
s. An example that is zeroed out keeps its row, so blocks and ranks hold the same rows with it and without it. Rounding is part of
the sensitivity all the same: the example may change how other additions round. With u = 2^-53, n = ROWS_PER_BLOCK and W ranks,
each of which has at most B = ceil(ceil(N / W) / n) blocks, the two rounded sums differ by at most s and

* 2 u n^2 s from the example's own block. Whatever the order in which a matrix product adds n terms, an entry is off by at
  most n u times the sum of their absolute values (Higham 2002, section 4.2, terms of u^2 left out as everywhere here; they
  add less than a millionth of the bound). These sums over all entries make an array no longer than n s, with the
  example and without it. No assumption about the kernel or its threads is needed, and neither about how many rows of a class
  stand in the block. All other blocks have the same bits.
* u n B (B + 1) s from adding blocks up, one after the other in fp64: the k-th partial sum is no longer than k n s, one rounding
  moves it by at most u k n s, and the two sums' roundings differ by at most twice that, for k = 1 to B.
* 2 u W N s from adding ranks up, in whatever order: the example's rank takes part in fewer than W additions, of at most N s.

`rounding` is their sum: 4.9e-8 s for 1.3 million examples on one rank, and 3.0e-7 s on 1,024. `head_plan` refuses what
exceeds half of ROUNDING_SLACK. The other half covers the rounding of one example's own contribution: lengths of D or L
entries, factors and products are relatively exact to (D + L) u, 2e-13 for 768 features and 1,000 classes.

What a row contributes depends on that row, on released weights and on shapes alone. (A product gives a row of scores the same
bits whatever other rows hold: BLAS has no branches on data.)
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from privacy.errors import PrivacyConfigError
from trainer.progress import track

ROUNDING_SLACK = 1e-6
"""Rounding may add this much to a sensitivity; charged in the accounting."""
ROWS_PER_BLOCK = 4096


class Matrix(Protocol):
    """Features (N, D) of which runs of rows can be read: an array, a memory-mapped file, or what computes them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Rows:
    """The examples of this rank. A row that is zero contributes nothing, whatever its label.

    Attributes:
        features_ND: any floating dtype; rows are clipped in fp64, a block at a time.
        labels_N: whole numbers from 0.
        num_examples: of all ranks together.
        num_ranks: how many ranks hold the examples; with more than one, `sum` is collective.
        digest: SHA-256 of the examples of all ranks, where they were dealt; else None.
    """

    features_ND: Matrix
    labels_N: np.ndarray
    num_examples: int
    num_ranks: int = 1
    digest: bytes | None = None

    @classmethod
    def of(cls, features_ND: Matrix, labels_N: np.ndarray) -> "Rows":
        """All examples, on one rank.

        Raises:
            PrivacyConfigError: the shapes do not fit together, or labels are no integers from 0.
        """
        if len(features_ND.shape) != 2 or labels_N.shape != (features_ND.shape[0],):
            raise PrivacyConfigError(
                f"features must be (N, D) and labels (N,), not {features_ND.shape} and {labels_N.shape}"
            )
        if not np.issubdtype(labels_N.dtype, np.integer):
            raise PrivacyConfigError(f"labels must be integers, not {labels_N.dtype}")
        return cls(features_ND, labels_N, len(labels_N))

    @classmethod
    def dealt(cls, whole: "Rows | None") -> "Rows":
        """Rank 0's examples over all ranks, each with a run of rows. Collective.

        Args:
            whole: from `of` on rank 0, None elsewhere.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        facts = [None if whole is None else (whole.num_examples, whole.features_ND[:0], whole.data_digest())]
        dist.broadcast_object_list(facts, 0)
        assert facts[0] is not None
        num_examples, no_rows, digest = facts[0]
        runs = [slice(num_examples * r // num_ranks, num_examples * (r + 1) // num_ranks) for r in range(num_ranks)]
        own = runs[rank]
        if whole is None:
            features_ND = np.empty((own.stop - own.start, no_rows.shape[1]), dtype=no_rows.dtype)
            labels_N = np.empty(own.stop - own.start, dtype=np.int64)
            for start in range(0, len(labels_N), ROWS_PER_BLOCK):
                part = slice(start, start + ROWS_PER_BLOCK)
                dist.recv(torch.from_numpy(features_ND[part]), 0)
                dist.recv(torch.from_numpy(labels_N[part]), 0)
            return cls(features_ND, labels_N, num_examples, num_ranks, digest)
        for r, run in enumerate(runs[1:], start=1):
            for start in range(run.start, run.stop, ROWS_PER_BLOCK):
                part = slice(start, min(start + ROWS_PER_BLOCK, run.stop))
                dist.send(torch.from_numpy(np.array(whole.features_ND[part])), r)
                dist.send(torch.from_numpy(np.array(whole.labels_N[part], dtype=np.int64)), r)
        return cls(whole.features_ND[own], whole.labels_N[own], num_examples, num_ranks, digest)

    @property
    def width(self) -> int:
        """D."""
        return self.features_ND.shape[1]

    def data_digest(self) -> bytes:
        """SHA-256 of the features and labels of all ranks."""
        if self.digest is not None:
            return self.digest
        sha = hashlib.sha256()
        for rows in _blocks(len(self.labels_N)):
            sha.update(np.ascontiguousarray(self.features_ND[rows]).tobytes())
        sha.update(np.ascontiguousarray(self.labels_N).tobytes())
        return sha.digest()

    def require_labels_below(self, num_classes: int) -> None:
        """
        Raises:
            PrivacyConfigError: a label is out of range.
        """
        if len(self.labels_N) and not 0 <= self.labels_N.min() <= self.labels_N.max() < num_classes:
            raise PrivacyConfigError(f"labels must be between 0 and {num_classes - 1}")

    def sum(self, part: Callable[[np.ndarray, np.ndarray], np.ndarray], bound: float, what: str) -> np.ndarray:
        """sum over the blocks of all ranks of part(x_BD, labels_B), with the rounding of the module's docstring.

        Args:
            part: a new fp64 array for a block: the sum of what its rows contribute.
            bound: the length to which rows are clipped first.
            what: it is, for progress.
        """
        blocks = list(_blocks(len(self.labels_N)))
        shows = self.num_ranks == 1 or dist.get_rank() == 0
        total: np.ndarray | None = None
        for rows in track(blocks, f"{what}, blocks of examples", len(blocks), shows=shows) if blocks[1:] else blocks:
            added = part(clip_rows(self.features_ND[rows], bound), self.labels_N[rows])
            total = added if total is None else np.add(total, added, out=total)
        assert total is not None and total.dtype == np.float64
        if self.num_ranks > 1:
            dist.all_reduce(torch.from_numpy(total))
        return total


def _blocks(num_rows: int) -> Iterator[slice]:
    """At least one, so that the sum over a rank without rows has a shape."""
    for start in range(0, max(num_rows, 1), ROWS_PER_BLOCK):
        yield slice(start, min(start + ROWS_PER_BLOCK, num_rows))


def rounding(num_examples: int, num_ranks: int = 1) -> float:
    """How far rounding moves the difference of two neighbours' sums, in sensitivities; derived in the module's docstring."""
    own = -(-num_examples // num_ranks)
    num_blocks = -(-own // ROWS_PER_BLOCK)
    across_ranks = 2 * num_ranks * num_examples if num_ranks > 1 else 0
    return 2.0**-53 * (2 * ROWS_PER_BLOCK**2 + ROWS_PER_BLOCK * num_blocks * (num_blocks + 1) + across_ranks)


def clip_rows(rows_ND: np.ndarray, bound: float) -> np.ndarray:
    """Rows of length at most `bound`, in float64; a row with a NaN or an infinity, or of infinite length, becomes zero."""
    rows_ND = np.asarray(rows_ND, dtype=np.float64)
    finite_N = np.isfinite(rows_ND).all(axis=1)
    rows_ND = np.where(finite_N[:, None], rows_ND, 0.0)
    # Scaled first, so that the square of a huge entry cannot overflow.
    largest_N1 = np.maximum(np.abs(rows_ND).max(axis=1, keepdims=True, initial=0.0), np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):  # an infinite length is dealt with below, without a word about an example
        length_N1 = largest_N1 * np.linalg.norm(rows_ND / largest_N1, axis=1, keepdims=True)
    factor_N1 = bound / np.maximum(length_N1, bound)
    return np.where(np.isfinite(length_N1), rows_ND * factor_N1, 0.0)
