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

The photographs are those of the embedded Fashion-MNIST of seven classes. Encoders are judged by few-shot and linear probes of
their frozen features on what no training saw: the three other classes, and scikit-learn's digits. Every seed has its own start,
runs and splits, so that differences are paired. OUTPUT is written after every seed, and a run that was stopped goes on with the
next one.
"""

import argparse
import io
import json
import lzma
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

FOLDER = ROOT / "runs/ordering"
TRAINED_ON = 7
"""Classes whose photographs are trained on: the first of the data set."""
SHAPE = {"patch_size": 7, "encoder_width": 64, "encoder_depth": 3, "encoder_mlp_ratio": 2.0, "encoder_qkv_bias": True}
DECODER = {"decoder_width": 64, "decoder_depth": 1, "decoder_mlp_ratio": 2.0}
BATCH = 500
SHOTS = (1, 5, 10)
ARMS = ("synthetic", "vip", "dpcap", "dpcap_random", "non_private")
CLAIMS = (("dpcap", "vip"), ("vip", "synthetic"), ("dpcap", "synthetic"), ("dpcap", "dpcap_random"))


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


def judges() -> dict[str, tuple[Any, Any]]:
    """(to train probes on, to test them on), of classes that no encoder was trained on."""
    from sklearn.datasets import load_digits

    from data.embedded import PARTS
    from evaluation.sources.labelled import ArrayImages

    grey, caption_N, _ = clothes()
    kinds = caption_N // 2 - TRAINED_ON
    ours, others = np.arange(len(kinds)) < PARTS["train"], np.arange(len(kinds)) >= PARTS["train"] + PARTS["choice"]
    x, y = load_digits(return_X_y=True)
    large = np.pad(np.kron(x.reshape(-1, 8, 8) / 16, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(x))
    numbers, y = np.rint(255 * (1 - large[order])).astype(np.uint8), y[order].astype(np.int64)

    def images(name: str, pictures: np.ndarray, labels: np.ndarray) -> ArrayImages:
        return ArrayImages(name, pictures, labels)

    return {
        "other clothes": (
            images("other clothes", grey[ours & (kinds >= 0)], kinds[ours & (kinds >= 0)]),
            images("other clothes", grey[others & (kinds >= 0)], kinds[others & (kinds >= 0)]),
        ),
        "digits": (images("digits", numbers[:1200], y[:1200]), images("digits", numbers[1200:], y[1200:])),
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
            "tiny_dpcap", f"{seed}-non_private", [*shared, *encoder, "privacy.enabled=false"], device
        ),
    }


def judged(folder: Path, seed: int) -> dict[str, float]:
    """Accuracies of probes on the encoder of a run."""
    from evaluation.encoder import FeatureOptions
    from evaluation.features import extract
    from evaluation.few_shot import few_shot_probe
    from evaluation.linear_probe import cross_validated_regression
    from trainer.weights.open_model import open_model

    opened, found = open_model(folder), {}
    for name, sources in judges().items():
        train, test = (extract(opened, source, FeatureOptions("pooled", 1)) for source in sources)
        assert train is not None and test is not None
        rows, held = (train.values_ND, train.labels_N), (test.values_ND, test.labels_N)
        for shots in few_shot_probe(rows, held, train.num_classes, SHOTS, num_splits=5, seed=100 * seed):
            found[f"{name}, {shots.shots} shots"] = shots.mean
        head, _ = cross_validated_regression(
            *rows, train.num_classes, ridges=(1e-1, 1e-2, 1e-3), num_folds=3, seed=seed
        )
        found[f"{name}, linear probe"] = head.accuracy(*held)
    return found


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


def summary(seeds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Means by arm and probe, and the papers' claims as paired differences."""
    probes = list(seeds[0][ARMS[0]])
    claims: dict[str, Any] = {}
    for better, worse in CLAIMS:
        for probe in probes:
            difference = interval([seed[better][probe] - seed[worse][probe] for seed in seeds])
            claims.setdefault(f"{better} > {worse}", {})[probe] = {**difference, "verdict": verdict(difference)}
    means = {arm: {probe: interval([seed[arm][probe] for seed in seeds]) for probe in probes} for arm in ARMS}
    return {"accuracy": means, "claims": claims}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600, help="of every run on photographs; batch 500")
    parser.add_argument("--synthetic_steps", type=int, default=4000, help="of the synthetic start; batch 64")
    parser.add_argument("--synthetic_pictures", type=int, default=20_000)
    parser.add_argument("--output", type=Path, help="where the JSON is written after every seed; what is there goes on")
    options = parser.parse_args()
    if min(options.seeds, options.steps, options.synthetic_steps, options.synthetic_pictures) < 1:
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
    record: dict[str, Any] = {
        "benchmark": "ordering", "command": " ".join(["python benchmarks/ordering.py", *sys.argv[1:]]),
        "settings": settings, "seeds": [], "processor_seconds": 0.0,
    }  # fmt: skip
    if options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text())
        if record["settings"] != settings:
            parser.error(f"{options.output} has other settings: {record['settings']}")
    from trainer.ranks import distributed
    from trainer.ranks.discovery import Ranks

    device = distributed.start(Ranks())
    for seed in range(len(record["seeds"]), options.seeds):
        began = time.process_time()
        runs = arms(seed, options.steps, options.synthetic_steps, num_examples, device)
        record["seeds"].append({arm: judged(runs[arm], seed) for arm in ARMS})
        record["processor_seconds"] += round(time.process_time() - began, 1)
        record |= summary(record["seeds"])
        if options.output is not None:
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1), flush=True)
    distributed.finish(0)


if __name__ == "__main__":
    main()
