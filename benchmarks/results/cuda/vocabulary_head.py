"""The vocabulary head in one piece and by chunks: time, memory and matrix products of one micro-batch.

    python benchmarks/results/cuda/vocabulary_head.py [--micro_batch_size 64] [--width 768]

The head alone, 39 tokens and 30,522 words, with gradients of the hidden states and the weights (non_private) or with clipping
(bookkeeping), each in a process of its own. Prints one JSON object: seconds, peak memory over what the process held before
the step, and FLOPs in units of one product of all hidden states with the weights.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula  # noqa: E402

from models.vocabulary_head import VocabularyHead  # noqa: E402
from privacy.clipping import ClippedSum  # noqa: E402

TOKENS, WORDS = 39, 30522
MAX_LOGITS = {"one piece": 2**40, "chunks": 2**24}


class HeadLoss(nn.Module):
    """A layer before the head, so that the gradient of the hidden states is wanted."""

    def __init__(self, width: int, max_logits: int) -> None:
        super().__init__()
        self.entrance = nn.Linear(width, width)
        self.head = VocabularyHead(width, WORDS, max_logits=max_logits)

    def forward(self, hidden_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        return self.head.token_losses(self.entrance(hidden_BLD), targets_BL).mean(1)


@register_flop_formula(torch.ops.aten.addmm_)
def _addmm_flops(total_shape: Any, a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    """torch counts `addmm`, but not the in-place form that the weighted sum uses."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


def measure(mode: str, how: str, rows: int, width: int) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = HeadLoss(width, MAX_LOGITS[how]).to(device, dtype)
    inputs = {
        "hidden_BLD": torch.randn(rows, TOKENS, width).to(device, dtype),
        "targets_BL": torch.randint(0, WORDS, (rows, TOKENS)).to(device),
    }
    clipped = ClippedSum(model, 1.0, self_check=False)
    is_padding_B = torch.zeros(rows, dtype=torch.bool, device=device)

    def step(inputs: dict[str, Tensor], is_padding_B: Tensor) -> None:
        if mode == "bookkeeping":
            clipped.add_micro_batch(model, inputs, is_padding_B)
        else:
            model.zero_grad(set_to_none=True)
            model(**inputs).sum().backward()

    step({k: v[:1] for k, v in inputs.items()}, is_padding_B[:1])  # buffers that stay: accumulators, gradients
    before = _memory(device)
    started = time.perf_counter()
    step(inputs, is_padding_B)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = _peak(device) - before
    with FlopCounterMode(display=False) as counter:
        step(inputs, is_padding_B)
    unit = 2 * rows * TOKENS * width * WORDS
    return {"seconds": seconds, "peak_mib": peak / 2**20, "products": counter.get_total_flops() / unit}


def _memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro_batch_size", type=int, default=64)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--only", nargs=2, metavar=("MODE", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        mode, how = options.only
        print(json.dumps(measure(mode, how, options.micro_batch_size, options.width)))
        return
    results: dict[str, dict[str, Any]] = {}
    for mode in ("non_private", "bookkeeping"):
        for how in MAX_LOGITS:
            sizes = ["--micro_batch_size", str(options.micro_batch_size), "--width", str(options.width)]
            command = [sys.executable, __file__, *sizes, "--only", mode, how]
            done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
            results.setdefault(mode, {})[how] = json.loads(done.stdout)
            print(f"{mode}, {how}: {done.stdout.strip()}", file=sys.stderr, flush=True)
    logits = options.micro_batch_size * TOKENS * WORDS
    print(
        json.dumps({"logits_mib_in_fp32": logits * 4 / 2**20, "threads": torch.get_num_threads(), **results}, indent=2)
    )


if __name__ == "__main__":
    main()
