"""The Triton ghost norm against float64 and the torch path: in Triton's interpreter, compiled for a GPU, and on one."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privacy.clipping import contributions, triton_norm
from privacy.clipping.norms import rounding
from privacy.releases import SENSITIVITY_SLACK
from tests.privacy.clipping.test_sensitivity import cancelling

ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the extra triton is not installed"
)


def in_interpreter(num_seeds: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.privacy.clipping.triton_in_interpreter", str(num_seeds)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def judge(report: dict[str, Any], num_seeds: int) -> None:
    cases = report["random"] + report["adversarial"]
    assert len(cases) == 24 + 8 * num_seeds
    for case in cases:
        assert case["of_bound"] <= 1, case
        assert case["gross"] <= 1e-5 and case["hidden"] <= 1e-5, case
        assert case["repeats"], case
    # Its error is of the size of the torch path's, over all cases: a wrong tile would be far outside.
    assert max(c["of_bound"] for c in cases) <= 4 * max(c["torch_of_bound"] for c in cases)
    assert report["contract_4"]["worst"] <= 1 + SENSITIVITY_SLACK
    assert report["contract_4"]["calls"] == 2 * 2 * (3 * num_seeds + 5)  # the sums above were made with the kernel


@needs_triton
def test_contract_4_the_kernel_in_the_interpreter() -> None:
    judge(in_interpreter(1), 1)


@needs_triton
@pytest.mark.full
@pytest.mark.timeout(1300)
def test_contract_4_the_kernel_in_the_interpreter_many_seeds() -> None:
    judge(in_interpreter(30), 30)


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
