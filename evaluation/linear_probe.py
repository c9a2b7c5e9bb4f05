"""Linear probes of frozen features, without privacy: LARS as in the papers, and regression.

Shapes: N examples, D features, L classes. Both probes standardise features by the training set's
mean and variance, as BatchNorm without affine parameters does at test time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.errors import DataError
from evaluation.command_options import LinearProbeOptions
from evaluation.features import compute, device_of, load_inputs
from evaluation.results import Results
from evaluation.sources import Augmentation
from trainer.errors import ConfigError
from trainer.progress import track

Rows = tuple[np.ndarray, np.ndarray]
"""Features (N, D) and labels (N,)."""

RIDGES = tuple(10.0**exponent for exponent in range(0, -7, -1))
"""Large to small: each fit starts from the weights of the fit before."""
CONVERGED_SLOPE = 1e-4
"""The largest entry of a gradient at which a regression counts as converged, in nats per standard
deviation of a feature."""
MOMENTUM = 0.9
LARS_DEFICIT = 0.02
"""A LARS head whose test accuracy is this far below that of regression has hardly converged."""


@dataclass(frozen=True)
class LinearHead:
    """A linear head: the scores of x are (x - mean) / scale @ weight' + bias; weight (L, D).

    Attributes:
        steepest: the largest entry of the objective's gradient where L-BFGS stopped; zero for heads
            of other origin.
    """

    mean_D: Tensor
    scale_D: Tensor
    weight_LD: Tensor
    bias_L: Tensor
    steepest: float = 0.0

    @property
    def converged(self) -> bool:
        """Returns whether L-BFGS stopped where its objective is flat."""
        return self.steepest <= CONVERGED_SLOPE

    def scores(self, x_ND: np.ndarray | Tensor) -> np.ndarray:
        """Returns scores (N, L)."""
        x = torch.as_tensor(x_ND, dtype=self.weight_LD.dtype, device=self.weight_LD.device)
        standard_ND = (x - self.mean_D) / self.scale_D
        return (standard_ND @ self.weight_LD.T + self.bias_L).cpu().numpy()

    def accuracy(self, x_ND: np.ndarray | Tensor, y_N: np.ndarray) -> float:
        """Returns the share of examples whose label scores highest."""
        return float((self.scores(x_ND).argmax(axis=1) == y_N).mean())


class LarsResult(NamedTuple):
    """The result of a probe by LARS.

    Attributes:
        accuracies: on the test set after every epoch.
        batch_size, peak_lr: after the batch was capped at the data.
        head: after the last epoch.
    """

    accuracies: tuple[float, ...]
    batch_size: int
    peak_lr: float
    head: LinearHead


def lars_probe(
    train: Rows,
    test: Rows,
    num_classes: int,
    *,
    epochs: int = 90,
    batch_size: int = 16384,
    base_lr: float = 0.1,
    warmup_epochs: int = 10,
    trust_coefficient: float = 1e-3,
    seed: int = 0,
    device: torch.device | str = "cpu",
    train_of: Callable[[int], Rows] | None = None,
) -> LarsResult:
    """Trains a head by the LARS protocol; the defaults are the papers' values.

    The protocol (He et al. 2021, https://arxiv.org/abs/2111.06377, appendix A.1, and the released
    code; used by ViP, Yu et al. 2023, https://arxiv.org/abs/2306.08842): BatchNorm without affine,
    weights from N(0, 0.01^2), rate 0.1 * batch / 256 with batch 16,384, 90 epochs, 10 of them
    warm-up, then a cosine, no weight decay. As in the released optimizer, the ratio of norms is
    inside the momentum and the rate outside: m <- 0.9 m + trust |w| / |g| g, w <- w - rate m; the
    bias has no ratio. The papers report the best epoch on the test set; callers get all epochs.

    Args:
        train, test: (features (N, D), labels (N,)).
        batch_size: capped at the number of examples.
        train_of: returns features and labels of an epoch, for new crops and flips of `train`'s
            images; None uses `train`, of centred images, in every epoch.

    Raises:
        DataError: fewer than two training examples.
    """
    x_ND, y_N = to_tensors(train, device)
    x_test_ND, y_test_N = to_tensors(test, device)
    if len(x_ND) < 2:
        raise DataError("a probe with BatchNorm needs at least two training examples")
    batch_size = min(batch_size, len(x_ND))
    per_epoch = len(x_ND) // batch_size
    peak_lr = base_lr * batch_size / 256
    warmup = min(warmup_epochs, epochs - 1)
    norm = nn.BatchNorm1d(x_ND.shape[1], affine=False, eps=1e-6)
    linear = nn.Linear(x_ND.shape[1], num_classes)
    nn.init.normal_(linear.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(linear.bias)
    head = nn.Sequential(norm, linear).to(device)
    momentum = {p: torch.zeros_like(p, requires_grad=False) for p in linear.parameters()}
    generator = torch.Generator().manual_seed(seed)
    accuracies = []
    for epoch in track(range(epochs), "epochs of the linear probe", epochs):
        if train_of is not None:
            x_ND, y_N = to_tensors(train_of(epoch), device)
        head.train()
        order = torch.randperm(len(x_ND), generator=generator).to(device)
        for step, rows in enumerate(order[: per_epoch * batch_size].split(batch_size)):
            F.cross_entropy(head(x_ND[rows]), y_N[rows]).backward()
            # The rate is zero at the first step, as in the released code.
            progress = epoch + step / per_epoch
            cosine = 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (epochs - warmup)))
            rate = peak_lr * (progress / warmup if progress < warmup else cosine)
            with torch.no_grad():
                for p, m in momentum.items():
                    assert p.grad is not None
                    ratio = torch.ones(())
                    if p.dim() > 1:
                        ratio = trust_coefficient * p.norm() / p.grad.norm()
                    # Zero weights, or a zero gradient, have no ratio.
                    has_ratio = ratio.isfinite() & (ratio > 0)
                    m.mul_(MOMENTUM).add_(p.grad * torch.where(has_ratio, ratio, 1.0))
                    p.sub_(rate * m)
            head.zero_grad()
        head.eval()
        with torch.no_grad():
            predicted_N = torch.cat([head(x_ND).argmax(dim=1) for x_ND in x_test_ND.split(8192)])
        accuracies.append(float((predicted_N == y_test_N).double().mean()))
    assert norm.running_mean is not None and norm.running_var is not None
    # At test time BatchNorm divides by this.
    scale_D = (norm.running_var + norm.eps).sqrt()
    weight_LD = linear.weight.detach()
    linear_head = LinearHead(norm.running_mean, scale_D, weight_LD, linear.bias.detach())
    return LarsResult(tuple(accuracies), batch_size, peak_lr, linear_head)


def to_tensors(rows: Rows, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Returns features in float32 and labels in int64, on the device."""
    features_ND, labels_N = rows
    x_ND = torch.as_tensor(features_ND, dtype=torch.float32, device=device)
    return x_ND, torch.as_tensor(labels_N, dtype=torch.int64, device=device)


def regression(
    x_ND: np.ndarray | Tensor,
    y_N: np.ndarray | Tensor,
    num_classes: int,
    *,
    ridge: float,
    device: torch.device | str = "cpu",
    standardise: bool = True,
    intercept: bool = True,
    start: LinearHead | None = None,
    max_iterations: int = 500,
) -> LinearHead:
    """Returns the head that minimises mean cross-entropy + ridge / 2 * |W|^2, by L-BFGS.

    The bias is not penalised. Arithmetic is float64 on a CPU and float32 on a GPU.

    Args:
        standardise: divides by these rows' standard deviation, after their mean is subtracted;
            constant features become zero.
        start: the first weights; None is zero.
    """
    dtype = torch.float64 if torch.device(device).type == "cpu" else torch.float32
    x = torch.as_tensor(x_ND, dtype=dtype, device=device)
    y = torch.as_tensor(y_N, dtype=torch.int64, device=device)
    mean_D = torch.zeros_like(x[0])
    scale_D = torch.ones_like(x[0])
    if standardise:
        mean_D = x.mean(dim=0)
        deviation_D = x.std(dim=0, correction=0)
        scale_D = torch.where(deviation_D > 1e-12, deviation_D, torch.inf)
    x = (x - mean_D) / scale_D
    weight_LD = torch.zeros(num_classes, x.shape[1], dtype=dtype, device=device)
    bias_L = torch.zeros(num_classes, dtype=dtype, device=device)
    if start is not None:
        weight_LD = start.weight_LD.to(dtype, copy=True)
        bias_L = start.bias_L.to(dtype, copy=True)
    weight_LD.requires_grad_()
    bias_L.requires_grad_(intercept)
    optimizer = torch.optim.LBFGS(
        [weight_LD, bias_L] if intercept else [weight_LD],
        max_iter=max_iterations,
        history_size=20,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        cross_entropy = F.cross_entropy(x @ weight_LD.T + bias_L, y)
        loss = cross_entropy + ridge / 2 * weight_LD.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    # Computes the gradient where L-BFGS stopped.
    objective()
    gradients = [p.grad for p in (weight_LD, bias_L) if p.grad is not None]
    steepest = max(float(gradient.abs().max()) for gradient in gradients)
    return LinearHead(mean_D, scale_D, weight_LD.detach(), bias_L.detach(), steepest)


def fold_of(y_N: np.ndarray, num_folds: int, seed: int) -> np.ndarray:
    """Returns the fold of each example (N,): every class is spread evenly over folds, at random."""
    rng = np.random.default_rng(seed)
    fold_N = np.empty(len(y_N), dtype=np.int64)
    # Counts on from class to class, so that folds differ by one example at most.
    start = 0
    for label in np.unique(y_N):
        rows = rng.permutation(np.flatnonzero(y_N == label))
        fold_N[rows] = (start + np.arange(len(rows))) % num_folds
        start += len(rows)
    return fold_N


def cross_validated_regression(
    x_ND: np.ndarray,
    y_N: np.ndarray,
    num_classes: int,
    *,
    ridges: Sequence[float] = RIDGES,
    num_folds: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[LinearHead, dict[float, float]]:
    """Returns a regression on all examples, and the validation accuracy by ridge.

    Its ridge has the highest validation accuracy; of equal ones the largest.

    Raises:
        DataError: fewer examples than folds.
    """
    if len(x_ND) < num_folds or num_folds < 2:
        raise DataError(f"{len(x_ND)} training examples cannot be split into {num_folds} folds")
    fold_N = fold_of(y_N, num_folds, seed)
    ordered = sorted(ridges, reverse=True)
    correct = dict.fromkeys(ordered, 0.0)
    for fold in range(num_folds):
        is_validation_N = fold_N == fold
        x_train_ND = x_ND[~is_validation_N]
        y_train_N = y_N[~is_validation_N]
        x_validation_ND = x_ND[is_validation_N]
        y_validation_N = y_N[is_validation_N]
        head = None
        for ridge in ordered:
            head = regression(
                x_train_ND, y_train_N, num_classes, ridge=ridge, device=device, start=head
            )
            accuracy = head.accuracy(x_validation_ND, y_validation_N)
            correct[ridge] += accuracy * len(y_validation_N)
    validation = {ridge: count / len(y_N) for ridge, count in correct.items()}
    best = max(ordered, key=lambda ridge: (round(validation[ridge], 12), ridge))
    return regression(x_ND, y_N, num_classes, ridge=best, device=device), validation


def linear_probe(options: LinearProbeOptions) -> Results | None:
    """Runs the command `linear-probe`; see its options."""
    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    train = inputs.features["train"].usable()
    test = inputs.features["test"].usable()
    device = device_of(options)
    scalars: dict[str, float] = {}
    details: dict[str, Any] = {}
    table: list[dict[str, Any]] = []
    notes: list[str] = []

    def augmented_rows(epoch: int) -> Rows:
        """Returns features of the training images in an epoch's crops and flips."""
        if inputs.opened is None or "train" not in inputs.sources:
            raise ConfigError("--augment needs --checkpoint and images for --train, not features")
        rows = np.flatnonzero(inputs.features["train"].is_usable_N).tolist()
        augmentation = Augmentation(options.seed, epoch)
        features = compute(
            inputs.opened.model, inputs.sources["train"], options, rows, augmentation
        )
        return features.usable()

    if options.method != "lbfgs":
        lars = lars_probe(
            train,
            test,
            inputs.num_classes(),
            epochs=options.epochs,
            batch_size=options.probe_batch_size,
            base_lr=options.base_lr,
            warmup_epochs=min(10, options.epochs // 9),
            trust_coefficient=options.trust_coefficient,
            seed=options.seed,
            device=device,
            train_of=augmented_rows if options.augment else None,
        )
        last = lars.accuracies[-1]
        # The best epoch is chosen on the test set, as in the papers: its number is optimistic.
        best = max(lars.accuracies)
        best_epoch = 1 + lars.accuracies.index(best)
        scalars |= {"lars_accuracy_last_epoch": last, "lars_accuracy_best_epoch": best}
        details["lars"] = {
            "accuracies": lars.accuracies,
            "best_epoch": best_epoch,
            "batch_size": lars.batch_size,
            "peak_lr": lars.peak_lr,
            "epochs": options.epochs,
            "trust_coefficient": options.trust_coefficient,
            "augmented": options.augment,
        }
        table.append({"probe": "LARS, last epoch", "test accuracy": last})
        best_probe = f"LARS, best epoch ({best_epoch}), chosen on the test set"
        table.append({"probe": best_probe, "test accuracy": best})
    if options.method != "lars":
        head, validation = cross_validated_regression(
            *train,
            inputs.num_classes(),
            num_folds=options.num_folds,
            seed=options.seed,
            device=device,
        )
        ridge = max(validation, key=lambda ridge: (round(validation[ridge], 12), ridge))
        accuracy = head.accuracy(*test)
        if not head.converged:
            notes.append(
                "L-BFGS stopped before it converged: "
                f"the steepest slope of its objective is {head.steepest:.1g}"
            )
        scalars["lbfgs_accuracy"] = accuracy
        shares = {f"{ridge:g}": share for ridge, share in validation.items()}
        details["lbfgs"] = {"ridge": ridge, "validation_accuracy_by_ridge": shares}
        probe = f"regression by L-BFGS, ridge {ridge:g} by cross-validation"
        table.append({"probe": probe, "test accuracy": accuracy})
        deficit = accuracy - scalars.get("lars_accuracy_last_epoch", accuracy)
        if deficit > LARS_DEFICIT:
            notes.append(
                f"LARS has hardly converged: it is {100 * deficit:.1f} points below regression. "
                "The papers' rate is for a million images; raise --trust_coefficient "
                "(--base_lr would drive the bias, which LARS does not scale, too) or --epochs"
            )
    return Results(
        "linear-probe", scalars, inputs.uses(), inputs.model, table, details, notes=notes
    )
