"""What correlated noise adds: the noise of one shard with 1, 16 and 128 bands, and whole steps with 1 and 16, in turns.

python benchmarks/correlated_noise.py [--coordinates N] [--rounds R] [--output FILE]

One process and one thread, as one rank has them. The rounds are interleaved, so that whatever else the machine does meets all
numbers of bands alike. Every row multiplies b - 1 past rows, as zeros before the segment began, so all rows cost the same.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.scaling_rank import build
from privacy.correlated.segment import Segment
from privacy.correlated.strategy import Strategy
from privacy.noise import SystemNoise
from privacy.step.step import train_step
from trainer.ranks import distributed
from trainer.ranks.discovery import discover_ranks

BANDS, BANDS_OF_STEPS = (1, 16, 128), (1, 16)
CASE = {
    "ds_config": {"zero_optimization": {"stage": 1}}, "engine": "local", "accumulation": "local", "mode": "bookkeeping",
    "micro_batches": 2,
}  # fmt: skip


def interleaved(run: Callable[[int], object], rounds: int, all_bands: Sequence[int]) -> dict[str, Any]:
    """Median seconds of `run(bands)` over rounds in which all numbers of bands take turns; the first round warms up."""
    seconds: dict[int, list[float]] = {bands: [] for bands in all_bands}
    for number in range(1 + rounds):
        for bands in all_bands:
            started = time.perf_counter()
            run(bands)
            if number > 0:
                seconds[bands].append(time.perf_counter() - started)
    median = {bands: statistics.median(taken) for bands, taken in seconds.items()}
    return {
        "seconds": {str(bands): taken for bands, taken in seconds.items()},
        "median": {str(bands): value for bands, value in median.items()},
        "times_independent_noise": {str(bands): value / median[1] for bands, value in median.items()},
    }


def shard_noise(coordinates: int, rounds: int) -> dict[str, Any]:
    """A row of noise on a shard of this size."""
    source, shard = SystemNoise(), torch.zeros(coordinates, dtype=torch.float64)
    segments = {bands: Segment(Strategy.square_root(bands)) for bands in BANDS}
    found = interleaved(lambda bands: segments[bands].add_row([shard], 1.0, source), rounds, BANDS)
    per_coordinate = {bands: 1e9 * value / coordinates for bands, value in found["median"].items()}
    return {"coordinates": coordinates, "nanoseconds_per_coordinate": per_coordinate, **found}


def whole_step(rounds: int) -> dict[str, Any]:
    """A step of a small captioner on one rank, which owns all coordinates: the share of noise is as large as it gets."""
    mechanism, batches = build(distributed.start(discover_ranks(os.environ)), CASE)
    segments = {bands: Segment(Strategy.square_root(bands)) for bands in BANDS_OF_STEPS}
    steps = iter(range(1, 10**9))

    def step(bands: int) -> None:
        mechanism.segment = segments[bands]
        train_step(mechanism, next(steps), iter(batches))

    parameters = sum(shape.numel() for shape in mechanism.engine.shapes.values())
    examples = sum(len(batch.is_padding_B) for batch in batches)
    return {"parameters": parameters, "examples": examples, **interleaved(step, rounds, BANDS_OF_STEPS)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints or writes one JSON object."""
    parser = argparse.ArgumentParser(description="What correlated noise adds to a step.")
    parser.add_argument("--coordinates", type=int, default=1 << 20, help="of the shard that one rank owns")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="where the JSON goes; standard output by default")
    options = parser.parse_args(arguments)
    if options.coordinates < 1 or options.rounds < 1:
        parser.error("--coordinates and --rounds must be positive")
    torch.set_num_threads(1)
    result = {
        "rounds": options.rounds,
        "noise_of_a_shard": shard_noise(options.coordinates, options.rounds),
        "step": whole_step(options.rounds),
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
    }
    text = json.dumps(result, indent=1)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n")
    distributed.finish(0)


if __name__ == "__main__":
    main()
