"""The command `aro`: does the captioner see how things are composed? One true caption against false ones of the same words.

Formats of ARO (Yuksekgonul et al. 2023, https://arxiv.org/abs/2210.01936): VG-Relation and VG-Attribution, one false caption
each; COCO-Order and Flickr30k-Order, several. And tests from synthetic pictures, whose programs know what is true. The caption of
least loss is the model's answer, as in DP-Cap's evaluation; chance is one over the number of captions.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor

from data.errors import DataError, DecodeError
from data.examples.tokenizer import CaptionTokenizer
from data.synthetic.generate import SyntheticData
from evaluation.captions import open_captioner
from evaluation.options import AroOptions
from evaluation.results import DataUse, Results
from evaluation.scoring import encoded_captions, fits, own_log_probs
from evaluation.sources import whole_image
from evaluation.synthetic_tests import Choice, shape_choices
from models.captioner import Captioner
from trainer.errors import ConfigError
from trainer.progress import track

Format = Literal["vg-relation", "vg-attribution", "order"]
FORMATS: tuple[Format, ...] = get_args(Format)
Rule = Literal["loss", "sum", "prior"]
RULES: tuple[Rule, ...] = get_args(Rule)


def read_aro(path: Path, image_root: Path, kind: Format) -> list[Choice]:
    """A file of ARO: a JSON list.

    vg-relation, vg-attribution: `image_path`, `bbox_x`, `bbox_y`, `bbox_w`, `bbox_h`, `true_caption`, `false_caption`, and
    `relation_name` or `attributes`, as released. order: `image` (or `image_path`) and either `true_caption` with
    `false_captions`, or `caption`, a list of true ones (the Karpathy splits of COCO and Flickr30k), which are perturbed here by
    `perturbed`.

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
            tests += _tests(record, image_root, kind, number)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"{path}: test {number} is not of the format {kind}: {type(error).__name__} {error}"
            ) from error
    return tests


def _tests(record: dict[str, Any], image_root: Path, kind: Format, number: int) -> Iterator[Choice]:
    """The tests that a record of a file of ARO makes."""
    image = image_root / str(record["image" if kind == "order" and "image" in record else "image_path"])
    if kind != "order":
        left, top, width, height = (float(record[f"bbox_{side}"]) for side in "xywh")
        attributes = [record["relation_name"]] if kind == "vg-relation" else record["attributes"]
        captions = (str(record["true_caption"]), str(record["false_caption"]))
        yield Choice(image, captions, "_".join(map(str, attributes)), (left, top, left + width, top + height))
    elif "false_captions" in record:
        wrong = [str(caption) for caption in record["false_captions"]]
        yield Choice(image, (str(record["true_caption"]), *wrong), "order")
    else:
        true = [record["caption"]] if isinstance(record["caption"], str) else list(record["caption"])
        for place, caption in enumerate(true):
            plain = " ".join(str(caption).lower().replace(".", " ").replace(",", " ").split()[:30])
            others = perturbed(plain, random.Random(f"{number} {place}"))
            if others:
                yield Choice(image, (plain, *others), "order")


def perturbed(caption: str, rng: random.Random) -> list[str]:
    """The same words in wrong orders, none twice: trigrams shuffled; words shuffled within trigrams; all words shuffled.

    ARO has the first two, and two by part of speech in place of the third; a file with `false_captions` may hold them. An order
    that is the caption's own, or that was there before, is drawn again up to 20 times and then left out; ARO keeps such captions.
    """
    words = caption.split()
    grams = [words[start : start + 3] for start in range(0, len(words), 3)]
    ways: list[Callable[[], list[str]]] = [
        lambda: [word for gram in rng.sample(grams, len(grams)) for word in gram],
        lambda: [word for gram in grams for word in rng.sample(gram, len(gram))],
        lambda: rng.sample(words, len(words)),
    ]
    others: list[str] = []
    for way in ways:
        for _ in range(20):
            other = " ".join(way())
            if other != caption and other not in others:
                others.append(other)
                break
    return others


