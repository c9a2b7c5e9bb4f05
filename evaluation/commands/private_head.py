"""A linear head trained with differential privacy on features of a frozen encoder, with a ledger of its own.

    python launch_scripts/evaluate.py private-head --checkpoint runs/x --train shards:train/ --test shards:val/ \\
        --num_classes 100 --method dp-ls --target_epsilon 1 --output runs/x-heads
    python launch_scripts/evaluate.py private-head ... --method dp-ls dp-fc --sweep [0.1 1 10] --data_is_public

The guarantee covers the training images given the encoder: where the encoder has seen them too, both epsilons add up. The test
accuracy is computed without noise. A sweep releases many heads; their joint epsilon is printed, and belongs to public data or to
a budget that has room for all of them. Weights, ledger and head.json are in OUTPUT/private_heads (--heads).
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.options import MOST_REPEATS, between
from evaluation.commands.common import device_of, output_of
from evaluation.commands.inputs import Inputs, add_inputs, load_inputs
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from evaluation.features import Features
    from evaluation.private_head.sweep import HeadData, HeadRequest, TrainedHead
    from evaluation.results import PrivateRelease, Results

NAME = "private-head"
HELP = "linear head trained with differential privacy on frozen features"
RANKS = True
METHODS = ("dp-ls", "dp-newton", "dp-fc", "dp-gd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_inputs(parser, ["train", "test"])
    group = parser.add_argument_group("head")
    group.add_argument("--method", choices=METHODS, nargs="+", required=True, help="several with --sweep")
    group.add_argument("--target_epsilon", type=float, metavar="E", help="of the head's release")
    group.add_argument(
        "--sweep", type=float, nargs="*", metavar="E", help="a head for each; default 0.1 to 10, plotted"
    )
    group.add_argument(
        "--repeats",
        type=between(1, MOST_REPEATS),
        default=1,
        metavar="R",
        help="heads per method and epsilon of a sweep",
    )
    group.add_argument("--delta", type=float, metavar="D", help="default 1 / (2 N)")
    group.add_argument(
        "--num_classes", type=between(2, 2**24), metavar="L", help="public; default: as many as have names"
    )
    group.add_argument("--centre_rows", action="store_true", help="subtract each feature vector's own mean first")
    group.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="[METHOD.]NAME=VALUE",
        help="of the method: max_norm, ridge, ...",
    )
    group.add_argument("--heads", type=Path, metavar="DIR", help="new folder for heads and ledgers")
    group.add_argument(
        "--shared_ledger", type=Path, metavar="FILE", help="the data owner's ledger, which must have room"
    )
    group.add_argument("--compare", action="store_true", help="also without privacy (a sweep always does)")


def run(args: argparse.Namespace) -> "Results | None":
    """See `evaluation.commands`."""
    from evaluation.private_head import sweep
    from evaluation.results import Results
    from privacy.card.text import rounded_up

    request = _request(args)
    inputs = load_inputs(args, ["train", "test"])
    if inputs is None:
        return None
    data = _data(args, inputs)
    request = replace(request, covers=_covers(args, inputs))
    heads = sweep.train_heads(data, request)
    rows = sweep.summary(heads)
    scalars = {f"{row['method']}/epsilon-{row['epsilon']:g}/accuracy": row["accuracy"] for row in rows}
    details: dict[str, Any] = {"options": request.options, "centre_rows": args.centre_rows, "repeats": request.repeats}
    notes = []
    together = sweep.spent_in(request.folder)
    if together.num_releases > 1:
        details["all_heads_together"] = together._asdict()
        notes.append(
            f"the {together.num_releases} releases in {request.folder}, earlier ones included, cost epsilon "
            f"{rounded_up(together.epsilon, 4)} at delta {together.delta:.3g} together where they are of the same examples; "
            "choosing a head by its accuracy costs the test data's privacy"
        )
    baselines = _baselines(args, data, request)
    if baselines:
        details["without_privacy"] = baselines
        scalars |= {f"{name}/without_privacy/accuracy": value for name, value in baselines.items()}
        rows += [{"method": f"{name}, without privacy", "accuracy": value} for name, value in baselines.items()]
    if args.sweep is not None:
        notes.append(f"plot: {_plot(args, sweep.summary(heads), baselines)}")
    released = _released(heads, request.covers)
    return Results(NAME, scalars, inputs.uses(), inputs.model, rows, details, released, notes=notes)


def _request(args: argparse.Namespace) -> "HeadRequest":
    """What can be wrong without looking at the data, first."""
    from evaluation.private_head.run import make_method
    from evaluation.private_head.sweep import EPSILONS, HeadRequest

    if (args.sweep is None) == (args.target_epsilon is None):
        raise ConfigError("give exactly one of --target_epsilon and --sweep")
    if args.sweep is None and (len(args.method) > 1 or args.repeats != 1):
        raise ConfigError("several methods or repeats are a sweep: give --sweep with their epsilons")
    if args.repeats > 1 and not args.data_is_public:
        raise ConfigError(
            "--repeats releases every head anew: it is for data that are declared public (--data_is_public)"
        )
    output = output_of(args)
    folder = args.heads or (None if output is None else output / "private_heads")
    if folder is None:
        raise ConfigError("give --output (or --heads), a folder for the head and its ledger")
    epsilons = [args.target_epsilon] if args.sweep is None else (args.sweep or list(EPSILONS))
    options = _method_options(args)
    for method in args.method:
        make_method(method, options[method])
    return HeadRequest(
        tuple(dict.fromkeys(args.method)), tuple(dict.fromkeys(epsilons)), folder, args.delta, args.repeats, options,
        args.shared_ledger,
    )  # fmt: skip


def _method_options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    import json

    found: dict[str, dict[str, Any]] = {method: {} for method in args.method}
    for text in args.option:
        name, equals, value = text.partition("=")
        method, dot, option = name.partition(".")
        try:
            parsed = json.loads(value) if equals else None
        except ValueError:
            parsed = None
        if not isinstance(parsed, int | float):
            raise ConfigError(f"--option {text}: write NAME=NUMBER, NAME=true or METHOD.NAME=NUMBER")
        if dot and method not in found:
            raise ConfigError(f"--option {text}: {method} is not among --method {' '.join(args.method)}")
        for target in [method] if dot else list(found):
            found[target][option if dot else name] = parsed
    return found


def _data(args: argparse.Namespace, inputs: Inputs) -> "HeadData":
    """Training rows that are not usable stay, as zeros: how many there are must not follow from an example's bytes."""
    from evaluation.private_head.sweep import HeadData

    train, test = inputs.features["train"], inputs.usable("test")
    num_classes = args.num_classes or len(train.class_names)
    if not num_classes:
        raise ConfigError("give --num_classes: what the largest label of the training data is would be no public fact")
    x_ND, y_N = _private_rows(train, num_classes, centre=args.centre_rows)
    return HeadData(x_ND, y_N, _centred(test.values_ND, centre=args.centre_rows), test.labels_N, num_classes)


