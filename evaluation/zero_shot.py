"""Zero-shot classification: which "a photo of a CLASS" is likeliest for the image?

As in DP-Cap's evaluation (Sander et al. 2024, https://arxiv.org/abs/2403.02506), with several
templates and the three rules of `scores_by_rule`.

Shapes: N images, K classes, P templates, C = K P captions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError
from data.synthetic.generate import SyntheticData
from data.synthetic.shapes import SIMPLE
from data.synthetic.vocabulary import BASIC, with_article
from evaluation.captions import open_captioner, usable_batches
from evaluation.command_options import ZeroShotOptions
from evaluation.compositional import examples_with_shapes
from evaluation.results import DataUse, Results
from evaluation.scoring import encoded_captions, tree_log_probs
from evaluation.sources import Arrays, Source, open_source
from trainer.errors import ConfigError

Rule = Literal["sum", "mean", "prior"]
RULES: tuple[Rule, ...] = get_args(Rule)
SHAPE_CLASSES = tuple(f"{colour} {shape}" for colour in BASIC for shape in SIMPLE)
"""Names of all single shapes: 12 colours times 10 shapes."""
TEMPLATES = ("{a}", "a photo of {a}", "a picture of {a}", "an image of {a}")


def prompts(class_names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Returns C captions, class by class.

    Args:
        templates: `{}` stands for the class name, `{a}` for the name with its indefinite article.

    Raises:
        DataError: fewer than two classes, an empty name, a name twice, a template without a place.
    """
    names = [" ".join(name.replace("_", " ").split()) for name in class_names]
    if len(names) < 2 or not all(names):
        raise DataError(
            f"zero-shot classification needs at least two class names, none empty; got {names[:3]}"
        )
    if len(set(names)) < len(names):
        raise DataError(f"the class name {max(names, key=names.count)!r} comes more than once")
    if not templates:
        raise DataError("there is no template")
    for template in templates:
        if "{}" not in template and "{a}" not in template:
            raise DataError(
                f"the template {template!r} has no place for the class name; "
                "write {}, or {a} for it with a/an"
            )
    captions = []
    for name in names:
        article_name = with_article(name)
        captions += [text.replace("{a}", article_name).replace("{}", name) for text in templates]
    return captions


def scores_by_rule(
    log_probs_NC: Tensor, lengths_C: Tensor, num_templates: int
) -> dict[Rule, Tensor]:
    """Returns scores (N, K) by each rule.

    * `sum`: log p(class | image), where p(class | image) is the mean over templates of
      p(caption | image);
    * `mean`: the mean over templates of the caption's log-probability per token (the published
      rule), which does not punish long names;
    * `prior`: `sum` minus log p(class), where p(class) is the mean of p(class | image) over all
      images to classify, without their labels. It does not favour common names (pointwise mutual
      information; Zhao et al. 2021, https://arxiv.org/abs/2102.09690, correct with content-free
      inputs).

    Args:
        log_probs_NC: of all captions, from `evaluation.scoring.tree_log_probs`.
        lengths_C: scored tokens of each caption.
    """
    log_probs_NKP = log_probs_NC.unflatten(-1, (-1, num_templates))
    per_token_NKP = (log_probs_NC / lengths_C).unflatten(-1, (-1, num_templates))
    sum_NK = log_probs_NKP.logsumexp(-1) - math.log(num_templates)
    prior_K = sum_NK.logsumexp(0) - math.log(len(sum_NK))
    return {"sum": sum_NK, "mean": per_token_NKP.mean(-1), "prior": sum_NK - prior_K}


@dataclass(frozen=True)
class Accuracy:
    """Holds the shares of images that a rule classifies right.

    Attributes:
        top1, top5: share of images whose class is the best, or among the best five (of more than
            five classes).
        per_class_K: top1 of each class; NaN for classes without images.
    """

    top1: float
    top5: float | None
    per_class_K: np.ndarray


