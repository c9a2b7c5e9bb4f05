"""Many private heads on the same features: accuracy as a function of epsilon, and what all of them cost together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.private_head.methods import accuracy
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import GIVEN_FEATURES, help_train, train_head, without_noise
from privacy.audit.members import FILE, not_in_ledger, read_lines
from privacy.card.composition import states_behind
from privacy.card.numbers import claimed_epsilon
from privacy.errors import PrivacyStateRefused
from privacy.ledger.records import LedgerState, read_ledger
from privacy.ledger.run_state import SharedTerms
from trainer.weights.behind import LedgerBehind

EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class HeadData:
    """Training examples (those of this rank), and test features with labels; shapes as in `evaluation.private_head.methods`."""

    rows: Rows
    x_test_ND: np.ndarray
    y_test_N: np.ndarray
    num_classes: int


@dataclass(frozen=True)
class TrainedHead:
    """
    Attributes:
        target_epsilon: that was asked for.
        epsilon: from the ledger; None where nothing is claimed.
        accuracy: on the test features, without noise.
        ledger: the head's own.
    """

    method: str
    target_epsilon: float
    repeat: int
    epsilon: float | None
    delta: float
    accuracy: float
    ledger: Path


@dataclass(frozen=True)
class HeadRequest:
    """
    Attributes:
        options: of each method.
        folder: each head gets a new folder in it, with a ledger of its own.
        shared: the data owner's ledger, where every head takes its part.
        covers, behind: what the guarantee is about, and what composes; see `evaluation.private_head.run.train_head`.
    """

    methods: Sequence[str]
    epsilons: Sequence[float]
    folder: Path
    delta: float | None = None
    repeats: int = 1
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: Path | None = None
    covers: str = GIVEN_FEATURES
    behind: Sequence[LedgerBehind] = ()


class Together(NamedTuple):
    """What all releases in a folder of heads cost at the largest of their deltas, the private runs behind encoders included."""

    num_releases: int
    epsilon: float
    delta: float


def train_heads(data: HeadData, request: HeadRequest) -> list[TrainedHead]:
    """One head per method, epsilon and repeat.

    Raises:
        PrivacyConfigError, BudgetSpent, PrivacyStateRefused: see `evaluation.private_head.run.train_head`; also an earlier head
            in the folder whose ledger is broken, which would leave open what all of them cost.
    """
    spent_in(request.folder)
    heads = []
    for method in request.methods:
        for epsilon in request.epsilons:
            for repeat in range(request.repeats):
                folder = request.folder / f"{method}-epsilon-{epsilon:g}-{repeat}"
                shared = None if request.shared is None else SharedTerms(request.shared, folder.name)
                head = train_head(
                    data.rows, data.num_classes, method, epsilon=epsilon, delta=request.delta, output=folder,
                    options=request.options.get(method), shared=shared, covers=request.covers, behind=request.behind,
                )  # fmt: skip
                score = accuracy(head.weights_LD, data.x_test_ND, data.y_test_N)
                ledger = folder / "ledger.jsonl"
                heads.append(TrainedHead(method, epsilon, repeat, head.epsilon, head.delta, score, ledger))
    return heads


def help_train_heads(rows: Rows, num_classes: int, request: HeadRequest, *, compares: bool) -> None:
    """What ranks other than 0 do while rank 0 is in `train_heads`, and in `without_privacy` after it."""
    for method in request.methods:
        for _ in range(len(request.epsilons) * request.repeats):
            help_train(rows, num_classes, method, request.options.get(method))
    for method in request.methods if compares else ():
        help_train(rows, num_classes, method, request.options.get(method))


def without_privacy(data: HeadData, request: HeadRequest) -> dict[str, float]:
    """Test accuracy of each method's estimator without noise; nothing about it is private."""
    accuracies = {}
    for method in request.methods:
        weights_LD = without_noise(data.rows, data.num_classes, method, request.options.get(method))
        accuracies[method] = accuracy(weights_LD, data.x_test_ND, data.y_test_N)
    return accuracies


def spent_in(folder: Path) -> Together:
    """Everything that the ledgers of the heads in this folder have charged, earlier commands and heads that failed included.

    Raises:
        PrivacyStateRefused: a ledger is broken, or lacks what private/ recorded.
    """
    # By the last line: heads on features of one encoder have the same ledgers behind them.
    states: dict[str, LedgerState] = {}
    paths = sorted(folder.glob("*/ledger.jsonl"))
    for path in paths:
        members = path.parent / "private" / FILE
        recorded = list(read_lines(members)) if members.is_file() else []
        state = read_ledger(path)
        if (lost := not_in_ledger(recorded, state)) is not None:
            raise PrivacyStateRefused(f"{path} and {members} contradict each other: {lost}; restore both")
        states |= {one.hashes[-1]: one for one in (state, *states_behind(path.parent, state.opened))}
    groups = [group for state in states.values() for group in state.charged_groups()]
    if not groups:
        return Together(0, 0.0, 0.0)
    delta = max(read_ledger(path).plan.target_delta for path in paths)
    left = delta - math.fsum(state.plan.noise_tail_delta for state in states.values())
    value = claimed_epsilon(groups, left)[0] if left > 0 else math.inf
    return Together(sum(read_ledger(path).num_charged for path in paths), value, delta)


def summary(heads: Sequence[TrainedHead]) -> list[dict[str, Any]]:
    """A row per method and epsilon, in the order of training, with mean and standard deviation over repeats."""
    rows = []
    for method, epsilon in dict.fromkeys((head.method, head.target_epsilon) for head in heads):
        scores = [head.accuracy for head in heads if (head.method, head.target_epsilon) == (method, epsilon)]
        spread = float(np.std(scores, ddof=1)) if len(scores) > 1 else math.nan
        rows.append({"method": method, "epsilon": epsilon, "accuracy": float(np.mean(scores)), "std": spread})
    return rows


def plot(rows: Sequence[dict[str, Any]], baselines: dict[str, float], title: str, path: Path) -> None:
    """Test accuracy over epsilon, a line per method with its spread; baselines without privacy as dashed lines (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["epsilon"])
        spread = [0.0 if math.isnan(row["std"]) else row["std"] for row in own]
        points = [row["epsilon"] for row in own], [row["accuracy"] for row in own]
        axes.errorbar(*points, yerr=spread, marker="o", capsize=3, color=f"C{number}", label=method)
        if method in baselines:
            axes.axhline(baselines[method], color=f"C{number}", linestyle="--", linewidth=0.8)
    for name in sorted(baselines.keys() - {row["method"] for row in rows}):
        axes.axhline(baselines[name], color="black", linestyle=":", label=name)
    axes.set(xscale="log", ylim=(0, 1), xlabel="epsilon of one head", ylabel="test accuracy", title=title)
    ticks = sorted({row["epsilon"] for row in rows})
    axes.set_xticks(ticks, [f"{epsilon:g}" for epsilon in ticks])
    axes.axhline(math.nan, color="gray", linestyle="--", linewidth=0.8, label="the same without noise")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
