"""Linear probe of frozen features, not private: the LARS protocol of the papers, and cross-validated regression by L-BFGS.

    python launch_scripts/evaluate.py linear-probe --checkpoint runs/x --train shards:train/ --test shards:val/ \\
        --features blocks --num_blocks 12

LARS gives the test accuracy of its last epoch and, labelled, of its best (which the papers report).
"""

import argparse
from typing import TYPE_CHECKING, Any

from data.options import LEAST_RATE, MOST, MOST_RATE, MOST_REPEATS, MOST_SEED, between, number_between
from evaluation.commands.inputs import Inputs, add_inputs, load_inputs

if TYPE_CHECKING:
    from evaluation.results import Results

NAME = "linear-probe"
HELP = "linear classifier on frozen features (LARS and L-BFGS), not private"
RANKS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_inputs(parser, ["train", "test"])
    group = parser.add_argument_group("probe")
    group.add_argument("--method", choices=("both", "lars", "lbfgs"), default="both")
    group.add_argument(
        "--epochs",
        type=between(1, MOST_REPEATS),
        default=90,
        help="LARS; default 90, a tenth of which at most warms up",
    )
    group.add_argument(
        "--probe_batch_size", type=between(1, MOST), default=16384, metavar="B", help="LARS; capped at the data"
    )
    group.add_argument(
        "--base_lr",
        type=number_between(LEAST_RATE, MOST_RATE),
        default=0.1,
        metavar="R",
        help="LARS: rate is R * batch / 256",
    )
    group.add_argument(
        "--trust_coefficient",
        type=number_between(LEAST_RATE, MOST_RATE),
        default=1e-3,
        metavar="R",
        help="LARS; to be raised for small data sets",
    )
    group.add_argument("--num_folds", type=between(2, 1000), default=5, help="L-BFGS: of the cross-validation")
    group.add_argument("--seed", type=between(0, MOST_SEED), default=0)


def run(args: argparse.Namespace) -> "Results | None":
    """See `evaluation.commands`."""
    from evaluation.results import Results

    inputs = load_inputs(args, ["train", "test"])
    if inputs is None:
        return None
    scalars: dict[str, float] = {}
    details: dict[str, Any] = {}
    table: list[dict[str, Any]] = []
    notes: list[str] = []
    if args.method in ("both", "lars"):
        _lars(args, inputs, scalars, details, table, notes)
    if args.method in ("both", "lbfgs"):
        _lbfgs(args, inputs, scalars, details, table)
    return Results(NAME, scalars, inputs.uses(), inputs.model, table, details, notes=notes)


def _lars(
    args: argparse.Namespace, inputs: Inputs, scalars: dict[str, float], details: dict[str, Any],
    table: list[dict[str, Any]], notes: list[str],
) -> None:  # fmt: skip
    from evaluation.commands.common import device_of
    from evaluation.linear_probe import LarsOptions, lars_probe

    options = LarsOptions(
        epochs=args.epochs, batch_size=args.probe_batch_size, base_lr=args.base_lr,
        trust_coefficient=args.trust_coefficient,
        warmup_epochs=min(10, args.epochs // 9), seed=args.seed,
    )  # fmt: skip
    train, test = inputs.usable("train"), inputs.usable("test")
    found = lars_probe(
        (train.values_ND, train.labels_N), (test.values_ND, test.labels_N), inputs.num_classes(), options,
        device_of(args),
    )  # fmt: skip
    scalars |= {"lars_accuracy_last_epoch": found.last, "lars_accuracy_best_epoch": found.best}
    details["lars"] = {
        "accuracies": found.accuracies, "best_epoch": found.best_epoch, "batch_size": found.batch_size,
        "peak_lr": found.peak_lr, "epochs": args.epochs, "trust_coefficient": args.trust_coefficient,
    }  # fmt: skip
    table.append({"probe": "LARS, last epoch", "test accuracy": found.last})
    table.append(
        {"probe": f"LARS, best epoch ({found.best_epoch}), chosen on the test set", "test accuracy": found.best}
    )
    if not found.settles:
        notes.append(
            "LARS made few steps for its rate: the head is still near its random start. The papers' rate is for a million "
            "images; raise --trust_coefficient (--base_lr would drive the bias, which LARS does not scale, too)"
        )


def _lbfgs(
    args: argparse.Namespace,
    inputs: Inputs,
    scalars: dict[str, float],
    details: dict[str, Any],
    table: list[dict[str, Any]],
) -> None:
    from evaluation.commands.common import device_of
    from evaluation.linear_probe import cross_validated_regression

    train, test = inputs.usable("train"), inputs.usable("test")
    head, validation = cross_validated_regression(
        train.values_ND, train.labels_N, inputs.num_classes(), num_folds=args.num_folds, seed=args.seed,
        device=device_of(args),
    )  # fmt: skip
    ridge = max(validation, key=lambda r: (round(validation[r], 12), r))
    accuracy = head.accuracy(test.values_ND, test.labels_N)
    scalars["lbfgs_accuracy"] = accuracy
    details["lbfgs"] = {"ridge": ridge, "validation_accuracy_by_ridge": {f"{r:g}": v for r, v in validation.items()}}
    table.append({"probe": f"regression by L-BFGS, ridge {ridge:g} by cross-validation", "test accuracy": accuracy})
