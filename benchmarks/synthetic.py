"""Images per second of the synthetic generator: composing, rendering and encoding, apart.

    python benchmarks/synthetic.py [--json] [--image_size 224] [--num_examples 2048]

Per wall-clock second and per second of processor time of this process (all threads), which a busy machine changes less.
With --json one JSON object on stdout.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.synthetic.generate import SyntheticData
from data.synthetic.render import draw
from data.synthetic.scene import FORMATS
from data.synthetic.write import encode


def rates(work: Callable[[], Any], count: int, repeats: int) -> dict[str, float]:
    """The best of `repeats` runs of `work`, which does `count` examples."""
    best_wall = best_cpu = float("inf")
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        best_wall = min(best_wall, time.perf_counter() - wall)
        best_cpu = min(best_cpu, time.process_time() - cpu)
    return {"per_second": count / best_wall, "per_processor_second": count / best_cpu}


def measure(data: SyntheticData, count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Rates of every stage."""
    scenes = [data.composition(index)[0].scene for index in range(count)]
    examples = [data.example(index) for index in range(min(count, 256))]
    stages = {
        "compose": rates(lambda: [data.composition(index) for index in range(count)], count, repeats),
        "render": rates(lambda: [draw(scene, data.image_size) for scene in scenes], count, repeats),
        "compose_and_render": rates(lambda: [data.example(index) for index in range(count)], count, repeats),
    }
    for image_format in FORMATS:
        stages[f"encode_{image_format}"] = rates(
            lambda chosen=image_format: [encode(example, chosen) for example in examples],  # type: ignore[misc]
            len(examples),
            repeats,
        )
    stages["all_with_jpg"] = rates(
        lambda: [encode(data.example(index), "jpg") for index in range(count)], count, repeats
    )
    return stages


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Images per second of the synthetic generator.")
    parser.add_argument("--num_examples", type=int, default=1024)
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    data = SyntheticData(0, args.image_size)
    stages = measure(data, args.num_examples, args.repeats)
    result = {
        "benchmark": "synthetic",
        "libraries": f"numpy {np.__version__}, Pillow {PIL.__version__}",
        "image_size": args.image_size,
        "num_examples": args.num_examples,
        "stages": stages,
        "processors": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"{result['libraries']}, {args.image_size} pixels, {result['processors']} processors")
    for stage, rate in stages.items():
        print(f"{stage:20} {rate['per_second']:9.0f}/s {rate['per_processor_second']:9.0f}/processor second")


if __name__ == "__main__":
    main()
