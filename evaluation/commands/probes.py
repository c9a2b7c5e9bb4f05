"""Commands that look at what a frozen encoder makes of images, not privately: features are kept, or small heads are trained."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from evaluation.commands.common import (
    CheckpointOptions,
    FeatureInputOptions,
    Inputs,
    Seed,
    Source,
    TrainTestOptions,
    cache_of,
    device_of,
    load_inputs,
    open_checkpoint,
)
from trainer.config.options import Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from evaluation.few_shot import Shots
    from evaluation.linear_probe import Rows
    from evaluation.results import Results


class FeaturesOptions(FeatureInputOptions):
    """Options of `features`."""

    data: Source
    """shards:PATTERN, folder:DIR, hf:DIR, arrays:FILE.npz, or features:FILE_OR_DIR"""


def features(options: FeaturesOptions) -> "Results | None":
    """Computes features of a frozen encoder and keeps them, for the other commands or for anything else.

        deepspeed launch_scripts/evaluate.py features --checkpoint runs/x --data shards:imagenet/train-{0000..1023}.tar \\
            --features blocks --num_blocks 12 --num_workers 8

    Under a launcher the ranks share the images, and the others than rank 0 return None.
    """
    from evaluation.results import Results

    cache = cache_of(options)
    if cache is None:
        raise ConfigError("the checkpoint lies in no run folder: give --cache, a folder for the features")
    inputs = load_inputs(options, data=options.data)
    if inputs is None:
        return None
    computed = inputs.features["data"]
    scalars = {
        "num_examples": len(computed.labels_N),
        "num_unusable": computed.num_unusable,
        "width": computed.values_ND.shape[1],
        "num_classes": computed.num_classes,
    }
    return Results("features", scalars, inputs.uses(), inputs.model, notes=[f"kept in {cache}"])


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
    augment: bool = False
    """LARS: features of random crops and flips, new in each epoch, as in the papers; needs images and that many passes"""
    num_folds: int = Field(5, ge=2, le=1000)
    """L-BFGS: of the cross-validation"""
    seed: Seed = 0


def linear_probe(options: LinearProbeOptions) -> "Results | None":
    """Linear probe of frozen features: the LARS protocol of the papers, and cross-validated regression by L-BFGS.

        python launch_scripts/evaluate.py linear-probe --checkpoint runs/x --train shards:train/ --test shards:val/ \\
            --features blocks --num_blocks 12

    LARS gives the test accuracy of its last epoch and, labelled, of its best (which the papers report). Not private.
    """
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
        lars = lars_probe(
            train,
            test,
            inputs.num_classes(),
            how,
            device,
            epochs=_augmented(options, inputs) if options.augment else None,
        )
        scalars |= {"lars_accuracy_last_epoch": lars.last, "lars_accuracy_best_epoch": lars.best}
        details["lars"] = {
            "accuracies": lars.accuracies, "best_epoch": lars.best_epoch, "batch_size": lars.batch_size,
            "peak_lr": lars.peak_lr, "epochs": options.epochs, "trust_coefficient": options.trust_coefficient,
            "augmented": options.augment, "accuracy_gained_by_descent": lars.accuracy_gained,
        }  # fmt: skip
        best = f"LARS, best epoch ({lars.best_epoch}), chosen on the test set"
        table.append({"probe": "LARS, last epoch", "test accuracy": lars.last})
        table.append({"probe": best, "test accuracy": lars.best})
        if not lars.converged:
            notes.append(
                f"LARS has not converged: a few steps of L-BFGS from its head gain {100 * lars.accuracy_gained:.1f} points on "
                "training examples that they leave out. The papers' rate is for a million images; raise --trust_coefficient "
                "(--base_lr would drive the bias, which LARS does not scale, too) or --epochs"
            )
    if options.method != "lars":
        head, by_ridge = cross_validated_regression(
            *train, inputs.num_classes(), num_folds=options.num_folds, seed=options.seed, device=device
        )
        ridge = max(by_ridge, key=lambda r: (round(by_ridge[r], 12), r))
        accuracy = head.accuracy(*test)
        if not head.converged:
            notes.append(
                f"L-BFGS stopped before it converged: the steepest slope of its objective is {head.steepest:.1g}"
            )
        scalars["lbfgs_accuracy"] = accuracy
        details["lbfgs"] = {"ridge": ridge, "validation_accuracy_by_ridge": {f"{r:g}": v for r, v in by_ridge.items()}}
        table.append({"probe": f"regression by L-BFGS, ridge {ridge:g} by cross-validation", "test accuracy": accuracy})
    return Results("linear-probe", scalars, inputs.uses(), inputs.model, table, details, notes=notes)


def _augmented(options: LinearProbeOptions, inputs: Inputs) -> "Callable[[int], Rows]":
    """Features of the training images in an epoch's crops and flips."""
    import numpy as np

    from evaluation.encoder import FeatureOptions
    from evaluation.features import Augmentation, compute

    if inputs.opened is None or "train" not in inputs.sources:
        raise ConfigError("--augment needs --checkpoint and images for --train, not features")
    model, source = inputs.opened.model, inputs.sources["train"]
    how = FeatureOptions(
        options.features, options.num_blocks if options.features == "blocks" else 1, options.image_size
    )
    rows = np.flatnonzero(inputs.features["train"].is_usable_N).tolist()

    def of_epoch(epoch: int) -> "Rows":
        augmentation = Augmentation(options.seed, epoch)
        found = compute(model, source, how, rows, options.batch_size, options.num_workers, augmentation).usable()
        return found.values_ND, found.labels_N

    return of_epoch


