"""Noise of one step: nanoseconds a coordinate on one thread, and its share of a step of each private recipe; prints JSON.

    python benchmarks/noise.py [RECIPE.toml ...] --output results.json

A step's seconds are on paper: floating-point operations of a forward and a backward of the expected batch, at a share of a
peak, as launch_scripts/plan.py counts them. Ranks divide batch and noise alike, so their number does not matter. On an
accelerator MOST_THREADS threads of the CPU draw, taken to be as fast together as they are one by one.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from privacy.noise.rounded_normal import draw_rounded_normal  # noqa: E402
from privacy.noise.source import MOST_THREADS, SystemNoise  # noqa: E402
from trainer.config.recipe import load_config  # noqa: E402
from trainer.hardware import GPUS  # noqa: E402
from trainer.planner.memory import trained_count  # noqa: E402
from trainer.planner.resources import EFFICIENCY, planning_task  # noqa: E402

DRAWN, ROUNDS = 1 << 19, 5
DEVIATIONS = (2.0**12, 0.7 * 2.0**34, 2.0**50)


def nanoseconds() -> dict[str, dict[str, float]]:
    """Returns what a coordinate takes, by deviation: processor time of the thread that draws, and time on the wall; medians."""
    found = {}
    for deviation in DEVIATIONS:
        rounds = []
        for _ in range(ROUNDS):
            wall, processor = time.perf_counter(), time.thread_time()
            draw_rounded_normal(deviation, DRAWN, SystemNoise())
            rounds.append((time.thread_time() - processor, time.perf_counter() - wall))
        processor, wall = (
            1e9 * statistics.median(column) / DRAWN for column in zip(*rounds, strict=True)
        )
        found[f"2^{math.log2(deviation):.1f}"] = {"processor": processor, "wall": wall}
    return found


def of_recipe(path: Path, drawn_ns: float) -> dict[str, Any]:
    """Coordinates and operations of a step, and the share of its noise on some hardware."""
    config = load_config(path)
    task = planning_task(config, ROOT)[0]
    coordinates, batch = trained_count(task.skeleton()), config.privacy.expected_batch_size
    flops = task.flops_of_an_example() * batch
    noise, shares = coordinates * drawn_ns * 1e-9, {}
    for name, threads in (("cpu", 1), ("a100-80gb", MOST_THREADS), ("h100-80gb", MOST_THREADS)):
        gpu = GPUS[name]
        peak = gpu.fp32_peak if name == "cpu" else gpu.bf16_peak
        shares[name] = noise / threads / (flops / (peak * EFFICIENCY))
    return {
        "recipe": path.stem,
        "coordinates": coordinates,
        "batch": batch,
        "flop_per_step": flops,
        "share": shares,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipes", nargs="*", type=Path, default=sorted((ROOT / "recipes").glob("*.toml"))
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    drawn = nanoseconds()
    usual = list(drawn.values())[1]["processor"]
    found = {
        "nanoseconds_a_coordinate": drawn,
        "draws_per_second_and_thread": 1e9 / usual,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "recipes": [
            of_recipe(path, usual) for path in options.recipes if load_config(path).privacy.enabled
        ],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
