"""The Poisson loader against webdataset's sequential pipeline, and what decoding takes.

python benchmarks/loader.py [--json] [--rounds 5] [--images 1500]

Both pipelines read the same shards, decode by the same code and stack the same micro-batches, each in a process of its
own, in turns; the first pass of each fills the page cache and is not counted. Rates are given by the clock and by CPU
time, which a busy machine does not change.
"""

import argparse
import io
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from data.examples.examples import CaptionExample  # noqa: E402
from data.examples.tokenizer import EMBEDDED_TOKENIZER  # noqa: E402
from data.index.build import build_index  # noqa: E402
from data.index.shards import find_shards  # noqa: E402
from data.index.tar_format import is_image  # noqa: E402
from data.index.tar_index import ExampleTable  # noqa: E402
from data.reading.loader import Loader, StepPlan  # noqa: E402
from data.reading.reader import RawExample  # noqa: E402
from privacy.sampling.poisson import PoissonSampler, example_keys  # noqa: E402

MAKE = CaptionExample(image_size=224, num_tokens=40, tokenizer_path=EMBEDDED_TOKENIZER)
MICRO_BATCH = 32
SAMPLE_RATE = 0.1
COIN_KEY = bytes(range(32))  # of made-up batches of the public demo


def poisson_batches(index: Path, root: Path) -> Iterator[int]:
    """Images in each micro-batch of Poisson samples, step after step."""
    table = ExampleTable.open(index, root)
    sampler = PoissonSampler.with_expected_batch(len(table), int(SAMPLE_RATE * len(table)), None)

    def plans() -> Iterator[StepPlan]:
        for step in range(10**9):
            ids = sampler.members(COIN_KEY, step)
            yield StepPlan(step, ids, example_keys(COIN_KEY, step, ids), -(-len(ids) // MICRO_BATCH))

    loader = Loader(table, MAKE, micro_batch_size=MICRO_BATCH, num_workers=0)
    for _, batches in loader.steps(plans()):
        for batch in batches:
            yield MICRO_BATCH - int(batch.is_padding_B.sum())


def sequential_batches(root: Path) -> Iterator[int]:
    """The same from webdataset: shards from their start to their end, again and again."""
    import webdataset

    def make(sample: dict[str, Any]) -> dict[str, np.ndarray]:
        fields = {name: value for name, value in sample.items() if not name.startswith("__")}
        image = next(fields[name] for name in fields if is_image(name))
        return MAKE(RawExample(image, fields), int.from_bytes(sample["__key__"].encode()[-8:], "little"))

    def stack(rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in MAKE.padding()}

    urls = find_shards("train-*.tar", root).locations()
    pipeline = webdataset.WebDataset(urls, shardshuffle=False).repeat().map(make)
    for batch in pipeline.batched(MICRO_BATCH, collation_fn=stack):
        yield len(batch["images_CHW"])


def measure_pipeline(kind: str, index: Path, root: Path, images: int) -> dict[str, float]:
    """One pass that warms up and one that counts."""
    torch.set_num_threads(1)
    batches = poisson_batches(index, root) if kind == "poisson" else sequential_batches(root)
    for _ in range(2):
        count, wall, cpu = 0, time.perf_counter(), time.process_time()
        while count < images:
            count += next(batches)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"images_per_second": count / wall, "cpu_ms_per_image": 1e3 * cpu / count, "peak_mib": peak}


def throughput(rounds: int, images: int) -> dict[str, Any]:
    """Medians over rounds of both pipelines in turns, and of the ratios of each round."""
    root = ROOT / "data" / "demo"
    runs_of: dict[str, list[dict[str, float]]] = {"poisson": [], "sequential": []}
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        build_index(find_shards("train-*.tar", root), Path(folder))
        with ProcessPoolExecutor(1, mp_context=spawned, max_tasks_per_child=1) as alone:
            for number in range(rounds):
                for kind in sorted(runs_of, reverse=bool(number % 2)):
                    runs_of[kind].append(alone.submit(measure_pipeline, kind, Path(folder), root, images).result())
    result: dict[str, Any] = {
        kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for kind, runs in runs_of.items()
    }
    pairs = list(zip(runs_of["poisson"], runs_of["sequential"], strict=True))
    for ratio, name, power in (("", "images_per_second", 1), ("_by_cpu_time", "cpu_ms_per_image", -1)):
        ratios = [(one[name] / two[name]) ** power for one, two in pairs]
        result[f"poisson_over_sequential{ratio}"] = statistics.median(ratios)
    return result


def decoding() -> dict[str, float]:
    """CPU time of one photograph-like JPEG of 640 x 480, about the size of those of the large run."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)).resize(
        (640, 480), Image.Resampling.BICUBIC
    )
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    raw = RawExample(buffer.getvalue(), {"txt": b"a photograph of something"})
    MAKE(raw, 0)
    started = time.process_time()
    for key in range(200):
        MAKE(raw, key)
    return {"jpeg_bytes": len(buffer.getvalue()), "cpu_ms_per_image": 1e3 * (time.process_time() - started) / 200}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=5, help="of each pipeline, in turns")
    parser.add_argument("--images", type=int, default=1500, help="in a round")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = {
        "benchmark": "loader",
        "one_process": throughput(options.rounds, options.images),
        "decoding": decoding(),
        **{"machine": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg()},
    }
    print(json.dumps(report, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
