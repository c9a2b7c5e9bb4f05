"""The noise of a private head: which statistics are released, with how much noise, and what all of them cost together.

Statistics with L2 sensitivities s_k, noised with standard deviations n_k, are together one Gaussian mechanism with
mu = sqrt(sum_k (s_k / n_k)^2) (Dong, Roth and Su 2019, arXiv 1905.02383, corollary 3.3), whose epsilon(delta) is exact:
nothing is lost to composition. Neighbours differ by one example whose feature is there or zeroed out.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from privacy.noise import NoiseSource, add_noise
from privacy.releases import Release

ROUNDING_SLACK = 1e-6
"""Rounding may add this much to a sensitivity; charged in the accounting. Of the statistics it takes half; see `summed`."""
ROWS_PER_BLOCK = 4096
MAX_EXAMPLES = 1 << 22
"""The most examples whose statistics keep within half of ROUNDING_SLACK."""


@dataclass(frozen=True)
class Statistic:
    """A statistic that a method asks for: its L2 sensitivity, and its share of the budget relative to the others."""

    name: str
    sensitivity: float
    share: float = 1.0


class Budget:
    """Hands out each planned statistic once, with its noise.

    Args:
        statistics: all that will be asked for.
        mu: what they cost together, 1 / noise_multiplier of the plan; infinite for no noise (comparisons that claim nothing).
        noise: where normals come from.
    """

    def __init__(self, statistics: Sequence[Statistic], mu: float, noise: NoiseSource) -> None:
        if not mu > 0:
            raise ValueError(f"mu must be positive, not {mu}")
        shares = math.sqrt(sum(s.share**2 for s in statistics))
        own_mu = {s.name: mu * s.share / shares for s in statistics}
        if len(own_mu) != len(statistics):
            raise ValueError("two statistics have one name")
        self._releases = [
            Release(name=s.name, std=s.sensitivity / own_mu[s.name], sensitivity=s.sensitivity) for s in statistics
        ]
        self._left = {release["name"]: release["std"] for release in self._releases}
        self._noise = noise

    @property
    def releases(self) -> list[Release]:
        """What the ledger notes before any of them is drawn."""
        return list(self._releases)

    def release(self, name: str, values: np.ndarray) -> np.ndarray:
        """The statistic with independent noise on every entry. A second request is an error: its noise is not paid for."""
        std = self._take(name)
        noised = torch.from_numpy(np.array(values, dtype=np.float64))
        add_noise(noised.view(-1), std, self._noise)
        return noised.numpy()

    def release_symmetric(self, name: str, matrices_KDD: np.ndarray) -> np.ndarray:
        """Symmetric matrices with symmetric noise, their negative eigenvalues removed (both free: post-processing).

        The noise of a full matrix, symmetrised, has variance std^2 on the diagonal and std^2 / 2 off it, which is exactly the
        Gaussian noise of the Frobenius norm on symmetric matrices.
        """
        noised = self.release(name, matrices_KDD)
        noised = (noised + noised.swapaxes(-1, -2)) / 2
        values, vectors = np.linalg.eigh(noised)
        return np.asarray((vectors * np.maximum(values, 0)[..., None, :]) @ vectors.swapaxes(-1, -2))

    def require_spent(self) -> None:
        """Everything that the ledger lists was asked for; a method that forgets one has planned wrongly."""
        if self._left:
            raise RuntimeError(f"planned but never released: {', '.join(self._left)}")

    def _take(self, name: str) -> float:
        if name not in self._left:
            raise RuntimeError(f"statistic {name} was released before, or never planned")
        return self._left.pop(name)


def clip_rows(rows_ND: np.ndarray, bound: float) -> np.ndarray:
    """Rows of length at most `bound`, in float64; a row with a NaN or an infinity, or of infinite length, becomes zero."""
    rows_ND = np.asarray(rows_ND, dtype=np.float64)
    finite_N = np.isfinite(rows_ND).all(axis=1)
    rows_ND = np.where(finite_N[:, None], rows_ND, 0.0)
    # Scaled first, so that the square of a huge entry cannot overflow.
    largest_N1 = np.maximum(np.abs(rows_ND).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    length_N1 = largest_N1 * np.linalg.norm(rows_ND / largest_N1, axis=1, keepdims=True)
    factor_N1 = np.minimum(1.0, bound / np.maximum(length_N1, np.finfo(np.float64).tiny))
    return np.where(np.isfinite(length_N1), rows_ND * factor_N1, 0.0)


def summed(part: Callable[[slice], np.ndarray], num_rows: int) -> np.ndarray:
    """sum over blocks of rows of part(rows), in float64: a statistic of all examples, of bounded memory and bounded rounding.

    One example changes how every later addition rounds: by up to 2^-53 of what has been added up until then, with it and
    without it (`privacy/clipping/accumulators.py` derives that). Over N examples of sensitivity s, in whatever order, that is
    up to 2^-53 N^2 s, 2e-4 s for a million. In blocks of n it is 2^-53 (n^2 + N^2 / n) s: 5e-7 s for MAX_EXAMPLES.
    """
    starts = range(0, max(num_rows, 1), ROWS_PER_BLOCK)
    parts = (part(slice(start, min(start + ROWS_PER_BLOCK, num_rows))) for start in starts)
    return np.asarray(functools.reduce(np.add, parts))
