"""Runs the kernel in Triton's interpreter, on the CPU, and prints what test_triton_norm.py judges: one JSON object.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from privacy.clipping import contributions, triton_norm
from privacy.clipping.contributions import OuterProducts
from privacy.clipping.norms import rounding
from privacy.clipping.precision import Norm
from tests.privacy.clipping.test_sensitivity import WeightedOutput, cancelling, change

SHAPES = [(1, 1, 1, 1), (2, 5, 3, 70), (2, 63, 65, 64), (1, 64, 128, 33), (3, 65, 40, 90), (1, 197, 100, 130)]
"""(B, T, d, p) around the borders of the tiles."""
DTYPES = (torch.float32, torch.bfloat16)


def random_cases() -> Iterator[tuple[str, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for batch_size, tokens, d, p in SHAPES:
        for a_dtype in DTYPES:
            for g_dtype in DTYPES:
                a = torch.randn(batch_size, d, tokens, generator=generator).to(a_dtype).transpose(1, 2)
                g = torch.randn(batch_size, tokens, 2 * p, generator=generator).to(g_dtype)[:, :, ::2]
                yield f"{batch_size, tokens, d, p} {a_dtype} {g_dtype}", a, g


def adversarial_cases(num_seeds: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Activations with a common mean whose gradients cancel over the tokens, as in test_sensitivity.py."""
    for seed in range(num_seeds):
        for mean in (0.0, 30.0, 1000.0, 1e5):
            for dtype in DTYPES:
                example = cancelling(100, 150, 200, mean, seed)
                yield f"mean {mean}, seed {seed}, {dtype}", example["x"].to(dtype), example["w"].to(dtype)


def errors(name: str, a: Tensor, g: Tensor) -> dict[str, Any]:
    """Error of the squared norm in units of its bound in norms.py; relative error of the gross norm; bits of a second run."""
    squared_B, gross_B, hidden_B = triton_norm.ghost_norm(a, g)
    again_B = triton_norm.ghost_norm(a, g).squared_B
    wide_a, wide_g = a.double(), g.double()
    exact_B = torch.bmm(wide_g.transpose(1, 2), wide_a).square().sum((1, 2))
    exact_gross_B = (wide_a.norm(dim=2) * wide_g.norm(dim=2)).sum(1)
    bound_B = 2 * rounding(a.shape[1] + a.shape[2] + g.shape[2], torch.float32) * exact_gross_B.square()
    reference_B, _, reference_hidden_B = contributions.ghost_norm(a.float(), g.float())
    return {
        "case": name,
        "of_bound": float(((squared_B - exact_B).abs() / bound_B).max()),
        "torch_of_bound": float(((reference_B - exact_B).abs() / bound_B).max()),
        "gross": float((gross_B / exact_gross_B - 1).abs().max()),
        "hidden": float((hidden_B / reference_hidden_B - 1).abs().max()),
        "repeats": torch.equal(squared_B, again_B),
    }


def contract_4(num_seeds: int) -> dict[str, Any]:
    """The largest change of a clipped sum, in units of C, with the kernel inside; and how often it ran."""
    torch.manual_seed(0)
    calls = 0
    kernel = triton_norm.ghost_norm

    def counted(a_BTd: Tensor, g_BTp: Tensor) -> Norm:
        nonlocal calls
        calls += 1
        return kernel(a_BTd, g_BTp)

    triton_norm.ghost_norm = counted
    worst = 0.0
    for dtype in DTYPES:
        model = WeightedOutput(nn.Linear(256, 512)).to(dtype)
        assert not OuterProducts(torch.zeros(1, 64, 256), torch.zeros(1, 64, 512)).prefers_instantiation
        for seed in range(num_seeds):
            for mean in (0.0, 1000.0, 1e5):
                example = {k: v.to(dtype) for k, v in cancelling(64, 256, 512, mean, seed).items()}
                others = {k: v.to(dtype) for k, v in cancelling(64, 256, 512, 0.0, 99).items()}
                worst = max(worst, change(model, others, example))
    # Squares that underflow, and squares that overflow.
    for large, small in ((3e17, 2e-23), (2e-23, 3e17), (1e18, 3e-21), (1e38, 1e-38), (1e-30, 1e-30)):
        for dtype in DTYPES:
            model = WeightedOutput(nn.Linear(256, 512)).to(dtype)
            example = {"x": torch.full((1, 64, 256), large).to(dtype), "w": torch.full((1, 64, 512), small).to(dtype)}
            others = {k: v.to(dtype) for k, v in cancelling(64, 256, 512, 0.0, 99).items()}
            worst = max(worst, change(model, others, example))
    triton_norm.ghost_norm = kernel
    return {"worst": worst, "calls": calls}


def main() -> None:
    num_seeds = int(sys.argv[1])
    torch.set_num_threads(1)
    report = {
        "random": [errors(*case) for case in random_cases()],
        "adversarial": [errors(*case) for case in adversarial_cases(num_seeds)],
        "contract_4": contract_4(num_seeds),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
