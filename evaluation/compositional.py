"""The command `aro`: does the captioner see how things are composed? One true caption against false ones of the same words.

Files of ARO (Yuksekgonul et al. 2023, https://arxiv.org/abs/2210.01936): VG-Relation and VG-Attribution, one false caption each;
COCO-Order and Flickr30k-Order, four. And tests from synthetic pictures, whose programs know what is true: no download. The
caption of least loss is the model's answer, as in DP-Cap's evaluation; chance is one over the number of captions.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import islice, permutations, product
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
from evaluation.options import AroOptions
from evaluation.results import DataUse, Results
from evaluation.scoring import encoded_captions, own_log_probs, tokens_of
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
    """
    Attributes:
        image: encoded bytes, or a file.
        captions: the true one first.
        group: what is tested, e.g. a relation.
        box: left, top, right, bottom in pixels of the part that is shown; None is all.
    """

    image: bytes | Path
    captions: tuple[str, ...]
    group: str
    box: Box | None = None


def read_aro(path: Path, image_root: Path, kind: Format) -> list[Choice]:
    """A file of ARO: a JSON list of records as released.

    vg-relation, vg-attribution: `image_path`, `bbox_x`, `bbox_y`, `bbox_w`, `bbox_h`, `true_caption`, `false_caption`, and
    `relation_name` or `attributes`. order: `image` (or `image_path`), `true_caption` and `false_captions`.

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
                wrong, group = record["false_captions"], "order"
            else:
                left, top, width, height = (float(record[f"bbox_{side}"]) for side in "xywh")
                attributes = (
                    [record["relation_name"]] if kind == "vg-relation" else record["attributes"]
                )
                wrong, group = [record["false_caption"]], "_".join(map(str, attributes))
                box = left, top, left + width, top + height
            image = image_root / str(record["image" if "image" in record else "image_path"])
            tests.append(
                Choice(image, tuple(map(str, (record["true_caption"], *wrong))), group, box)
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"{path}: test {number} is not of the format {kind}: "
                + (f"it has no {error}" if isinstance(error, KeyError) else type(error).__name__)
            ) from error
    return tests


def shape_choices(
    data: SyntheticData, count: int, groups: Sequence[str] = SHAPE_GROUPS
) -> list[Choice]:
    """`count` tests of each group, from plain shapes (`prepare.py synthetic --content shapes`) that no training shard shows where
    its seed is another. All false captions have as many words as the true one.

    colour, shape: one word of the caption of two shapes becomes each other one that neither shape has: 11 and 9 ways.
    relation: of two shapes, against the opposite relation, exchanged places, and exchanged colours with each of these: 7 ways.
    order: of three shapes, against all other orders: 6 ways.
    """
    choices = []
    for group in groups:
        examples = of_number(data, 3 if group == "order" else 2, count)
        for number, example in enumerate(examples):
            true = example.statement
            if group == "order":
                false = [
                    replace(true, groups=order)
                    for order in permutations(true.groups)
                    if order != true.groups
                ]
            elif group == "relation":
                # For "A left of B": "A right of B" and "B left of A", and all three with exchanged colours.
                first, second = true.groups
                mixed = first.with_look_of(second), second.with_look_of(first)
                opposite = OPPOSITES[str(true.relation)]
                false = [replace(true, relation=opposite), replace(true, groups=(second, first))]
                for exchanged in (mixed, mixed[::-1]):
                    false += [
                        replace(true, groups=exchanged),
                        replace(true, groups=exchanged, relation=opposite),
                    ]
            else:
                place, words = number % 2, BASIC if group == "colour" else shapes.SIMPLE
                used = {getattr(other, group) for other in true.groups}
                before, shown, after = (
                    true.groups[:place],
                    true.groups[place],
                    true.groups[place + 1 :],
                )
                unused = [word for word in words if word not in used]
                is_colour = group == "colour"
                others = [
                    replace(shown, colour=w) if is_colour else replace(shown, shape=w)
                    for w in unused
                ]
                false = [replace(true, groups=(*before, other, *after)) for other in others]
            captions = tuple(statement.plain_caption() for statement in (true, *false))
            choices.append(Choice(encode_png(example.image_HWC), captions, group))
    return choices


def of_number(data: SyntheticData, number: int, count: int) -> list[SyntheticExample]:
    """The first `count` examples that show `number` shapes."""
    numbers = (
        index
        for index in count_from()
        if len(data.composition(index)[0].statement.groups) == number
    )
    return [data.example(index) for index in islice(numbers, count)]


class Answers(NamedTuple):
    """What a model chose in tests of one group.

    Attributes:
        credits_N: 1 where the true caption has the least loss (shared between equal ones), else 0.
        chances_N: one over the number of captions of each test.
    """

    credits_N: np.ndarray
    chances_N: np.ndarray

    @property
    def p_value(self) -> float:
        """How often guessing is at least as good: one-sided binomial test, at the largest chance of any of these tests."""
        wins, chance = int(np.floor(self.credits_N.sum())), float(self.chances_N.max())
        return float(binomtest(wins, len(self.credits_N), chance, alternative="greater").pvalue)


