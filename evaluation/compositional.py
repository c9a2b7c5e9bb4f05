"""The command `aro`: does the captioner see how things are composed?

A test is one true caption against false ones of the same words; the answer is the caption of least
loss, as in DP-Cap's evaluation, and chance is one over the number of captions. Tests come from
files of ARO (Yuksekgonul et al. 2023, https://arxiv.org/abs/2210.01936), VG-Relation and
VG-Attribution with one false caption each, COCO-Order and Flickr30k-Order with four; or from
synthetic pictures, whose programs know the truth and need no download.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor

from data.errors import DataError, DecodeError
from data.examples.tokenizer import CaptionTokenizer
from data.synthetic import shapes
from data.synthetic.generate import SyntheticData, SyntheticExample
from data.synthetic.vocabulary import BASIC, OPPOSITES
from evaluation.captions import open_captioner
from evaluation.command_options import AroOptions
from evaluation.results import DataUse, Results
from evaluation.scoring import encoded_captions, log_probs_per_image, tokens_of
from evaluation.sources import encode_png, whole_image
from models.captioner import Captioner
from trainer.errors import ConfigError
from trainer.progress import track

Box = tuple[float, float, float, float]
Format = Literal["vg-relation", "vg-attribution", "order"]
FORMATS: tuple[Format, ...] = get_args(Format)
Rule = Literal["loss", "sum", "prior"]
RULES: tuple[Rule, ...] = get_args(Rule)
SHAPE_GROUPS = ("colour", "shape", "relation", "order")


@dataclass(frozen=True)
class Choice:
    """A test: one image, a true caption and false ones.

    Attributes:
        image: encoded bytes, or a file.
        captions: the true one first.
        group: the tested skill, e.g. a relation.
        box: left, top, right, bottom in pixels of the part that is shown; None is all.
    """

    image: bytes | Path
    captions: tuple[str, ...]
    group: str
    box: Box | None = None


def read_aro(path: Path, image_root: Path, kind: Format) -> list[Choice]:
    """Returns the tests in a file of ARO, a JSON list of records as released.

    vg-relation, vg-attribution: `image_path`, `bbox_x`, `bbox_y`, `bbox_w`, `bbox_h`,
    `true_caption`, `false_caption`, and `relation_name` or `attributes`. order: `image` (or
    `image_path`), `true_caption` and `false_captions`.

    Raises:
        DataError: no such file, or other content.
    """
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON file: {error}") from error
    if not isinstance(records, list) or not records:
        raise DataError(f"{path} is no list of tests")
    tests: list[Choice] = []
    for number, record in enumerate(records):
        try:
            box: Box | None = None
            if kind == "order":
                false_captions = record["false_captions"]
                group = "order"
            else:
                x, y, width, height = (float(record[f"bbox_{side}"]) for side in "xywh")
                attributes = (
                    [record["relation_name"]] if kind == "vg-relation" else record["attributes"]
                )
                false_captions = [record["false_caption"]]
                group = "_".join(map(str, attributes))
                box = x, y, x + width, y + height
            image = image_root / str(record["image" if "image" in record else "image_path"])
            captions = tuple(map(str, (record["true_caption"], *false_captions)))
            tests.append(Choice(image, captions, group, box))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            defect = f"it has no {error}" if isinstance(error, KeyError) else type(error).__name__
            raise DataError(
                f"{path}: test {number} is not of the format {kind}: {defect}"
            ) from error
    return tests


def shape_choices(
    data: SyntheticData, count: int, groups: Sequence[str] = SHAPE_GROUPS
) -> list[Choice]:
    """Returns `count` tests of each group, from pictures of plain shapes.

    A training shard (`prepare.py synthetic --content shapes`) of another seed shows none of these
    pictures. All false captions have as many words as the true one.

    colour, shape: one word of the caption of two shapes is replaced by each word that fits neither
    shape: 11 and 9 captions. relation: of two shapes, against the opposite relation, exchanged
    places, and exchanged colours with each of these: 7 captions. order: of three shapes, against
    all other orders: 6 captions.
    """
    choices = []
    for group in groups:
        examples = examples_with_shapes(data, 3 if group == "order" else 2, count)
        for number, example in enumerate(examples):
            true = example.statement
            if group == "order":
                orders = [order for order in permutations(true.groups) if order != true.groups]
                false = [replace(true, groups=order) for order in orders]
            elif group == "relation":
                # "A left of B" becomes "A right of B" and "B left of A"; with exchanged colours
                # all three of them, and "B right of A".
                first, second = true.groups
                recoloured = first.with_look_of(second), second.with_look_of(first)
                opposite = OPPOSITES[str(true.relation)]
                false = [replace(true, relation=opposite), replace(true, groups=(second, first))]
                for pair in (recoloured, recoloured[::-1]):
                    false += [
                        replace(true, groups=pair),
                        replace(true, groups=pair, relation=opposite),
                    ]
            else:
                words = BASIC if group == "colour" else shapes.SIMPLE
                true_words = {getattr(shape, group) for shape in true.groups}
                place = number % 2
                false = []
                for word in words:
                    if word in true_words:
                        continue
                    shape = true.groups[place]
                    if group == "colour":
                        false_shape = replace(shape, colour=word)
                    else:
                        false_shape = replace(shape, shape=word)
                    false_groups = list(true.groups)
                    false_groups[place] = false_shape
                    false.append(replace(true, groups=tuple(false_groups)))
            captions = tuple(statement.plain_caption() for statement in (true, *false))
            choices.append(Choice(encode_png(example.image_HWC), captions, group))
    return choices


def examples_with_shapes(
    data: SyntheticData, num_shapes: int, count: int
) -> list[SyntheticExample]:
    """Returns the first `count` examples that show `num_shapes` shapes."""
    examples: list[SyntheticExample] = []
    index = 0
    while len(examples) < count:
        composition, _ = data.composition(index)
        if len(composition.statement.groups) == num_shapes:
            examples.append(data.example(index))
        index += 1
    return examples


class Answers(NamedTuple):
    """The answers of a model in tests of one group.

    Attributes:
        credits_N: 1 where the true caption has the least loss (shared between equal ones), else 0.
        chances_N: one over the number of captions of each test.
    """

    credits_N: np.ndarray
    chances_N: np.ndarray

    @property
    def p_value(self) -> float:
        """Returns how often guessing is at least as good: a one-sided binomial test.

        The chance of a guess is the largest of any test.
        """
        wins = int(np.floor(self.credits_N.sum()))
        chance = float(self.chances_N.max())
        return float(binomtest(wins, len(self.credits_N), chance, alternative="greater").pvalue)


def choose(
    model: Captioner, tokenizer: CaptionTokenizer, tests: Sequence[Choice], *, batch_size: int = 32
) -> tuple[dict[Rule, dict[str, Answers]], int]:
    """Returns answers by rule and group, and the number of tests whose image cannot be decoded.

    Raises:
        DataError: no tests, a caption that does not fit the model, an image that cannot be read.
    """
    if not tests:
        raise DataError("there are no tests")
    # (credit, chance) of every test, by rule and group.
    scores: dict[Rule, dict[str, list[tuple[float, float]]]] = {rule: {} for rule in RULES}
    image_size = model.config.encoder.image_size
    undecodable = 0
    starts = range(0, len(tests), batch_size)
    for start in track(starts, "batches of tests", len(starts)):
        decoded: list[Choice] = []
        images: list[np.ndarray] = []
        for number, test in enumerate(tests[start : start + batch_size], start):
            image_CHW = pixels_of(test, image_size, number)
            if image_CHW is None:
                undecodable += 1
            else:
                decoded.append(test)
                images.append(image_CHW)
        if not decoded:
            continue
        losses_of = losses(model, tokenizer, decoded, np.stack(images))
        for rule, losses_of_tests in losses_of.items():
            for test, loss_O in zip(decoded, losses_of_tests, strict=True):
                is_least_O = loss_O == loss_O.min()
                credit = float(loss_O[0] <= loss_O.min()) / int(is_least_O.sum())
                chance = 1 / len(loss_O)
                scores[rule].setdefault(test.group, []).append((credit, chance))
    if undecodable == len(tests):
        raise DataError(f"none of {len(tests)} images can be decoded")
    answers: dict[Rule, dict[str, Answers]] = {}
    for rule, scores_of_groups in scores.items():
        answers[rule] = {}
        for group, pairs in scores_of_groups.items():
            credits_N, chances_N = np.array(pairs).T
            answers[rule][group] = Answers(credits_N, chances_N)
    return answers, undecodable


def losses(
    model: Captioner, tokenizer: CaptionTokenizer, tests: Sequence[Choice], images_BCHW: np.ndarray
) -> dict[Rule, list[Tensor]]:
    """Returns by rule the losses of every test's captions, in nats, the true caption first.

    "loss" is per token (the published rule); "sum" over the tokens; "prior" the sum minus its value
    for a black image, so that wording alone cannot decide.
    """
    num_tokens = model.config.num_tokens
    captions = [encoded_captions(tokenizer, test.captions, num_tokens) for test in tests]
    images = torch.from_numpy(images_BCHW).to(next(model.parameters()).device)
    scores = log_probs_per_image(model, images, captions)
    black_scores = log_probs_per_image(model, torch.zeros_like(images), captions)
    by_rule: dict[Rule, list[Tensor]] = {"loss": [], "sum": [], "prior": []}
    for score, black_score, captions_of_test in zip(scores, black_scores, captions, strict=True):
        length = torch.tensor([len(caption) - 1 for caption in captions_of_test])
        by_rule["loss"].append(-score / length)
        by_rule["sum"].append(-score)
        by_rule["prior"].append(-(score - black_score))
    return by_rule


def pixels_of(test: Choice, size: int, number: int = 0) -> np.ndarray | None:
    """Returns the shown part as normalised pixels (3, size, size), or None for bytes of no image.

    The part is squashed to a square: a central crop could leave out the things that captions name.

    Args:
        number: of the test, for the error.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        encoded = test.image if isinstance(test.image, bytes) else test.image.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the image of test {number}: {error.strerror or type(error).__name__}"
        ) from error
    try:
        return whole_image(encoded, size, test.box)[0]
    except DecodeError:
        return None


