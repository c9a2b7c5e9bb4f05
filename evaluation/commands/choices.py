"""Commands that let a captioner choose among texts: the names of classes, or a true caption among false ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from evaluation.commands.captioner import SYNTHETIC_SEED, Count, TooLongOptions, open_captioner
from evaluation.commands.common import CheckpointOptions, LabelledImageOptions, open_labelled
from trainer.config.options import Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from evaluation.compositional import Choice
    from evaluation.results import Results
    from evaluation.sources.records import LabelledImages
    from evaluation.zero_shot import Prompts
    from models.captioner import Captioner


class ZeroShotOptions(CheckpointOptions, LabelledImageOptions):
    """Options of `zero_shot`."""

    ONE_OF = ("data", "synthetic_shapes")

    data: Annotated[str | None, Shown("SOURCE")] = None
    """shards:PATTERN, folder:DIR, hf:DIR or arrays:FILE.npz"""
    synthetic_shapes: Count = None
    """zero-shot on N pictures of plain shapes"""
    synthetic_seed: int = Field(SYNTHETIC_SEED, ge=0, lt=2**63)
    """of these pictures"""
    max_examples: Count = None
    """the first N only"""
    classes: Annotated[Path | None, Shown("FILE")] = None
    """class names, one per line; default: the data's own"""
    template: Annotated[tuple[str, ...] | None, Shown("TEXT", is_repeated=True)] = None
    """with {} for the name or {a} for it with a/an; may be repeated (default: evaluation/zero_shot.py)"""
    calibration: Annotated[str | None, Shown("SOURCE")] = None
    """images for the prior; default: the images to classify, without labels"""

    @property
    def results_are_public(self) -> bool:
        """Pictures from a seed are public; a prior from somebody's images makes the numbers theirs."""
        return self.data_is_public or (self.data is None and self.calibration is None)


def zero_shot(options: ZeroShotOptions) -> "Results":
    """Zero-shot classification by caption likelihood.

        python launch_scripts/evaluate.py zero-shot --checkpoint runs/x --data folder:imagenet/val --classes names.txt
        python launch_scripts/evaluate.py zero-shot --checkpoint runs/x --synthetic_shapes 1000

    Rules: `sum`, `mean` (per token, the published one) and `prior` (minus the log of the name's mean probability over calibration
    images); see evaluation/zero_shot.py.
    """
    from evaluation.results import DataUse, Results
    from evaluation.synthetic_tests import ShapePictures
    from evaluation.zero_shot import TEMPLATES, Prompts, accuracy

    captioner = open_captioner(options)
    source: LabelledImages
    if options.data is None:
        assert options.synthetic_shapes is not None
        source = ShapePictures(options.synthetic_shapes, options.synthetic_seed)
    else:
        source = open_labelled(options, options.data)
    names: Sequence[str] = source.class_names
    if options.classes is not None:
        try:
            lines = options.classes.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--classes {options.classes}: {error}") from error
        names = [line for line in lines if line.strip()]
    elif not names:
        raise ConfigError(f"{source.name} does not name its classes: give --classes FILE, one name per line")
    # Captions of synthetic shapes have no introduction.
    templates = options.template or (("{a}",) if options.data is None else TEMPLATES)
    prompts = Prompts.of(names, templates, captioner.tokenizer, captioner.model.config.num_tokens)
    scored = _score(options, source, captioner.model, prompts)
    uses = [DataUse("images", source.name, len(scored.log_probs_NC), scored.num_unusable)]
    calibration_MC = None
    if options.calibration is not None:
        calibration = open_labelled(options, options.calibration)
        calibration_MC = _score(options, calibration, captioner.model, prompts).log_probs_NC
        uses.append(DataUse("calibration", calibration.name, len(calibration_MC)))
    by_rule = prompts.by_rule(scored.log_probs_NC, calibration_MC)
    accuracies = {rule: accuracy(scores_NK, scored.labels_N) for rule, scores_NK in by_rule.items()}
    chance = 1 / len(names)
    scalars = {f"accuracy_{rule}": result.top1 for rule, result in accuracies.items()}
    scalars |= {f"top5_{rule}": result.top5 for rule, result in accuracies.items() if result.top5 is not None}
    scalars["chance"] = chance
    table = [
        {"rule": rule, "top 1": result.top1, "top 5": result.top5, "chance": chance}
        for rule, result in accuracies.items()
    ]
    details = {
        "templates": templates,
        "num_classes": len(names),
        "num_prompts": len(prompts.captions),
        "num_tree_nodes": prompts.tree.num_nodes,
        "per_class": {
            rule: dict(zip(names, result.per_class_K.tolist(), strict=True)) for rule, result in accuracies.items()
        },
    }
    return Results("zero-shot", scalars, uses, captioner.facts, table, details)


class _Scored(NamedTuple):
    """Usable images with the log-probabilities (N, C) of all captions, and how many images are not usable."""

    log_probs_NC: "Tensor"
    labels_N: "np.ndarray"
    num_unusable: int


