"""What does a small captioner see of synthetic shapes, trained without and with differential privacy?

    python benchmarks/results/shapes/shapes_study.py --output benchmarks/results/shapes/2026-11-22-shapes

makes 20,000 pairs (`prepare.py synthetic --content shapes`), trains recipes/synthetic_shapes.toml and recipes/shapes_dp.toml on
them (about 5 and 18 processor minutes), and asks both and the untrained model what new pictures show:

* zero-shot: which of 120 names (12 colours times 10 shapes) fits the picture of one shape;
* choices between captions of equal length: another colour (11 ways), another shape (9), relation and who has which colour (7),
  order of three (6); see evaluation/synthetic_tests.py.

Every test asks for the likeliest caption; p is the chance that guessing does as well (one-sided binomial test), and, against the
best of several models with random weights, that equal models differ so much (Fisher's exact test, one-sided). Test pictures
have a seed of their own, apart from training, from the held-out pairs that training shows, and from the pictures of --validation,
which are for choosing recipes. What is there is not trained again; --evaluate_only trains nothing. Writes OUTPUT.json, .md, .png
and the first test pictures with the captions of each model.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from scipy.stats import binomtest, fisher_exact

from data.examples.tokenizer import CaptionTokenizer
from data.examples.transforms import eval_image
from data.synthetic.generate import SyntheticData
from data.synthetic.write import encode
from evaluation.captions import CaptionWriter, picture_grid
from evaluation.compositional import Answers, choose
from evaluation.scoring import tree_log_probs
from evaluation.synthetic_tests import SHAPE_CLASSES, SHAPE_GROUPS, shape_choices, shape_images
from evaluation.zero_shot import Prompts, accuracy
from models.captioner import Captioner
from privacy.card.report import read_snapshot
from trainer.tasks.captioning import CaptioningTask
from trainer.weights.open_model import OpenedModel, open_model

ROOT = Path(__file__).resolve().parents[3]
DATA, HELDOUT = ROOT / "runs" / "shapes-data", ROOT / "runs" / "shapes-heldout"
PICTURE_SIZE = 64
"""Pixels of the drawn pictures, in training and in tests; the model's own size may be another."""
TEST_SEED, VALIDATION_SEED = 1 << 40, 1 << 41
UNTRAINED = 8
RUNS = {"non-private": "synthetic_shapes", "epsilon 8": "shapes_dp"}


def commands() -> list[list[str]]:
    """Data, then both runs; held-out pairs of another seed show their progress."""

    def pairs(count: int, seed: int, output: Path) -> list[str]:
        options = {"content": "shapes", "num_examples": count, "image_size": PICTURE_SIZE, "seed": seed}
        told = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return ["launch_scripts/prepare.py", "synthetic", *told, "--output", str(output.relative_to(ROOT))]

    found = [pairs(20000, 0, DATA), pairs(500, 1, HELDOUT)]
    for name, every, count in (("synthetic_shapes", 500, 300), ("shapes_dp", 50, 200)):
        found.append(
            ["launch_scripts/train.py", "--ds_config", "ds_configs/zero1.json", "--recipe", f"recipes/{name}.toml",
             "--engine", "local", f"heldout.shards={HELDOUT.relative_to(ROOT)}/*.tar", "heldout.is_public=true",
             f"heldout.every_steps={every}", f"heldout.num_examples={count}"]
        )  # fmt: skip
    return found


def train() -> None:
    """Makes and trains what is not there."""
    for command in commands():
        print(" ".join(["python", *command]), file=sys.stderr, flush=True)
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=sys.stderr)


