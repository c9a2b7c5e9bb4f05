"""DP-LS, DP-Newton, DP-FC and one-step DP-GD: weights of a linear head, argmax_l w_l . x, from a few noised statistics.

Shapes: N examples, D features, L classes, W weights (L, D). Each method first says which statistics it will ask for, with
their sensitivities, so that the ledger has them before any is computed. Noise is independent for every class, every entry and
every step (the released code of the paper adds one vector to all classes, which cancels in the argmax: no privacy at all).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import expit

from evaluation.private_head.budget import Budget, Statistic, clip_rows, summed


class HeadMethod(Protocol):
    """A way to train a head."""

    def statistics(self, num_classes: int) -> list[Statistic]:
        """What `fit` will release, with sensitivities for one example there or zeroed out."""
        ...

    def fit(self, features_ND: np.ndarray, labels_N: np.ndarray, num_classes: int, budget: Budget) -> np.ndarray:
        """(L, D) weights. Labels are ints below `num_classes`; a row of zeros contributes nothing."""
        ...


def accuracy(weights_LD: np.ndarray, features_ND: np.ndarray, labels_N: np.ndarray) -> float:
    """Share of the examples whose own class scores highest."""
    return float((np.argmax(features_ND @ weights_LD.T, axis=1) == labels_N).mean())


def _sum_of_products(left_NK: np.ndarray, right_ND: np.ndarray) -> np.ndarray:
    return summed(lambda rows: left_NK[rows].T @ right_ND[rows], len(right_ND))


def _solve(matrix_DD: np.ndarray, ridge: float, right_LD: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.solve(matrix_DD + ridge * np.eye(len(matrix_DD)), right_LD.T).T)


@dataclass(frozen=True)
class LeastSquares:
    """DP-LS: per class argmin_w sum_{y = l} (w.x - 1)^2 + alpha sum_all (w.x)^2 + ridge |w|^2.

    Attributes:
        max_norm: C, to which features are clipped.
        alpha: weight of "not this class".
        ridge: relative to N C^2.
        class_moments: whether each class's own second moment is released too; without it there is one statistic less to
            pay for and one matrix to factorise.
    """

    max_norm: float = 1.0
    alpha: float = 1.0
    ridge: float = 0.03
    class_moments: bool = False

    def statistics(self, num_classes: int) -> list[Statistic]:
        """One example is in one class, so that all classes together have the sensitivity of one."""
        c = self.max_norm
        extra = [Statistic("class_second_moments", c**2)] if self.class_moments else []
        return [Statistic("second_moment", c**2), Statistic("class_sums", c), *extra]

    def fit(self, features_ND: np.ndarray, labels_N: np.ndarray, num_classes: int, budget: Budget) -> np.ndarray:
        x_ND = clip_rows(features_ND, self.max_norm)
        by_class = [x_ND[labels_N == label] for label in range(num_classes)]
        moment_DD = self.alpha * budget.release_symmetric("second_moment", _sum_of_products(x_ND, x_ND))
        class_sums = [summed(lambda rows, x=x: x[rows].sum(axis=0), len(x)) for x in by_class]  # type: ignore[misc]
        sums_LD = budget.release("class_sums", np.stack(class_sums))
        ridge = self.ridge * len(x_ND) * self.max_norm**2
        if not self.class_moments:
            return _solve(moment_DD, ridge, sums_LD)
        moments_LDD = np.stack([_sum_of_products(x, x) for x in by_class])
        moments_LDD = budget.release_symmetric("class_second_moments", moments_LDD) + moment_DD
        return np.stack([_solve(m, ridge, b[None])[0] for m, b in zip(moments_LDD, sums_LD, strict=True)])


@dataclass(frozen=True)
class Newton:
    """DP-Newton on the sum of one logistic loss per class, from zero weights.

    An example touches every class, hence the sqrt(L) in both sensitivities: |p - y| <= sqrt(L), p (1 - p) <= 1/4.
    """

    max_norm: float = 1.0
    num_steps: int = 1
    lr: float = 1.0
    ridge: float = 1e-3

    def statistics(self, num_classes: int) -> list[Statistic]:
        c, root = self.max_norm, num_classes**0.5
        return [
            statistic
            for step in range(self.num_steps)
            for statistic in (
                Statistic(f"gradient[{step}]", c * (root if step else root / 2)),
                Statistic(f"hessians[{step}]", root * c**2 / 4),
            )
        ]

    def fit(self, features_ND: np.ndarray, labels_N: np.ndarray, num_classes: int, budget: Budget) -> np.ndarray:
        x_ND = clip_rows(features_ND, self.max_norm)
        target_NL = np.eye(num_classes)[labels_N]
        weights_LD = np.zeros((num_classes, x_ND.shape[1]))
        ridge = self.ridge * len(x_ND) * self.max_norm**2
        for step in range(self.num_steps):
            p_NL = expit(x_ND @ weights_LD.T)  # a half for all at step 0, hence the smaller sensitivity there
            residual_NL, curvature_NL = p_NL - target_NL, p_NL * (1 - p_NL)
            gradient_LD = budget.release(f"gradient[{step}]", _sum_of_products(residual_NL, x_ND))
            hessians = [_sum_of_products(curvature_NL[:, label, None] * x_ND, x_ND) for label in range(num_classes)]
            hessian_LDD = budget.release_symmetric(f"hessians[{step}]", np.stack(hessians))
            step_LD = [_solve(h, ridge, g[None])[0] for h, g in zip(hessian_LDD, gradient_LD, strict=True)]
            weights_LD = weights_LD - self.lr * np.stack(step_LD)
        return weights_LD


@dataclass(frozen=True)
class FeatureCovariance:
    """DP-FC: clipped gradient steps on the softmax loss, preconditioned by one noised second moment of the features.

    Attributes:
        max_norm: C of the second moment.
        max_grad_norm: of one example's gradient, all classes together.
        ridge: relative to N C^2.
        covariance_share: the second moment's share of the budget against that of all steps together.
    """

    max_norm: float = 1.0
    max_grad_norm: float = 1.0
    num_steps: int = 10
    lr: float = 1.0
    ridge: float = 1e-2
    covariance_share: float = 1.0

    def statistics(self, num_classes: int) -> list[Statistic]:
        share = self.num_steps**-0.5
        steps = [Statistic(f"gradient[{step}]", self.max_grad_norm, share) for step in range(self.num_steps)]
        return [Statistic("second_moment", self.max_norm**2, self.covariance_share), *steps]

    def fit(self, features_ND: np.ndarray, labels_N: np.ndarray, num_classes: int, budget: Budget) -> np.ndarray:
        x_ND = clip_rows(features_ND, self.max_norm)
        moment_DD = budget.release_symmetric("second_moment", _sum_of_products(x_ND, x_ND))
        ridge = self.ridge * len(x_ND) * self.max_norm**2
        weights_LD = np.zeros((num_classes, x_ND.shape[1]))
        for step in range(self.num_steps):
            gradient_LD = _clipped_gradient(weights_LD, x_ND, labels_N, self.max_grad_norm)
            weights_LD = weights_LD - self.lr * _solve(
                moment_DD, ridge, budget.release(f"gradient[{step}]", gradient_LD)
            )
        return weights_LD


@dataclass(frozen=True)
class OneStep:
    """DP-GD: one full-batch gradient step from zero weights, which is a noised class mean (arXiv 2205.02973)."""

    max_grad_norm: float = 1.0

    def statistics(self, num_classes: int) -> list[Statistic]:
        return [Statistic("gradient", self.max_grad_norm)]

    def fit(self, features_ND: np.ndarray, labels_N: np.ndarray, num_classes: int, budget: Budget) -> np.ndarray:
        x_ND = clip_rows(features_ND, np.inf)
        weights_LD = np.zeros((num_classes, x_ND.shape[1]))
        gradient_LD = _clipped_gradient(weights_LD, x_ND, labels_N, self.max_grad_norm)
        return -budget.release("gradient", gradient_LD)


def _clipped_gradient(weights_LD: np.ndarray, x_ND: np.ndarray, labels_N: np.ndarray, bound: float) -> np.ndarray:
    """sum_i clip(g_i), g_i = (softmax(W x_i) - y_i) (x) x_i, whose norm is the product of two lengths."""

    def of_rows(rows: slice) -> np.ndarray:
        x, labels = x_ND[rows], labels_N[rows]
        scores_NL = x @ weights_LD.T
        p_NL = np.exp(scores_NL - scores_NL.max(axis=1, keepdims=True))
        residual_NL = p_NL / p_NL.sum(axis=1, keepdims=True)
        residual_NL[np.arange(len(x)), labels] -= 1
        length_N = np.linalg.norm(residual_NL, axis=1) * np.linalg.norm(x, axis=1)
        factor_N = np.minimum(1.0, bound / np.maximum(length_N, np.finfo(np.float64).tiny))
        return np.asarray((residual_NL * factor_N[:, None]).T @ x)

    return summed(of_rows, len(x_ND))


METHODS: Mapping[str, type[LeastSquares | Newton | FeatureCovariance | OneStep]] = {
    "dp-ls": LeastSquares,
    "dp-newton": Newton,
    "dp-fc": FeatureCovariance,
    "dp-gd": OneStep,
}
"""The methods by the names that the command uses."""
