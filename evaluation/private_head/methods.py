"""DP-LS, DP-Newton and DP-FC: weights of a linear head, argmax_l w_l . x, from a few noised statistics.

Full-batch methods of Mehta, Krichene, Thakurta, Kurakin and Cutkosky 2022 (arXiv 2211.13403): a handful of statistics, each
noised once, all of them together one Gaussian mechanism.

Shapes: N examples, B of them in a block, D features, L classes, K of them in a chunk, W weights (L, D). Each method first says
which statistics it will ask for, with their sensitivities for one example there or zeroed out, so that the ledger has them before
any is computed; `fit` gives (L, D) weights and refuses steps that diverge, which is seen on released weights. Noise is
independent for every class, every entry and every step (the released code of the paper adds one vector to all classes, which
cancels in the argmax: no privacy at all).

Nothing is held for all examples, and no array of shape (L, D, D): classes whose matrices take CHUNK_BYTES together are gone
through at once, which means one pass over the examples for each such chunk.

Statistics with L2 sensitivities s_k, noised with standard deviations n_k, are together one Gaussian mechanism with
mu = sqrt(sum_k (s_k / n_k)^2) (Dong, Roth and Su 2019, arXiv 1905.02383, corollary 3.3), whose epsilon(delta) is exact:
nothing is lost to composition. Neighbours differ by one example whose feature is there or zeroed out.

Sums and noise are whole multiples of a step h_k, so that what is released is a function of that mechanism
(privacy/noise/source.py). Each of the d_k entries of a statistic is rounded once, over all its pieces, and
sqrt(d_k) h_k <= 2^-13 s_k, which the slack r of the plan covers.
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
"""Second moments or Hessians of several classes that are held at once, in fp64. Speed and memory only."""
LARGEST_WEIGHT = 1e100

Positive = Annotated[float, Field(ge=1e-9, le=1e9)]
"""Far from where squares of it, or their inverses, leave the range of fp64: a deviation of zero would be no noise."""
Steps = Annotated[int, Field(ge=1, le=1000)]

method_options = dataclass(frozen=True, config=ConfigDict(strict=True))


class Statistic(NamedTuple):
    """A statistic that a method asks for: its L2 sensitivity, its entries, and its share of the budget beside the others'."""

    name: str
    sensitivity: float
    size: int
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
        num_examples: of which each statistic is a sum.

    Raises:
        PrivacyConfigError: so much noise on one of them that it passes what is drawn exactly.
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
        shares = math.sqrt(sum(s.share**2 for s in statistics))
        self.releases = [
            Release(
                name=s.name, std=s.sensitivity / (mu * s.share / shares), sensitivity=s.sensitivity
            )
            for s in statistics
        ]
        """What the ledger notes before any of them is drawn."""
        self._stds = {release["name"]: release["std"] for release in self.releases}
        if len(self._stds) != len(statistics):
            raise ValueError("two statistics have one name")
        self.units: dict[str, Unit] = {}
        """The step of each statistic; none without noise."""
        for s in statistics if noise is not None else ():
            multiplier = self._stds[s.name] / s.sensitivity
            grid = Grid.of(s.size, torch.float64, max(num_examples, 1), noise_multiplier=multiplier)
            unit = grid.unit(s.sensitivity)
            assert unit is not None, "noise has a step"
            self.units[s.name] = unit
        self._num_examples = num_examples
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
        """Symmetric matrices with symmetric noise, their negative eigenvalues removed (both free: post-processing).

        The noise of a full matrix, symmetrised, has variance std^2 on the diagonal and std^2 / 2 off it, which is exactly the
        Gaussian noise of the Frobenius norm on symmetric matrices.
        """
        noised = self.release(name, matrices_KDD, piece)
        for matrix_DD in noised.reshape(
            -1, *noised.shape[-2:]
        ):  # one by one, which bounds the memory
            values, vectors = np.linalg.eigh((matrix_DD + matrix_DD.T) / 2)
            matrix_DD[...] = (vectors * np.maximum(values, 0)) @ vectors.T
        return noised

    def require_spent(self) -> None:
        """Everything that the ledger lists was asked for; a method that forgets one has planned wrongly."""
        left = [name for name in self._stds if self._left.get(name, {Piece()})]
        if left:
            raise RuntimeError(f"planned but never released: {', '.join(left)}")

    def _take(self, name: str, piece: Piece) -> float:
        pieces = self._left.setdefault(
            name, {Piece(number, piece.of) for number in range(piece.of)}
        )
        if name not in self._stds or piece not in pieces:
            raise RuntimeError(f"statistic {name} was released before, or never planned")
        pieces.remove(piece)
        return self._stds[name]