def asked(model: Captioner, tokenizer: CaptionTokenizer, seed: int, count: int) -> dict[str, Any]:
    """All tests of one model on pictures of this seed: accuracy, chance, p."""
    data, size = SyntheticData(seed, PICTURE_SIZE, "shapes"), model.config.encoder.image_size
    found: dict[str, Any] = {}
    examples = shape_images(data, 2 * count).read(range(2 * count))
    images, labels_N = [e.image or b"" for e in examples], np.array([e.label for e in examples])
    batches = [
        torch.from_numpy(np.stack([eval_image(i, size) for i in images[k : k + 100]]))
        for k in range(0, len(images), 100)
    ]
    prompts = Prompts.of(SHAPE_CLASSES, ("{a}",), tokenizer, model.config.num_tokens)
    device = next(model.parameters()).device
    log_probs_NC = torch.cat([tree_log_probs(model, batch.to(device), prompts.tree) for batch in batches])
    scores_NK = prompts.by_rule(log_probs_NC)["sum"]
    top1 = accuracy(scores_NK, labels_N).top1
    found["zero-shot"] = result(round(top1 * len(labels_N)), len(labels_N), len(SHAPE_CLASSES))
    scores_NCS = scores_NK.unflatten(1, (12, 10)).logsumexp(2), scores_NK.unflatten(1, (12, 10)).logsumexp(1)
    for name, part_NK, labels in (
        ("zero-shot colour", scores_NCS[0], labels_N // 10),
        ("zero-shot shape", scores_NCS[1], labels_N % 10),
    ):
        found[name] = result(round(accuracy(part_NK, labels).top1 * len(labels)), len(labels), part_NK.shape[1])
    for group in SHAPE_GROUPS:
        answers: Answers = choose(model, tokenizer, shape_choices(data, count, [group]), rule="sum")[0][group]
        found[f"choice: {group}"] = result(int(answers.credits_N.sum()), count, int(answers.num_options_N[0]))
    return found


def untrained(opened: OpenedModel, tokenizer: CaptionTokenizer, seed: int, count: int) -> dict[str, Any]:
    """Per test the best of several models with random weights.

    One model answers pictures of the same colour alike, so by luck of its weights it may be right more, or less, often than
    independent guesses: p knows nothing of that.
    """
    builds = (opened.task.build(torch.Generator().manual_seed(weights)).eval() for weights in range(UNTRAINED))
    found = [asked(model, tokenizer, seed, count) for model in builds if isinstance(model, Captioner)]
    best = {test: max((one[test] for one in found), key=lambda r: r["right"]) for test in found[0]}
    return {"seeds": UNTRAINED, "accuracies": {t: [one[t]["accuracy"] for one in found] for t in best}, "results": best}


def result(right: int, tests: int, ways: int) -> dict[str, Any]:
    """Scores `right` correct answers to `tests` questions that have one right answer among `ways`."""
    p = binomtest(right, tests, 1 / ways, alternative="greater").pvalue
    return {
        "right": right,
        "tests": tests,
        "ways": ways,
        "accuracy": right / tests,
        "times_chance": right / tests * ways,
        "p": p,
    }


def beats(one: dict[str, Any], other: dict[str, Any]) -> float:
    """p of the first model's being right so much more often if both were equally good."""
    table = [[model["right"], model["tests"] - model["right"]] for model in (one, other)]
    return float(fisher_exact(table, alternative="greater").pvalue)


def study(args: argparse.Namespace) -> dict[str, Any]:
    """The record; writes the grids of captions next to it."""
    if not args.evaluate_only:
        train()
    said = [" ".join(["python", *command]) for command in commands()]
    seed = VALIDATION_SEED if args.validation else TEST_SEED
    record: dict[str, Any] = {"study": "shapes", "commands": said, "picture_seed": seed, "models": {}}
    for (label, name), run_dir in zip(RUNS.items(), args.run_dirs, strict=True):
        opened = open_model(run_dir)
        model, task = opened.model, opened.task
        assert isinstance(model, Captioner) and isinstance(task, CaptioningTask)
        tokenizer = task.make_example(train=False).tokenizer
        if "untrained" not in record["models"]:
            record["models"]["untrained"] = untrained(opened, tokenizer, seed, args.tests // 2)
        facts = {"run": name, "step": opened.manifest["step"], "formal_guarantee": opened.manifest["formal_guarantee"]}
        if facts["formal_guarantee"]:
            state = read_snapshot(run_dir / "ledger.jsonl").state
            facts |= {
                "epsilon": state.epsilon(),
                "delta": state.plan.target_delta,
                "noise_multiplier": state.plan.noise_multiplier,
            }
        facts["recipe"] = (ROOT / "recipes" / f"{name}.toml").read_text()
        results = asked(model, tokenizer, seed, args.tests)
        for test, best in record["models"]["untrained"]["results"].items():
            results[test]["p_against_untrained"] = beats(results[test], best)
        record["models"][label] = {**facts, "results": results}
        grid(model, tokenizer, seed, args.output.with_name(f"{args.output.name}-{name}-captions.png"))
    return record


def grid(model: Captioner, tokenizer: CaptionTokenizer, seed: int, path: Path) -> None:
    """Greedy captions of the first test pictures."""
    data = SyntheticData(seed, PICTURE_SIZE, "shapes")
    examples = [data.example(index) for index in range(24)]
    images = np.stack([eval_image(encode(example, "png"), model.config.encoder.image_size) for example in examples])
    captions = CaptionWriter(model, tokenizer)(images)
    picture_grid(list(images), [caption.text for caption in captions]).save(path)


def markdown(record: dict[str, Any], output: str) -> str:
    """The table, and what it says of the two questions."""
    models = record["models"]
    first_row = {"untrained": f"untrained (best of {UNTRAINED})"}
    names = " | ".join(first_row.get(name, name) for name in models)
    lines = [
        "# What a small captioner sees of synthetic shapes", "",
        f"`python benchmarks/results/shapes/shapes_study.py --output {output}`", "",
        f"20,000 pairs, drawn at {PICTURE_SIZE} pixels; one run each. Accuracy of the likeliest caption, in brackets times "
        "chance and p of guessing. A model answers pictures of one colour alike, so p understates luck: of "
        f"{UNTRAINED} models with random weights the best is shown, too (half as many tests).", "",
        f"Pictures of {'validation' if record['picture_seed'] == VALIDATION_SEED else 'the test'}. Recipes were chosen by other "
        "pictures than those of the test; epsilon is that of the one private run and does not cover that choice.", "",
        f"| test | ways | tests | {names} |", "|---" * (3 + len(models)) + "|",
    ]  # fmt: skip
    for test, first in models["untrained"]["results"].items():
        cells = [
            f"{100 * one['accuracy']:.1f} % ({one['times_chance']:.1f} x, p {f'= {p:.1g}' if (p := one['p']) else '< 1e-300'})"
            for one in (model["results"][test] for model in models.values())
        ]
        tests = models["non-private"]["results"][test]["tests"]
        lines.append(f"| {test} | {first['ways']} | {tests} | " + " | ".join(cells) + " |")
    plain, private = models["non-private"]["results"], models["epsilon 8"]["results"]
    below = [test for test, one in plain.items() if one["times_chance"] < 3]
    unseen = [test for test, one in private.items() if one["p"] >= 0.01]
    unclear = [test for test, one in private.items() if test not in unseen and one["p_against_untrained"] >= 0.01]
    guarantee = models["epsilon 8"]
    lines += [
        "", f"Non-private: at least 3 times chance in all tests{' but ' + ', '.join(below) if below else ''}.", "",
        f"With differential privacy (epsilon {guarantee['epsilon']:.4f} at delta {guarantee['delta']:g} by the run's ledger): "
        f"above chance with p < 0.01 in {len(private) - len(unseen)} of {len(private)} tests"
        f"{'; not in ' + ', '.join(unseen) if unseen else ''}."
        f"{' Not clearly above what luck gave random weights: ' + ', '.join(unclear) + '.' if unclear else ''}", "",
        f"Above the best of the untrained models with p < 0.01 in "
        f"{sum(one['p_against_untrained'] < 0.01 for one in private.values())} of {len(private)} tests (largest p "
        f"{max(one['p_against_untrained'] for one in private.values()):.1g}).", "",
    ]  # fmt: skip
    return "\n".join(lines)


def plot(record: dict[str, Any], path: Path) -> None:
    """Accuracies, with chance as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models, tests = record["models"], list(record["models"]["untrained"]["results"])
    figure, axes = pyplot.subplots(figsize=(10, 4.2))
    for number, (label, model) in enumerate(models.items()):
        heights = [100 * model["results"][test]["accuracy"] for test in tests]
        axes.bar(
            np.arange(len(tests)) + 0.27 * (number - 1),
            heights,
            0.25,
            label=f"untrained, best of {UNTRAINED}" if label == "untrained" else label,
        )
    chances = [100 / models["untrained"]["results"][test]["ways"] for test in tests]
    axes.hlines(chances, np.arange(len(tests)) - 0.42, np.arange(len(tests)) + 0.42, "black", "dashed", label="chance")
    axes.set_xticks(range(len(tests)), [test.replace(": ", ":\n").replace("shot ", "shot\n") for test in tests])
    axes.set_ylabel("right answers, %")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs the study and writes its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX", help="of the files that are written")
    parser.add_argument("--tests", type=int, default=4000, help="of each kind; zero-shot takes twice as many")
    parser.add_argument(
        "--run_dirs", type=Path, nargs=2, default=[ROOT / "runs" / name for name in RUNS.values()], metavar="DIR",
        help="to evaluate: without privacy, and with it (default: those that are trained)",
    )  # fmt: skip
    parser.add_argument(
        "--validation", action="store_true", help="other pictures than those of the test, to choose recipes by"
    )
    parser.add_argument("--evaluate_only", action="store_true", help="of runs that are there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = study(args)
    args.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    text = markdown(record, str(args.output))
    args.output.with_suffix(".md").write_text(text)
    plot(record, args.output.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