def _score(options: ZeroShotOptions, source: "LabelledImages", model: "Captioner", prompts: "Prompts") -> _Scored:
    import numpy as np
    import torch

    from data.errors import DataError
    from evaluation.features import decoded_batches
    from evaluation.scoring import tree_log_probs

    device = next(model.parameters()).device
    log_probs, labels, num_unusable = [], [], 0
    for images_BCHW, labels_B, is_usable_B in decoded_batches(
        source, range(min(len(source), options.max_examples or len(source))), batch_size=options.batch_size,
        image_size=model.config.encoder.image_size, num_workers=options.num_workers,
    ):  # fmt: skip
        num_unusable += int((~is_usable_B).sum())
        if is_usable_B.any():
            images = images_BCHW[torch.from_numpy(is_usable_B)].to(device)
            log_probs.append(tree_log_probs(model, images, prompts.tree))
            labels.append(labels_B[is_usable_B])
    if not log_probs:
        raise DataError(f"{source.name}: there are no images to classify")
    return _Scored(torch.cat(log_probs), np.concatenate(labels), num_unusable)


class AroOptions(TooLongOptions, CheckpointOptions):
    """Options of `aro`."""

    ONE_OF = ("test", "synthetic")

    test: Annotated[str | None, Shown("FORMAT:FILE")] = None
    """vg-relation:, vg-attribution: or order: and a JSON file"""
    synthetic: Literal["shapes"] | None = None
    """plain shapes, or pictures of every kind"""
    images: Annotated[Path | None, Shown("DIR")] = None
    """that the image paths of --test are relative to"""
    tagger: Annotated[str | None, Shown("NAME")] = None
    """a pipeline of spaCy (ARO: en_core_web_sm) for the orders that need parts of speech; for --test order:"""
    synthetic_tests: Annotated[int, Shown("N"), Field(ge=1, le=100_000)] = 500
    """of each kind (default: 500)"""
    synthetic_seed: int = Field(SYNTHETIC_SEED, ge=0, lt=2**63)
    """of the pictures"""
    max_examples: Count = None
    """the first N tests only"""
    batch_size: Annotated[int, Shown("B"), Field(ge=1, le=2**20)] = 32
    """images at once"""

    @property
    def results_are_public(self) -> bool:
        """Pictures from a seed are public."""
        return self.data_is_public or self.test is None


def aro(options: AroOptions) -> "Results":
    """Compositional tests: the true caption against false ones, by the captioner's loss.

        python launch_scripts/evaluate.py aro --checkpoint runs/x --images vg/images \\
            --test vg-relation:visual_genome_relation.json
        python launch_scripts/evaluate.py aro --checkpoint runs/x --test order:coco_karpathy_test.json --images coco
        python launch_scripts/evaluate.py aro --checkpoint runs/x --synthetic shapes --synthetic_tests 500

    File formats: evaluation/compositional.py; synthetic tests, which need no download: evaluation/synthetic_tests.py.
    """
    import numpy as np

    from evaluation.compositional import RULES, Answers, choose
    from evaluation.results import DataUse, Results
    from evaluation.scoring import fits

    model, tokenizer, facts = open_captioner(options)
    name, tests = _tests(options, model.config.encoder.image_size)
    tests = tests[: options.max_examples]
    num_given = len(tests)
    if options.too_long == "skip":
        longest = model.config.num_tokens
        tests = [test for test in tests if all(fits(tokenizer, caption, longest) for caption in test.captions)]
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    undecodable = 0
    for rule in RULES:
        answers, undecodable = choose(model, tokenizer, tests, batch_size=options.batch_size, rule=rule)
        everything = Answers(
            np.concatenate([answer.credits_N for answer in answers.values()]),
            np.concatenate([answer.num_options_N for answer in answers.values()]),
        )
        scalars |= {f"accuracy_{rule}": everything.accuracy, "chance": everything.chance}
        scalars[f"group_mean_{rule}"] = float(np.mean([answer.accuracy for answer in answers.values()]))
        if len(answers) <= 20:
            scalars |= {f"accuracy_{rule}_{group}": answer.accuracy for group, answer in answers.items()}
        for group, answer in [*answers.items(), ("all", everything)]:
            row = {"rule": rule, "group": group, "accuracy": answer.accuracy, "chance": answer.chance}
            table.append({**row, "tests": len(answer.credits_N), "p (guessing)": answer.p_value})
    uses = [DataUse("tests", name, len(tests) - undecodable, undecodable)]
    notes = ["loss: least loss per token; sum: likeliest caption; prior: sum minus what it is for a black image"]
    return Results("aro", scalars, uses, facts, table, {"num_too_long": num_given - len(tests)}, notes=notes)


def _tests(options: AroOptions, image_size: int) -> "tuple[str, list[Choice]]":
    """The tests and their name."""
    from data.synthetic.generate import SyntheticData
    from evaluation.compositional import FORMATS, read_aro, spacy_tagger
    from evaluation.synthetic_tests import shape_choices

    if options.tagger is not None and not (options.test or "").startswith("order:"):
        raise ConfigError("--tagger is for --test order:FILE, whose captions are put into wrong orders")
    if options.test is None:
        data = SyntheticData(options.synthetic_seed, max(image_size, 16), "shapes")
        tests = shape_choices(data, options.synthetic_tests)
        return f"synthetic {options.synthetic}, seed {options.synthetic_seed}", tests
    kind, _, file = options.test.partition(":")
    if kind not in FORMATS or not file:
        raise ConfigError(f"--test {options.test}: write FORMAT:FILE with FORMAT one of {', '.join(FORMATS)}")
    if options.images is None:
        raise ConfigError("--test needs --images DIR, the folder that its image paths are relative to")
    tagger = None if options.tagger is None else spacy_tagger(options.tagger)
    return options.test, read_aro(Path(file), options.images, kind, tagger)
