"""The command `private-head`: one head, or one for each method and epsilon of a sweep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.features import Features, device_of, load_inputs
from evaluation.linear_probe import cross_validated_regression
from evaluation.options import PrivateHeadOptions
from evaluation.private_head.methods import accuracy
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import GIVEN_FEATURES, make_method, spent_in, train_head, without_noise
from evaluation.results import PrivateRelease, Results
from privacy.card.text import rounded_up
from privacy.ledger.run_state import SharedTerms
from trainer.errors import ConfigError
from trainer.weights.behind import LedgerBehind, ledgers_of

EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MethodOptions = dict[str, dict[str, Any]]
"""Of each method."""


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
    epsilon: float | None
    delta: float
    accuracy: float
    ledger: Path


def train_heads(
    rows: Rows,
    test: tuple[np.ndarray, np.ndarray],
    num_classes: int,
    options: MethodOptions,
    *,
    epsilons: Sequence[float],
    folder: Path,
    delta: float | None = None,
    repeats: int = 1,
    shared: Path | None = None,
    covers: str = GIVEN_FEATURES,
    behind: Sequence[LedgerBehind] = (),
) -> list[TrainedHead]:
    """One head per method, epsilon and repeat.

    Args:
        test: features and labels.
        folder: each head gets a new folder in it, with a ledger of its own.
        shared: the data owner's ledger, where every head takes its part.
        covers, behind: what the guarantee is about, and what composes; see `evaluation.private_head.run.train_head`.

    Raises:
        PrivacyConfigError, BudgetSpent, PrivacyStateRefused: see `evaluation.private_head.run.train_head`; also an earlier head
            in the folder whose ledger is broken, which would leave open what all of them cost.
    """
    spent_in(folder)
    heads = []
    for method, chosen in options.items():
        for epsilon in epsilons:
            for repeat in range(repeats):
                output = folder / f"{method}-epsilon-{epsilon:g}-{repeat}"
                head = train_head(
                    rows, num_classes, method, epsilon=epsilon, delta=delta, output=output, options=chosen, covers=covers,
                    shared=None if shared is None else SharedTerms(shared, output.name), behind=behind,
                )  # fmt: skip
                score, ledger = accuracy(head.weights_LD, *test), output / "ledger.jsonl"
                heads.append(TrainedHead(method, epsilon, head.epsilon, head.delta, score, ledger))
    return heads


def summary(heads: Sequence[TrainedHead]) -> list[dict[str, Any]]:
    """A row per method and epsilon, in the order of training, with mean and standard deviation over repeats."""
    rows = []
    for method, epsilon in dict.fromkeys((head.method, head.target_epsilon) for head in heads):
        scores = [head.accuracy for head in heads if (head.method, head.target_epsilon) == (method, epsilon)]
        spread = float(np.std(scores, ddof=1)) if len(scores) > 1 else math.nan
        rows.append({"method": method, "epsilon": epsilon, "accuracy": float(np.mean(scores)), "std": spread})
    return rows


def private_head(options: PrivateHeadOptions) -> Results | None:
    """The command; see its options."""
    output, by_method = options.output_folder, options.method_options()
    folder = options.heads or (None if output is None else output / "private_heads")
    if folder is None:
        raise ConfigError("give --output (or --heads), a folder for the head and its ledger")
    epsilons = (options.sweep or EPSILONS) if options.target_epsilon is None else (options.target_epsilon,)
    for method, chosen in by_method.items():  # refused before the features are computed
        make_method(method, chosen)
    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    train, (x_test_ND, y_test_N) = inputs.features["train"], inputs.usable("test")
    num_classes = options.num_classes or len(train.class_names)
    if not num_classes:
        raise ConfigError(
            "--num_classes is required: inferring it from the training labels would leak private information"
        )
    # Training rows that are not usable stay, as zeros: how many there are must not follow from an example's bytes.
    rows, test = private_rows(train, num_classes, centre=options.centre_rows), (x_test_ND, y_test_N)
    if options.centre_rows:
        test = centred(x_test_ND), y_test_N
    # The guarantee holds given what made the features; that has a guarantee of its own, or none.
    behind: Sequence[LedgerBehind] = ()
    if inputs.model is None or options.train.startswith("features:"):
        given = "what made the features of each from that example alone"
    elif inputs.model.formal_guarantee:
        given = "nothing: what the encoder spent is composed with the head, in case it has seen them"
        assert inputs.opened is not None
        behind = ledgers_of(inputs.opened.path, inputs.opened.manifest)
    else:
        given = "the encoder, which has no formal guarantee: if it has seen them, none is left"
    covers = f"the examples of {options.train}, given {given}"
    heads = train_heads(
        rows, test, num_classes, by_method, epsilons=tuple(dict.fromkeys(epsilons)), folder=folder, delta=options.delta,
        repeats=options.repeats, shared=options.shared_ledger, covers=covers, behind=behind,
    )  # fmt: skip
    table = summary(heads)
    scalars = {f"{row['method']}/epsilon-{row['epsilon']:g}/accuracy": row["accuracy"] for row in table}
    details: dict[str, Any] = {"options": by_method, "centre_rows": options.centre_rows, "repeats": options.repeats}
    notes = []
    together = spent_in(folder)
    if together.num_releases > 1:
        details["all_heads_together"] = together._asdict()
        notes.append(
            f"the {together.num_releases} releases in {folder}, earlier ones included, cost epsilon "
            f"{rounded_up(together.epsilon, 4)} at delta {together.delta:.3g} together where they are of the same examples; "
            "choosing a head by its accuracy costs the test data's privacy"
        )
    if options.sweep is not None or options.compare:
        x_ND = rows.features_ND[:]
        used = x_ND.any(axis=1)
        plain, _ = cross_validated_regression(x_ND[used], rows.labels_N[used], num_classes, device=device_of(options))
        baselines = {
            method: accuracy(without_noise(rows, num_classes, method, chosen), *test)
            for method, chosen in by_method.items()
        }
        baselines["regression"] = plain.accuracy(*test)
        details["without_privacy"] = baselines
        scalars |= {f"{name}/without_privacy/accuracy": value for name, value in baselines.items()}
        table += [{"method": f"{name}, without privacy", "accuracy": value} for name, value in baselines.items()]
    released = [
        PrivateRelease(f"weights of a {head.method} head", str(head.ledger), head.epsilon, head.delta, covers)
        for head in heads
        if head.epsilon is not None
    ]
    return Results("private-head", scalars, inputs.uses(), inputs.model, table, details, released, notes=notes)


def private_rows(train: Features, num_classes: int, *, centre: bool) -> Rows:
    """Rows that are not usable, or whose label is out of range, become zero, decided by each row alone."""
    keep_N = train.is_usable_N & (train.labels_N >= 0) & (train.labels_N < num_classes)
    return Rows(_Kept(train.values_ND, keep_N, centre), np.where(keep_N, train.labels_N, 0))


@dataclass(frozen=True)
class _Kept:
    """A `Matrix` of the features: a block is centred, and its other rows are zeroed, when it is read."""

    values_ND: np.ndarray
    keep_N: np.ndarray
    centre: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values_ND.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        x_ND = centred(self.values_ND[rows]) if self.centre else self.values_ND[rows]
        return np.where(self.keep_N[rows, None], x_ND, 0.0)


def centred(x_ND: np.ndarray) -> np.ndarray:
    """Each row less its own mean."""
    return x_ND - x_ND.mean(axis=1, keepdims=True)
