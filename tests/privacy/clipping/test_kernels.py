"""The Triton kernels: ghost norm and blanked rows, in Triton's interpreter, compiled for a GPU, and on one.

`python -m tests.privacy.clipping.test_kernels` runs them in the interpreter, on the CPU, and prints what is judged here. It is a
process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum, contributions, triton_norm
from privacy.clipping.clipped_sum import needs_blanking
from privacy.clipping.contributions import OuterProducts, blanked
from privacy.clipping.norms import rounding
from privacy.clipping.precision import Norm
from privacy.clipping.triton_norm import blank_rows_
from privacy.releases import SENSITIVITY_SLACK
from tests.privacy.clipping.test_sensitivity import WeightedOutput, cancelling, change

ROOT = Path(__file__).resolve().parents[3]
DTYPES = (torch.float32, torch.bfloat16)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (the extra triton)"
)

SHAPES = [(1, 1, 1, 1), (2, 5, 3, 70), (2, 63, 65, 64), (1, 64, 128, 33), (3, 65, 40, 90), (1, 197, 100, 130)]
"""(B, T, d, p) around the borders of the tiles."""


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


def bad_rows(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x = torch.arange(1, 5 * 3 * 700 + 1, device=device).view(5, 3, 700).to(dtype)
    x[1, 2, 3], x[4] = torch.nan, torch.inf
    return x, torch.tensor([False, True, False, False, True], device=device)


def blanks_in_place(dtype: torch.dtype) -> bool:
    """Bad rows are zeroed where they stand, others and empty tensors are left alone."""
    x, excluded_B = bad_rows(dtype, "cpu")
    good, place = x[~excluded_B].clone(), x.data_ptr()
    y = blank_rows_(x, excluded_B)
    is_right = y.data_ptr() == place and torch.equal(y[~excluded_B], good) and not bool(y[excluded_B].any())
    x, excluded_B = bad_rows(dtype, "cpu")
    blank_rows_(x, torch.zeros_like(excluded_B))
    blank_rows_(x[:, :0].contiguous(), excluded_B)
    return is_right and bool(x[1].isnan().any()) and bool(x[4].isinf().all())


def in_interpreter() -> None:
    """Prints the report of this process."""
    torch.set_num_threads(1)
    report = {
        "norms": [errors(*case) for case in (*random_cases(), *adversarial_cases(1))],
        "contract_4": contract_4(1),
        "blanked": [blanks_in_place(dtype) for dtype in (*DTYPES, torch.float64)],
    }
    print(json.dumps(report))


@needs_triton
def test_contracts_4_and_5_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["norms"]) == 24 + 8
    for case in report["norms"]:
        assert case["of_bound"] <= 1, case
        assert case["gross"] <= 1e-5 and case["hidden"] <= 1e-5, case
        assert case["repeats"], case
    # Its error is of the size of the torch path's, over all cases: a wrong tile would be far outside.
    assert max(c["of_bound"] for c in report["norms"]) <= 4 * max(c["torch_of_bound"] for c in report["norms"])
    assert report["contract_4"]["worst"] <= 1 + SENSITIVITY_SLACK
    assert report["contract_4"]["calls"] == 2 * 2 * (3 + 5)  # the sums above were made with the kernel
    assert report["blanked"] == [True] * 3


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_compiled_for_a_gpu_it_keeps_fp32(dtype: str) -> None:
    """Needs no GPU: no TF32 anywhere; bf16 uses the matrix units, and their sums are added outside of them."""
    import triton
    from triton.backends.compiler import GPUTarget

    from privacy.clipping.kernels import pair_of_tiles

    constants = {"BLOCK_T": triton_norm.BLOCK_T, "BLOCK_K": triton_norm.BLOCK_K, "WIDEN": False}
    kinds = {"a": f"*{dtype}", "g": f"*{dtype}", "squared_BN": "*fp32", "gross_BI": "*fp32"}
    kinds |= {"hidden_BI": "*fp32", "one": "fp32", "hidden_a": "fp32", "hidden_g": "fp32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in pair_of_tiles.arg_names}
    source = triton.compiler.ASTSource(fn=pair_of_tiles, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    assert "tf32" not in ptx
    assert bool(re.search(r"wgmma\.mma_async\S*f32\.bf16\.bf16", ptx)) == (dtype == "bf16")
    # Each thread adds its share of a chunk to the running block, once for each of the two Gram matrices.
    share = triton_norm.BLOCK_T**2 // (4 * 32)
    assert len(re.findall(r"fma\.rn\.f32", ptx)) >= 2 * share


@pytest.mark.parametrize("width", [64, 1024, 4096, 16384])
def test_contract_4_truncating_matrix_units_stay_within_the_bound(width: int) -> None:
    """Matrix units as measured by Fasi, Higham, Mikaitis and Pranesh (PeerJ CS 2021), on sums that only grow.

    Sixteen exact products and the accumulator are aligned to the largest, cut off two bits below its last, added, cut off.
    """
    generator = np.random.default_rng(width)
    x = torch.from_numpy(generator.uniform(1, 2, (8, width))).bfloat16().double().numpy()
    products = x * x
    chunked = np.zeros(8, dtype=np.float32)
    for start in range(0, width, triton_norm.BLOCK_K):
        chunked += unit_sum(products[:, start : start + triton_norm.BLOCK_K]).astype(np.float32)
    exact = products.sum(1)
    worst = float(np.abs(chunked / exact - 1).max())
    assert worst <= rounding(width, torch.float32)
    if width >= 16384:  # the danger is real: one long sum in the unit reads lower than the bound allows
        assert float((1 - unit_sum(products) / exact).max()) > rounding(width, torch.float32)


def unit_sum(products: np.ndarray) -> np.ndarray:
    total = np.zeros(len(products))
    for start in range(0, products.shape[1], 16):
        terms = np.concatenate([total[:, None], products[:, start : start + 16]], 1)
        last_bit = 2.0 ** (np.floor(np.log2(terms.max(1, keepdims=True))) - 23)
        total = (np.floor(terms / (last_bit / 4)) * (last_bit / 4)).sum(1)
        total = np.floor(total / (bit := 2.0 ** (np.floor(np.log2(total)) - 23))) * bit
    return total


def test_elsewhere_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not triton_norm.can_run(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for dtype in (torch.float64, torch.float16):
        assert not triton_norm.can_run(torch.zeros(1, 2, 3, dtype=dtype), torch.zeros(1, 2, 3, dtype=dtype))


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_against_the_torch_path(dtype: torch.dtype) -> None:
    shapes = [(4, 197, 768, 3072, 0.0), (4, 39, 768, 2304, 30.0), (2, 257, 1000, 130, 1000.0)]
    for batch_size, tokens, d, p, mean in shapes:
        examples = [cancelling(tokens, d, p, mean, seed) for seed in range(batch_size)]
        a = torch.cat([e["x"] for e in examples]).to("cuda", dtype)
        g = torch.cat([e["w"] for e in examples]).to("cuda", dtype)
        assert triton_norm.can_run(a, g)
        squared_B, gross_B, hidden_B = triton_norm.ghost_norm(a, g)
        again_B = triton_norm.ghost_norm(a, g).squared_B
        reference_B, reference_gross_B, reference_hidden_B = contributions.ghost_norm(a.float(), g.float())
        exact_B = torch.bmm(g.double().transpose(1, 2), a.double()).square().sum((1, 2))
        bound_B = 2 * rounding(tokens + d + p, torch.float32) * reference_gross_B.square()
        assert ((squared_B - exact_B).abs() <= bound_B).all()
        assert ((squared_B - reference_B).abs() <= 2 * bound_B).all()
        torch.testing.assert_close(gross_B, reference_gross_B, rtol=1e-5, atol=0)
        torch.testing.assert_close(hidden_B, reference_hidden_B, rtol=1e-5, atol=0)
        assert torch.equal(squared_B, again_B)


def check(dtype: torch.dtype, device: str) -> None:
    x, excluded_B = bad_rows(dtype, device)
    good = x[~excluded_B].clone()
    y = blanked(x, excluded_B)
    assert torch.equal(y[~excluded_B], good) and not y[excluded_B].any()
    wide = torch.zeros(5, 1, device=device, dtype=dtype).fill_(torch.nan).expand(5, 4)  # not contiguous
    assert not blanked(wide, torch.ones_like(excluded_B)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_5_blanked_rows(dtype: torch.dtype) -> None:
    check(dtype, "cpu")
    assert not needs_blanking(torch.tensor([True, True])) and needs_blanking(torch.tensor([True, False]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_5_blanked_on_a_gpu(dtype: torch.dtype) -> None:
    check(dtype, "cuda")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 6).cuda().to(dtype)
    x = torch.randn(4, 5, 8, device="cuda", dtype=dtype)
    x[2, 1] = torch.nan
    before = x.clone()
    total = ClippedSum(model, 1.0, self_check=False)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")  # a wait for the device is an error
        try:
            stats = total.add_micro_batch(
                lambda x: model(x).float().sum((1, 2)), {"x": x}, torch.zeros(4, dtype=torch.bool, device="cuda")
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int(stats.num_nonfinite) == 1
    assert torch.equal(x.isnan(), before.isnan())  # the caller's tensor is as it was
    assert all(value.isfinite().all() for _, value in total.sums())


if __name__ == "__main__":
    in_interpreter()
