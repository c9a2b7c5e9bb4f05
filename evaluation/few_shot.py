"""Few-shot classification, without privacy: K examples per class, S random splits, mean and 95 % interval.

The probe follows DP-Cap's evaluation (Sander et al. 2024, https://arxiv.org/abs/2403.02506): every feature vector is centred and
brought to length 1, then multinomial regression without intercept, ridge 0.0025 / n.

Whole fine-tuning, in one process: AdamW with layer-wise decay of the rate, warm-up and cosine, random crops and flips, label
smoothing: the masked autoencoder's recipe (He et al. 2021, https://arxiv.org/abs/2111.06377, appendix A.1; ViP fine-tunes by it
too), without its random changes of colour, mixup, cutmix, random erasing and stochastic depth. Fine-tuning with privacy, or on
many machines, is a training run of `model.kind = "classifier"`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from data.errors import DataError
from evaluation.encoder import encoder_of
from evaluation.features import Inputs, device_of, load_inputs
from evaluation.linear_probe import regression
from evaluation.options import FeatureOptions, FewShotOptions
from evaluation.results import Results
from evaluation.sources import Augmentation, Source, decoded_batches
from models.adapters import without_adapters
from models.classifier import Classifier, build_classifier
from models.classifier_config import ClassifierConfig
from models.vit import VisionTransformer
from trainer.config.optimizer import OptimizerSection, ScheduleSection
from trainer.errors import ConfigError
from trainer.loop.schedule import learning_rate
from trainer.optimizers import make_optimizer, parameter_groups, set_step
from trainer.progress import track

DPCAP_RIDGE = 0.0025
LABEL_SMOOTHING = 0.1
FITTED = 0.9
"""Whole fine-tuning that gets a smaller share of its own few training images right has not trained long enough."""


@dataclass(frozen=True)
class Shots:
    """
    Attributes:
        shots: K.
        accuracies: on the test set, one per split.
    """

    shots: int
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of the mean over splits (Student's t); NaN for one. The test set counts as fixed."""
        count = len(self.accuracies)
        if count < 2:
            return math.nan
        return float(stats.t.ppf(0.975, count - 1) * np.std(self.accuracies, ddof=1) / math.sqrt(count))


