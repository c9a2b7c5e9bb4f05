"""Linear probes of frozen features, without privacy: the LARS protocol of the papers, and multinomial regression by L-BFGS.

Shapes: N examples, D features, L classes. Features are standardised by the training set's mean and variance, which is what
BatchNorm without affine parameters does at test time.

The LARS protocol (He et al. 2021, https://arxiv.org/abs/2111.06377, appendix A.1; used by ViP, Yu et al. 2023,
https://arxiv.org/abs/2306.08842): BatchNorm without affine, weights from N(0, 0.01^2), rate 0.1 * batch / 256 with batch 16,384,
90 epochs, 10 of them warm-up, then a cosine, no weight decay. The papers crop and flip at random in training; here features are
computed once, of the centred image. The papers report the best epoch on the test set; both that and the last one are given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.errors import DataError
from trainer.config.optimizer import OptimizerSection, ScheduleSection
from trainer.loop.schedule import learning_rate
from trainer.optimizers import Segment, bind_segments, make_optimizer, parameter_groups, set_step
from trainer.progress import track

RIDGES = tuple(10.0**exponent for exponent in range(0, -7, -1))
"""Large to small: each fit starts from the one before."""
SETTLED = 5.0
"""Sum of rate * trust * 1 / (1 - momentum) over all steps, above which LARS forgets its random start."""


@dataclass(frozen=True)
class LarsOptions:
    """The papers' values; `batch_size` is capped at the number of examples."""

    epochs: int = 90
    batch_size: int = 16384
    base_lr: float = 0.1
    warmup_epochs: int = 10
    momentum: float = 0.9
    trust_coefficient: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class LinearHead:
    """Scores of x are (x - mean) / scale @ weight' + bias; weight (L, D)."""

    mean_D: Tensor
    scale_D: Tensor
    weight_LD: Tensor
    bias_L: Tensor

    def scores(self, x_ND: np.ndarray) -> np.ndarray:
        """(N, L)"""
        x = torch.as_tensor(x_ND, dtype=self.weight_LD.dtype, device=self.weight_LD.device)
        return (((x - self.mean_D) / self.scale_D) @ self.weight_LD.T + self.bias_L).cpu().numpy()

    def accuracy(self, x_ND: np.ndarray, y_N: np.ndarray) -> float:
        return float((self.scores(x_ND).argmax(axis=1) == y_N).mean())


@dataclass(frozen=True)
class LarsResult:
    """
    Attributes:
        accuracies: on the test set after every epoch.
        batch_size, peak_lr: that were used.
        settles: whether there were steps enough for the rates to move the head away from its random start.
        head: after the last epoch.
    """

    accuracies: tuple[float, ...]
    batch_size: int
    peak_lr: float
    settles: bool
    head: LinearHead

    @property
    def last(self) -> float:
        return self.accuracies[-1]

    @property
    def best(self) -> float:
        """Chosen by looking at the test set, as the papers do: an optimistic number."""
        return max(self.accuracies)

    @property
    def best_epoch(self) -> int:
        """The number of the best epoch, counted from 1."""
        return self.accuracies.index(self.best) + 1


def lars_probe(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    num_classes: int,
    options: LarsOptions = LarsOptions(),
    device: torch.device | str = "cpu",
) -> LarsResult:
    """Trains by the LARS protocol.

    Args:
        train, test: (features (N, D), labels (N,)).

    Raises:
        DataError: fewer than two training examples.
    """
    x_ND, x_test_ND = (torch.as_tensor(x, dtype=torch.float32, device=device) for x, _ in (train, test))
    y_N, y_test_N = (torch.as_tensor(y, dtype=torch.int64, device=device) for _, y in (train, test))
    if len(x_ND) < 2:
        raise DataError("a probe with BatchNorm needs at least two training examples")
    batch_size = min(options.batch_size, len(x_ND))
    per_epoch = len(x_ND) // batch_size
    peak_lr = options.base_lr * batch_size / 256
    schedule = ScheduleSection(warmup_steps=min(options.warmup_epochs, options.epochs - 1) * per_epoch)
    norm, linear = nn.BatchNorm1d(x_ND.shape[1], affine=False, eps=1e-6), nn.Linear(x_ND.shape[1], num_classes)
    nn.init.normal_(linear.weight, std=0.01, generator=torch.Generator().manual_seed(options.seed))
    nn.init.zeros_(linear.bias)
    head = nn.Sequential(norm, linear).to(device)
    section = OptimizerSection(
        name="lars", peak_lr=peak_lr, momentum=options.momentum, trust_coefficient=options.trust_coefficient
    )
    named = dict(head.named_parameters())
    groups = parameter_groups(named.items(), {n: p.shape for n, p in named.items()}, section)
    optimizer = make_optimizer(groups, section)
    bind_segments(optimizer, {p: [Segment(n, 0, p.numel())] for n, p in named.items()}, sharded=False)
    generator = torch.Generator().manual_seed(options.seed)
    accuracies, step, moved = [], 0, 0.0
    for _ in track(range(options.epochs), "epochs of the linear probe", options.epochs):
        head.train()
        order = torch.randperm(len(x_ND), generator=generator).to(device)
        for rows in order[: per_epoch * batch_size].split(batch_size):
            step += 1
            lr = learning_rate(step, options.epochs * per_epoch, peak_lr, schedule)
            moved += lr * options.trust_coefficient / (1 - options.momentum)
            F.cross_entropy(head(x_ND[rows]), y_N[rows]).backward()
            set_step(optimizer.param_groups, lr=lr, noise_variance=0.0)
            optimizer.step()
            optimizer.zero_grad()
        head.eval()
        correct = 0
        with torch.no_grad():
            for x, y in zip(x_test_ND.split(8192), y_test_N.split(8192), strict=True):
                correct += int((head(x).argmax(dim=1) == y).sum())
        accuracies.append(correct / len(y_test_N) if len(y_test_N) else math.nan)
    assert norm.running_mean is not None and norm.running_var is not None
    scale_D = (norm.running_var + norm.eps).sqrt()  # what the norm computes at test time
    at_test = LinearHead(norm.running_mean, scale_D, linear.weight.detach(), linear.bias.detach())
    return LarsResult(tuple(accuracies), batch_size, peak_lr, moved >= SETTLED, at_test)


def regression(
    x_ND: np.ndarray,
    y_N: np.ndarray,
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
        weight_LD, bias_L = start.weight_LD.clone(), start.bias_L.clone()
    weight_LD.requires_grad_()
    bias_L.requires_grad_(intercept)
    optimizer = torch.optim.LBFGS(
        [weight_LD, bias_L] if intercept else [weight_LD], max_iter=max_iterations, history_size=20,
        tolerance_grad=1e-7, tolerance_change=1e-12, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def objective() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight_LD.T + bias_L, y) + ridge / 2 * weight_LD.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    return LinearHead(mean_D, scale_D, weight_LD.detach(), bias_L.detach())


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
            head = regression(x_ND[inside], y_N[inside], num_classes, ridge=ridge, device=device, start=head)
            correct[ridge] += head.accuracy(x_ND[outside], y_N[outside]) * int(outside.sum())
    validation = {ridge: count / len(y_N) for ridge, count in correct.items()}
    chosen = max(ordered, key=lambda ridge: (round(validation[ridge], 12), ridge))
    return regression(x_ND, y_N, num_classes, ridge=chosen, device=device), validation
