"""Below which noise-to-signal do runs learn? Trains small runs on both sides, and writes what came of them.

    python benchmarks/noise_to_signal.py --part grid --output benchmarks/results/2026-11-22-noise-to-signal
    python benchmarks/noise_to_signal.py --part validation --output benchmarks/results/2026-11-22-noise-to-signal

The runs of the grid calibrate `trainer.planner.signal.LARGEST_THAT_LEARNS`; those of the validation were chosen afterwards, with
other seeds and settings. OUTPUT/runs.json has a line for each run and is written after every run, so that what was stopped goes
on where it was; `--part report` draws and counts, and `--part classes` writes the classifiers' shards alone. About a quarter of a
minute of one core for a run.

Every run is marked as a simulation: sigma is chosen for the ratio, whatever its epsilon, so nothing is claimed and no time goes
into accounting. Sampling, clipping, noise and optimizer are those of a private run.
"""

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CLASSES = Path("runs/fashion-classes")


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        accumulated: sigma sqrt(P) / (B sqrt(T)); sigma follows from it.
        width, depth, patch: of the encoder; a captioner's decoder is as wide and has one block.
        num_shards: of the five training shards of 2,000 examples each.
    """

    kind: str
    accumulated: float
    batch: int
    steps: int
    width: int = 64
    depth: int = 2
    patch: int = 14
    num_shards: int = 5
    rate: float = 8e-3
    bound: float = 1.0
    clipping: str = "flat"
    seed: int = 0

    @property
    def name(self) -> str:
        """A folder's name that tells all."""
        return "_".join(str(value).replace(".", "p") for value in asdict(self).values())

    @property
    def overrides(self) -> list[str]:
        """Changes of benchmarks/noise_to_signal.toml, all but sigma."""
        model: dict[str, float] = {"patch_size": self.patch, "encoder_width": self.width, "encoder_depth": self.depth}
        shards = "runs/fashion"
        match self.kind:
            case "captioner":
                model |= {
                    "encoder_mlp_ratio": 2.0,
                    "decoder_width": self.width,
                    "decoder_depth": 1,
                    "decoder_mlp_ratio": 2.0,
                }
            case "masked_autoencoder":
                model |= {"decoder_width": self.width, "decoder_depth": 1}
            case "classifier":
                model, shards = {**model, "num_classes": 20}, str(CLASSES)
        last = f"train-{{00000..{self.num_shards - 1:05d}}}.tar"
        rows = math.ceil(self.batch + 8 * math.sqrt(self.batch))
        written = ", ".join(f"{key} = {value}" for key, value in model.items())
        return [
            f"model.kind={self.kind}",
            f"model.overrides={{ {written} }}",
            f"data.shards={shards}/{last}",
            "data.provenance=public",
            f"heldout.shards={shards}/test-*.tar",
            "heldout.is_public=true",
            f"privacy.expected_batch_size={self.batch}",
            f"privacy.max_grad_norm={self.bound}",
            f"privacy.clipping_function={self.clipping}",
            f"optimizer.peak_lr={self.rate}",
            f"train.num_steps={self.steps}",
            f"train.seed={self.seed}",
            f"train.micro_batch_size={math.ceil(rows / math.ceil(rows / 256))}",
            f"train.checkpoint_every={self.steps}",
        ]


def grid() -> Iterator[Case]:
    """Four noise levels of shapes that differ in parameters, batch, steps and examples; near the border also in rate and task."""
    shapes: list[dict[str, Any]] = [
        {"batch": 400, "steps": 60},
        {"batch": 125, "steps": 120},
        {"batch": 62, "steps": 300},
        {"batch": 400, "steps": 60, "width": 32, "depth": 1},
        {"batch": 125, "steps": 120, "width": 32, "depth": 1},
        {"batch": 250, "steps": 60, "patch": 7, "num_shards": 2},
        {"batch": 250, "steps": 60, "width": 128, "depth": 3, "rate": 4e-3},
        {"batch": 125, "steps": 120, "width": 128, "depth": 3, "rate": 4e-3},
        {"batch": 250, "steps": 80, "num_shards": 1},
    ]
    for accumulated in (0.06, 0.2, 0.4, 0.8):
        yield from (Case("captioner", accumulated, **shape) for shape in shapes)
        yield Case("masked_autoencoder", accumulated, batch=250, steps=100, patch=7, rate=4e-3, bound=0.1)
        yield Case("classifier", accumulated, batch=250, steps=80, rate=4e-3)
    yield Case("captioner", 0.12, batch=400, steps=60)
    for accumulated in (0.03, 0.12):
        yield Case("captioner", accumulated, batch=125, steps=120)
    yield Case("captioner", 0.03, batch=500, steps=40)
    for accumulated in (0.2, 0.4):  # other rates of what is near the border: the best rate of a setting counts
        yield Case("captioner", accumulated, batch=125, steps=120, rate=3e-3)
    for accumulated in (0.01, 0.1):
        yield Case("masked_autoencoder", accumulated, batch=125, steps=200, patch=7, rate=4e-3, bound=0.1)
    yield Case("masked_autoencoder", 0.01, batch=250, steps=100, patch=7, rate=4e-3, bound=0.1)


