"""Compositional tests: the true caption against false ones, by the captioner's loss.

    python launch_scripts/evaluate.py aro --checkpoint runs/x --test vg-relation:visual_genome_relation.json --images vg/images
    python launch_scripts/evaluate.py aro --checkpoint runs/x --test order:coco_karpathy_test.json --images coco
    python launch_scripts/evaluate.py aro --checkpoint runs/x --synthetic shapes --synthetic_tests 500

File formats: evaluation/compositional.py; synthetic tests, which need no download: evaluation/synthetic_tests.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from evaluation.commands.captioner import SYNTHETIC_SEED, Count, TooLongOptions, open_captioner
from evaluation.commands.common import CheckpointOptions
from trainer.config.options import Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.compositional import Choice
    from evaluation.results import Results


class AroOptions(TooLongOptions, CheckpointOptions):
    """Options of `aro`."""

    ONE_OF = ("test", "synthetic")

    test: Annotated[str | None, Shown("FORMAT:FILE")] = None
    """vg-relation:, vg-attribution: or order: and a JSON file"""
    synthetic: Literal["shapes", "scenes"] | None = None
    """plain shapes, or pictures of every kind"""
    images: Annotated[Path | None, Shown("DIR")] = None
    """that the image paths of --test are relative to"""
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
    """Asks all tests by all rules."""
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
    from evaluation.compositional import FORMATS, read_aro
    from evaluation.synthetic_tests import scene_choices, shape_choices

    if options.test is None:
        content = "shapes" if options.synthetic == "shapes" else "all"
        data = SyntheticData(options.synthetic_seed, max(image_size, 16), content)
        make = shape_choices if options.synthetic == "shapes" else scene_choices
        return f"synthetic {options.synthetic}, seed {options.synthetic_seed}", make(data, options.synthetic_tests)
    kind, _, file = options.test.partition(":")
    if kind not in FORMATS or not file:
        raise ConfigError(f"--test {options.test}: write FORMAT:FILE with FORMAT one of {', '.join(FORMATS)}")
    if options.images is None:
        raise ConfigError("--test needs --images DIR, the folder that its image paths are relative to")
    return options.test, read_aro(Path(file), options.images, kind)
