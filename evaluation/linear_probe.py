"""Linear probes of frozen features, without privacy: the LARS protocol of the papers, and multinomial regression by L-BFGS.

Shapes: N examples, D features, L classes. Features are standardised by the training set's mean and variance, which is what
BatchNorm without affine parameters does at test time.

The LARS protocol (He et al. 2021, https://arxiv.org/abs/2111.06377, appendix A.1, and the released code; used by ViP, Yu et al.
2023, https://arxiv.org/abs/2306.08842): BatchNorm without affine, weights from N(0, 0.01^2), rate 0.1 * batch / 256 with batch
16,384, 90 epochs, 10 of them warm-up, then a cosine, no weight decay. As in the released optimizer the ratio of norms is inside
of the momentum and the rate outside: m <- 0.9 m + trust |w| / |g| g, w <- w - rate m; the bias has no ratio. Training features
are of random crops and flips, new in each epoch, where the caller computes them (`train_of`); features of the centred images,
computed once, are the default. The papers report the best epoch on the test set; both that and the last one are given.
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
from evaluation.features import compute, device_of, load_inputs
from evaluation.options import LinearProbeOptions
from evaluation.results import Results
from evaluation.sources import Augmentation
from trainer.errors import ConfigError
from trainer.progress import track

Rows = tuple[np.ndarray, np.ndarray]
"""Features (N, D) and labels (N,)."""

RIDGES = tuple(10.0**exponent for exponent in range(0, -7, -1))
"""Large to small: each fit starts from the one before."""
FLAT = 1e-4
"""The largest entry of a gradient at which a regression counts as converged, in nats per standard deviation of a feature."""
MOMENTUM = 0.9
BEHIND = 0.02
"""A LARS head whose test accuracy is this far below that of regression has hardly converged."""


@dataclass(frozen=True)
class LinearHead:
    """Scores of x are (x - mean) / scale @ weight' + bias; weight (L, D).

    Attributes:
        steepest: the largest entry of the objective's gradient where L-BFGS stopped; zero for heads of other origin.
    """

    mean_D: Tensor
    scale_D: Tensor
    weight_LD: Tensor
    bias_L: Tensor
    steepest: float = 0.0

    @property
    def converged(self) -> bool:
        return self.steepest <= FLAT

    def scores(self, x_ND: np.ndarray | Tensor) -> np.ndarray:
        """(N, L)"""
        x = torch.as_tensor(x_ND, dtype=self.weight_LD.dtype, device=self.weight_LD.device)
        return (((x - self.mean_D) / self.scale_D) @ self.weight_LD.T + self.bias_L).cpu().numpy()

    def accuracy(self, x_ND: np.ndarray | Tensor, y_N: np.ndarray) -> float:
        return float((self.scores(x_ND).argmax(axis=1) == y_N).mean())


class LarsResult(NamedTuple):
    """
    Attributes:
        accuracies: on the test set after every epoch.
        batch_size, peak_lr: that were used.
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
    """Trains by the LARS protocol; the defaults are the papers' values.

    Args:
        train, test: (features (N, D), labels (N,)).
        batch_size: capped at the number of examples.
        train_of: features and labels of an epoch, of `train`'s examples in some augmentation; by default `train` in every epoch.

    Raises:
        DataError: fewer than two training examples.
    """
    x_ND, y_N = on(train, device)
    x_test_ND, y_test_N = on(test, device)
    if len(x_ND) < 2:
        raise DataError("a probe with BatchNorm needs at least two training examples")
    batch_size = min(batch_size, len(x_ND))
    per_epoch = len(x_ND) // batch_size
    peak_lr = base_lr * batch_size / 256
    warmup = min(warmup_epochs, epochs - 1)
    norm, linear = (
        nn.BatchNorm1d(x_ND.shape[1], affine=False, eps=1e-6),
        nn.Linear(x_ND.shape[1], num_classes),
    )
    nn.init.normal_(linear.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(linear.bias)
    head = nn.Sequential(norm, linear).to(device)
    momentum = {p: torch.zeros_like(p, requires_grad=False) for p in linear.parameters()}
    generator = torch.Generator().manual_seed(seed)
    accuracies = []
    for epoch in track(range(epochs), "epochs of the linear probe", epochs):
        if train_of is not None:
            x_ND, y_N = on(train_of(epoch), device)
        head.train()
        order = torch.randperm(len(x_ND), generator=generator).to(device)
        for step, rows in enumerate(order[: per_epoch * batch_size].split(batch_size)):
            F.cross_entropy(head(x_ND[rows]), y_N[rows]).backward()
            at = (
                epoch + step / per_epoch
            )  # the rate is zero at the first step, as in the released code
            cosine = 0.5 * (1 + math.cos(math.pi * (at - warmup) / (epochs - warmup)))
            rate = peak_lr * (at / warmup if at < warmup else cosine)
            with torch.no_grad():
                for p, m in momentum.items():
                    assert p.grad is not None
                    ratio = (
                        trust_coefficient * p.norm() / p.grad.norm()
                        if p.dim() > 1
                        else torch.ones(())
                    )
                    m.mul_(MOMENTUM).add_(
                        p.grad * torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
                    )
                    p.sub_(rate * m)
            head.zero_grad()
        head.eval()
        with torch.no_grad():
            predicted_N = torch.cat([head(x_ND).argmax(dim=1) for x_ND in x_test_ND.split(8192)])
        accuracies.append(float((predicted_N == y_test_N).double().mean()))
    assert norm.running_mean is not None and norm.running_var is not None
    scale_D = (norm.running_var + norm.eps).sqrt()  # what the norm computes at test time
    at_test = LinearHead(norm.running_mean, scale_D, linear.weight.detach(), linear.bias.detach())
    return LarsResult(tuple(accuracies), batch_size, peak_lr, at_test)


def on(rows: Rows, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Features in float32 and labels."""
    x_ND = torch.as_tensor(rows[0], dtype=torch.float32, device=device)
    return x_ND, torch.as_tensor(rows[1], dtype=torch.int64, device=device)


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
    """Minimises mean cross-entropy + ridge / 2 * |W|^2 by L-BFGS, from zero or `start`. The bias is not penalised.

    On CPU in float64, on a GPU in float32.

    Args:
        standardise: by this data's mean and standard deviation; constant features become zero.
    """
    dtype = torch.float64 if torch.device(device).type == "cpu" else torch.float32
    x = torch.as_tensor(x_ND, dtype=dtype, device=device)
    y = torch.as_tensor(y_N, dtype=torch.int64, device=device)
    mean_D, scale_D = torch.zeros_like(x[0]), torch.ones_like(x[0])
    if standardise:
        mean_D, scale_D = x.mean(dim=0), x.std(dim=0, correction=0)
        scale_D = torch.where(scale_D > 1e-12, scale_D, torch.inf)
    x = (x - mean_D) / scale_D
    weight_LD = torch.zeros(num_classes, x.shape[1], dtype=dtype, device=device)
    bias_L = torch.zeros(num_classes, dtype=dtype, device=device)
    if start is not None:
        weight_LD, bias_L = start.weight_LD.to(dtype, copy=True), start.bias_L.to(dtype, copy=True)
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
        loss = F.cross_entropy(x @ weight_LD.T + bias_L, y) + ridge / 2 * weight_LD.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    objective()
    steepest = max(float(p.grad.abs().max()) for p in (weight_LD, bias_L) if p.grad is not None)
    return LinearHead(mean_D, scale_D, weight_LD.detach(), bias_L.detach(), steepest)


def fold_of(y_N: np.ndarray, num_folds: int, seed: int) -> np.ndarray:
    """(N,) the fold of each example: classes are dealt out evenly, at random."""
    rng, fold_N = np.random.default_rng(seed), np.empty(len(y_N), dtype=np.int64)
    dealt = 0
    for label in np.unique(y_N):
        rows = rng.permutation(np.flatnonzero(y_N == label))
        fold_N[rows] = (dealt + np.arange(len(rows))) % num_folds
        dealt += len(rows)
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
    """The regression with the ridge whose validation accuracy is highest (of equal ones the largest), on all examples.

    Returns:
        The head, and the validation accuracy by ridge.

    Raises:
        DataError: fewer examples than folds.
    """
    if len(x_ND) < num_folds or num_folds < 2:
        raise DataError(f"{len(x_ND)} training examples cannot be split into {num_folds} folds")
    fold_N = fold_of(y_N, num_folds, seed)
    ordered = sorted(ridges, reverse=True)
    correct = dict.fromkeys(ordered, 0.0)
    for fold in range(num_folds):
        inside, outside = fold_N != fold, fold_N == fold
        head = None
        for ridge in ordered:
            head = regression(
                x_ND[inside], y_N[inside], num_classes, ridge=ridge, device=device, start=head
            )
            correct[ridge] += head.accuracy(x_ND[outside], y_N[outside]) * int(outside.sum())
    validation = {ridge: count / len(y_N) for ridge, count in correct.items()}
    chosen = max(ordered, key=lambda ridge: (round(validation[ridge], 12), ridge))
    return regression(x_ND, y_N, num_classes, ridge=chosen, device=device), validation


def linear_probe(options: LinearProbeOptions) -> Results | None:
    """The command; see its options."""
    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    train, test = (inputs.features[role].usable() for role in ("train", "test"))
    device = device_of(options)
    scalars: dict[str, float] = {}
    details: dict[str, Any] = {}
    table: list[dict[str, Any]] = []
    notes: list[str] = []

    def of_epoch(epoch: int) -> Rows:
        """Features of the training images in an epoch's crops and flips."""
        if inputs.opened is None or "train" not in inputs.sources:
            raise ConfigError("--augment needs --checkpoint and images for --train, not features")
        rows = np.flatnonzero(inputs.features["train"].is_usable_N).tolist()
        how = Augmentation(options.seed, epoch)
        return compute(inputs.opened.model, inputs.sources["train"], options, rows, how).usable()

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
            train_of=of_epoch if options.augment else None,
        )
        last = lars.accuracies[-1]
        best = max(
            lars.accuracies
        )  # chosen by looking at the test set, as the papers do: an optimistic number
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
        table.append(
            {
                "probe": f"LARS, best epoch ({best_epoch}), chosen on the test set",
                "test accuracy": best,
            }
        )
    if options.method != "lars":
        head, by_ridge = cross_validated_regression(
            *train,
            inputs.num_classes(),
            num_folds=options.num_folds,
            seed=options.seed,
            device=device,
        )
        ridge = max(by_ridge, key=lambda r: (round(by_ridge[r], 12), r))
        accuracy = head.accuracy(*test)
        if not head.converged:
            notes.append(
                f"L-BFGS stopped before it converged: the steepest slope of its objective is {head.steepest:.1g}"
            )
        scalars["lbfgs_accuracy"] = accuracy
        details["lbfgs"] = {
            "ridge": ridge,
            "validation_accuracy_by_ridge": {f"{r:g}": v for r, v in by_ridge.items()},
        }
        table.append(
            {
                "probe": f"regression by L-BFGS, ridge {ridge:g} by cross-validation",
                "test accuracy": accuracy,
            }
        )
        behind = accuracy - scalars.get("lars_accuracy_last_epoch", accuracy)
        if behind > BEHIND:
            notes.append(
                f"LARS has hardly converged: it is {100 * behind:.1f} points below regression. The papers' rate is for a million "
                "images; raise --trust_coefficient (--base_lr would drive the bias, which LARS does not scale, too) or --epochs"
            )
    return Results(
        "linear-probe", scalars, inputs.uses(), inputs.model, table, details, notes=notes
    )