def validation() -> Iterator[Case]:
    """Other seeds, shapes, rates and ways to clip; the first two have equal sigma / B, as in a simulation by TAN."""
    yield Case("captioner", 0.1, batch=48, steps=120, width=48, seed=1)
    yield Case("captioner", 0.1, batch=96, steps=120, width=48, seed=2)
    yield Case("captioner", 1.0, batch=64, steps=100, rate=5e-3, seed=3)
    yield Case("captioner", 0.04, batch=80, steps=100, width=96, num_shards=3, seed=4)
    yield Case("captioner", 2.0, batch=100, steps=80, width=96, depth=1, rate=5e-3, seed=7)
    yield Case("captioner", 0.07, batch=80, steps=120, clipping="automatic", bound=0.1, seed=8)
    yield Case("captioner", 0.9, batch=80, steps=120, clipping="automatic", bound=0.1, seed=9)
    yield Case("captioner", 4.0, batch=64, steps=120, width=48, seed=11)
    yield Case("captioner", 0.02, batch=100, steps=100, width=48, depth=1, rate=1.2e-2, seed=14)
    yield Case("classifier", 0.1, batch=64, steps=120, rate=4e-3, num_shards=2, seed=12)
    yield Case("classifier", 4.0, batch=64, steps=100, width=96, rate=4e-3, seed=13)
    yield Case("captioner", 0.05, batch=100, steps=100, depth=4, clipping="per_layer", seed=10)
    yield Case("captioner", 1.2, batch=64, steps=110, patch=7, num_shards=4, seed=5)
    yield Case("captioner", 0.08, batch=64, steps=110, patch=7, num_shards=4, seed=6)


def write_classes() -> None:
    """The embedded pictures with the number of their caption as a class, in shards like those of `data.embedded`."""
    import io
    import lzma

    import numpy as np
    from PIL import Image

    from data.embedded import FASHION_FILE, NUM_SHADES, PARTS
    from data.index.tar_writer import write_shard

    folder = ROOT / CLASSES
    if folder.is_dir():
        return
    made = folder.with_name(f"{folder.name}-{os.getpid()}")
    made.mkdir(parents=True)
    with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as held:
        shades_NHW, caption_N = held["shades_NHW"], held["caption_N"]

    def members(i: int) -> dict[str, bytes]:
        picture = io.BytesIO()
        grey_HW = np.rint(shades_NHW[i] * (255 / (NUM_SHADES - 1))).astype(np.uint8)
        Image.fromarray(grey_HW).save(picture, "PNG")
        return {"png": picture.getvalue(), "cls": str(caption_N[i]).encode()}

    first = 0
    for part, size in PARTS.items():
        for number, start in enumerate(range(first, first + size, 2000)):
            ids = range(start, min(start + 2000, first + size))
            write_shard(made / f"{part}-{number:05d}.tar", ((f"{i:05d}", members(i)) for i in ids))
        first += size
    made.rename(folder)


