"""What torch.compile of the blocks gains, with clipping and without.

    python benchmarks/results/cuda/compile.py [--size dpcap_base] [--micro_batch_size 8] [--rounds 3]

One captioner per case in one process, interleaved rounds, medians. Prints one JSON object: milliseconds of a micro-batch for
non-private training and for book-keeping clipping, each with and without compiled blocks; the ratios compiled / plain and
clipped / non-private; graphs and graph breaks of the clipped model (0 breaks: tests/privacy/clipping/test_compile.py); seconds
of the first, compiling, step. The time ratio is what design asks about: fusing helps both sides of it.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from models.captioner import build_captioner  # noqa: E402
from models.config import captioner_config  # noqa: E402
from privacy.clipping import ClippedSum  # noqa: E402
from trainer.engines.compilation import BACKEND, CompileCounts, compile_counts, require_compiler  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402

Step = Callable[[], None]


def non_private(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs).sum().backward()

    return step


def bookkeeping(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    clipped = ClippedSum(model, 1.0, self_check=False)
    is_padding_B = torch.zeros(len(inputs["tokens_BL"]), dtype=torch.bool, device=inputs["tokens_BL"].device)

    def step() -> None:
        clipped.add_micro_batch(model, inputs, is_padding_B)

    return step


MODES = {"non_private": non_private, "bookkeeping": bookkeeping}


def seconds_of(step: Step, device: torch.device) -> float:
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="dpcap_base")
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        require_compiler(device)
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    config = captioner_config(options.size)
    generator = torch.Generator().manual_seed(0)
    side, rows = config.encoder.image_size, options.micro_batch_size
    tokens_BL = torch.randint(0, config.vocab_size, (rows, config.num_tokens), generator=generator).to(device)
    inputs = {
        "images_BCHW": torch.randn(rows, 3, side, side, generator=generator).to(device, dtype),
        "tokens_BL": tokens_BL,
        "token_mask_BL": torch.ones_like(tokens_BL, dtype=torch.bool),
    }
    steps: dict[tuple[str, str], Step] = {}
    first: dict[str, float] = {}
    counts = CompileCounts(0, 0)
    for mode, how in itertools.product(MODES, ("plain", "compiled")):
        model = build_captioner(config, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        if how == "compiled":
            for block in model.blocks():
                block.compile(backend=BACKEND)
        before = compile_counts()
        steps[mode, how] = MODES[mode](model, inputs)
        first[f"{mode} {how}"] = seconds_of(steps[mode, how], device)
        after = compile_counts()
        counts = CompileCounts(*(b - a for a, b in zip(before, after, strict=True)))  # of the last case in the end
        print(f"{mode} {how}: first step {first[f'{mode} {how}']:.1f} s", file=sys.stderr, flush=True)
    times: dict[tuple[str, str], list[float]] = {case: [] for case in steps}
    for _ in range(options.rounds):
        for case, step in steps.items():
            times[case].append(seconds_of(step, device))
    medians = {case: statistics.median(values) for case, values in times.items()}
    report = {
        "hardware": torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "size": options.size,
        "micro_batch_size": rows,
        "milliseconds": {f"{mode} {how}": 1e3 * value for (mode, how), value in medians.items()},
        "first_step_seconds": first,
        "compiled_over_plain": {mode: medians[mode, "compiled"] / medians[mode, "plain"] for mode in MODES},
        "clipped_over_non_private": {
            how: medians["bookkeeping", how] / medians["non_private", how] for how in ("plain", "compiled")
        },
        "graphs_with_clipping": counts.graphs,
        "graph_breaks_with_clipping": counts.graph_breaks,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
