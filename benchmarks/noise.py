"""Samples per second of every noise source on every device, and of rounded normals: one JSON object on stdout.

python benchmarks/noise.py [--count 16777216] [--repeats 3]
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from privacy.accounting.noise_tail import NOISE_SOURCES
from privacy.noise import noise_source

DEVIATION = 2.0**30
"""Lattice units of the rounded normals; their speed hardly depends on it."""


def samples_per_second(name: str, device: torch.device, count: int, repeats: int) -> float:
    """The best of `repeats` draws, after one that warms up."""
    source, best = noise_source(name), float("inf")
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        source.standard_normal(count, device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat:
            best = min(best, time.perf_counter() - started)
    return count / best


def rounded_normals_per_second(name: str, count: int, repeats: int) -> float:
    """The best of `repeats` draws on one core, by its processor time, after one that warms up."""
    source, best = noise_source(name), float("inf")
    for repeat in range(repeats + 1):
        started = time.process_time()
        source.rounded_normal(DEVIATION, count, torch.device("cpu"))
        if repeat:
            best = min(best, time.process_time() - started)
    return count / best


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Samples per second of every noise source on every device.")
    parser.add_argument("--count", type=int, default=1 << 24, help="samples in one draw")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rates = {
        device: {
            name: samples_per_second(name, torch.device(device), args.count, args.repeats) for name in NOISE_SOURCES
        }
        for device in devices
    }
    print(
        json.dumps(
            {
                "benchmark": "noise",
                "samples_per_second": rates,
                "rounded_normals_per_second_and_core": {
                    name: rounded_normals_per_second(name, args.count, args.repeats) for name in NOISE_SOURCES
                },
                "count": args.count,
                "dtype": "float64",
                "threads": torch.get_num_threads(),
                "machine": platform.machine(),
                "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
