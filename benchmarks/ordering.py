"""Do captions teach an encoder more than masked pictures, under the same privacy? The papers' order, at a size for two cores.

    python benchmarks/ordering.py --output benchmarks/results/DATE-ordering.json

Sander et al. 2024 (https://arxiv.org/abs/2403.02506) and Yu et al. 2023 (https://arxiv.org/abs/2306.08842) find DP-Cap better
than ViP, and ViP better than its synthetic start. Here one small encoder (`SHAPE`) goes five ways, each with the same number of
examples in expectation and epsilon 8 at delta 1e-5 where it is private:

    synthetic      a masked autoencoder on rendered pictures alone, without privacy
    vip            from it, a private masked autoencoder on photographs of clothes
    dpcap          from it, a private captioner on the same photographs with their captions
    dpcap_random   the same captioner from random weights
    non_private    the captioner from the synthetic start, without clipping and noise

Two controls go with them: the same encoder with random weights (`untrained`), and grey values without an encoder (`pixels`). The
size could tell the order of useful encoders if the non-private one were better than both on the mean of all probes.

The photographs are Fashion-MNIST's (Debian: dataset-fashion-mnist), with a caption for each class and tone. Three of its
classes are never trained on: those that a regression on grey values gets wrong most often. Encoders are judged by probes of
their frozen features on these, on scikit-learn's digits, and on stamps and clip art in grey (tuxpaint-stamps-default,
openclipart-png). As published, few-shot probes see the mean of the normalised patch tokens, linear ones the means of the tokens
of all blocks. `mean of all` is the mean over these probes: it is what the papers' order is judged by, and the others say where
it comes from. Every seed has its own start, runs and splits, so that differences are paired. The blind lines are the loss that
the best answer without looking has, and the accuracy of the most frequent class. OUTPUT and a plot of the same name are written
after every seed, and a run that was stopped goes on; two programs may share the seeds.

Shape and steps are what five seeds at nine processor minutes each allow. The rate of each arm is the best of three by the
held-out loss of the classes that are trained on, in two thirds of the steps and on another seed, and no probe has a part in it:

    python benchmarks/ordering.py --tune 0.5 1 2 --steps 65 --synthetic_steps 600 --output DATE-ordering-rates.json

The record was made with a rate of 3e-3 for the start in `RATES`, of which twice as much was the best.
"""

import argparse
import datetime
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.pictures import Labelled, gathered, judges, write_shards  # noqa: E402
from trainer.config.cli import Parser, run_command  # noqa: E402

FOLDER = ROOT / "runs/ordering"
SHAPE = {"patch_size": 7, "encoder_width": 64, "encoder_depth": 3, "encoder_mlp_ratio": 2.0, "encoder_qkv_bias": True}
DECODER = {"decoder_width": 64, "decoder_depth": 1, "decoder_mlp_ratio": 2.0}
BATCH, SYNTHETIC_BATCH = 1000, 128
RATES = {"synthetic": 6e-3, "vip": 1e-2, "dpcap": 1e-2, "dpcap_random": 1e-2, "non_private": 4e-3}
TUNED_ON = 100
"""The seed by which the rates were chosen."""
SHOTS = (1, 5, 10)
RUNS = tuple(RATES)
ARMS = ("pixels", "untrained", *RUNS)
CLAIMS = (
    ("dpcap", "vip"), ("vip", "synthetic"), ("dpcap", "synthetic"), ("dpcap", "dpcap_random"), ("non_private", "dpcap"),
    ("synthetic", "untrained"), ("dpcap", "untrained"), ("non_private", "untrained"), ("non_private", "pixels"),
)  # fmt: skip
TOGETHER = "mean of all"


