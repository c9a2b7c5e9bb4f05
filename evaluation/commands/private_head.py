"""The command `private-head`."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import model_validator

from evaluation.commands.common import TrainTestOptions, device_of, load_inputs, output_of
from trainer.config.options import Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from evaluation.features import Features
    from evaluation.private_head.rows import Rows
    from evaluation.private_head.sweep import HeadRequest
    from evaluation.results import Results

Method = Literal["dp-ls", "dp-newton", "dp-fc", "dp-fc-bce", "dp-gd"]


class PrivateHeadOptions(TrainTestOptions):
    """Options of `private_head`."""

    GROUP = "head"

    method: tuple[Method, ...]
    """several with --sweep"""
    target_epsilon: Annotated[float | None, Shown("E")] = None
    """of the head's release"""
    sweep: Annotated[tuple[float, ...] | None, Shown("E")] = None
    """a head for each; default 0.1 to 10, plotted"""
    repeats: Annotated[int, Shown("R")] = 1
    """heads per method and epsilon of a sweep"""
    delta: Annotated[float | None, Shown("D")] = None
    """default 1 / (2 N)"""
    num_classes: Annotated[int | None, Shown("L")] = None
    """public; default: as many as have names"""
    centre_rows: bool = False
    """subtract each feature vector's own mean first"""
    option: Annotated[tuple[str, ...], Shown("[METHOD.]NAME=VALUE", is_repeated=True)] = ()
    """of the method: max_norm, ridge, ..."""
    heads: Annotated[Path | None, Shown("DIR")] = None
    """new folder for heads and ledgers"""
    shared_ledger: Annotated[Path | None, Shown("FILE")] = None
    """the data owner's ledger, which must have room"""
    compare: bool = False
    """also without privacy (a sweep always does)"""

    @model_validator(mode="after")
    def _releases_what_was_meant(self) -> Self:
        if (self.sweep is None) == (self.target_epsilon is None):
            raise ValueError("give exactly one of --target_epsilon and --sweep")
        if self.sweep is None and (len(self.method) > 1 or self.repeats != 1):
            raise ValueError("several methods or repeats are a sweep: give --sweep with their epsilons")
        if self.repeats < 1 or (self.repeats > 1 and not self.data_is_public):
            raise ValueError(
                "--repeats releases every head anew: it is for data that are declared public (--data_is_public)"
            )
        return self

    def method_options(self) -> dict[str, dict[str, Any]]:
        """What --option says, by method.

        Raises:
            ConfigError: it is no number, or its method is not among the chosen ones.
        """
        by_method: dict[str, dict[str, Any]] = {method: {} for method in self.method}
        for text in self.option:
            name, equals, value = text.partition("=")
            prefix, dot, option = name.rpartition(".")
            try:
                parsed = json.loads(value) if equals else None
            except ValueError:
                parsed = None
            if not isinstance(parsed, int | float):
                raise ConfigError(f"--option {text}: write NAME=NUMBER, NAME=true or METHOD.NAME=NUMBER")
            if dot and prefix not in by_method:
                raise ConfigError(f"--option {text}: {prefix} is not among --method {' '.join(self.method)}")
            for method in self.method:
                if not dot or method == prefix:
                    by_method[method][option] = parsed
        return by_method


