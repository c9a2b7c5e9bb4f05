"""The noise of a private head: which statistics are released, with how much noise, and what all of them cost together.

Statistics with L2 sensitivities s_k, noised with standard deviations n_k, are together one Gaussian mechanism with
mu = sqrt(sum_k (s_k / n_k)^2) (Dong, Roth and Su 2019, arXiv 1905.02383, corollary 3.3), whose epsilon(delta) is exact:
nothing is lost to composition. Neighbours differ by one example whose feature is there or zeroed out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from privacy.noise import NoiseSource, add_noise
from privacy.releases import Release


@dataclass(frozen=True)
class Statistic:
    """A statistic that a method asks for: its L2 sensitivity, and its share of the budget relative to the others."""

    name: str
    sensitivity: float
    share: float = 1.0


class Piece(NamedTuple):
    """A statistic that does not fit into memory is released in `of` pieces, which share no entry; this is one of them.

    Noise is independent for every entry, so pieces that are noised one after the other are the same Gaussian mechanism.
    """

    number: int = 0
    of: int = 1


class Budget:
    """Hands out each planned statistic once, with its noise.

    Args:
        statistics: all that will be asked for.
        mu: what they cost together, 1 / noise_multiplier of the plan; infinite for no noise (comparisons that claim nothing).
        noise: where normals come from; None where, and only where, mu is infinite.
    """

    def __init__(self, statistics: Sequence[Statistic], mu: float, noise: NoiseSource | None) -> None:
        if not mu > 0 or math.isinf(mu) != (noise is None):
            raise ValueError(f"mu must be positive, and infinite where there is no noise, not {mu}")
        shares = math.sqrt(sum(s.share**2 for s in statistics))
        own_mu = {s.name: mu * s.share / shares for s in statistics}
        if len(own_mu) != len(statistics):
            raise ValueError("two statistics have one name")
        self.releases = [
            Release(name=s.name, std=s.sensitivity / own_mu[s.name], sensitivity=s.sensitivity) for s in statistics
        ]
        """What the ledger notes before any of them is drawn."""
        self._stds = {release["name"]: release["std"] for release in self.releases}
        self._left: dict[str, set[Piece]] = {}
        self._noise = noise

    def release(self, name: str, values: np.ndarray, piece: Piece = Piece()) -> np.ndarray:  # noqa: B008  (immutable)
        """The statistic with independent noise on every entry. A second request is an error: its noise is not paid for.

        Args:
            values: the whole statistic, or the entries of this piece of it.
        """
        std = self._take(name, piece)
        noised = torch.from_numpy(np.array(values, dtype=np.float64))
        if self._noise is not None:
            add_noise(noised.view(-1), std, self._noise)
        return noised.numpy()

    def release_symmetric(self, name: str, matrices_KDD: np.ndarray, piece: Piece = Piece()) -> np.ndarray:  # noqa: B008
        """Symmetric matrices with symmetric noise, their negative eigenvalues removed (both free: post-processing).

        The noise of a full matrix, symmetrised, has variance std^2 on the diagonal and std^2 / 2 off it, which is exactly the
        Gaussian noise of the Frobenius norm on symmetric matrices.
        """
        noised = self.release(name, matrices_KDD, piece)
        for matrix_DD in noised.reshape(-1, *noised.shape[-2:]):  # one by one, which bounds the memory
            values, vectors = np.linalg.eigh((matrix_DD + matrix_DD.T) / 2)
            matrix_DD[...] = (vectors * np.maximum(values, 0)) @ vectors.T
        return noised

    def require_spent(self) -> None:
        """Everything that the ledger lists was asked for; a method that forgets one has planned wrongly."""
        left = [name for name in self._stds if self._left.get(name, {Piece()})]
        if left:
            raise RuntimeError(f"planned but never released: {', '.join(left)}")

    def _take(self, name: str, piece: Piece) -> float:
        pieces = self._left.setdefault(name, {Piece(number, piece.of) for number in range(piece.of)})
        if name not in self._stds or piece not in pieces:
            raise RuntimeError(f"statistic {name} was released before, or never planned")
        pieces.remove(piece)
        return self._stds[name]