def table(values: dict[str, float]) -> str:
    """An inline table of TOML."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"


def trained(
    arm: str, name: str, seed: int, options: argparse.Namespace, num_examples: int, rate: float, start: Path | None
) -> Path:
    """The folder of a run by a recipe of studies/ with this program's shape and steps, from a run's encoder or from random."""
    import torch

    from trainer.config.machine import load_machine_settings
    from trainer.config.recipe import load_config
    from trainer.ranks.discovery import Ranks
    from trainer.run.start import train

    recipe = {"synthetic": "synthetic_tiny_vip", "vip": "tiny_vip"}.get(arm, "tiny_dpcap")
    batch, num_steps = (SYNTHETIC_BATCH, options.synthetic_steps) if arm == "synthetic" else (BATCH, options.steps)
    rows = batch if arm == "synthetic" else math.ceil(batch + 8 * math.sqrt(batch))
    overrides = [
        f"model.overrides={table(SHAPE | DECODER)}", f"heldout.shards={FOLDER}/pairs/test.tar", "heldout.is_public=true",
        "heldout.num_captions=0", f"optimizer.peak_lr={rate}", f"schedule.warmup_steps={math.ceil(num_steps / 20)}",
        f"privacy.expected_batch_size={batch}", f"train.num_steps={num_steps}", f"train.seed={seed}",
        f"train.micro_batch_size={math.ceil(rows / math.ceil(rows / 256))}", f"train.checkpoint_every={num_steps}",
        f"heldout.every_steps={num_steps}",
    ]  # fmt: skip
    if arm == "synthetic":
        pictures = FOLDER / f"synthetic-{options.synthetic_pictures}"
        overrides += [f"data.shards={pictures}/*.tar", "data.provenance=synthetic", "privacy.sampling=shuffle"]
    else:
        overrides += [
            f"data.shards={FOLDER}/pairs/train.tar",
            f"data.num_examples={num_examples}",
            "data.provenance=public",
        ]
    if arm == "non_private":
        overrides.append("privacy.enabled=false")
    if start is not None:
        overrides += [f"init.checkpoint={start}", *(["init.parts=encoder"] if arm != "vip" else [])]
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    config = load_config(ROOT / f"studies/recipes/{recipe}.toml", overrides)
    machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
    code = train(config, machine, "local", folder, ROOT, Ranks(), torch.device("cpu"))
    if code != 0:
        raise SystemExit(f"{folder.name} ended with {code}")
    return folder


def probed(
    sets: dict[str, tuple[Labelled, Labelled]],
    features: Callable[[Labelled, str], tuple[np.ndarray, np.ndarray]],
    seed: int,
) -> dict[str, float]:
    """Accuracies of probes; `features` is asked for those of (to train on, to test on), by the kind that a probe has."""
    from evaluation.few_shot import few_shot_probe
    from evaluation.linear_probe import cross_validated_regression

    found: dict[str, float] = {}
    for name, sources in sets.items():
        num_classes = 1 + int(sources[0].labels.max())
        rows, held = (features(source, "pooled") for source in sources)
        for shots in few_shot_probe(rows, held, num_classes, SHOTS, num_splits=3, seed=100 * seed):
            found[f"{name}, {shots.shots} shots"] = shots.mean
        rows, held = (features(source, "blocks") for source in sources)
        head, _ = cross_validated_regression(*rows, num_classes, ridges=(1e-1, 1e-2), num_folds=3, seed=seed)
        found[f"{name}, linear probe"] = head.accuracy(*held)
    return found | {TOGETHER: float(np.mean(list(found.values())))}


def judged(runs: dict[str, Path], sets: dict[str, tuple[Labelled, Labelled]], seed: int) -> dict[str, dict[str, float]]:
    """By arm, accuracies by probe."""
    import torch

    from evaluation.features import extract
    from evaluation.options import FeatureOptions
    from evaluation.sources import Arrays
    from trainer.weights.open_model import open_model

    opened = {name: open_model(folder) for name, folder in runs.items()}
    random = opened["synthetic"].task.build(torch.Generator().manual_seed(seed)).eval()
    opened["untrained"] = opened["synthetic"]._replace(model=random)

    def encoded(arm: str, source: Labelled, kind: Any) -> tuple[np.ndarray, np.ndarray]:
        options = FeatureOptions(features=kind, num_blocks=int(SHAPE["encoder_depth"]), batch_size=250)
        found = extract(opened[arm], Arrays("pictures", *source), options)
        assert found is not None
        return found.values_ND, found.labels_N

    controls = {"pixels": lambda source, kind: source.grey()}
    return {arm: probed(sets, controls.get(arm, partial(encoded, arm)), seed) for arm in ARMS}


def most_frequent(test: Labelled) -> float:
    """The share of the most frequent class."""
    return float(np.bincount(test.labels).max() / len(test.labels))


def losses(folder: Path) -> dict[str, float]:
    """The last held-out loss of a run on photographs of the trained classes, with that of the best answer without looking."""
    *_, last = (json.loads(line) for line in (folder / "evaluation/heldout.jsonl").read_text().splitlines())
    return {name: last[name] for name in ("loss", "blind_loss", "shuffled_loss") if name in last}


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and half of its 95 % interval (Student's t)."""
    from scipy import stats

    count = len(values)
    half = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else None
    return {"mean": float(np.mean(values)), "half_width": half}


