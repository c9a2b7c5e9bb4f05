"""Training examples of a private head, gone through in blocks, and sums over all of them whose rounding is bounded.

Every statistic of a head is a sum over N examples, of which one adds a vector (a matrix, an array) no longer than its sensitivity
s. An example that is zeroed out keeps its row, so blocks hold the same rows with it and without it. Rounding is part of the
sensitivity all the same: the example may change how other additions round. With u = 2^-53, n = ROWS_PER_BLOCK and B = ceil(N / n)
blocks, the two rounded sums differ by at most s and

* 2 u n^2 s from the example's own block. Whatever the order in which a matrix product adds n terms, an entry is off by at
  most n u times the sum of their absolute values (Higham 2002, section 4.2, terms of u^2 left out as everywhere here; they
  add less than a millionth of the bound). These sums over all entries make an array no longer than n s, with the
  example and without it. No assumption about the kernel or its threads is needed, and neither about how many rows of a class
  stand in the block. All other blocks have the same bits.
* u n B (B + 1) s from adding blocks up, one after the other in fp64: the k-th partial sum is no longer than k n s, one rounding
  moves it by at most u k n s, and the two sums' roundings differ by at most twice that, for k = 1 to B.

`rounding` is their sum: 4.9e-8 s for 1.3 million examples. `head_plan` refuses what exceeds a quarter of SENSITIVITY_SLACK r.
Rounding the sum to whole steps moves it by at most an eighth (methods.py). What is left covers the rounding of one example's own
contribution: lengths of D or L entries, factors and products are relatively exact to (D + L) u, 2e-13 for 768 features
and 1,000 classes.

What a row contributes depends on that row, on released weights and on shapes alone. (A product gives a row of scores the same
bits whatever other rows hold: BLAS has no branches on data.)
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from privacy.errors import PrivacyConfigError
from trainer.progress import track

ROWS_PER_BLOCK = 4096


@dataclass(frozen=True)
class Rows:
    """The examples. A row that is zero contributes nothing, whatever its label.

    Attributes:
        features_ND: any floating dtype; rows are clipped in fp64, a block at a time.
        labels_N: whole numbers from 0.
    """

    features_ND: np.ndarray
    labels_N: np.ndarray

    @property
    def num_examples(self) -> int:
        """Returns N, unusable examples included."""
        return len(self.labels_N)

    @property
    def width(self) -> int:
        """D."""
        return self.features_ND.shape[1]

    def data_digest(self) -> bytes:
        """SHA-256 of the features and labels."""
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

    def sum(
        self, part: Callable[[np.ndarray, np.ndarray], np.ndarray], bound: float, what: str
    ) -> np.ndarray:
        """sum over the blocks of part(x_BD, labels_B), with the rounding of the module's docstring.

        Args:
            part: a new fp64 array for a block: the sum of what its rows contribute.
            bound: the length to which rows are clipped first.
            what: it is, for progress.
        """
        blocks = list(_blocks(len(self.labels_N)))
        total: np.ndarray | None = None
        for rows in (
            track(blocks, f"{what}, blocks of examples", len(blocks)) if blocks[1:] else blocks
        ):
            added = part(clip_rows(self.features_ND[rows], bound), self.labels_N[rows])
            total = added if total is None else np.add(total, added, out=total)
        assert total is not None and total.dtype == np.float64
        return total


def _blocks(num_rows: int) -> Iterator[slice]:
    """At least one, so that the sum over no rows has a shape."""
    for start in range(0, max(num_rows, 1), ROWS_PER_BLOCK):
        yield slice(start, min(start + ROWS_PER_BLOCK, num_rows))


def rounding(num_examples: int) -> float:
    """How far rounding moves the difference of two neighbours' sums, in sensitivities; derived in the module's docstring."""
    num_blocks = -(-num_examples // ROWS_PER_BLOCK)
    return 2.0**-53 * (2 * ROWS_PER_BLOCK**2 + ROWS_PER_BLOCK * num_blocks * (num_blocks + 1))


def clip_rows(rows_ND: np.ndarray, bound: float) -> np.ndarray:
    """Rows of length at most `bound`, in float64; a row with a NaN or an infinity, or of infinite length, becomes zero."""
    rows_ND = np.asarray(rows_ND, dtype=np.float64)
    finite_N = np.isfinite(rows_ND).all(axis=1)
    rows_ND = np.where(finite_N[:, None], rows_ND, 0.0)
    # Scaled first, so that the square of a huge entry cannot overflow.
    largest_N1 = np.maximum(
        np.abs(rows_ND).max(axis=1, keepdims=True, initial=0.0), np.finfo(np.float64).tiny
    )
    with np.errstate(
        over="ignore"
    ):  # an infinite length is dealt with below, without a word about an example
        length_N1 = largest_N1 * np.linalg.norm(rows_ND / largest_N1, axis=1, keepdims=True)
    factor_N1 = bound / np.maximum(length_N1, bound)
    return np.where(np.isfinite(length_N1), rows_ND * factor_N1, 0.0)
