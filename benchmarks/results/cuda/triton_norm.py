"""The fused Triton ghost norm against the torch path, on the Linear layers of the captioners: error and speed.

    python benchmarks/results/cuda/triton_norm.py [--batch_size 64]

Prints one JSON object: for each layer and dtype the median milliseconds of both, the share of the symmetric FLOPs per second
(T (T + 1) (d + p) per example), and both errors against float64, in units of the rounding bound of privacy/clipping/norms.py
(1 would touch it). Needs a CUDA device: elsewhere torch does the work, and the kernel's arithmetic is tested in Triton's
interpreter (tests/privacy/clipping/test_triton_norm.py).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from privacy.clipping import contributions, triton_norm  # noqa: E402
from privacy.clipping.norms import rounding  # noqa: E402
from privacy.clipping.precision import Norm  # noqa: E402

LAYERS = {
    "encoder qkv, ViT-S": (197, 384, 1152),
    "encoder mlp, ViT-B": (197, 768, 3072),
    "encoder mlp, ViT-L": (197, 1024, 4096),
    "decoder mlp": (39, 768, 3072),
    "vocabulary head": (39, 768, 30522),
}
"""(T, d, p)."""
ROUNDS = 30

GhostNorm = Callable[[Tensor, Tensor], Norm]


def torch_path(a_BTd: Tensor, g_BTp: Tensor) -> Norm:
    return contributions.ghost_norm(a_BTd.float(), g_BTp.float())


def milliseconds(norms: dict[str, GhostNorm], a: Tensor, g: Tensor) -> dict[str, float]:
    """Medians of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in norms}
    for round_number in range(ROUNDS + 3):
        for name, norm in norms.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            norm(a, g)
            end.record()
            torch.cuda.synchronize()
            if round_number >= 3:  # the first ones compile and warm up
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def errors(norms: dict[str, GhostNorm], a: Tensor, g: Tensor) -> dict[str, float]:
    """Largest error of the squared norm over the examples, in units of its bound."""
    tokens, d, p = a.shape[1], a.shape[2], g.shape[2]
    exact_B = torch.stack([(gb.double().t() @ ab.double()).square().sum() for ab, gb in zip(a, g, strict=True)])
    gross_B = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    bound_B = 2 * rounding(tokens + d + p, torch.float32) * gross_B.square()
    return {name: float(((norm(a, g)[0] - exact_B).abs() / bound_B).max()) for name, norm in norms.items()}


def measure(name: str, batch_size: int, dtype: torch.dtype) -> dict[str, Any]:
    tokens, d, p = LAYERS[name]
    generator = torch.Generator("cuda").manual_seed(0)
    # A common mean and gradients that cancel over the tokens: what fp32 Gram matrices like least.
    a = 1 + torch.randn(batch_size, tokens, d, device="cuda", generator=generator)
    g = torch.randn(batch_size, tokens, p, device="cuda", generator=generator)
    a, g = a.to(dtype), (g - g.mean(1, keepdim=True)).to(dtype)
    norms: dict[str, GhostNorm] = {"triton": triton_norm.ghost_norm, "torch": torch_path}
    times = milliseconds(norms, a, g)
    flops = batch_size * tokens * (tokens + 1) * (d + p)
    return {
        "layer": name,
        "dtype": str(dtype).removeprefix("torch."),
        "shape_BTdp": [batch_size, tokens, d, p],
        "milliseconds": times,
        "teraflops_per_second": {key: flops / value / 1e9 for key, value in times.items()},
        "speedup": times["torch"] / times["triton"],
        "error_of_bound": errors(norms, a, g),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=64, help="examples; default 64")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device: on this machine torch computes the norm", file=sys.stderr)
        raise SystemExit(2)
    probe = torch.zeros(1, 1, 1, device="cuda")
    if not triton_norm.can_run(probe, probe):
        print("triton is not installed: pip install -r requirements-triton.txt", file=sys.stderr)
        raise SystemExit(2)
    results = [measure(name, options.batch_size, t) for name in LAYERS for t in (torch.bfloat16, torch.float32)]
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({"hardware": torch.cuda.get_device_name(), **versions, "layers": results}, indent=2))


if __name__ == "__main__":
    main()