def verdict(difference: dict[str, float | None]) -> str:
    """What an interval of a paired difference says."""
    mean, half = difference["mean"], difference["half_width"]
    if half is None or mean is None or abs(mean) <= half:
        return "not told apart"
    return "as the papers" if mean > 0 else "the other way round"


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means by arm and probe, held-out losses, and the papers' claims as paired differences."""
    found = [seed["accuracy"] for seed in seeds]
    probes = list(found[0][ARMS[0]])
    claims: dict[str, Any] = {}
    for better, worse in CLAIMS:
        for probe in probes:
            difference = interval([seed[better][probe] - seed[worse][probe] for seed in found])
            claims.setdefault(f"{better} > {worse}", {})[probe] = {**difference, "verdict": verdict(difference)}
    means = {arm: {probe: interval([seed[arm][probe] for seed in found]) for probe in probes} for arm in ARMS}
    losses = {
        arm: {name: interval([seed["heldout"][arm][name] for seed in seeds]) for name in one}
        for arm, one in seeds[0]["heldout"].items()
    }
    names = seeds[0]["blind_accuracy"]
    blind = {name: float(np.mean([seed["blind_accuracy"][name] for seed in seeds])) for name in names}
    return {"accuracy": means, "blind_accuracy": blind, "heldout_losses": losses, "claims": claims}


