"""DP-LS and DP-FC: weights of a linear head, argmax_l w_l . x, from a few noised statistics.

Full-batch methods of Mehta, Krichene, Thakurta, Kurakin and Cutkosky 2022 (arXiv 2211.13403): a handful of statistics, each
noised once, all of them together one Gaussian mechanism. Their DP-Newton was measured here and left out: every example touches
every class, and it was behind DP-LS at each epsilon (docs/evaluation.md).

Shapes: N examples, B of them in a block, D features, L classes, W weights (L, D). Each method first says
which statistics it will ask for, with their sensitivities for one example there or zeroed out, so that the ledger has them before
any is computed; `fit` gives (L, D) weights and refuses steps that diverge, which is seen on released weights. Noise is
independent for every class, every entry and every step (the released code of the paper adds one vector to all classes, which
cancels in the argmax: no privacy at all).

Nothing is held for all examples, and no array of shape (L, D, D).

Statistics with L2 sensitivities s_k, noised with standard deviations n_k, are together one Gaussian mechanism with
mu = sqrt(sum_k (s_k / n_k)^2) (Dong, Roth and Su 2019, arXiv 1905.02383, corollary 3.3), whose epsilon(delta) is exact:
nothing is lost to composition. Neighbours differ by one example whose feature is there or zeroed out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from scipy.special import softmax

from evaluation.private_head.rows import Rows
from privacy.errors import PrivacyConfigError
from privacy.noise import NoiseSource, add_noise
from privacy.releases import Release

LARGEST_WEIGHT = 1e100

Positive = Annotated[float, Field(ge=1e-9, le=1e9)]
"""Far from where squares of it, or their inverses, leave the range of fp64: a deviation of zero would be no noise."""
Steps = Annotated[int, Field(ge=1, le=1000)]

method_options = dataclass(frozen=True, config=ConfigDict(strict=True))


class Statistic(NamedTuple):
    """A statistic that a method asks for: its L2 sensitivity, and its share of the budget relative to the others."""

    name: str
    sensitivity: float
    share: float = 1.0


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
        self.releases = [
            Release(name=s.name, std=s.sensitivity / (mu * s.share / shares), sensitivity=s.sensitivity)
            for s in statistics
        ]
        """What the ledger notes before any of them is drawn."""
        self._stds = {release["name"]: release["std"] for release in self.releases}
        if len(self._stds) != len(statistics):
            raise ValueError("two statistics have one name")
        self._noise = noise

    def release(self, name: str, values: np.ndarray) -> np.ndarray:
        """The statistic with independent noise on every entry. A second request is an error: its noise is not paid for."""
        std = self._take(name)
        noised = torch.from_numpy(np.array(values, dtype=np.float64))
        if self._noise is not None:
            add_noise(noised.view(-1), std, self._noise)
        return noised.numpy()

    def release_symmetric(self, name: str, matrix_DD: np.ndarray) -> np.ndarray:
        """A symmetric matrix with symmetric noise, its negative eigenvalues removed (both free: post-processing).

        The noise of a full matrix, symmetrised, has variance std^2 on the diagonal and std^2 / 2 off it, which is exactly the
        Gaussian noise of the Frobenius norm on symmetric matrices.
        """
        noised_DD = self.release(name, matrix_DD)
        values, vectors = np.linalg.eigh((noised_DD + noised_DD.T) / 2)
        return np.asarray((vectors * np.maximum(values, 0)) @ vectors.T)

    def require_spent(self) -> None:
        """Everything that the ledger lists was asked for; a method that forgets one has planned wrongly."""
        if self._stds:
            raise RuntimeError(f"planned but never released: {', '.join(self._stds)}")

    def _take(self, name: str) -> float:
        if name not in self._stds:
            raise RuntimeError(f"statistic {name} was released before, or never planned")
        return self._stds.pop(name)


def accuracy(weights_LD: np.ndarray, features_ND: np.ndarray, labels_N: np.ndarray) -> float:
    """Share of the examples whose own class scores highest."""
    return float((np.argmax(features_ND @ weights_LD.T, axis=1) == labels_N).mean())


def _second_moment(rows: Rows, max_norm: float) -> np.ndarray:
    """sum x x', exactly symmetric; numpy takes the product of half the work for a matrix and its own transpose."""
    return rows.sum(lambda x_BD, _: np.asarray(x_BD.T @ x_BD), max_norm, "second moment")


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
    """

    max_norm: Positive = 1.0
    alpha: Positive = 1.0
    ridge: Positive = 0.03

    def statistics(self, num_classes: int) -> list[Statistic]:
        """One example is in one class, so that all classes together have the sensitivity of one."""
        return [Statistic("second_moment", self.max_norm**2), Statistic("class_sums", self.max_norm)]

    def fit(self, rows: Rows, num_classes: int, budget: Budget) -> np.ndarray:
        def class_sums(x_BD: np.ndarray, labels_B: np.ndarray) -> np.ndarray:
            sums_LD = np.zeros((num_classes, rows.width))
            np.add.at(sums_LD, labels_B, x_BD)
            return sums_LD

        moment_DD = self.alpha * budget.release_symmetric("second_moment", _second_moment(rows, self.max_norm))
        sums_LD = budget.release("class_sums", rows.sum(class_sums, self.max_norm, "class sums"))
        ridge = self.ridge * rows.num_examples * self.max_norm**2
        return _solve(moment_DD, ridge, sums_LD)


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

    def statistics(self, num_classes: int) -> list[Statistic]:
        share = self.num_steps**-0.5
        steps = [Statistic(f"gradient[{step}]", self.max_grad_norm, share) for step in range(self.num_steps)]
        return [Statistic("second_moment", self.max_norm**2, self.covariance_share), *steps]

    def fit(self, rows: Rows, num_classes: int, budget: Budget) -> np.ndarray:
        moment_DD = budget.release_symmetric("second_moment", _second_moment(rows, self.max_norm))
        ridge = self.ridge * rows.num_examples * self.max_norm**2
        weights_LD = np.zeros((num_classes, rows.width))
        for step in range(self.num_steps):

            def gradient(x_BD: np.ndarray, labels_B: np.ndarray, weights_LD: np.ndarray = weights_LD) -> np.ndarray:
                residual_BL = softmax(x_BD @ weights_LD.T, axis=1)
                residual_BL[np.arange(len(labels_B)), labels_B] -= 1
                # An example's gradient is residual (x) x, so its norm is the product of two lengths.
                norm_B = np.linalg.norm(residual_BL, axis=1) * np.linalg.norm(x_BD, axis=1)
                factor_B = self.max_grad_norm / np.maximum(norm_B, self.max_grad_norm)
                return np.asarray((residual_BL * factor_B[:, None]).T @ x_BD)

            gradient_LD = rows.sum(gradient, self.max_norm, f"gradient, step {step + 1} of {self.num_steps}")
            gradient_LD = budget.release(f"gradient[{step}]", gradient_LD)
            weights_LD = _finite(weights_LD - self.lr * _solve(moment_DD, ridge, gradient_LD))
        return weights_LD


HeadMethod = LeastSquares | FeatureCovariance
METHODS: Mapping[str, type[HeadMethod]] = {"dp-ls": LeastSquares, "dp-fc": FeatureCovariance}
"""The methods by the names that the command uses."""
