"""DP-LS, DP-Newton and DP-FC: weights of a linear head, argmax_l w_l . x, from noised statistics.

The full-batch methods of Mehta, Krichene, Thakurta, Kurakin and Cutkosky 2022 (arXiv 2211.13403).
Shapes: N examples, B of them in a block, D features, L classes, K of them in a chunk.
No array holds a vector for all examples, and none has the shape (L, D, D): each chunk of classes
takes one pass over the examples. `Budget` says why the statistics are one Gaussian mechanism.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from scipy.special import expit, softmax

from evaluation.private_head.rows import Rows
from privacy.errors import PrivacyConfigError
from privacy.noise.rounded_normal import deviation_in_units
from privacy.noise.source import NoiseSource, add_noise
from privacy.plan.releases import Release
from privacy.sums.grid import Grid, Unit
from privacy.sums.totals import real_numbers, whole_numbers

CHUNK_BYTES = 1 << 27
"""The size in fp64 of the second moments or Hessians of a chunk of classes. Affects speed and
memory only."""
LARGEST_WEIGHT = 1e100

Positive = Annotated[float, Field(ge=1e-9, le=1e9)]
"""Keeps squares and inverses far inside the range of fp64: a deviation of zero would be no
noise."""
Steps = Annotated[int, Field(ge=1, le=1000)]

method_options = dataclass(frozen=True, config=ConfigDict(strict=True))


class Statistic(NamedTuple):
    """A statistic that a method plans to ask for.

    Attributes:
        sensitivity: the L2 distance that one example, there or zeroed out, moves it by at most.
        size: number of entries.
        share: of the budget, beside the shares of the other statistics.
    """

    name: str
    sensitivity: float
    size: int
    share: float = 1.0


class Piece(NamedTuple):
    """A piece of a statistic that does not fit into memory: number `number` of `num_pieces`.

    Pieces share no entry. Noise is independent for every entry, so pieces that are noised one after
    the other are the same Gaussian mechanism.
    """

    number: int = 0
    num_pieces: int = 1


class Budget:
    """Hands out each planned statistic once, with its noise.

    Statistics with L2 sensitivities s_k, noised with standard deviations n_k, are together one
    Gaussian mechanism with mu = sqrt(sum_k (s_k / n_k)^2) (Dong, Roth and Su 2019, arXiv
    1905.02383, corollary 3.3), whose epsilon(delta) is exact: composition loses nothing. Neighbours
    differ by one example whose feature is there or zeroed out.

    Noise is independent for every class, every entry and every step. The paper's released code adds
    one vector to all classes, which cancels in the argmax and protects nothing.

    Sums and noise are whole multiples of a step h_k, so that a release is a function of that
    mechanism (privacy/noise/source.py). Each of the d_k entries of a statistic is rounded once,
    over all its pieces, and sqrt(d_k) h_k <= 2^-13 s_k, which the slack r of the plan covers.

    Args:
        statistics: all that `fit` will ask for; known before any is computed, so that the ledger
            has them first.
        mu: of all statistics together, 1 / noise_multiplier of the plan; infinite for no noise, in
            comparisons that claim nothing.
        noise: the source of normals; None if, and only if, mu is infinite.
        num_examples: the number of examples in each sum.

    Attributes:
        releases: the ledger's intent, written before any noise is drawn.
        units: the step of each statistic; empty without noise.

    Raises:
        PrivacyConfigError: a statistic needs more noise than can be drawn exactly.
    """

    def __init__(
        self,
        statistics: Sequence[Statistic],
        mu: float,
        noise: NoiseSource | None,
        num_examples: int,
    ) -> None:
        if not mu > 0 or math.isinf(mu) != (noise is None):
            raise ValueError(f"mu must be positive, and infinite where there is no noise, not {mu}")
        norm_of_shares = math.sqrt(sum(statistic.share**2 for statistic in statistics))
        self.releases: list[Release] = []
        for name, sensitivity, _, share in statistics:
            std = sensitivity / (mu * share / norm_of_shares)
            self.releases.append(Release(name=name, std=std, sensitivity=sensitivity))
        self._stds = {release["name"]: release["std"] for release in self.releases}
        if len(self._stds) != len(statistics):
            raise ValueError("two statistics have one name")
        self.units: dict[str, Unit] = {}
        for name, sensitivity, size, _ in statistics if noise is not None else ():
            multiplier = self._stds[name] / sensitivity
            grid = Grid.of(size, torch.float64, max(num_examples, 1), noise_multiplier=multiplier)
            unit = grid.unit(sensitivity)
            assert unit is not None, "noise has a step"
            self.units[name] = unit
        self._num_examples = num_examples
        self._unreleased: dict[str, set[Piece]] = {}
        self._noise = noise

    def release(
        self,
        name: str,
        values: np.ndarray,
        piece: Piece = Piece(),  # noqa: B008  (a tuple is immutable)
    ) -> np.ndarray:
        """Returns the statistic with independent noise on every entry.

        Args:
            values: the entries of the statistic, or of this piece of it.

        Raises:
            RuntimeError: a second request, whose noise the plan does not pay for.
        """
        std = self._take(name, piece)
        noised = torch.from_numpy(np.array(values, dtype=np.float64))
        if self._noise is not None:
            unit = self.units[name]
            units = whole_numbers(unit, noised, self._num_examples)
            add_noise(units, deviation_in_units(std, unit.exponent), self._noise)
            noised = real_numbers(units, unit.exponent)
        return noised.numpy()

    def release_symmetric(
        self,
        name: str,
        matrices_KDD: np.ndarray,
        piece: Piece = Piece(),  # noqa: B008
    ) -> np.ndarray:
        """Returns symmetric matrices with symmetric noise and without negative eigenvalues.

        Symmetrising and projecting are post-processing. The symmetrised noise of a full matrix has
        variance std^2 on the diagonal and std^2 / 2 off it: exactly the Gaussian noise of the
        Frobenius norm on symmetric matrices.
        """
        noised = self.release(name, matrices_KDD, piece)
        # Factorises one matrix at a time, which bounds the memory.
        for matrix_DD in noised.reshape(-1, *noised.shape[-2:]):
            eigenvalues_D, eigenvectors_DD = np.linalg.eigh((matrix_DD + matrix_DD.T) / 2)
            projected_DD = (eigenvectors_DD * np.maximum(eigenvalues_D, 0)) @ eigenvectors_DD.T
            matrix_DD[...] = projected_DD
        return noised

    def require_spent(self) -> None:
        """Refuses a method that did not ask for every statistic of its plan.

        Raises:
            RuntimeError: the ledger lists a statistic that was never released.
        """
        unreleased = [name for name in self._stds if self._unreleased.get(name, {Piece()})]
        if unreleased:
            raise RuntimeError(f"planned but never released: {', '.join(unreleased)}")

    def _take(self, name: str, piece: Piece) -> float:
        """Marks a piece as released, and returns the standard deviation of its noise."""
        if name not in self._unreleased:
            all_pieces = {Piece(number, piece.num_pieces) for number in range(piece.num_pieces)}
            self._unreleased[name] = all_pieces
        pieces = self._unreleased[name]
        if name not in self._stds or piece not in pieces:
            raise RuntimeError(f"statistic {name} was released before, or never planned")
        pieces.remove(piece)
        return self._stds[name]


def accuracy(weights_LD: np.ndarray, features_ND: np.ndarray, labels_N: np.ndarray) -> float:
    """Returns the share of examples whose label scores highest."""
    predicted_N = np.argmax(features_ND @ weights_LD.T, axis=1)
    return float((predicted_N == labels_N).mean())


def _gram(x_BD: np.ndarray) -> np.ndarray:
    """Returns sum_b x_b x_b', exactly symmetric.

    numpy halves the work of a product of a matrix with its own transpose.
    """
    return np.asarray(x_BD.T @ x_BD)


def _second_moment(rows: Rows, max_norm: float) -> np.ndarray:
    return rows.sum(lambda x_BD, _: _gram(x_BD), max_norm, "second moment")


def _chunks(num_classes: int, width: int) -> list[range]:
    size = max(1, CHUNK_BYTES // (8 * width**2))
    return [range(start, min(start + size, num_classes)) for start in range(0, num_classes, size)]


def _solve(matrix_DD: np.ndarray, ridge: float, right_LD: np.ndarray) -> np.ndarray:
    regular_DD = matrix_DD + ridge * np.eye(len(matrix_DD))
    return np.asarray(np.linalg.solve(regular_DD, right_LD.T).T)


def _require_finite(weights_LD: np.ndarray) -> np.ndarray:
    """Returns the weights; refuses weights so large that later scores could overflow.

    An overflow would make NaN of an example. Weights follow from releases, so this refusal reveals
    nothing else.
    """
    if not np.abs(weights_LD).max() <= LARGEST_WEIGHT:
        raise PrivacyConfigError(
            "the head's weights grow without end: its steps diverge with these options; "
            "choose a larger ridge or a smaller lr"
        )
    return weights_LD


@method_options
class LeastSquares:
    """DP-LS: per class argmin_w sum_{y = l} (w.x - 1)^2 + alpha sum_all (w.x)^2 + ridge |w|^2.

    Attributes:
        max_norm: C, the length to which features are clipped.
        alpha: weight of "not this class".
        ridge: relative to N C^2.
        class_moments: releases each class's second moment too; without it there is one statistic
            less to pay for and one matrix to factorise.
    """

    max_norm: Positive = 1.0
    alpha: Positive = 1.0
    ridge: Positive = 0.03
    class_moments: bool = False

    def statistics(self, num_classes: int, width: int) -> list[Statistic]:
        """Returns the planned statistics.

        An example is in one class, so sums over all classes have the sensitivity of one class.
        """
        bound = self.max_norm
        planned = [
            Statistic("second_moment", bound**2, width**2),
            Statistic("class_sums", bound, num_classes * width),
        ]
        if self.class_moments:
            planned.append(Statistic("class_second_moments", bound**2, num_classes * width * width))
        return planned

    def fit(self, rows: Rows, num_classes: int, budget: Budget) -> np.ndarray:
        """Returns weights (L, D)."""

        def class_sums(x_BD: np.ndarray, labels_B: np.ndarray) -> np.ndarray:
            sums_LD = np.zeros((num_classes, rows.width))
            np.add.at(sums_LD, labels_B, x_BD)
            return sums_LD

        moment_DD = _second_moment(rows, self.max_norm)
        weighted_DD = self.alpha * budget.release_symmetric("second_moment", moment_DD)
        sums_LD = budget.release("class_sums", rows.sum(class_sums, self.max_norm, "class sums"))
        ridge = self.ridge * rows.num_examples * self.max_norm**2
        if not self.class_moments:
            return _solve(weighted_DD, ridge, sums_LD)
        weights_LD = np.empty_like(sums_LD)
        chunks = _chunks(num_classes, rows.width)
        for number, chunk in enumerate(chunks):

            def moments(x_BD: np.ndarray, labels_B: np.ndarray, chunk: range = chunk) -> np.ndarray:
                return np.stack([_gram(x_BD[labels_B == label]) for label in chunk])

            classes = f"classes {chunk.start} to {chunk.stop - 1} of {num_classes}"
            moments_KDD = rows.sum(moments, self.max_norm, f"second moments of {classes}")
            piece = Piece(number, len(chunks))
            moments_KDD = budget.release_symmetric("class_second_moments", moments_KDD, piece)
            for label, class_DD in zip(chunk, moments_KDD, strict=True):
                matrix_DD = class_DD + weighted_DD
                weights_LD[label] = _solve(matrix_DD, ridge, sums_LD[label, None])[0]
        return weights_LD


@method_options
class Newton:
    """DP-Newton on the sum of one logistic loss per class, from zero weights.

    An example touches every class, hence the sqrt(L) in both sensitivities: |p - y| <= sqrt(L),
    p (1 - p) <= 1/4.

    Attributes:
        max_norm: C, the length to which features are clipped.
        ridge: relative to N C^2.
    """

    max_norm: Positive = 1.0
    num_steps: Steps = 1
    lr: Positive = 1.0
    ridge: Positive = 1e-3

    def statistics(self, num_classes: int, width: int) -> list[Statistic]:
        """Returns the planned statistics: a gradient and Hessians for each step."""
        bound = self.max_norm
        root = num_classes**0.5
        size = num_classes * width
        planned = []
        for step in range(self.num_steps):
            # At step 0 the weights are zero and every p is 1/2.
            gradient_bound = bound * (root if step else root / 2)
            hessian_bound = root * bound**2 / 4
            planned.append(Statistic(f"gradient[{step}]", gradient_bound, size))
            planned.append(Statistic(f"hessians[{step}]", hessian_bound, size * width))
        return planned

    def fit(self, rows: Rows, num_classes: int, budget: Budget) -> np.ndarray:
        """Returns weights (L, D).

        Raises:
            PrivacyConfigError: the steps diverge, which released weights show.
        """
        weights_LD = np.zeros((num_classes, rows.width))
        ridge = self.ridge * rows.num_examples * self.max_norm**2
        chunks = _chunks(num_classes, rows.width)
        for step in range(self.num_steps):

            def gradient(
                x_BD: np.ndarray, labels_B: np.ndarray, weights_LD: np.ndarray = weights_LD
            ) -> np.ndarray:
                residual_BL = expit(x_BD @ weights_LD.T)
                residual_BL[np.arange(len(x_BD)), labels_B] -= 1
                return np.asarray(residual_BL.T @ x_BD)

            step_title = f"step {step + 1} of {self.num_steps}"
            step_LD = np.empty_like(weights_LD)
            gradient_LD = rows.sum(gradient, self.max_norm, f"gradient, {step_title}")
            gradient_LD = budget.release(f"gradient[{step}]", gradient_LD)
            for number, chunk in enumerate(chunks):
                chunk_KD = weights_LD[chunk.start : chunk.stop]

                def hessians(
                    x_BD: np.ndarray, _: np.ndarray, chunk_KD: np.ndarray = chunk_KD
                ) -> np.ndarray:
                    p_BK = expit(x_BD @ chunk_KD.T)
                    root_BK = np.sqrt(p_BK * (1 - p_BK))
                    return np.stack([_gram(root_B[:, None] * x_BD) for root_B in root_BK.T])

                classes = f"classes {chunk.start} to {chunk.stop - 1} of {num_classes}"
                title = f"Hessians of {classes}, {step_title}"
                hessians_KDD = rows.sum(hessians, self.max_norm, title)
                piece = Piece(number, len(chunks))
                hessians_KDD = budget.release_symmetric(f"hessians[{step}]", hessians_KDD, piece)
                for label, hessian_DD in zip(chunk, hessians_KDD, strict=True):
                    step_LD[label] = _solve(hessian_DD, ridge, gradient_LD[label, None])[0]
            weights_LD = _require_finite(weights_LD - self.lr * step_LD)
        return weights_LD


@method_options
class FeatureCovariance:
    """DP-FC: clipped gradient steps on the softmax loss, preconditioned by one second moment.

    Attributes:
        max_norm: C, the length to which features are clipped for the second moment.
        max_grad_norm: bound of one example's gradient, all classes together.
        ridge: relative to N C^2.
        covariance_share: the second moment's share of the budget against that of all steps
            together.
    """

    max_norm: Positive = 1.0
    max_grad_norm: Positive = 1.0
    num_steps: Steps = 10
    lr: Positive = 1.0
    ridge: Positive = 1e-2
    covariance_share: Positive = 1.0

    def statistics(self, num_classes: int, width: int) -> list[Statistic]:
        """Returns the planned statistics: the second moment, then a gradient for each step."""
        step_share = self.num_steps**-0.5
        size = num_classes * width
        planned = [Statistic("second_moment", self.max_norm**2, width**2, self.covariance_share)]
        for step in range(self.num_steps):
            planned.append(Statistic(f"gradient[{step}]", self.max_grad_norm, size, step_share))
        return planned

    def fit(self, rows: Rows, num_classes: int, budget: Budget) -> np.ndarray:
        """Returns weights (L, D).

        Raises:
            PrivacyConfigError: the steps diverge, which released weights show.
        """
        moment_DD = budget.release_symmetric("second_moment", _second_moment(rows, self.max_norm))
        ridge = self.ridge * rows.num_examples * self.max_norm**2
        weights_LD = np.zeros((num_classes, rows.width))
        for step in range(self.num_steps):

            def gradient(
                x_BD: np.ndarray, labels_B: np.ndarray, weights_LD: np.ndarray = weights_LD
            ) -> np.ndarray:
                residual_BL = softmax(x_BD @ weights_LD.T, axis=1)
                residual_BL[np.arange(len(labels_B)), labels_B] -= 1
                # An example's gradient is residual (x) x: its norm is the product of two lengths.
                norm_B = np.linalg.norm(residual_BL, axis=1) * np.linalg.norm(x_BD, axis=1)
                factor_B = self.max_grad_norm / np.maximum(norm_B, self.max_grad_norm)
                return np.asarray((residual_BL * factor_B[:, None]).T @ x_BD)

            title = f"gradient, step {step + 1} of {self.num_steps}"
            gradient_LD = rows.sum(gradient, self.max_norm, title)
            gradient_LD = budget.release(f"gradient[{step}]", gradient_LD)
            step_LD = _solve(moment_DD, ridge, gradient_LD)
            weights_LD = _require_finite(weights_LD - self.lr * step_LD)
        return weights_LD


HeadMethod = LeastSquares | Newton | FeatureCovariance
METHODS: Mapping[str, type[HeadMethod]] = {
    "dp-ls": LeastSquares,
    "dp-newton": Newton,
    "dp-fc": FeatureCovariance,
}
"""Maps the names that the command uses to the methods."""