class FewShotOptions(TrainTestOptions):
    """Options of `few_shot`."""

    GROUP = "few-shot"

    method: Literal["probe", "finetune"] = "probe"
    shots: Annotated[tuple[Annotated[int, Field(ge=1, le=100_000)], ...], Shown("K"), Field(min_length=1)] = (
        1,
        2,
        5,
        10,
    )
    """examples per class"""
    num_splits: Annotated[int, Shown("S"), Field(ge=1, le=100_000)] = 3
    """random splits for each K"""
    seed: Seed = 0
    """of the first split"""
    epochs: int = Field(100, ge=1, le=100_000)
    """of fine-tuning"""
    base_lr: Annotated[float, Shown("R"), Field(gt=0, le=1e4)] = 5e-4
    """of fine-tuning: rate is R * batch / 256"""
    layer_decay: float = Field(0.65, gt=0, le=1)
    """of fine-tuning"""


def few_shot(options: FewShotOptions) -> "Results | None":
    """Few-shot classification, not private: K examples per class, mean and 95 % interval over random splits.

        python launch_scripts/evaluate.py few-shot --checkpoint runs/x --train shards:train/ --test shards:val/ \\
            --shots 1 2 5 10

    `--method probe` is DP-Cap's regression on frozen features; `--method finetune` trains the whole encoder (in one process).
    """
    from evaluation.few_shot import few_shot_probe
    from evaluation.results import Results

    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    notes: list[str] = []
    if options.method == "finetune":
        measured, notes = _fine_tuned(options, inputs)
    else:
        measured = few_shot_probe(
            inputs.usable("train"), inputs.usable("test"), inputs.num_classes(), options.shots,
            num_splits=options.num_splits, seed=options.seed, device=device_of(options),
        )  # fmt: skip
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for shots in measured:
        row: dict[str, Any] = {"shots": shots.shots, "test accuracy": shots.mean}
        scalars[f"{options.method}/{shots.shots}-shot/accuracy"] = shots.mean
        if not math.isnan(shots.half_width):
            row["95 % interval"] = f"+- {shots.half_width:.4f}"
            scalars[f"{options.method}/{shots.shots}-shot/interval_half_width"] = shots.half_width
        table.append(row)
    details = {
        "method": options.method, "num_splits": options.num_splits, "seed": options.seed,
        "accuracies": {str(shots.shots): shots.accuracies for shots in measured},
    }  # fmt: skip
    return Results("few-shot", scalars, inputs.uses(), inputs.model, table, details, notes=notes)