def accuracy(scores_NK: Tensor, labels_N: np.ndarray) -> Accuracy:
    """Returns the accuracy; equal scores share the credit, so that blind models score as a guess.

    Raises:
        DataError: a label without a class name.
    """
    num_classes = scores_NK.shape[1]
    if labels_N.min() < 0 or labels_N.max() >= num_classes:
        raise DataError(
            f"a label has no name: {num_classes} class names are of the labels "
            f"0 to {num_classes - 1}"
        )
    score_N1 = scores_NK.gather(1, torch.from_numpy(labels_N)[:, None])
    num_better_N = (scores_NK > score_N1).sum(1)
    num_equal_N = (scores_NK == score_N1).sum(1)
    top1_N = ((1 - num_better_N).clamp(0, 1) / num_equal_N).numpy()
    top5_N = ((5 - num_better_N).clamp(min=0) / num_equal_N).clamp(max=1).numpy()
    per_class_K = np.full(num_classes, np.nan, dtype=top1_N.dtype)
    for label in range(num_classes):
        is_label_N = labels_N == label
        if is_label_N.any():
            per_class_K[label] = top1_N[is_label_N].mean()
    top5 = float(top5_N.mean()) if num_classes > 5 else None
    return Accuracy(float(top1_N.mean()), top5, per_class_K)


def zero_shot(options: ZeroShotOptions) -> Results:
    """Runs the command `zero-shot`; see its options."""
    model, tokenizer, facts = open_captioner(options)
    source: Source
    if options.data is None:
        assert options.synthetic_shapes is not None
        pictures = SyntheticData(options.synthetic_seed, 64, "shapes")
        examples = examples_with_shapes(pictures, 1, options.synthetic_shapes)
        labels_N = np.zeros(len(examples), dtype=np.int64)
        for row, example in enumerate(examples):
            group = example.statement.groups[0]
            labels_N[row] = SHAPE_CLASSES.index(f"{group.colour} {group.shape}")
        name = f"{len(examples)} synthetic shapes, seed {options.synthetic_seed}"
        images = np.stack([example.image_HWC for example in examples])
        source = Arrays(name, images, labels_N, SHAPE_CLASSES)
    else:
        source = open_source(options.data, options)
    class_names: Sequence[str] = source.class_names
    if options.classes is not None:
        try:
            lines = options.classes.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--classes {options.classes}: {error}") from error
        class_names = [line for line in lines if line.strip()]
    elif not class_names:
        raise ConfigError(
            f"{source.name} does not name its classes: give --classes FILE, one name per line"
        )
    # Captions of synthetic shapes have no introduction.
    templates = options.template or (("{a}",) if options.data is None else TEMPLATES)
    captions = prompts(class_names, templates)
    tokens = encoded_captions(tokenizer, captions, model.config.num_tokens)
    log_probs: list[Tensor] = []
    labels: list[int] = []
    undecodable = 0
    batches = usable_batches(model, source, options, options.max_examples)
    for images_BCHW, batch, num_unusable in batches:
        undecodable += num_unusable
        if batch:
            log_probs.append(tree_log_probs(model, images_BCHW, tokens))
            labels += [example.label or 0 for example in batch]
    if not log_probs:
        raise DataError(f"{source.name}: there are no images to classify")
    uses = [DataUse("images", source.name, len(labels), undecodable)]
    lengths_C = torch.tensor([len(caption) - 1 for caption in tokens])
    scores = scores_by_rule(torch.cat(log_probs), lengths_C, len(templates))
    chance = 1 / len(class_names)
    scalars: dict[str, float] = {}
    top5: dict[str, float] = {}
    table = []
    per_class = {}
    for rule, scores_NK in scores.items():
        shares = accuracy(scores_NK, np.array(labels))
        scalars[f"accuracy_{rule}"] = shares.top1
        if shares.top5 is not None:
            top5[f"top5_{rule}"] = shares.top5
        table.append({"rule": rule, "top 1": shares.top1, "top 5": shares.top5, "chance": chance})
        per_class[rule] = dict(zip(class_names, shares.per_class_K.tolist(), strict=True))
    scalars |= top5
    scalars["chance"] = chance
    details = {
        "templates": templates,
        "num_classes": len(class_names),
        "num_prompts": len(tokens),
        "per_class": per_class,
    }
    return Results("zero-shot", scalars, uses, facts, table, details)