def run(case: Case, device: Any) -> dict[str, Any]:
    """Trains it and returns its settings and held-out losses."""
    from trainer.config.machine import load_machine_settings
    from trainer.config.recipe import load_config
    from trainer.planner.memory import Trainable
    from trainer.ranks.discovery import Ranks
    from trainer.run.start import train
    from trainer.tasks import make_task

    recipe = ROOT / "benchmarks" / "noise_to_signal.toml"
    shapes = load_config(recipe, case.overrides)
    parameters = Trainable.of(make_task(shapes, ROOT).skeleton()).count
    sigma = case.accumulated * math.sqrt(case.steps) * case.batch / math.sqrt(parameters)
    config = load_config(recipe, [*case.overrides, f"privacy.noise_multiplier={sigma:.6g}"])
    run_dir = ROOT / "runs" / "noise-to-signal" / case.name
    shutil.rmtree(run_dir, ignore_errors=True)
    started = time.process_time()
    code = train(
        config, load_machine_settings(ROOT / "ds_configs" / "zero1.json"), "local", run_dir, ROOT, Ranks(), device
    )
    assert code == 0, code
    last = json.loads((run_dir / "evaluation" / "heldout.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(run_dir)
    losses = {name: last.get(name) for name in ("loss", "blind_loss", "shuffled_loss", "accuracy", "blind_accuracy")}
    facts = {
        "parameters": parameters,
        "noise_multiplier": sigma,
        "per_step": sigma * math.sqrt(parameters) / case.batch,
    }
    return {**asdict(case), **facts, **losses, "processor_seconds": round(time.process_time() - started, 1)}


def learned(line: Mapping[str, Any]) -> bool:
    """Held-out loss at least a tenth below what one gets without looking; and a captioner loses a twentieth by other pictures."""
    looks = line["shuffled_loss"] is None or line["shuffled_loss"] >= 1.05 * line["loss"]
    return bool(line["loss"] <= 0.9 * line["blind_loss"] and looks)


PREDICTORS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "accumulated, sigma sqrt(P) / (B sqrt(T))": lambda line: line["accumulated"],
    "per step, sigma sqrt(P) / B": lambda line: line["per_step"],
    "sigma sqrt(P) / (B T)": lambda line: line["per_step"] / line["steps"],
    "without parameters, sigma / (B sqrt(T))": lambda line: line["accumulated"] / math.sqrt(line["parameters"]),
}


def fewest_wrong(
    lines: Sequence[Mapping[str, Any]], score: Callable[[Mapping[str, Any]], float]
) -> tuple[int, float, float]:
    """How many lines the best threshold on a score gets wrong, and the two neighbouring scores between which it lies."""
    scores = sorted({score(line) for line in lines})
    edges = [0.0, *scores, math.inf]
    wrong = {
        i: sum((score(line) <= low) != learned(line) for line in lines) for i, low in enumerate(edges[:-1])
    }  # fmt: skip
    best = min(wrong, key=wrong.__getitem__)
    return wrong[best], edges[best], edges[best + 1]


def best_rates(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each setting, that of the rate with the lowest loss."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        setting = tuple(line[key] for key in Case.__dataclass_fields__ if key != "rate")
        if setting not in found or line["loss"] < found[setting]["loss"]:
            found[setting] = line
    return list(found.values())


def report(folder: Path) -> None:
    """Writes README.md and noise_to_signal.png from runs.json."""
    from trainer.planner.signal import LARGEST_THAT_LEARNS

    held: dict[str, list[dict[str, Any]]] = json.loads((folder / "runs.json").read_text())
    settings = {part: best_rates(lines) for part, lines in held.items()}
    scores = ["| score | captioners of the grid it gets wrong | best threshold between |", "|---|---|---|"]
    captioners = [line for line in settings["grid"] if line["kind"] == "captioner"]
    for name, score in PREDICTORS.items():
        wrong, low, high = fewest_wrong(captioners, score)
        scores.append(f"| {name} | {wrong} of {len(captioners)} | {low:.3g} and {high:.3g} |")
    confusion = [
        "| | threshold | to learn: right | to learn: wrong | nothing: right | nothing: wrong |",
        "|---|---|---|---|---|---|",
    ]
    for part, lines in settings.items():
        for kind, threshold in LARGEST_THAT_LEARNS.items():
            pairs = [(x["accumulated"] <= threshold, learned(x)) for x in lines if x["kind"] == kind]
            if not pairs:
                continue
            counts = [pairs.count(pair) for pair in ((True, True), (True, False), (False, False), (False, True))]
            confusion.append(
                f"| {part}, {kind.replace('_', ' ')} | {threshold:g} | " + " | ".join(map(str, counts)) + " |"
            )
    rows = [
        "| part | kind | P | B | T | sigma | rate | per step | accumulated | loss | blind | shuffled | learned |",
        "|---" * 13 + "|",
    ]
    for part, lines in held.items():
        for line in sorted(lines, key=lambda line: (line["kind"], line["accumulated"])):
            shuffled = "" if line["shuffled_loss"] is None else f"{line['shuffled_loss']:.3f}"
            rows.append(
                f"| {part} | {line['kind'].replace('_', ' ')} | {line['parameters']:,} | {line['batch']} | {line['steps']} | "
                f"{line['noise_multiplier']:.3g} | {line['rate']:g} | {line['per_step']:.3g} | {line['accumulated']:.3g} | "
                f"{line['loss']:.3f} | {line['blind_loss']:.3f} | {shuffled} | {'yes' if learned(line) else 'no'} |"
            )
    seconds = sum(line["processor_seconds"] for lines in held.values() for line in lines)
    tables = {name: "\n".join(table) for name, table in (("scores", scores), ("confusion", confusion), ("rows", rows))}
    text = TEXT.format(minutes=seconds / 60, runs=sum(map(len, held.values())), **tables)
    (folder / "README.md").write_text(text)
    draw(settings, LARGEST_THAT_LEARNS, folder / "noise_to_signal.png")


TEXT = """# Below which noise-to-signal do runs learn?

    python benchmarks/noise_to_signal.py --part grid --output benchmarks/results/2026-11-22-noise-to-signal
    python benchmarks/noise_to_signal.py --part validation --output benchmarks/results/2026-11-22-noise-to-signal
    python benchmarks/noise_to_signal.py --part report --output benchmarks/results/2026-11-22-noise-to-signal

{runs} runs, {minutes:.0f} processor minutes. Small models of the embedded pictures of clothes at 28 pixels, from random weights;
sigma follows from the ratio, so these are simulations without a guarantee. A run has learned where its loss on 500 held-out
examples is at least 10 % below what one gets without looking, and, for captions, at least 5 % higher with other pictures.

![Loss over what one gets without looking, by noise-to-signal](noise_to_signal.png)

How well a score separates the captioners that learned, each with its own best threshold, the best rate of each setting:

{scores}

What the sentence of `plan.py` and of the start says, by its thresholds on the accumulated ratio:

{confusion}

All runs:

{rows}
"""


def draw(held: Mapping[str, Sequence[Mapping[str, Any]]], thresholds: Mapping[str, float], path: Path) -> None:
    """Loss over blind loss by the accumulated ratio, a panel for each kind; runs outside the grid are hollow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.0), layout="constrained")
    panels = figure.subplots(1, len(thresholds), sharey=True)
    bands = (
        ("T below 100", 0, 100, "#0072B2"),
        ("T 100 to 199", 100, 200, "#D55E00"),
        ("T from 200", 200, 10**9, "#009E73"),
    )
    for axis, (kind, threshold) in zip(panels, thresholds.items(), strict=True):
        for part, lines in held.items():
            for _, low, high, color in bands:
                chosen = [line for line in lines if line["kind"] == kind and low <= line["steps"] < high]
                axis.scatter(
                    [line["accumulated"] for line in chosen], [line["loss"] / line["blind_loss"] for line in chosen],
                    s=34, edgecolors=color, facecolors=color if part == "grid" else "none", linewidths=1.3,
                )  # fmt: skip
        axis.axhline(0.9, color="#888888", linewidth=1, linestyle=":")
        axis.axvline(threshold, color="black", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="sigma sqrt(P) / (B sqrt(T))", xlim=(5e-3, 8))
        axis.set_title(f"{kind.replace('_', ' ')}, threshold {threshold:g}", fontsize=10)
        axis.grid(color="#dddddd", which="major")
        axis.set_axisbelow(True)
        axis.minorticks_off()
    panels[0].set_ylabel("held-out loss / loss without looking")
    panels[0].set_yticks([0.4, 0.6, 0.9, 1.5, 2.5], ["0.4", "0.6", "0.9", "1.5", "2.5"])
    for name, _, _, color in bands:
        panels[-1].scatter([], [], color=color, label=name)
    panels[-1].scatter([], [], edgecolors="#666666", facecolors="none", label="outside the grid")
    panels[-1].legend(frameon=False, fontsize=9, loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("grid", "validation", "report", "classes"), required=True)
    parser.add_argument("--output", type=Path, help="the record's folder")
    options = parser.parse_args()
    if options.part == "classes":
        write_classes()
        return
    if options.output is None:
        parser.error("--output is the record's folder")
    if options.part == "report":
        report(options.output)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    record = options.output / "runs.json"
    held: dict[str, list[dict[str, Any]]] = json.loads(record.read_text()) if record.exists() else {}
    done = {tuple(line[key] for key in Case.__dataclass_fields__) for line in held.get(options.part, [])}
    write_classes()
    from trainer.ranks import distributed
    from trainer.ranks.discovery import Ranks

    device = distributed.start(Ranks())
    for case in grid() if options.part == "grid" else validation():
        if tuple(asdict(case).values()) in done:
            continue
        held.setdefault(options.part, []).append(run(case, device))
        print(json.dumps(held[options.part][-1]), flush=True)
        lines = {part: ",\n".join(json.dumps(line) for line in runs) for part, runs in held.items()}
        record.write_text("{\n" + ",\n".join(f'"{part}": [\n{text}\n]' for part, text in lines.items()) + "\n}\n")
    distributed.finish(0)


if __name__ == "__main__":
    main()
