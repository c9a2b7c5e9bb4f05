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

Two controls go with them: the same encoder with random weights (`untrained`), and grey values without an encoder (`pixels`).

The photographs are those of the embedded Fashion-MNIST of seven classes. Encoders are judged by few-shot and linear probes of
their frozen features on what no training saw: the three other classes, and scikit-learn's digits. `mean of all` is the mean over
these probes: it is what the papers' order is judged by, and the others say where it comes from. Every seed has its own start,
runs and splits, so that differences are paired. The blind lines are the loss that the best answer without looking has, and the
accuracy of the most frequent class. OUTPUT and a plot of the same name are written after every seed, and a run that was stopped
goes on; two programs may share the seeds.
"""

import argparse
import datetime
import io
import json
import lzma
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

FOLDER = ROOT / "runs/ordering"
TRAINED_ON = 7
"""Classes whose photographs are trained on: the first of the data set."""
SHAPE = {"patch_size": 7, "encoder_width": 32, "encoder_depth": 2, "encoder_mlp_ratio": 2.0, "encoder_qkv_bias": True}
DECODER = {"decoder_width": 32, "decoder_depth": 1, "decoder_mlp_ratio": 2.0}
NON_PRIVATE_RATE = 4e-3
"""The private arms' rates are those of the studies' recipes. All were chosen on another seed, by the held-out loss of the classes
that are trained on, one or two rates for each."""
BATCH = 500
SHOTS = (1, 5, 10)
RUNS = ("synthetic", "vip", "dpcap", "dpcap_random", "non_private")
ARMS = ("pixels", "untrained", *RUNS)
CLAIMS = (
    ("dpcap", "vip"), ("vip", "synthetic"), ("dpcap", "synthetic"), ("dpcap", "dpcap_random"), ("non_private", "dpcap"),
    ("synthetic", "untrained"), ("dpcap", "untrained"),
)  # fmt: skip
TOGETHER = "mean of all"


def clothes() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(pictures (N, 28, 28) uint8, number of each caption, captions); two captions for each class."""
    from data.embedded import FASHION_FILE, NUM_SHADES

    with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as held:
        grey = np.rint(held["shades_NHW"] * (255 / (NUM_SHADES - 1))).astype(np.uint8)
        return grey, held["caption_N"].astype(np.int64), [str(caption) for caption in held["captions"]]


