"""The command `aro`: tests of `evaluation.compositional`, from ARO's files or from drawn shapes."""

from pathlib import Path
from typing import Any

import numpy as np

from data.synthetic.generate import SyntheticData
from evaluation.captions import open_captioner
from evaluation.compositional import FORMATS, RULES, Answers, Choice, choose, read_aro
from evaluation.options import AroOptions
from evaluation.results import DataUse, Results
from evaluation.scoring import fits
from evaluation.synthetic_tests import shape_choices
from trainer.errors import ConfigError


def aro(options: AroOptions) -> Results:
    """The command; see its options."""
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


def _tests(options: AroOptions, image_size: int) -> tuple[str, list[Choice]]:
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