@dataclass(frozen=True)
class Answers:
    """What a model chose in tests of one group.

    Attributes:
        credits_N: 1 where the true caption has the least loss (shared between equal ones), else 0.
        num_options_N: captions of each test.
    """

    credits_N: np.ndarray
    num_options_N: np.ndarray

    @property
    def accuracy(self) -> float:
        return float(self.credits_N.mean())

    @property
    def chance(self) -> float:
        """Expected accuracy of guessing."""
        return float((1 / self.num_options_N).mean())

    @property
    def p_value(self) -> float:
        """How often guessing is at least as good: one-sided binomial test, at the largest chance of any of these tests."""
        wins = int(np.floor(self.credits_N.sum()))
        chance = float((1 / self.num_options_N).max())
        return float(binomtest(wins, len(self.credits_N), chance, alternative="greater").pvalue)


def choose(
    model: Captioner, tokenizer: CaptionTokenizer, tests: Sequence[Choice], *, batch_size: int = 32, rule: Rule = "loss"
) -> tuple[dict[str, Answers], int]:
    """Answers by group, and how many tests were left out because their bytes are no image.

    Args:
        rule: "loss" per token (the published one); "sum" over the tokens; "prior": the sum minus what it is for a black image,
            so that wording alone cannot decide.

    Raises:
        DataError: no tests, a caption that does not fit the model, an image that cannot be read.
    """
    if not tests:
        raise DataError("there are no tests")
    credits: dict[str, list[tuple[float, int]]] = {}
    undecodable = 0
    starts = range(0, len(tests), batch_size)
    for start in track(starts, "batches of tests", len(starts)):
        some = tests[start : start + batch_size]
        images = [pixels_of(test, model.config.encoder.image_size) for test in some]
        kept = [(test, image) for test, image in zip(some, images, strict=True) if image is not None]
        undecodable += len(some) - len(kept)
        if kept:
            scores = losses(model, tokenizer, [test for test, _ in kept], np.stack([i for _, i in kept]), rule)
            for (test, _), loss_O in zip(kept, scores, strict=True):
                credit = float(loss_O[0] <= loss_O.min()) / int((loss_O == loss_O.min()).sum())
                credits.setdefault(test.group, []).append((credit, len(loss_O)))
    if not credits:
        raise DataError(f"none of {len(tests)} images can be decoded")
    answers = {g: Answers(np.array([c for c, _ in v]), np.array([n for _, n in v])) for g, v in credits.items()}
    return answers, undecodable


def losses(
    model: Captioner, tokenizer: CaptionTokenizer, tests: Sequence[Choice], images_BCHW: np.ndarray, rule: Rule
) -> list[Tensor]:
    """What the rule compares, in nats, of every caption of every test, the true one first: less is better."""
    captions = [encoded_captions(tokenizer, test.captions, model.config.num_tokens) for test in tests]
    images = torch.from_numpy(images_BCHW).to(next(model.parameters()).device)
    scores = own_log_probs(model, images, captions)
    if rule == "prior":
        blank = own_log_probs(model, torch.zeros_like(images), captions)
        scores = [score - without for score, without in zip(scores, blank, strict=True)]
    if rule != "loss":
        return [-score for score in scores]
    lengths = [torch.tensor([len(caption) - 1 for caption in some]) for some in captions]
    return [-score / length for score, length in zip(scores, lengths, strict=True)]


def pixels_of(test: Choice, size: int) -> np.ndarray | None:
    """The shown part, squashed to a square: a central crop could leave out what the captions speak of.

    Returns:
        Normalised pixels (3, size, size); None where the bytes are no image.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        data = test.image if isinstance(test.image, bytes) else test.image.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror or error}") from error
    try:
        return whole_image(data, size, test.box)[0]
    except DecodeError:
        return None


def aro(options: AroOptions) -> Results:
    """The command; see its options."""
    model, tokenizer, facts = open_captioner(options)
    name, tests = _chosen(options, model.config.encoder.image_size)
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


def _chosen(options: AroOptions, image_size: int) -> tuple[str, list[Choice]]:
    """The tests and their name."""
    if options.test is None:
        data = SyntheticData(options.synthetic_seed, max(image_size, 16), "shapes")
        return f"synthetic shapes, seed {options.synthetic_seed}", shape_choices(data, options.synthetic_tests)
    kind, _, file = options.test.partition(":")
    if kind not in FORMATS or not file:
        raise ConfigError(f"--test {options.test}: write FORMAT:FILE with FORMAT one of {', '.join(FORMATS)}")
    if options.images is None:
        raise ConfigError("--test needs --images DIR, the folder that its image paths are relative to")
    return options.test, read_aro(Path(file), options.images, kind)
