"""The Poisson loader against webdataset's sequential pipeline, the index, and what decoding takes.

python benchmarks/loader.py [--json] [--rounds 5] [--images 1500] [--num_examples 1000000]

Both pipelines read the same shards, decode by the same code and stack the same micro-batches, each in a process of its
own, in turns; the first pass of each fills the page cache and is not counted. Rates are given by the clock and by CPU
time, which a busy machine does not change. Needs about 2 KiB of disk per example of the synthetic index.
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
from data.index.shards import expand_shards  # noqa: E402
from data.index.tar_format import is_image  # noqa: E402
from data.index.tar_index import ExampleTable  # noqa: E402
from data.index.tar_writer import write_shard  # noqa: E402
from data.reading.loader import Loader, StepPlan  # noqa: E402
from data.reading.pool import worker_pool  # noqa: E402
from data.reading.reader import RawExample, TarReader  # noqa: E402
from privacy.sampling.poisson import PoissonSampler, example_keys  # noqa: E402

MAKE = CaptionExample(image_size=224, num_tokens=40, tokenizer_path=EMBEDDED_TOKENIZER)
MICRO_BATCH = 32
SAMPLE_RATE = 0.1
COIN_KEY = bytes(range(32))  # of made-up batches of the public demo


def poisson_batches(index: Path, root: Path, num_workers: int) -> Iterator[int]:
    """Images in each micro-batch of Poisson samples, step after step."""
    table = ExampleTable.open(index, root)
    sampler = PoissonSampler.with_expected_batch(len(table), int(SAMPLE_RATE * len(table)), None)

    def plans() -> Iterator[StepPlan]:
        for step in range(10**9):
            ids = sampler.members(COIN_KEY, step)
            yield StepPlan(step, ids, example_keys(COIN_KEY, step, ids), -(-len(ids) // MICRO_BATCH))

    loader = Loader(table, MAKE, micro_batch_size=MICRO_BATCH, num_workers=num_workers)
    for _, batches in loader.steps(plans()):
        for batch in batches:
            yield MICRO_BATCH - int(batch.is_padding_B.sum())


def sequential_batches(root: Path, num_workers: int) -> Iterator[int]:
    """The same from webdataset: shards from their start to their end, again and again."""
    import webdataset

    def make(sample: dict[str, Any]) -> dict[str, np.ndarray]:
        fields = {name: value for name, value in sample.items() if not name.startswith("__")}
        image = next(fields[name] for name in fields if is_image(name))
        return MAKE(RawExample(image, fields), int.from_bytes(sample["__key__"].encode()[-8:], "little"))

    def stack(rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in MAKE.padding()}

    urls = [str(path) for path in expand_shards("train-*.tar", root)]
    pipeline = webdataset.WebDataset(urls, shardshuffle=False).repeat().map(make)
    batches = pipeline.batched(MICRO_BATCH, collation_fn=stack)
    fork = (
        "fork" if num_workers else None
    )  # this process was spawned, and would spawn workers that take no local function
    loader = torch.utils.data.DataLoader(
        batches, batch_size=None, num_workers=num_workers, multiprocessing_context=fork
    )
    for batch in loader:
        yield len(batch["images_CHW"])


def measure_pipeline(kind: str, index: Path, root: Path, images: int, num_workers: int) -> dict[str, float]:
    """One pass that warms up and one that counts; CPU time is that of this process, so 0 workers count it all."""
    torch.set_num_threads(1)
    batches = poisson_batches(index, root, num_workers) if kind == "poisson" else sequential_batches(root, num_workers)
    for _ in range(2):
        count, wall, cpu = 0, time.perf_counter(), time.process_time()
        while count < images:
            count += next(batches)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"images_per_second": count / wall, "cpu_ms_per_image": 1e3 * cpu / count, "peak_mib": peak}


def throughput(rounds: int, images: int, num_workers: int) -> dict[str, Any]:
    """Medians over rounds of both pipelines in turns, and of the ratio of each round."""
    root = ROOT / "data" / "demo"
    runs_of: dict[str, list[dict[str, float]]] = {"poisson": [], "sequential": []}
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        build_index(expand_shards("train-*.tar", root), Path(folder))
        with ProcessPoolExecutor(1, mp_context=spawned, max_tasks_per_child=1) as alone:
            for number in range(rounds):
                for kind in sorted(runs_of, reverse=bool(number % 2)):
                    run = alone.submit(measure_pipeline, kind, Path(folder), root, images, num_workers).result()
                    runs_of[kind].append(run)
    result: dict[str, Any] = {"num_workers": num_workers}
    for kind, runs in runs_of.items():
        names = [
            name for name in runs[0] if num_workers == 0 or name != "cpu_ms_per_image"
        ]  # workers' time is not in it
        result[kind] = {name: statistics.median(run[name] for run in runs) for name in names}
    pairs = list(zip(runs_of["poisson"], runs_of["sequential"], strict=True))
    ratio = statistics.median(one["images_per_second"] / two["images_per_second"] for one, two in pairs)
    result["poisson_over_sequential"] = ratio
    if num_workers == 0:
        cpu = statistics.median(two["cpu_ms_per_image"] / one["cpu_ms_per_image"] for one, two in pairs)
        result["poisson_over_sequential_by_cpu_time"] = cpu
    return result


def index_rates(num_examples: int) -> dict[str, Any]:
    """Build rate (one process, then one per core), size and random reads of a synthetic index."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        members = {
            "jpg": bytes(20),
            "txt": b"twenty bytes of text",
        }  # so small that what an index costs per example shows
        starts = range(0, num_examples, 50_000)
        shards = [folder / f"tiny-{start:09d}.tar" for start in starts]
        for start, shard in zip(starts, shards, strict=True):
            write_shard(shard, ((f"{n:09d}", members) for n in range(start, min(start + 50_000, num_examples))))
        started, cpu = time.perf_counter(), time.process_time()
        table = build_index(shards, folder / "index")
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        size = sum(path.stat().st_size for path in (folder / "index").iterdir())
        with worker_pool(os.cpu_count() or 1) as pool:
            started = time.perf_counter()
            build_index(shards, folder / "parallel", executor=pool.executor)
            parallel = time.perf_counter() - started
        # Whole examples in random order, sorted within a batch as in training; the page cache is warm.
        reader, rng, batches, batch = TarReader(table), np.random.default_rng(0), 100, 1024
        started, reading_cpu = time.perf_counter(), time.process_time()
        for _ in range(batches):
            for _raw in reader.read_all(np.sort(rng.integers(0, num_examples, batch))):
                pass
        reading, reading_cpu = time.perf_counter() - started, time.process_time() - reading_cpu
        return {
            "num_examples": num_examples,
            "examples_per_second_per_core": num_examples / cpu,
            "examples_per_second": num_examples / wall,
            "examples_per_second_all_cores": num_examples / parallel,
            "bytes_per_example": size / num_examples,
            "random_reads_per_second": batches * batch / reading,
            "random_reads_per_cpu_second": batches * batch / reading_cpu,
        }


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
    parser.add_argument("--num_examples", type=int, default=1_000_000, help="of the synthetic index")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report: dict[str, Any] = {"benchmark": "loader"}
    parts = {
        "one_process": lambda: throughput(options.rounds, options.images, 0),
        "two_workers": lambda: throughput(options.rounds, options.images, 2),
        "index": lambda: index_rates(options.num_examples),
        "decoding": decoding,
    }
    for name, measure in parts.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        report[name] = measure()
    report |= {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
    }
    print(json.dumps(report, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
