"""Training examples of a private head in blocks, and sums over them whose rounding is bounded.

A statistic of a head is a sum over N examples, each of which adds an array no longer than the
statistic's sensitivity. Rounding counts towards the sensitivity: an example may change how other
additions round. `rounding` bounds and derives by how much.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from privacy.errors import PrivacyConfigError
from trainer.progress import track

ROWS_PER_BLOCK = 4096


@dataclass(frozen=True)
class Rows:
    """Holds the examples. A row of zeros contributes nothing, whatever its label.

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
        """Returns D."""
        return self.features_ND.shape[1]

    def data_digest(self) -> bytes:
        """Returns the SHA-256 of features and labels."""
        sha = hashlib.sha256()
        for block in _blocks(len(self.labels_N)):
            sha.update(np.ascontiguousarray(self.features_ND[block]).tobytes())
        sha.update(np.ascontiguousarray(self.labels_N).tobytes())
        return sha.digest()

    def require_labels_below(self, num_classes: int) -> None:
        """Refuses labels out of range.

        Raises:
            PrivacyConfigError: a label is negative, or not below `num_classes`.
        """
        if not len(self.labels_N):
            return
        if not 0 <= self.labels_N.min() <= self.labels_N.max() < num_classes:
            raise PrivacyConfigError(f"labels must be between 0 and {num_classes - 1}")

    def sum(
        self,
        contribution: Callable[[np.ndarray, np.ndarray], np.ndarray],
        max_norm: float,
        title: str,
    ) -> np.ndarray:
        """Returns the sum of contribution(x_BD, labels_B) over the blocks.

        Args:
            contribution: returns a new fp64 array for a block, the sum over its rows.
            max_norm: the length to which rows are clipped first.
            title: of the statistic, for the progress bar.
        """
        blocks = list(_blocks(len(self.labels_N)))
        progress: Iterable[slice] = blocks
        if len(blocks) > 1:
            progress = track(blocks, f"{title}, blocks of examples", len(blocks))
        total: np.ndarray | None = None
        for block in progress:
            x_BD = clip_rows(self.features_ND[block], max_norm)
            addend = contribution(x_BD, self.labels_N[block])
            # One block after the other: `rounding` bounds this order.
            total = addend if total is None else np.add(total, addend, out=total)
        assert total is not None and total.dtype == np.float64
        return total


def _blocks(num_rows: int) -> Iterator[slice]:
    """Yields slices of ROWS_PER_BLOCK rows; at least one, so that an empty sum has a shape."""
    for start in range(0, max(num_rows, 1), ROWS_PER_BLOCK):
        yield slice(start, min(start + ROWS_PER_BLOCK, num_rows))


def rounding(num_examples: int) -> float:
    """Returns how far rounding moves the difference of two neighbours' sums, in sensitivities.

    An example that is zeroed out keeps its row, so blocks hold the same rows with it and without
    it. With sensitivity s, u = 2^-53, n = ROWS_PER_BLOCK and B = ceil(N / n) blocks, the two
    rounded sums differ by at most s and

    * 2 u n^2 s from the example's own block. A matrix product adds n terms to an entry in any
      order, so the entry is off by at most n u times the sum of their absolute values (Higham 2002,
      section 4.2; terms of u^2 are left out here and below, and add less than a millionth of the
      bound). Those sums of absolute values make an array no longer than n s, with the example and
      without it. This assumes nothing about the kernel, its threads or the number of rows of a
      class in the block. All other blocks have the same bits.
    * u n B (B + 1) s from adding blocks one after the other in fp64. The k-th partial sum is no
      longer than k n s, so one rounding moves it by at most u k n s, and the roundings of the two
      sums differ by at most twice that, for k = 1 to B.

    For 1.3 million examples they add up to 4.9e-8 s. `head_plan` refuses more than a quarter of
    SENSITIVITY_SLACK r. Rounding the sum to whole steps moves it by at most an eighth of r
    (methods.py). The rest of r covers the rounding of one example's own contribution: lengths of D
    or L entries, factors and products are relatively exact to (D + L) u, 2e-13 for 768 features and
    1,000 classes.

    A row's contribution depends on that row, on released weights and on shapes alone. A product
    gives a row of scores the same bits whatever other rows hold, because BLAS has no branches on
    data.
    """
    num_blocks = -(-num_examples // ROWS_PER_BLOCK)
    inside_block = 2 * ROWS_PER_BLOCK**2
    over_blocks = ROWS_PER_BLOCK * num_blocks * (num_blocks + 1)
    return 2.0**-53 * (inside_block + over_blocks)


def clip_rows(rows_ND: np.ndarray, max_norm: float) -> np.ndarray:
    """Returns the rows in float64, clipped to length `max_norm`.

    A row with a NaN or an infinity, or of infinite length, becomes zero.
    """
    rows_ND = np.asarray(rows_ND, dtype=np.float64)
    is_finite_N = np.isfinite(rows_ND).all(axis=1)
    rows_ND = np.where(is_finite_N[:, None], rows_ND, 0.0)
    # Scales rows first, so that the square of a huge entry cannot overflow.
    largest_N1 = np.abs(rows_ND).max(axis=1, keepdims=True, initial=0.0)
    scale_N1 = np.maximum(largest_N1, np.finfo(np.float64).tiny)
    # The last line handles an infinite length. A warning of numpy would reveal an example.
    with np.errstate(over="ignore"):
        length_N1 = scale_N1 * np.linalg.norm(rows_ND / scale_N1, axis=1, keepdims=True)
    factor_N1 = max_norm / np.maximum(length_N1, max_norm)
    return np.where(np.isfinite(length_N1), rows_ND * factor_N1, 0.0)
