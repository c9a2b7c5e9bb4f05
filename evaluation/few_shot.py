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

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from data.errors import DataError
from evaluation.features import Augmentation, decoded_batches
from evaluation.linear_probe import regression
from evaluation.sources.records import LabelledImages
from models.adapters import without_adapters
from models.classifier import Classifier, build_classifier
from models.classifier_config import ClassifierConfig
from models.vit import VisionTransformer
from trainer.config.optimizer import OptimizerSection, ScheduleSection
from trainer.loop.schedule import learning_rate
from trainer.optimizers import make_optimizer, parameter_groups, set_step
from trainer.progress import track

DPCAP_RIDGE = 0.0025
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


@dataclass(frozen=True)
class FineTuneOptions:
    """The rate is base_lr * batch / 256; `batch_size` is capped at the number of images."""

    epochs: int = 100
    batch_size: int = 1024
    micro_batch_size: int = 64
    base_lr: float = 5e-4
    layer_decay: float = 0.65
    weight_decay: float = 0.05
    warmup_epochs: int = 5
    label_smoothing: float = 0.1
    augment: bool = True
    seed: int = 0


def fine_tune(
    encoder: VisionTransformer, source: LabelledImages, rows: np.ndarray, num_classes: int, options: FineTuneOptions
) -> Classifier:
    """A classifier on the mean of the patch tokens that starts from the encoder; the encoder given stays as it is.

    Low-rank adapters are first added into the weights that they correct: the start computes the same, whole weights are trained.

    Args:
        rows: which images of `source` to train on.

    Raises:
        DataError: an image among them that cannot be used.
        ReadError: images cannot be read.
    """
    device = encoder.class_token.device
    model = starting_classifier(encoder, num_classes, options).to(device)
    named = dict(model.named_parameters())
    batch_size = min(options.batch_size, len(rows))
    per_epoch = -(-len(rows) // batch_size)
    peak_lr = options.base_lr * batch_size / 256
    section = OptimizerSection(
        name="adamw",
        peak_lr=peak_lr,
        betas=(0.9, 0.999),
        weight_decay=options.weight_decay,
        layer_decay=options.layer_decay,
    )
    optimizer = make_optimizer(
        parameter_groups(named.items(), {n: p.shape for n, p in named.items()}, section), section
    )
    schedule = ScheduleSection(warmup_steps=min(options.warmup_epochs, options.epochs - 1) * per_epoch)
    rng, step = np.random.default_rng(options.seed), 0
    model.train()
    for epoch in track(range(options.epochs), "epochs of fine-tuning", options.epochs):
        order = rng.permutation(rows)
        for start in range(0, len(order), batch_size):
            step += 1
            ids = order[start : start + batch_size]
            for first in range(0, len(ids), options.micro_batch_size):
                part = [int(i) for i in ids[first : first + options.micro_batch_size]]
                images_BCHW, labels_B = _training_batch(source, part, epoch, encoder.config.image_size, options)
                loss_B = model(images_BCHW.to(device), labels_B.to(device))
                (loss_B.sum() / len(ids)).backward()
            lr = learning_rate(step, options.epochs * per_epoch, peak_lr, schedule)
            set_step(optimizer.param_groups, lr=lr, noise_variance=0.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def starting_classifier(encoder: VisionTransformer, num_classes: int, options: FineTuneOptions) -> Classifier:
    """A classifier with a new head whose encoder computes what the given one does."""
    config = ClassifierConfig(
        encoder=encoder.config, num_classes=num_classes, features="pooled", label_smoothing=options.label_smoothing
    )
    model = build_classifier(config, generator=torch.Generator().manual_seed(options.seed))
    model.encoder.load_state_dict(without_adapters(encoder).state_dict())
    return model


def _training_batch(
    source: LabelledImages, ids: list[int], epoch: int, image_size: int, options: FineTuneOptions
) -> tuple[Tensor, Tensor]:
    """Images, cropped and flipped at random by a key for every image and epoch where they are augmented, and labels."""
    augmentation = Augmentation(options.seed, epoch) if options.augment else None
    [batch] = decoded_batches(source, ids, batch_size=len(ids), image_size=image_size, augmentation=augmentation)
    if not batch.is_usable_B.all():
        row = ids[int(np.argmin(batch.is_usable_B))]
        raise DataError(f"{source.name}: image {row} cannot be decoded or has no label")
    return batch.images_BCHW, torch.from_numpy(batch.labels_B)


@torch.no_grad()
def classifier_accuracy(
    model: Classifier,
    source: LabelledImages,
    rows: Sequence[int] | None = None,
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    resize: int | None = None,
) -> float:
    """Share of the usable images whose own class scores highest.

    Args:
        rows: which images; all by default.
        resize: see `evaluation.encoder.FeatureOptions`.

    Raises:
        DataError: none is usable.
    """
    correct, count = 0, 0
    size, device = model.config.encoder.image_size, model.head.weight.device
    for batch in decoded_batches(
        source,
        range(len(source)) if rows is None else rows,
        batch_size=batch_size,
        image_size=size,
        num_workers=num_workers,
        resize=resize,
    ):
        predicted_B = model(batch.images_BCHW.to(device), output="logits").argmax(dim=1).cpu().numpy()
        correct += int(((predicted_B == batch.labels_B) & batch.is_usable_B).sum())
        count += int(batch.is_usable_B.sum())
    if not count:
        raise DataError(f"{source.name}: no example has both an image and a label")
    return correct / count