def plot(record: dict[str, Any], path: Path) -> None:
    """Accuracies by probe, one colour an arm, with 95 % intervals of the mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    probes = list(record["accuracy"][ARMS[0]])
    figure, axes = plt.subplots(figsize=(16, 6), layout="constrained")
    for number, arm in enumerate(ARMS):
        found = [record["accuracy"][arm][probe] for probe in probes]
        at = np.arange(len(probes)) + (number - (len(ARMS) - 1) / 2) * 0.11
        axes.errorbar(
            at, [f["mean"] for f in found], [f["half_width"] or 0 for f in found],
            fmt="o" if arm in RUNS else "x", color=f"C{number}", capsize=3, label=arm,
        )  # fmt: skip
    for number, probe in enumerate(probes):
        blind = [value for name, value in record["blind_accuracy"].items() if probe.startswith(name)]
        axes.hlines(blind, number - 0.45, number + 0.45, color="grey", linestyle="--")
    axes.set_xticks(np.arange(len(probes)), [probe.replace(",", "").replace(" ", "\n") for probe in probes])
    axes.margins(x=0.01)
    axes.set_ylabel("accuracy on what no training saw")
    s = record["settings"]
    axes.set_title(
        f"{len(record['seeds'])} seeds, {s['steps']} steps of {s['batch']} photographs, epsilon {s['epsilon']:g}; "
        "95 % intervals; dashed: the most frequent class"
    )
    axes.legend(ncols=len(ARMS), loc="lower center", bbox_to_anchor=(0.5, -0.32), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read(output: Path | None) -> dict[str, Any] | None:
    """The record so far."""
    return json.loads(output.read_text()) if output is not None and output.exists() else None


def command() -> str:
    return " ".join(["python benchmarks/ordering.py", *sys.argv[1:]])


def tune(options: argparse.Namespace, num_examples: int, record: dict[str, Any]) -> None:
    """Writes held-out losses of another seed, by arm and rate; no probe has a part in it. The best start is gone on from."""
    for arm in options.arms:
        start = None
        if arm not in ("synthetic", "dpcap_random"):
            found = json.loads(options.output.read_text())["losses"]["synthetic"]
            start = FOLDER / f"{TUNED_ON}-synthetic-{min(found, key=found.__getitem__)}"
        for factor in options.tune:
            rate = f"{RATES[arm] * factor:.2g}"
            run = trained(arm, f"{TUNED_ON}-{arm}-{rate}", TUNED_ON, options, num_examples, float(rate), start)
            record = read(options.output) or record
            record["commands"] = sorted({*record["commands"], command()})
            record["losses"].setdefault(arm, {})[rate] = losses(run)["loss"]
            options.output.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="those to run")
    parser.add_argument("--steps", type=int, default=100, help=f"of every run on photographs; batch {BATCH}")
    parser.add_argument("--synthetic_steps", type=int, default=1000, help=f"of the start; batch {SYNTHETIC_BATCH}")
    parser.add_argument("--synthetic_pictures", type=int, default=20_000)
    parser.add_argument("--tune", nargs="+", type=float, help="tries these factors of all rates instead of the seeds")
    parser.add_argument("--arms", nargs="+", choices=RUNS, default=RUNS, help="that --tune is for")
    parser.add_argument("--output", type=Path, help="the JSON, written after every seed; seeds there are kept")
    options = parser.parse_args()
    if min(options.steps, options.synthetic_steps, options.synthetic_pictures) < 1:
        parser.error("all counts must be at least 1")
    if options.tune and not options.output:
        parser.error("--tune writes an --output")

    from data.synthetic.write import Settings, write_synthetic
    from trainer.ranks import distributed
    from trainer.ranks.discovery import Ranks

    train, test, sets, facts = gathered()
    for name, photographs in (("train", train), ("test", test)):
        write_shards(photographs, FOLDER / f"pairs/{name}.tar")
    num_examples = len(train.labels)
    write_synthetic(
        FOLDER / f"synthetic-{options.synthetic_pictures}", Settings(options.synthetic_pictures, 28, seed=0)
    )
    settings = {
        "steps": options.steps, "batch": BATCH, "synthetic_steps": options.synthetic_steps, "synthetic_batch": SYNTHETIC_BATCH,
        "synthetic_pictures": options.synthetic_pictures, "shape": SHAPE, "decoder": DECODER, "rates": RATES, "epsilon": 8.0,
        "delta": 1e-5, "num_examples": num_examples, **facts,
    }  # fmt: skip
    print(json.dumps(settings, indent=1), flush=True)
    kept = read(options.output)
    if kept is not None and kept["settings"] != settings:
        parser.error(f"{options.output} has other settings: {kept['settings']}")
    distributed.start(Ranks())
    if options.tune:
        about = {"settings": settings, "date": datetime.date.today().isoformat(), "commands": [], "seed": TUNED_ON}
        tune(options, num_examples, about | {"losses": {}})
        distributed.finish(0)
    for seed in options.seeds:
        record = read(options.output) or {"benchmark": "ordering", "settings": settings, "seeds": {}}
        if str(seed) in record["seeds"]:
            continue
        began = time.process_time()
        runs: dict[str, Path] = {}
        for arm in RUNS:
            start = runs["synthetic"] if arm not in ("synthetic", "dpcap_random") else None
            runs[arm] = trained(arm, f"{seed}-{arm}", seed, options, num_examples, RATES[arm], start)
        drawn = judges(sets, seed)
        made = {
            "date": datetime.date.today().isoformat(),
            "command": command(),
            "accuracy": judged(runs, drawn, seed),
            "blind_accuracy": {name: most_frequent(test) for name, (_, test) in drawn.items()},
            "heldout": {arm: losses(folder) for arm, folder in runs.items()},
            "processor_seconds": round(time.process_time() - began, 1),
        }
        record = read(options.output) or record  # another program may have written meanwhile
        record["seeds"][str(seed)] = made
        record |= summary(list(record["seeds"].values()))
        if options.output is not None:
            options.output.write_text(json.dumps(record, indent=1) + "\n")
            plot(record, options.output.with_suffix(".png"))
        print(json.dumps(made, indent=1), flush=True)
    distributed.finish(0)


if __name__ == "__main__":
    run_command(main)