def split(labels_N: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Rows of `shots` random examples of every class that occurs, (K * classes,); more shots of a seed contain fewer ones.

    Raises:
        DataError: a class has fewer examples.
    """
    rng, chosen = np.random.default_rng(seed), []
    for label in np.unique(labels_N):
        rows = np.flatnonzero(labels_N == label)
        if len(rows) < shots:
            raise DataError(f"class {label} has {len(rows)} training examples, fewer than {shots} shots")
        chosen.append(rng.permutation(rows)[:shots])
    return np.concatenate(chosen)


def unit_rows(x_ND: np.ndarray) -> np.ndarray:
    """Each row centred and of length 1; constant rows become zero."""
    x_ND = x_ND.astype(np.float64) - x_ND.mean(axis=1, keepdims=True, dtype=np.float64)
    length_N1 = np.linalg.norm(x_ND, axis=1, keepdims=True)
    return np.divide(x_ND, length_N1, out=np.zeros_like(x_ND), where=length_N1 > 1e-12)


def few_shot_probe(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    num_classes: int,
    shots: Sequence[int],
    *,
    num_splits: int = 3,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[Shots]:
    """DP-Cap's regression on features.

    Args:
        train, test: (features (N, D), labels (N,)).
        shots: each K.
        seed: of the first split; the others follow.

    Raises:
        DataError: a class with too few examples.
    """
    x_ND, y_N = unit_rows(train[0]), train[1]
    x_test_ND = unit_rows(test[0])
    measured = []
    for count in shots:
        accuracies = []
        for number in range(num_splits):
            rows = split(y_N, count, seed + number)
            head = regression(
                x_ND[rows], y_N[rows], num_classes, ridge=DPCAP_RIDGE / len(rows), device=device, standardise=False,
                intercept=False,
            )  # fmt: skip
            accuracies.append(head.accuracy(x_test_ND, test[1]))
        measured.append(Shots(count, tuple(accuracies)))
    return measured


def fine_tune(
    encoder: VisionTransformer,
    source: Source,
    rows: np.ndarray,
    num_classes: int,
    *,
    epochs: int = 100,
    batch_size: int = 1024,
    micro_batch_size: int = 64,
    base_lr: float = 5e-4,
    layer_decay: float = 0.65,
    weight_decay: float = 0.05,
    warmup_epochs: int = 5,
    seed: int = 0,
) -> Classifier:
    """A classifier on the mean of the patch tokens that starts from the encoder; the encoder given stays as it is.

    Low-rank adapters are first added into the weights that they correct: the start computes the same, whole weights are trained.

    Args:
        rows: which images of `source` to train on.
        batch_size: capped at the number of images; the rate is base_lr * batch / 256.

    Raises:
        DataError: an image among them that cannot be used.
        ReadError: images cannot be read.
    """
    device = encoder.class_token.device
    model = starting_classifier(encoder, num_classes, seed).to(device)
    named = dict(model.named_parameters())
    batch_size = min(batch_size, len(rows))
    per_epoch, peak_lr = -(-len(rows) // batch_size), base_lr * batch_size / 256
    section = OptimizerSection(
        name="adamw", peak_lr=peak_lr, betas=(0.9, 0.999), weight_decay=weight_decay, layer_decay=layer_decay
    )
    groups = parameter_groups(named.items(), {n: p.shape for n, p in named.items()}, section)
    optimizer = make_optimizer(groups, section)
    schedule = ScheduleSection(warmup_steps=min(warmup_epochs, epochs - 1) * per_epoch)
    rng, step = np.random.default_rng(seed), 0
    model.train()
    for epoch in track(range(epochs), "epochs of fine-tuning", epochs):
        order = rng.permutation(rows)
        for start in range(0, len(order), batch_size):
            step += 1
            ids = order[start : start + batch_size].tolist()
            for batch in decoded_batches(
                source, ids, batch_size=micro_batch_size, image_size=encoder.config.image_size,
                augmentation=Augmentation(seed, epoch),
            ):  # fmt: skip
                if not batch.is_usable_B.all():
                    raise DataError(f"{source.name}: an image to train on cannot be decoded or has no label")
                loss_B = model(batch.images_BCHW.to(device), torch.from_numpy(batch.labels_B).to(device))
                (loss_B.sum() / len(ids)).backward()
            lr = learning_rate(step, epochs * per_epoch, peak_lr, schedule)
            set_step(optimizer.param_groups, lr=lr, noise_variance=0.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def starting_classifier(encoder: VisionTransformer, num_classes: int, seed: int = 0) -> Classifier:
    """A classifier with a new head whose encoder computes what the given one does."""
    config = ClassifierConfig(
        encoder=encoder.config, num_classes=num_classes, features="pooled", label_smoothing=LABEL_SMOOTHING
    )
    model = build_classifier(config, generator=torch.Generator().manual_seed(seed))
    model.encoder.load_state_dict(without_adapters(encoder).state_dict())
    return model


@torch.no_grad()
def classifier_accuracy(
    model: Classifier, source: Source, rows: Sequence[int] | None, options: FeatureOptions
) -> float:
    """Share of the usable images whose own class scores highest.

    Args:
        rows: which images; None for all.

    Raises:
        DataError: none is usable.
    """
    correct, count = 0, 0
    size, device = model.config.encoder.image_size, model.head.weight.device
    for batch in decoded_batches(
        source, range(len(source)) if rows is None else rows, batch_size=options.batch_size, image_size=size,
        num_workers=options.num_workers, resize=options.resize,
    ):  # fmt: skip
        predicted_B = model(batch.images_BCHW.to(device), output="logits").argmax(dim=1).cpu().numpy()
        correct += int(((predicted_B == batch.labels_B) & batch.is_usable_B).sum())
        count += int(batch.is_usable_B.sum())
    if not count:
        raise DataError(f"{source.name}: no example has both an image and a label")
    return correct / count


def few_shot(options: FewShotOptions) -> Results | None:
    """The command; see its options."""
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


def _fine_tuned(options: FewShotOptions, inputs: Inputs) -> tuple[list[Shots], list[str]]:
    """Accuracies, and a note for each number of shots at which training has not fitted its own images.

    The features that were computed say which images are usable; training sees the images."""
    if inputs.opened is None or len(inputs.sources) < 2:
        raise ConfigError("fine-tuning needs --checkpoint and images for --train and --test, not features")
    encoder, train = encoder_of(inputs.opened.model), inputs.features["train"]
    if options.image_size not in (None, encoder.config.image_size):
        raise ConfigError(
            f"--image_size is for --method probe; fine-tuning is at the model's {encoder.config.image_size}"
        )
    usable = np.flatnonzero(train.is_usable_N)
    measured, notes = [], []
    for shots in options.shots:
        accuracies: list[float] = []
        fitted: list[float] = []
        for number in range(options.num_splits):
            rows = usable[split(train.labels_N[usable], shots, options.seed + number)]
            model = fine_tune(
                encoder, inputs.sources["train"], rows, inputs.num_classes(), epochs=options.epochs,
                base_lr=options.base_lr, layer_decay=options.layer_decay, warmup_epochs=min(5, options.epochs // 10),
            )  # fmt: skip
            accuracies.append(classifier_accuracy(model, inputs.sources["test"], None, options))
            fitted.append(classifier_accuracy(model, inputs.sources["train"], rows.tolist(), options))
        measured.append(Shots(shots, tuple(accuracies)))
        if min(fitted) < FITTED:
            notes.append(
                f"fine-tuning at {shots} shots has not converged: it gets {min(fitted):.2f} of its own training images right; "
                "raise --epochs or --base_lr"
            )
    return measured, notes