def private_head(options: PrivateHeadOptions) -> "Results | None":
    """A linear head trained with differential privacy on features of a frozen encoder, with a ledger of its own.

        python launch_scripts/evaluate.py private-head --checkpoint runs/x --train shards:train/ --test shards:val/ \\
            --num_classes 100 --method dp-ls --target_epsilon 1 --output runs/x-heads
        python launch_scripts/evaluate.py private-head ... --method dp-ls dp-fc --sweep [0.1 1 10] --data_is_public

    The guarantee covers the training images. What a private encoder spent is composed with the head, since it may have seen them
    too; without a guarantee of the encoder, or from stored features, it holds given the encoder. The test accuracy is computed
    without noise. A sweep releases many heads; their joint epsilon is printed, and belongs to public data or to a budget that has
    room for all of them. Weights, ledger and head.json are in OUTPUT/private_heads (--heads).
    Under a launcher the ranks share images, then rows of features and sums over them; the others than rank 0 return None.
    """
    import torch.distributed as dist

    from evaluation.linear_probe import cross_validated_regression
    from evaluation.private_head import sweep
    from evaluation.private_head.rows import Rows
    from evaluation.results import PrivateRelease, Results, results_folder
    from privacy.card.text import rounded_up
    from trainer.ranks.distributed import broadcast_object
    from trainer.weights.behind import ledgers_of

    request = _request(options)
    compares = options.sweep is not None or options.compare
    shares = dist.is_initialized() and dist.get_world_size() > 1
    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:  # rank 0 tells the others which rows are theirs, and for how many classes
        rows, num_classes = Rows.dealt(None), broadcast_object(0)
        sweep.help_train_heads(rows, num_classes, request, compares=compares)
        return None
    train, (x_test_ND, y_test_N) = inputs.features["train"], inputs.usable("test")
    num_classes = options.num_classes or len(train.class_names)
    if not num_classes:
        raise ConfigError("give --num_classes: what the largest label of the training data is would be no public fact")
    # Training rows that are not usable stay, as zeros: how many there are must not follow from an example's bytes.
    whole = private_rows(train, num_classes, centre=options.centre_rows)
    rows = whole
    if shares:
        rows = Rows.dealt(whole)
        broadcast_object(num_classes)
    data = sweep.HeadData(rows, _centred(x_test_ND, centre=options.centre_rows), y_test_N, num_classes)
    # The guarantee holds given what made the features; that has a guarantee of its own, or none.
    if inputs.model is None or options.train.startswith("features:"):
        given = "what made the features of each from that example alone"
    elif inputs.model.formal_guarantee:
        given = "nothing: what the encoder spent is composed with the head, in case it has seen them"
        assert inputs.opened is not None
        request = replace(request, behind=ledgers_of(inputs.opened.path, inputs.opened.manifest))
    else:
        given = "the encoder, which has no formal guarantee: if it has seen them, none is left"
    request = replace(request, covers=f"the examples of {options.train}, given {given}")
    heads = sweep.train_heads(data, request)
    table = sweep.summary(heads)
    scalars = {f"{row['method']}/epsilon-{row['epsilon']:g}/accuracy": row["accuracy"] for row in table}
    details: dict[str, Any] = {
        "options": request.options, "centre_rows": options.centre_rows, "repeats": request.repeats,
    }  # fmt: skip
    notes = []
    together = sweep.spent_in(request.folder)
    if together.num_releases > 1:
        details["all_heads_together"] = together._asdict()
        notes.append(
            f"the {together.num_releases} releases in {request.folder}, earlier ones included, cost epsilon "
            f"{rounded_up(together.epsilon, 4)} at delta {together.delta:.3g} together where they are of the same examples; "
            "choosing a head by its accuracy costs the test data's privacy"
        )
    baselines: dict[str, float] = {}
    if compares:
        x_ND = whole.features_ND[:]
        used = x_ND.any(axis=1)
        plain, _ = cross_validated_regression(x_ND[used], whole.labels_N[used], num_classes, device=device_of(options))
        regression = plain.accuracy(data.x_test_ND, y_test_N)
        baselines = {**sweep.without_privacy(data, request), "regression": regression}
    if options.sweep is not None:
        folder = results_folder(output_of(options) or request.folder, data_is_public=options.results_are_public)
        plot = folder / "private-head-sweep.png"
        sweep.plot(table, baselines, "Private heads: accuracy without noise on the test data", plot)
        notes.append(f"plot: {plot}")
    if baselines:
        details["without_privacy"] = baselines
        scalars |= {f"{name}/without_privacy/accuracy": value for name, value in baselines.items()}
        table += [{"method": f"{name}, without privacy", "accuracy": value} for name, value in baselines.items()]
    released = [
        PrivateRelease(f"weights of a {head.method} head", str(head.ledger), head.epsilon, head.delta, request.covers)
        for head in heads
        if head.epsilon is not None
    ]
    return Results("private-head", scalars, inputs.uses(), inputs.model, table, details, released, notes=notes)


def _request(options: PrivateHeadOptions) -> "HeadRequest":
    """The request, checked as far as that is possible without looking at the data."""
    from evaluation.private_head.run import make_method
    from evaluation.private_head.sweep import EPSILONS, HeadRequest

    output = output_of(options)
    folder = options.heads or (None if output is None else output / "private_heads")
    if folder is None:
        raise ConfigError("give --output (or --heads), a folder for the head and its ledger")
    epsilons = (options.sweep or EPSILONS) if options.target_epsilon is None else (options.target_epsilon,)
    by_method = options.method_options()
    for method in options.method:
        make_method(method, by_method[method])
    return HeadRequest(
        tuple(dict.fromkeys(options.method)), tuple(dict.fromkeys(epsilons)), folder, options.delta, options.repeats,
        by_method, options.shared_ledger,
    )  # fmt: skip


def private_rows(train: "Features", num_classes: int, *, centre: bool) -> "Rows":
    """Rows that are not usable, or whose label is out of range, become zero, decided by each row alone."""
    import numpy as np

    from evaluation.private_head.rows import Rows

    keep_N = train.is_usable_N & (train.labels_N >= 0) & (train.labels_N < num_classes)
    return Rows.of(_Kept(train.values_ND, keep_N, centre), np.where(keep_N, train.labels_N, 0))


@dataclass(frozen=True)
class _Kept:
    """A `Matrix` of the features: a block is centred, and its other rows are zeroed, when it is read."""

    values_ND: "np.ndarray"
    keep_N: "np.ndarray"
    centre: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values_ND.shape

    def __getitem__(self, rows: slice) -> "np.ndarray":
        import numpy as np

        return np.where(self.keep_N[rows, None], _centred(self.values_ND[rows], centre=self.centre), 0.0)


def _centred(x_ND: "np.ndarray", *, centre: bool) -> "np.ndarray":
    return x_ND - x_ND.mean(axis=1, keepdims=True) if centre else x_ND
