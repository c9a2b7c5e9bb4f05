"""Compositional tests: the true caption against false ones, by the captioner's loss.

    python launch_scripts/evaluate.py aro --checkpoint runs/x --test vg-relation:visual_genome_relation.json --images vg/images
    python launch_scripts/evaluate.py aro --checkpoint runs/x --test order:coco_karpathy_test.json --images coco
    python launch_scripts/evaluate.py aro --checkpoint runs/x --synthetic shapes --synthetic_tests 500

File formats: evaluation/compositional.py; synthetic tests, which need no download: evaluation/synthetic_tests.py.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.options import MOST, MOST_AT_ONCE, MOST_REPEATS, MOST_SEED, between
from evaluation.commands.common import add_checkpoint
from evaluation.commands.zero_shot import SYNTHETIC_SEED, add_too_long, open_captioner
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.compositional import Choice
    from evaluation.results import Results

NAME = "aro"
HELP = "does it see attributes, relations and order? (ARO's files, or synthetic tests)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_checkpoint(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--test", metavar="FORMAT:FILE", help="vg-relation:, vg-attribution: or order: and a JSON file")
    source.add_argument("--synthetic", choices=("shapes", "scenes"), help="plain shapes, or pictures of every kind")
    parser.add_argument("--images", type=Path, metavar="DIR", help="that the image paths of --test are relative to")
    parser.add_argument(
        "--synthetic_tests", type=between(1, MOST_REPEATS), default=500, metavar="N", help="of each kind (default: 500)"
    )
    parser.add_argument("--synthetic_seed", type=between(0, MOST_SEED), default=SYNTHETIC_SEED, help="of the pictures")
    parser.add_argument("--max_examples", type=between(1, MOST), metavar="N", help="the first N tests only")
    parser.add_argument("--batch_size", type=between(1, MOST_AT_ONCE), default=32, metavar="B", help="images at once")
    add_too_long(parser)


def run(args: argparse.Namespace) -> "Results":
    """See `evaluation.commands`."""
    import numpy as np

    from evaluation.compositional import RULES, Answers, choose
    from evaluation.results import DataUse, ModelFacts, Results
    from evaluation.scoring import fits

    args.data_is_public |= args.test is None  # computed from a seed
    opened, model = open_captioner(args)
    name, tests = _tests(args, model.config.encoder.image_size)
    tests = tests[: args.max_examples]
    tokenizer = opened.task.make_example(train=False).tokenizer  # type: ignore[attr-defined]
    given, longest = len(tests), model.config.num_tokens
    if args.too_long == "skip":
        tests = [test for test in tests if all(fits(tokenizer, caption, longest) for caption in test.captions)]
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    undecodable = 0
    for rule in RULES:
        answers, undecodable = choose(model, tokenizer, tests, batch_size=args.batch_size, rule=rule)
        everything = Answers(
            *(np.concatenate([getattr(a, f) for a in answers.values()]) for f in ("credits_N", "num_options_N"))
        )
        scalars |= {f"accuracy_{rule}": everything.accuracy, "chance": everything.chance}
        scalars[f"group_mean_{rule}"] = float(np.mean([answer.accuracy for answer in answers.values()]))
        few = answers if len(answers) <= 20 else {}
        scalars |= {f"accuracy_{rule}_{group}": answer.accuracy for group, answer in few.items()}
        for group, answer in [*answers.items(), ("all", everything)]:
            row = {"rule": rule, "group": group, "accuracy": answer.accuracy, "chance": answer.chance}
            table.append({**row, "tests": len(answer.credits_N), "p (guessing)": answer.p_value})
    uses = [DataUse("tests", name, len(tests) - undecodable, undecodable)]
    notes = ["loss: least loss per token; sum: likeliest caption; prior: sum minus what it is for a black image"]
    details = {"num_too_long": given - len(tests)}
    return Results(NAME, scalars, uses, ModelFacts.of(opened.path, opened.manifest), table, details, notes=notes)


def _tests(args: argparse.Namespace, image_size: int) -> "tuple[str, list[Choice]]":
    from data.synthetic.generate import SyntheticData
    from evaluation.compositional import FORMATS, read_aro
    from evaluation.synthetic_tests import scene_choices, shape_choices

    if args.test is None:
        content = "shapes" if args.synthetic == "shapes" else "all"
        data = SyntheticData(args.synthetic_seed, max(image_size, 16), content)
        make = shape_choices if args.synthetic == "shapes" else scene_choices
        return f"synthetic {args.synthetic}, seed {args.synthetic_seed}", make(data, args.synthetic_tests)
    kind, _, file = args.test.partition(":")
    if kind not in FORMATS or not file:
        raise ConfigError(f"--test {args.test}: write FORMAT:FILE with FORMAT one of {', '.join(FORMATS)}")
    if args.images is None:
        raise ConfigError("--test needs --images DIR, the folder that its image paths are relative to")
    return args.test, read_aro(Path(file), args.images, kind)