def accuracy(weights_LD: np.ndarray, features_ND: np.ndarray, labels_N: np.ndarray) -> float:
    """Share of the examples whose own class scores highest."""
    return float((np.argmax(features_ND @ weights_LD.T, axis=1) == labels_N).mean())


def _gram(x_BD: np.ndarray) -> np.ndarray:
    """sum_b x_b x_b', exactly symmetric; numpy takes the product of half the work for a matrix and its own transpose."""
    return np.asarray(x_BD.T @ x_BD)


def _second_moment(rows: Rows, max_norm: float) -> np.ndarray:
    return rows.sum(lambda x_BD, _: _gram(x_BD), max_norm, "second moment")


def _chunks(num_classes: int, width: int) -> list[range]:
    size = max(1, CHUNK_BYTES // (8 * width**2))
    return [range(start, min(start + size, num_classes)) for start in range(0, num_classes, size)]


def _solve(matrix_DD: np.ndarray, ridge: float, right_LD: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.solve(matrix_DD + ridge * np.eye(len(matrix_DD)), right_LD.T).T)


def _finite(weights_LD: np.ndarray) -> np.ndarray:
    """The weights, unless later scores could overflow, which would make NaN of an example."""
    if not np.abs(weights_LD).max() <= LARGEST_WEIGHT:
        raise PrivacyConfigError(
            "the head's weights grow without end: its steps diverge with these options; choose a larger ridge or a smaller lr"
        )
    return weights_LD


@method_options
class LeastSquares:
    """DP-LS: per class argmin_w sum_{y = l} (w.x - 1)^2 + alpha sum_all (w.x)^2 + ridge |w|^2.

    Attributes:
        max_norm: C, to which features are clipped.
        alpha: weight of "not this class".
        ridge: relative to N C^2.
        class_moments: whether each class's own second moment is released too; without it there is one statistic less to
            pay for and one matrix to factorise.
    """

    max_norm: Positive = 1.0
    alpha: Positive = 1.0
    ridge: Positive = 0.03
    class_moments: bool = False

    def statistics(self, num_classes: int, width: int) -> list[Statistic]:
        """One example is in one class, so that all classes together have the sensitivity of one."""
        c, square, size = self.max_norm, width**2, num_classes * width
        extra = (
            [Statistic("class_second_moments", c**2, size * width)] if self.class_moments else []
        )
        return [Statistic("second_moment", c**2, square), Statistic("class_sums", c, size), *extra]

    def fit(self, rows: Rows, num_classes: int, budget: Budget) -> np.ndarray:
        def class_sums(x_BD: np.ndarray, labels_B: np.ndarray) -> np.ndarray:
            sums_LD = np.zeros((num_classes, rows.width))
            np.add.at(sums_LD, labels_B, x_BD)
            return sums_LD

        moment_DD = self.alpha * budget.release_symmetric(
            "second_moment", _second_moment(rows, self.max_norm)
        )
        sums_LD = budget.release("class_sums", rows.sum(class_sums, self.max_norm, "class sums"))
        ridge = self.ridge * rows.num_examples * self.max_norm**2
        if not self.class_moments:
            return _solve(moment_DD, ridge, sums_LD)
        weights_LD, chunks = np.empty_like(sums_LD), _chunks(num_classes, rows.width)
        for number, chunk in enumerate(chunks):

            def moments(x_BD: np.ndarray, labels_B: np.ndarray, chunk: range = chunk) -> np.ndarray:
                return np.stack([_gram(x_BD[labels_B == label]) for label in chunk])

            what = f"second moments of classes {chunk.start} to {chunk.stop - 1} of {num_classes}"
            moments_KDD = rows.sum(moments, self.max_norm, what)
            moments_KDD = budget.release_symmetric(
                "class_second_moments", moments_KDD, Piece(number, len(chunks))
            )
            for label, own_DD in zip(chunk, moments_KDD, strict=True):
                weights_LD[label] = _solve(own_DD + moment_DD, ridge, sums_LD[label, None])[0]
        return weights_LD


@method_options
class Newton:
    """DP-Newton on the sum of one logistic loss per class, from zero weights.

    An example touches every class, hence the sqrt(L) in both sensitivities: |p - y| <= sqrt(L), p (1 - p) <= 1/4.
    """

    max_norm: Positive = 1.0
    num_steps: Steps = 1
    lr: Positive = 1.0
    ridge: Positive = 1e-3

    def statistics(self, num_classes: int, width: int) -> list[Statistic]:
        c, root, size = self.max_norm, num_classes**0.5, num_classes * width
        return [
            statistic
            for step in range(self.num_steps)
            for statistic in (
                Statistic(f"gradient[{step}]", c * (root if step else root / 2), size),
                Statistic(f"hessians[{step}]", root * c**2 / 4, size * width),
            )
        ]

    def fit(self, rows: Rows, num_classes: int, budget: Budget) -> np.ndarray:
        weights_LD = np.zeros((num_classes, rows.width))
        ridge = self.ridge * rows.num_examples * self.max_norm**2
        chunks = _chunks(num_classes, rows.width)
        for step in range(self.num_steps):

            def gradient(
                x_BD: np.ndarray, labels_B: np.ndarray, weights_LD: np.ndarray = weights_LD
            ) -> np.ndarray:
                residual_BL = expit(
                    x_BD @ weights_LD.T
                )  # a half for all at step 0, hence the smaller sensitivity there
                residual_BL[np.arange(len(x_BD)), labels_B] -= 1
                return np.asarray(residual_BL.T @ x_BD)

            name, step_LD = f"step {step + 1} of {self.num_steps}", np.empty_like(weights_LD)
            gradient_LD = budget.release(
                f"gradient[{step}]", rows.sum(gradient, self.max_norm, f"gradient, {name}")
            )
            for number, chunk in enumerate(chunks):
                chosen_KD = weights_LD[chunk.start : chunk.stop]

                def hessians(
                    x_BD: np.ndarray, _: np.ndarray, chosen_KD: np.ndarray = chosen_KD
                ) -> np.ndarray:
                    p_BK = expit(x_BD @ chosen_KD.T)
                    root_BK = np.sqrt(p_BK * (1 - p_BK))
                    return np.stack([_gram(root_B[:, None] * x_BD) for root_B in root_BK.T])

                what = f"Hessians of classes {chunk.start} to {chunk.stop - 1} of {num_classes}, {name}"
                hessians_KDD = budget.release_symmetric(
                    f"hessians[{step}]",
                    rows.sum(hessians, self.max_norm, what),
                    Piece(number, len(chunks)),
                )
                for label, hessian_DD in zip(chunk, hessians_KDD, strict=True):
                    step_LD[label] = _solve(hessian_DD, ridge, gradient_LD[label, None])[0]
            weights_LD = _finite(weights_LD - self.lr * step_LD)
        return weights_LD


@method_options
class FeatureCovariance:
    """DP-FC: clipped gradient steps on the softmax loss, preconditioned by one noised second moment of the features.

    Attributes:
        max_norm: C of the second moment.
        max_grad_norm: of one example's gradient, all classes together.
        ridge: relative to N C^2.
        covariance_share: the second moment's share of the budget against that of all steps together.
    """

    max_norm: Positive = 1.0
    max_grad_norm: Positive = 1.0
    num_steps: Steps = 10
    lr: Positive = 1.0
    ridge: Positive = 1e-2
    covariance_share: Positive = 1.0

    def statistics(self, num_classes: int, width: int) -> list[Statistic]:
        share, size = self.num_steps**-0.5, num_classes * width
        steps = [
            Statistic(f"gradient[{step}]", self.max_grad_norm, size, share)
            for step in range(self.num_steps)
        ]
        return [
            Statistic("second_moment", self.max_norm**2, width**2, self.covariance_share),
            *steps,
        ]

    def fit(self, rows: Rows, num_classes: int, budget: Budget) -> np.ndarray:
        moment_DD = budget.release_symmetric("second_moment", _second_moment(rows, self.max_norm))
        ridge = self.ridge * rows.num_examples * self.max_norm**2
        weights_LD = np.zeros((num_classes, rows.width))
        for step in range(self.num_steps):

            def gradient(
                x_BD: np.ndarray, labels_B: np.ndarray, weights_LD: np.ndarray = weights_LD
            ) -> np.ndarray:
                residual_BL = softmax(x_BD @ weights_LD.T, axis=1)
                residual_BL[np.arange(len(labels_B)), labels_B] -= 1
                # An example's gradient is residual (x) x, so its norm is the product of two lengths.
                norm_B = np.linalg.norm(residual_BL, axis=1) * np.linalg.norm(x_BD, axis=1)
                factor_B = self.max_grad_norm / np.maximum(norm_B, self.max_grad_norm)
                return np.asarray((residual_BL * factor_B[:, None]).T @ x_BD)

            gradient_LD = rows.sum(
                gradient, self.max_norm, f"gradient, step {step + 1} of {self.num_steps}"
            )
            gradient_LD = budget.release(f"gradient[{step}]", gradient_LD)
            weights_LD = _finite(weights_LD - self.lr * _solve(moment_DD, ridge, gradient_LD))
        return weights_LD


HeadMethod = LeastSquares | Newton | FeatureCovariance
METHODS: Mapping[str, type[HeadMethod]] = {
    "dp-ls": LeastSquares,
    "dp-newton": Newton,
    "dp-fc": FeatureCovariance,
}
"""The methods by the names that the command uses."""