def aro(options: AroOptions) -> Results:
    """Runs the command `aro`; see its options."""
    model, tokenizer, facts = open_captioner(options)
    if options.test is None:
        name = f"synthetic shapes, seed {options.synthetic_seed}"
        side = max(model.config.encoder.image_size, 16)
        pictures = SyntheticData(options.synthetic_seed, side, "shapes")
        tests = shape_choices(pictures, options.synthetic_tests)
    else:
        name = options.test
        kind, _, file = options.test.partition(":")
        if kind not in FORMATS or not file:
            raise ConfigError(
                f"--test {name}: write FORMAT:FILE with FORMAT one of {', '.join(FORMATS)}"
            )
        if options.images is None:
            raise ConfigError(
                "--test needs --images DIR, the folder that its image paths are relative to"
            )
        tests = read_aro(Path(file), options.images, kind)
    tests = tests[: options.max_examples]
    num_read = len(tests)
    if options.too_long == "skip":
        longest = model.config.num_tokens
        fitting_tests = []
        for test in tests:
            lengths = [len(tokens_of(tokenizer, text, longest)) for text in test.captions]
            if max(lengths) <= longest:
                fitting_tests.append(test)
        tests = fitting_tests
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    answers_by_rule, undecodable = choose(model, tokenizer, tests, batch_size=options.batch_size)
    for rule, answers in answers_by_rule.items():
        credits, chances = zip(*answers.values(), strict=True)
        total = Answers(np.concatenate(credits), np.concatenate(chances))
        by_group = {group: float(answer.credits_N.mean()) for group, answer in answers.items()}
        scalars[f"accuracy_{rule}"] = float(total.credits_N.mean())
        scalars["chance"] = float(total.chances_N.mean())
        scalars[f"group_mean_{rule}"] = float(np.mean(list(by_group.values())))
        # Many groups, as in VG-Attribution, are in the table alone.
        if len(answers) <= 20:
            for group, accuracy in by_group.items():
                scalars[f"accuracy_{rule}_{group}"] = accuracy
        for group, answer in [*answers.items(), ("all", total)]:
            accuracy = float(answer.credits_N.mean())
            chance = float(answer.chances_N.mean())
            row = {
                "rule": rule,
                "group": group,
                "accuracy": accuracy,
                "chance": chance,
                "tests": len(answer.credits_N),
                "p (guessing)": answer.p_value,
            }
            table.append(row)
    uses = [DataUse("tests", name, len(tests) - undecodable, undecodable)]
    notes = [
        "loss: least loss per token; sum: likeliest caption; "
        "prior: sum minus its value for a black image"
    ]
    details = {"num_too_long": num_read - len(tests)}
    return Results("aro", scalars, uses, facts, table, details, notes=notes)
