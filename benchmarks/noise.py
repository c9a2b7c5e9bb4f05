"""Noise of a step: nanoseconds a coordinate on one thread, and its share of a recipe's step.

    python benchmarks/noise.py [RECIPE.toml ...] --output results.json

Prints JSON.

A step's seconds are on paper: floating-point operations of a forward and a backward of the expected
batch, at a share of a peak, as launch_scripts/plan.py counts them. Ranks divide batch and noise
alike, so their number does not matter. On an accelerator MOST_THREADS threads of the CPU draw,
taken to be as fast together as they are one by one.
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

NUM_DRAWN = 1 << 19
ROUNDS = 5
DEVIATIONS = (2.0**12, 0.7 * 2.0**34, 2.0**50)


def nanoseconds() -> dict[str, dict[str, float]]:
    """Returns the nanoseconds of a coordinate by deviation: of the processor, and on the wall.

    Processor time is that of the thread that draws. Both are medians over rounds.
    """
    times = {}
    for deviation in DEVIATIONS:
        processor_seconds = []
        wall_seconds = []
        for _ in range(ROUNDS):
            wall_start = time.perf_counter()
            processor_start = time.thread_time()
            draw_rounded_normal(deviation, NUM_DRAWN, SystemNoise())
            processor_seconds.append(time.thread_time() - processor_start)
            wall_seconds.append(time.perf_counter() - wall_start)
        times[f"2^{math.log2(deviation):.1f}"] = {
            "processor": 1e9 * statistics.median(processor_seconds) / NUM_DRAWN,
            "wall": 1e9 * statistics.median(wall_seconds) / NUM_DRAWN,
        }
    return times


def noise_of_recipe(path: Path, nanoseconds_a_coordinate: float) -> dict[str, Any]:
    """Returns coordinates and operations of a step, and the share of its noise on some hardware."""
    config = load_config(path)
    task, _ = planning_task(config, ROOT)
    coordinates = trained_count(task.skeleton())
    batch = config.privacy.expected_batch_size
    flops = task.flops_of_an_example() * batch
    noise_seconds = coordinates * nanoseconds_a_coordinate * 1e-9
    shares = {}
    for name, threads in (("cpu", 1), ("a100-80gb", MOST_THREADS), ("h100-80gb", MOST_THREADS)):
        gpu = GPUS[name]
        peak = gpu.fp32_peak if name == "cpu" else gpu.bf16_peak
        shares[name] = noise_seconds / threads / (flops / (peak * EFFICIENCY))
    return {
        "recipe": path.stem,
        "coordinates": coordinates,
        "batch": batch,
        "flop_per_step": flops,
        "share": shares,
    }


def main() -> None:
    """Prints the noise of the recipes as JSON, and writes it if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipes", nargs="*", type=Path, default=sorted((ROOT / "recipes").glob("*.toml"))
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    times = nanoseconds()
    # The deviation in the middle is a usual one.
    usual = list(times.values())[1]["processor"]
    recipes = [path for path in options.recipes if load_config(path).privacy.enabled]
    record = {
        "nanoseconds_a_coordinate": times,
        "draws_per_second_and_thread": 1e9 / usual,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "recipes": [noise_of_recipe(path, usual) for path in recipes],
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