def choose(
    model: Captioner, tokenizer: CaptionTokenizer, tests: Sequence[Choice], *, batch_size: int = 32
) -> tuple[dict[Rule, dict[str, Answers]], int]:
    """Scores every test: answers by rule and group, and the number of tests whose image cannot be decoded.

    Raises:
        DataError: no tests, a caption that does not fit the model, an image that cannot be read.
    """
    if not tests:
        raise DataError("there are no tests")
    credits: dict[Rule, dict[str, list[tuple[float, float]]]] = {rule: {} for rule in RULES}
    undecodable = 0
    starts = range(0, len(tests), batch_size)
    for start in track(starts, "batches of tests", len(starts)):
        some = tests[start : start + batch_size]
        images = [
            pixels_of(test, model.config.encoder.image_size, start + place)
            for place, test in enumerate(some)
        ]
        kept = [
            (test, image) for test, image in zip(some, images, strict=True) if image is not None
        ]
        undecodable += len(some) - len(kept)
        if kept:
            found = losses(
                model, tokenizer, [test for test, _ in kept], np.stack([i for _, i in kept])
            )
            for (rule, scores), (place, (test, _)) in product(found.items(), enumerate(kept)):
                loss_O = scores[place]
                credit = float(loss_O[0] <= loss_O.min()) / int((loss_O == loss_O.min()).sum())
                credits[rule].setdefault(test.group, []).append((credit, 1 / len(loss_O)))
    if undecodable == len(tests):
        raise DataError(f"none of {len(tests)} images can be decoded")
    answers = {
        rule: {group: Answers(*np.array(pairs).T) for group, pairs in own.items()}
        for rule, own in credits.items()
    }
    return answers, undecodable


def losses(
    model: Captioner, tokenizer: CaptionTokenizer, tests: Sequence[Choice], images_BCHW: np.ndarray
) -> dict[Rule, list[Tensor]]:
    """What each rule compares, in nats, of every caption of every test, the true one first: less is better.

    "loss" is per token (the published one); "sum" over the tokens; "prior" the sum minus what it is for a black image, so that
    wording alone cannot decide.
    """
    captions = [
        encoded_captions(tokenizer, test.captions, model.config.num_tokens) for test in tests
    ]
    images = torch.from_numpy(images_BCHW).to(next(model.parameters()).device)
    scores, blank = (
        own_log_probs(model, shown, captions) for shown in (images, torch.zeros_like(images))
    )
    lengths = [torch.tensor([len(caption) - 1 for caption in some]) for some in captions]
    return {
        "loss": [-score / length for score, length in zip(scores, lengths, strict=True)],
        "sum": [-score for score in scores],
        "prior": [-(score - without) for score, without in zip(scores, blank, strict=True)],
    }


def pixels_of(test: Choice, size: int, number: int = 0) -> np.ndarray | None:
    """The shown part, squashed to a square: a central crop could leave out what the captions speak of.

    Args:
        number: of the test, for the error.

    Returns:
        Normalised pixels (3, size, size); None where the bytes are no image.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        data = test.image if isinstance(test.image, bytes) else test.image.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the image of test {number}: {error.strerror or type(error).__name__}"
        ) from error
    try:
        return whole_image(data, size, test.box)[0]
    except DecodeError:
        return None


def aro(options: AroOptions) -> Results:
    """The command; see its options."""
    model, tokenizer, facts = open_captioner(options)
    if options.test is None:
        name = f"synthetic shapes, seed {options.synthetic_seed}"
        data = SyntheticData(
            options.synthetic_seed, max(model.config.encoder.image_size, 16), "shapes"
        )
        tests = shape_choices(data, options.synthetic_tests)
    else:
        name, (kind, _, file) = options.test, options.test.partition(":")
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
    num_given = len(tests)
    if options.too_long == "skip":
        longest = model.config.num_tokens
        tests = [
            t
            for t in tests
            if all(len(tokens_of(tokenizer, c, longest)) <= longest for c in t.captions)
        ]
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    chosen, undecodable = choose(model, tokenizer, tests, batch_size=options.batch_size)
    for rule, answers in chosen.items():
        everything = Answers(*map(np.concatenate, zip(*answers.values(), strict=True)))
        by_group = {group: float(answer.credits_N.mean()) for group, answer in answers.items()}
        scalars |= {
            f"accuracy_{rule}": float(everything.credits_N.mean()),
            "chance": float(everything.chances_N.mean()),
        }
        scalars[f"group_mean_{rule}"] = float(np.mean(list(by_group.values())))
        if len(answers) <= 20:
            scalars |= {
                f"accuracy_{rule}_{group}": accuracy for group, accuracy in by_group.items()
            }
        for group, (credits_N, chances_N) in [*answers.items(), ("all", everything)]:
            row = {
                "rule": rule,
                "group": group,
                "accuracy": float(credits_N.mean()),
                "chance": float(chances_N.mean()),
            }
            table.append(
                {
                    **row,
                    "tests": len(credits_N),
                    "p (guessing)": Answers(credits_N, chances_N).p_value,
                }
            )
    uses = [DataUse("tests", name, len(tests) - undecodable, undecodable)]
    notes = [
        "loss: least loss per token; sum: likeliest caption; prior: sum minus what it is for a black image"
    ]
    return Results(
        "aro", scalars, uses, facts, table, {"num_too_long": num_given - len(tests)}, notes=notes
    )
