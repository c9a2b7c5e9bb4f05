"""Samples per second of every noise source on every device: one JSON object on stdout.

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
