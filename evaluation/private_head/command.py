"""The command `private-head`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from evaluation.features import Features, device_of, load_inputs
from evaluation.linear_probe import cross_validated_regression
from evaluation.options import PrivateHeadOptions
from evaluation.private_head.methods import accuracy
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import make_method, spent_in, train_head, without_noise
from evaluation.results import PrivateRelease, Results
from privacy.accounting.rounding import rounded_up
from privacy.ledger.run_state import SharedTerms
from trainer.errors import ConfigError
from trainer.weights.parent_ledgers import LedgerBehind, ledgers_of


def private_head(options: PrivateHeadOptions) -> Results | None:
    """The command; see its options."""
    output, method, chosen = options.output_folder, options.method, options.method_options()
    folder = options.heads or (None if output is None else output / "private_heads")
    if folder is None:
        raise ConfigError("give --output (or --heads), a folder for the head and its ledger")
    make_method(method, chosen)  # refused before the features are computed
    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    train, test = inputs.features["train"], inputs.usable("test")
    num_classes = options.num_classes or len(train.class_names)
    if not num_classes:
        raise ConfigError(
            "--num_classes is required: inferring it from the training labels would leak private information"
        )
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
    spent_in(folder)  # a broken ledger in there would leave open what all heads together cost
    rows, own = private_rows(train, num_classes), folder / f"{method}-epsilon-{options.target_epsilon:g}"
    shared = None if options.shared_ledger is None else SharedTerms(options.shared_ledger, own.name)
    head = train_head(
        rows, num_classes, method, epsilon=options.target_epsilon, delta=options.delta, output=own, options=chosen,
        shared=shared, covers=covers, behind=behind,
    )  # fmt: skip
    scalars = {f"{method}/epsilon-{options.target_epsilon:g}/accuracy": accuracy(head.weights_LD, *test)}
    details: dict[str, Any] = {"options": chosen}
    notes = []
    together = spent_in(folder)
    if together.num_releases > 1:
        details["all_heads_together"] = together._asdict()
        notes.append(
            f"the {together.num_releases} releases in {folder}, earlier ones included, cost epsilon "
            f"{rounded_up(together.epsilon, 4)} at delta {together.delta:.3g} together where they are of the same examples; "
            "choosing a head by its accuracy costs the test data's privacy"
        )
    if options.compare:
        used = rows.features_ND.any(axis=1)
        x_ND, y_N = rows.features_ND[used], rows.labels_N[used]
        plain, _ = cross_validated_regression(x_ND, y_N, num_classes, device=device_of(options))
        weights_LD = without_noise(rows, num_classes, method, chosen)
        scalars[f"{method}/without_privacy/accuracy"] = accuracy(weights_LD, *test)
        scalars["regression/without_privacy/accuracy"] = plain.accuracy(*test)
    released = []
    if head.epsilon is not None:
        what, ledger = f"weights of a {method} head", str(own / "ledger.jsonl")
        released.append(PrivateRelease(what, ledger, head.epsilon, head.delta, covers))
    return Results("private-head", scalars, inputs.uses(), inputs.model, (), details, released, notes=notes)


def private_rows(train: Features, num_classes: int) -> Rows:
    """Rows that are not usable, or whose label is out of range, become zero in their place, decided by each row alone.

    They stay: how many rows there are must not follow from an example's bytes.
    """
    keep_N = train.is_usable_N & (train.labels_N >= 0) & (train.labels_N < num_classes)
    train.values_ND[~keep_N] = 0  # a copy may take gigabytes
    return Rows(train.values_ND, np.where(keep_N, train.labels_N, 0))