def _fine_tuned(options: FewShotOptions, inputs: Inputs) -> "tuple[list[Shots], list[str]]":
    """Accuracies, and a note for each number of shots at which training has not fitted its own images.

    The features that were computed say which images are usable; training sees the images."""
    import numpy as np

    from evaluation.encoder import encoder_of
    from evaluation.few_shot import FITTED, FineTuneOptions, Shots, classifier_accuracy, fine_tune, split

    if inputs.opened is None or len(inputs.sources) < 2:
        raise ConfigError("fine-tuning needs --checkpoint and images for --train and --test, not features")
    encoder, train = encoder_of(inputs.opened.model), inputs.features["train"]
    if options.image_size not in (None, encoder.config.image_size):
        raise ConfigError(
            f"--image_size is for --method probe; fine-tuning is at the model's {encoder.config.image_size}"
        )
    usable = np.flatnonzero(train.is_usable_N)
    how = FineTuneOptions(
        epochs=options.epochs, base_lr=options.base_lr, layer_decay=options.layer_decay,
        warmup_epochs=min(FineTuneOptions.warmup_epochs, options.epochs // 10),
    )  # fmt: skip
    measured, notes = [], []
    for shots in options.shots:
        accuracies, fitted = [], []
        for number in range(options.num_splits):
            rows = usable[split(train.labels_N[usable], shots, options.seed + number)]
            model = fine_tune(encoder, inputs.sources["train"], rows, inputs.num_classes(), how)
            accuracy = classifier_accuracy(
                model, inputs.sources["test"], batch_size=options.batch_size, num_workers=options.num_workers,
                resize=options.resize,
            )  # fmt: skip
            accuracies.append(accuracy)
            own = classifier_accuracy(
                model, inputs.sources["train"], rows.tolist(), batch_size=options.batch_size, resize=options.resize
            )
            fitted.append(own)
        measured.append(Shots(shots, tuple(accuracies)))
        if min(fitted) < FITTED:
            notes.append(
                f"fine-tuning at {shots} shots has not converged: it gets {min(fitted):.2f} of its own training images right; "
                "raise --epochs or --base_lr"
            )
    return measured, notes


class DenseCommandOptions(CheckpointOptions):
    """Options of `dense`."""

    task: Literal["segmentation", "detection"]
    train: Annotated[str, Shown("SOURCE")]
    """synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"""
    test: Annotated[str, Shown("SOURCE")]
    """synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"""
    image_size: Annotated[int | None, Shown("PIXELS"), Field(ge=1, le=8192)] = None
    """default: the model's; positions are interpolated"""
    head: Literal["linear", "conv"] = "conv"
    epochs: int = Field(30, ge=1, le=100_000)
    lr: float = Field(2e-3, gt=0, le=1e4)
    """of AdamW, in one cycle"""


def dense(options: DenseCommandOptions) -> "Results":
    """Segmentation or detection by a small head on token maps of the frozen encoder, not private.

        python launch_scripts/evaluate.py dense --task segmentation --checkpoint runs/x --train ade20k:ADE/training \\
            --test ade20k:ADE/validation --image_size 512
        python launch_scripts/evaluate.py dense --task detection --checkpoint runs/x --train synthetic:1:400 \\
            --test synthetic:2:100

    Whole pictures are squeezed to a square of --image_size pixels. Masks are scored at their own resolution.
    """
    from evaluation.dense.heads import DenseOptions, detection_scores, prepare, segmentation_scores
    from evaluation.dense.sources import open_dense
    from evaluation.encoder import encoder_of
    from evaluation.results import DataUse, ModelFacts, Results

    opened = open_checkpoint(options)
    how = DenseOptions(options.image_size, options.head, options.epochs, lr=options.lr)
    side = options.image_size or encoder_of(opened.model).config.image_size
    sources = {"train": open_dense(options.train, side), "test": open_dense(options.test, side)}
    classes = sources["train"]
    if classes.mask_classes != sources["test"].mask_classes:
        raise ConfigError("--train and --test have other classes")
    if options.task == "detection" and not classes.object_classes:
        raise ConfigError(f"detection needs boxes, and {classes.name} has masks only")
    train, test = (prepare(opened.model, source, how) for source in sources.values())
    if options.task == "segmentation":
        scores = segmentation_scores(train, test, len(classes.mask_classes), how)
    else:
        scores = detection_scores(train, test, len(classes.object_classes), how)
    uses = [DataUse(role, source.name, len(source)) for role, source in sources.items()]
    scalars = {f"{options.task}/{name}": value for name, value in scores.items()}
    facts = ModelFacts.of(opened.path, opened.manifest)
    return Results("dense", scalars, uses, facts, details={"head": options.head})
