"""Linear probe of frozen features, not private: the LARS protocol of the papers, and cross-validated regression by L-BFGS.

    python launch_scripts/evaluate.py linear-probe --checkpoint runs/x --train shards:train/ --test shards:val/ \\
        --features blocks --num_blocks 12

LARS gives the test accuracy of its last epoch and, labelled, of its best (which the papers report).
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from evaluation.commands.common import Seed, device_of
from evaluation.commands.inputs import TrainTestOptions, load_inputs
from trainer.config.options import Shown

if TYPE_CHECKING:
    from evaluation.results import Results


class LinearProbeOptions(TrainTestOptions):
    """Options of `linear_probe`."""

    GROUP = "probe"

    method: Literal["both", "lars", "lbfgs"] = "both"
    epochs: int = Field(90, ge=1, le=100_000)
    """LARS; default 90, a tenth of which at most warms up"""
    probe_batch_size: Annotated[int, Shown("B"), Field(ge=1, le=10**12)] = 16384
    """LARS; capped at the data"""
    base_lr: Annotated[float, Shown("R"), Field(gt=0, le=1e4)] = 0.1
    """LARS: rate is R * batch / 256"""
    trust_coefficient: Annotated[float, Shown("R"), Field(gt=0, le=1e4)] = 1e-3
    """LARS; to be raised for small data sets"""
    num_folds: int = Field(5, ge=2, le=1000)
    """L-BFGS: of the cross-validation"""
    seed: Seed = 0


def linear_probe(options: LinearProbeOptions) -> "Results | None":
    """Trains and tests the probes; None on other ranks than 0."""
    from evaluation.linear_probe import LarsOptions, cross_validated_regression, lars_probe
    from evaluation.results import Results

    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    train, test, device = inputs.usable("train"), inputs.usable("test"), device_of(options)
    scalars: dict[str, float] = {}
    details: dict[str, Any] = {}
    table: list[dict[str, Any]] = []
    notes: list[str] = []
    if options.method != "lbfgs":
        how = LarsOptions(
            epochs=options.epochs, batch_size=options.probe_batch_size, base_lr=options.base_lr,
            trust_coefficient=options.trust_coefficient, warmup_epochs=min(10, options.epochs // 9), seed=options.seed,
        )  # fmt: skip
        lars = lars_probe(train, test, inputs.num_classes(), how, device)
        scalars |= {"lars_accuracy_last_epoch": lars.last, "lars_accuracy_best_epoch": lars.best}
        details["lars"] = {
            "accuracies": lars.accuracies, "best_epoch": lars.best_epoch, "batch_size": lars.batch_size,
            "peak_lr": lars.peak_lr, "epochs": options.epochs, "trust_coefficient": options.trust_coefficient,
        }  # fmt: skip
        best = f"LARS, best epoch ({lars.best_epoch}), chosen on the test set"
        table.append({"probe": "LARS, last epoch", "test accuracy": lars.last})
        table.append({"probe": best, "test accuracy": lars.best})
        if not lars.settles:
            notes.append(
                "LARS made few steps for its rate: the head is still near its random start. The papers' rate is for a "
                "million images; raise --trust_coefficient (--base_lr would drive the bias, which LARS does not scale, too)"
            )
    if options.method != "lars":
        head, by_ridge = cross_validated_regression(
            *train, inputs.num_classes(), num_folds=options.num_folds, seed=options.seed, device=device
        )
        ridge = max(by_ridge, key=lambda r: (round(by_ridge[r], 12), r))
        accuracy = head.accuracy(*test)
        scalars["lbfgs_accuracy"] = accuracy
        details["lbfgs"] = {"ridge": ridge, "validation_accuracy_by_ridge": {f"{r:g}": v for r, v in by_ridge.items()}}
        table.append({"probe": f"regression by L-BFGS, ridge {ridge:g} by cross-validation", "test accuracy": accuracy})
    return Results("linear-probe", scalars, inputs.uses(), inputs.model, table, details, notes=notes)