def _private_rows(train: "Features", num_classes: int, *, centre: bool) -> "tuple[np.ndarray, np.ndarray]":
    """Rows whose label is out of range become zero too, decided by each row alone."""
    import numpy as np

    keep_N = train.is_usable_N & (train.labels_N >= 0) & (train.labels_N < num_classes)
    x_ND = np.where(keep_N[:, None], _centred(train.values_ND, centre=centre), 0.0)
    return x_ND, np.where(keep_N, train.labels_N, 0)


def _centred(x_ND: "np.ndarray", *, centre: bool) -> "np.ndarray":
    return x_ND - x_ND.mean(axis=1, keepdims=True) if centre else x_ND


def _baselines(args: argparse.Namespace, data: "HeadData", request: "HeadRequest") -> dict[str, float]:
    if args.sweep is None and not args.compare:
        return {}
    from evaluation.linear_probe import cross_validated_regression
    from evaluation.private_head.sweep import without_privacy

    used = data.x_ND.any(axis=1)
    head, _ = cross_validated_regression(data.x_ND[used], data.y_N[used], data.num_classes, device=device_of(args))
    return {**without_privacy(data, request), "regression": head.accuracy(data.x_test_ND, data.y_test_N)}


def _covers(args: argparse.Namespace, inputs: Inputs) -> str:
    """The guarantee holds given what made the features; that has a guarantee of its own, or none."""
    if inputs.model is None or args.train.startswith("features:"):
        return f"the examples of {args.train}, given what made the features of each from that example alone"
    if inputs.model.formal_guarantee:
        return f"the examples of {args.train}, given the encoder, whose epsilon is to be added where it has seen them"
    return f"the examples of {args.train}, given the encoder, which has no formal guarantee: if it has seen them, none is left"


def _released(heads: "list[TrainedHead]", covers: str) -> "list[PrivateRelease]":
    from evaluation.results import PrivateRelease

    return [
        PrivateRelease(f"weights of a {head.method} head", str(head.ledger), head.epsilon, head.delta, covers)
        for head in heads
        if head.epsilon is not None
    ]


def _plot(args: argparse.Namespace, rows: list[dict[str, Any]], baselines: dict[str, float]) -> Path:
    from evaluation.private_head.sweep import plot
    from evaluation.results import results_folder

    output = output_of(args) or args.heads
    path = results_folder(output, data_is_public=args.data_is_public) / "private-head-sweep.png"
    plot(rows, baselines, "Private heads: accuracy without noise on the test data", path)
    return path
