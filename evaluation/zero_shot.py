"""Zero-shot classification: which of "a photo of a CLASS" does the captioner find likeliest for the image?

As in DP-Cap's evaluation (Sander et al. 2024, https://arxiv.org/abs/2403.02506), with several templates, and three rules:

* `sum`: log p(class | image), where p(class | image) is the mean over templates of p(caption | image);
* `mean`: the mean over templates of the caption's log-probability per token (the published rule): long names are not punished;
* `prior`: `sum` minus log p(class), where p(class) is the mean of p(class | image) over all images to classify, without their
  labels: common names are not rewarded (pointwise mutual information; Zhao et al. 2021, https://arxiv.org/abs/2102.09690,
  correct with content-free inputs).

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
from evaluation.compositional import of_number
from evaluation.options import ZeroShotOptions
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
    """C captions, class by class.

    Args:
        templates: `{}` stands for the class name, `{a}` for the name with its indefinite article.

    Raises:
        DataError: no classes, fewer than two, a name twice, a template without a place.
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
                f"the template {template!r} has no place for the class name; write {{}}, or {{a}} for it with a/an"
            )
    return [
        template.replace("{a}", with_article(name)).replace("{}", name)
        for name in names
        for template in templates
    ]


def by_rule(log_probs_NC: Tensor, lengths_C: Tensor, num_templates: int) -> dict[Rule, Tensor]:
    """Scores (N, K) by each rule; see the module.

    Args:
        log_probs_NC: of all captions, from `evaluation.scoring.tree_log_probs`.
        lengths_C: scored tokens of each caption.
    """
    whole_NKP, mean_NKP = (
        x.unflatten(-1, (-1, num_templates)) for x in (log_probs_NC, log_probs_NC / lengths_C)
    )
    sum_NK = whole_NKP.logsumexp(-1) - math.log(num_templates)
    prior_K = sum_NK.logsumexp(0) - math.log(len(sum_NK))
    return {"sum": sum_NK, "mean": mean_NKP.mean(-1), "prior": sum_NK - prior_K}


@dataclass(frozen=True)
class Accuracy:
    """
    Attributes:
        top1, top5: share of images whose class is the best, or among the best five (of more than five classes).
        per_class_K: top1 of each class; NaN for classes without images.
    """

    top1: float
    top5: float | None
    per_class_K: np.ndarray


def accuracy(scores_NK: Tensor, labels_N: np.ndarray) -> Accuracy:
    """Equal scores share the credit, so that a model that cannot tell gets what guessing gets.

    Raises:
        DataError: a label without a class name.
    """
    num_classes = scores_NK.shape[1]
    if labels_N.min() < 0 or labels_N.max() >= num_classes:
        raise DataError(
            f"a label has no name: {num_classes} class names are of the labels 0 to {num_classes - 1}"
        )
    labels = torch.from_numpy(labels_N)
    own_N1 = scores_NK.gather(1, labels[:, None])
    better_N, equal_N = (scores_NK > own_N1).sum(1), (scores_NK == own_N1).sum(1)
    first_N = ((1 - better_N).clamp(0, 1) / equal_N).numpy()
    five_N = ((5 - better_N).clamp(min=0) / equal_N).clamp(max=1).numpy()
    per_class = np.array(
        [
            first_N[labels_N == k].mean() if (labels_N == k).any() else np.nan
            for k in range(num_classes)
        ]
    )
    return Accuracy(
        float(first_N.mean()), float(five_N.mean()) if num_classes > 5 else None, per_class
    )


def zero_shot(options: ZeroShotOptions) -> Results:
    """The command; see its options."""
    model, tokenizer, facts = open_captioner(options)
    source: Source
    if options.data is None:
        assert options.synthetic_shapes is not None
        shown = of_number(
            SyntheticData(options.synthetic_seed, 64, "shapes"), 1, options.synthetic_shapes
        )
        single = [example.statement.groups[0] for example in shown]
        labels_N = np.array(
            [SHAPE_CLASSES.index(f"{group.colour} {group.shape}") for group in single]
        )
        name = f"{len(single)} synthetic shapes, seed {options.synthetic_seed}"
        source = Arrays(
            name, np.stack([example.image_HWC for example in shown]), labels_N, SHAPE_CLASSES
        )
    else:
        source = open_source(options.data, options)
    names: Sequence[str] = source.class_names
    if options.classes is not None:
        try:
            lines = options.classes.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--classes {options.classes}: {error}") from error
        names = [line for line in lines if line.strip()]
    elif not names:
        raise ConfigError(
            f"{source.name} does not name its classes: give --classes FILE, one name per line"
        )
    # Captions of synthetic shapes have no introduction.
    templates = options.template or (("{a}",) if options.data is None else TEMPLATES)
    tokens = encoded_captions(tokenizer, prompts(names, templates), model.config.num_tokens)
    log_probs, labels, num_used, num_unusable = [], [], 0, 0
    for images_BCHW, examples, left_out in usable_batches(
        model, source, options, options.max_examples
    ):
        num_used, num_unusable = num_used + len(examples), num_unusable + left_out
        if examples:
            log_probs.append(tree_log_probs(model, images_BCHW, tokens))
            labels += [example.label or 0 for example in examples]
    if not log_probs:
        raise DataError(f"{source.name}: there are no images to classify")
    uses = [DataUse("images", source.name, num_used, num_unusable)]
    lengths_C = torch.tensor([len(caption) - 1 for caption in tokens])
    scores = by_rule(torch.cat(log_probs), lengths_C, len(templates))
    accuracies = {rule: accuracy(scores_NK, np.array(labels)) for rule, scores_NK in scores.items()}
    chance = 1 / len(names)
    scalars = {f"accuracy_{rule}": result.top1 for rule, result in accuracies.items()}
    scalars |= {
        f"top5_{rule}": result.top5
        for rule, result in accuracies.items()
        if result.top5 is not None
    }
    scalars["chance"] = chance
    table = [
        {"rule": rule, "top 1": result.top1, "top 5": result.top5, "chance": chance}
        for rule, result in accuracies.items()
    ]
    details = {
        "templates": templates,
        "num_classes": len(names),
        "num_prompts": len(tokens),
        "per_class": {
            rule: dict(zip(names, result.per_class_K.tolist(), strict=True))
            for rule, result in accuracies.items()
        },
    }
    return Results("zero-shot", scalars, uses, facts, table, details)