def write_shards() -> int:
    """Training and held-out pairs of the classes that are trained on; returns how many there are to train on."""
    from PIL import Image

    from data.embedded import PARTS
    from data.index.tar_writer import write_shard

    grey, caption_N, captions = clothes()
    inside = np.flatnonzero(caption_N // 2 < TRAINED_ON)
    parts = {"train": inside[inside < PARTS["train"]], "test": inside[inside >= PARTS["train"] + PARTS["choice"]]}

    def members(i: int) -> dict[str, bytes]:
        picture = io.BytesIO()
        Image.fromarray(grey[i]).save(picture, "PNG")
        return {"png": picture.getvalue(), "txt": captions[caption_N[i]].encode()}

    for name, rows in parts.items():
        for number, start in enumerate(range(0, len(rows), 2000)):
            path = FOLDER / f"{name}-{number:05d}.tar"
            if not path.exists():
                write_shard(path, ((f"{i:05d}", members(i)) for i in rows[start : start + 2000]))
    return len(parts["train"])


class Labelled(NamedTuple):
    """Pictures (N, 28, 28) uint8 with labels (N,)."""

    pictures: np.ndarray
    labels: np.ndarray


def judges() -> dict[str, tuple[Labelled, Labelled]]:
    """(to train probes on, to test them on), of classes that no encoder was trained on."""
    from sklearn.datasets import load_digits

    from data.embedded import PARTS

    grey, caption_N, _ = clothes()
    kinds = caption_N // 2 - TRAINED_ON
    ours, others = np.arange(len(kinds)) < PARTS["train"], np.arange(len(kinds)) >= PARTS["train"] + PARTS["choice"]
    x, y = load_digits(return_X_y=True)
    large = np.pad(np.kron(x.reshape(-1, 8, 8) / 16, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(x))
    numbers, y = np.rint(255 * (1 - large[order])).astype(np.uint8), y[order].astype(np.int64)

    train, test = (Labelled(grey[rows & (kinds >= 0)], kinds[rows & (kinds >= 0)]) for rows in (ours, others))
    return {
        "other clothes": (train, test),
        "digits": (Labelled(numbers[:1200], y[:1200]), Labelled(numbers[1200:], y[1200:])),
    }


def table(values: dict[str, float]) -> str:
    """An inline table of TOML."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"


def trained(recipe: str, name: str, overrides: Sequence[str], device: Any) -> Path:
    """The run folder of a recipe of studies/ with this program's shape."""
    from trainer.config.machine import load_machine_settings
    from trainer.config.recipe import load_config
    from trainer.ranks.discovery import Ranks
    from trainer.run.start import train

    config = load_config(
        ROOT / f"studies/recipes/{recipe}.toml", [f"model.overrides={table(SHAPE | DECODER)}", *overrides]
    )
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
    code = train(config, machine, "local", folder, ROOT, Ranks(), device)
    if code != 0:
        raise SystemExit(f"{name} ended with {code}")
    return folder


def arms(seed: int, num_steps: int, synthetic_steps: int, num_examples: int, device: Any) -> dict[str, Path]:
    """Trains one seed's five encoders."""
    rows = math.ceil(BATCH + 8 * math.sqrt(BATCH))
    shared = [
        f"data.shards={FOLDER}/train-*.tar", f"data.num_examples={num_examples}", "data.provenance=public",
        f"heldout.shards={FOLDER}/test-*.tar", "heldout.is_public=true", f"heldout.every_steps={num_steps}",
        f"privacy.expected_batch_size={BATCH}", f"train.num_steps={num_steps}", f"train.seed={seed}",
        f"train.micro_batch_size={math.ceil(rows / math.ceil(rows / 256))}", f"train.checkpoint_every={num_steps}",
        f"schedule.warmup_steps={max(1, num_steps // 20)}",
    ]  # fmt: skip
    start = trained(
        "synthetic_tiny_vip", f"{seed}-synthetic",
        [
            f"data.shards={FOLDER}/synthetic/*.tar", "data.provenance=synthetic", f"train.seed={seed}",
            f"train.num_steps={synthetic_steps}", f"train.checkpoint_every={synthetic_steps}",
            f"schedule.warmup_steps={max(1, synthetic_steps // 10)}",
        ],
        device,
    )  # fmt: skip
    encoder = [f"init.checkpoint={start}", "init.parts=encoder"]
    return {
        "synthetic": start,
        "vip": trained("tiny_vip", f"{seed}-vip", [*shared, f"init.checkpoint={start}"], device),
        "dpcap": trained("tiny_dpcap", f"{seed}-dpcap", [*shared, *encoder], device),
        "dpcap_random": trained("tiny_dpcap", f"{seed}-dpcap_random", shared, device),
        "non_private": trained(
            "tiny_dpcap",
            f"{seed}-non_private",
            [*shared, *encoder, "privacy.enabled=false", f"optimizer.peak_lr={NON_PRIVATE_RATE}"],
            device,
        ),
    }


def probed(features: Callable[[Labelled], tuple[np.ndarray, np.ndarray]], seed: int) -> dict[str, float]:
    """Accuracies of probes; `features` is asked for those of (to train on, to test on) in turn."""
    from evaluation.few_shot import few_shot_probe
    from evaluation.linear_probe import cross_validated_regression

    found: dict[str, float] = {}
    for name, sources in judges().items():
        (rows, held), num_classes = (features(source) for source in sources), 1 + int(sources[0].labels.max())
        for shots in few_shot_probe(rows, held, num_classes, SHOTS, num_splits=5, seed=100 * seed):
            found[f"{name}, {shots.shots} shots"] = shots.mean
        head, _ = cross_validated_regression(*rows, num_classes, ridges=(1e-1, 1e-2, 1e-3), num_folds=3, seed=seed)
        found[f"{name}, linear probe"] = head.accuracy(*held)
    return found | {TOGETHER: float(np.mean(list(found.values())))}


def judged(runs: dict[str, Path], seed: int) -> dict[str, dict[str, float]]:
    """By arm, accuracies by probe."""
    import torch

    from evaluation.encoder import FeatureOptions
    from evaluation.features import extract
    from evaluation.sources.labelled import ArrayImages
    from trainer.weights.open_model import open_model

    opened = {name: open_model(folder) for name, folder in runs.items()}
    random = opened["synthetic"].task.build(torch.Generator().manual_seed(seed)).eval()
    opened["untrained"] = opened["synthetic"]._replace(model=random)

    def encoded(arm: str, source: Labelled) -> tuple[np.ndarray, np.ndarray]:
        found = extract(opened[arm], ArrayImages("pictures", *source), FeatureOptions("pooled", 1))
        assert found is not None
        return found.values_ND, found.labels_N

    def grey(source: Labelled) -> tuple[np.ndarray, np.ndarray]:
        return source.pictures.reshape(len(source.labels), -1).astype(np.float32) / 255, source.labels

    return {arm: probed(grey if arm == "pixels" else partial(encoded, arm), seed) for arm in ARMS}


def blind_accuracies() -> dict[str, float]:
    """The share of the most frequent class, by what is judged."""
    return {name: float(np.bincount(test.labels).max() / len(test.labels)) for name, (_, test) in judges().items()}


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
    return {"accuracy": means, "heldout_losses": losses, "claims": claims}


def plot(record: dict[str, Any], path: Path) -> None:
    """Accuracies by probe, one colour an arm, with 95 % intervals of the mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    probes = list(record["accuracy"][ARMS[0]])
    figure, axes = plt.subplots(figsize=(13, 5), layout="constrained")
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
    axes.set_xticks(np.arange(len(probes)), [probe.replace(", ", ",\n") for probe in probes])
    axes.set_ylabel("accuracy on what no training saw")
    s = record["settings"]
    axes.set_title(
        f"{len(record['seeds'])} seeds, {s['steps']} steps of {s['batch']} photographs, epsilon {s['epsilon']:g}; "
        "95 % intervals; dashed: the most frequent class"
    )
    axes.legend(ncols=len(ARMS), loc="lower center", bbox_to_anchor=(0.5, -0.28), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read(output: Path | None) -> dict[str, Any] | None:
    """The record so far."""
    return json.loads(output.read_text()) if output is not None and output.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="those to run")
    parser.add_argument("--steps", type=int, default=100, help="of every run on photographs; batch 500")
    parser.add_argument("--synthetic_steps", type=int, default=500, help="of the synthetic start; batch 64")
    parser.add_argument("--synthetic_pictures", type=int, default=20_000)
    parser.add_argument("--output", type=Path, help="the JSON, written after every seed; seeds there are kept")
    options = parser.parse_args()
    if min(options.steps, options.synthetic_steps, options.synthetic_pictures) < 1:
        parser.error("all counts must be at least 1")

    from data.synthetic.write import Settings, write_synthetic

    FOLDER.mkdir(parents=True, exist_ok=True)
    num_examples = write_shards()
    if not (FOLDER / "synthetic").is_dir():
        write_synthetic(FOLDER / "synthetic", Settings(options.synthetic_pictures, 28, seed=0))
    settings = {
        "steps": options.steps, "batch": BATCH, "synthetic_steps": options.synthetic_steps, "shape": SHAPE,
        "synthetic_pictures": options.synthetic_pictures, "epsilon": 8.0, "delta": 1e-5, "num_examples": num_examples,
    }  # fmt: skip
    kept = read(options.output)
    if kept is not None and kept["settings"] != settings:
        parser.error(f"{options.output} has other settings: {kept['settings']}")
    from trainer.ranks import distributed
    from trainer.ranks.discovery import Ranks

    device = distributed.start(Ranks())
    for seed in options.seeds:
        record = read(options.output) or {"benchmark": "ordering", "settings": settings, "seeds": {}}
        if str(seed) in record["seeds"]:
            continue
        began = time.process_time()
        runs = arms(seed, options.steps, options.synthetic_steps, num_examples, device)
        made = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python benchmarks/ordering.py", *sys.argv[1:]]),
            "accuracy": judged(runs, seed),
            "heldout": {arm: losses(runs[arm]) for arm in RUNS if arm != "synthetic"},
            "processor_seconds": round(time.process_time() - began, 1),
        }
        record = read(options.output) or record  # another program may have written meanwhile
        record["seeds"][str(seed)] = made
        record |= {"blind_accuracy": blind_accuracies(), **summary(list(record["seeds"].values()))}
        if options.output is not None:
            options.output.write_text(json.dumps(record, indent=1) + "\n")
            plot(record, options.output.with_suffix(".png"))
        print(json.dumps(made, indent=1), flush=True)
    distributed.finish(0)


if __name__ == "__main__":
    main()
