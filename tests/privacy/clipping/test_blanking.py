"""Contract 5: rows of non-finite examples are zeroed, and no others, by every way of doing it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from privacy.clipping import ClippedSum
from privacy.clipping.blanking import blanked, needs_blanking

ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="tests/install_packages.sh")


def bad_rows(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(1, 5 * 3 * 700 + 1, device=device).view(5, 3, 700).to(dtype)
    x[1, 2, 3], x[4] = torch.nan, torch.inf
    return x, torch.tensor([False, True, False, False, True], device=device)


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


@needs_triton
def test_contract_5_blanked_in_the_interpreter() -> None:
    code = """
import torch
from privacy.clipping.blanking import blank_rows_
from tests.privacy.clipping.test_blanking import bad_rows
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    x, excluded_B = bad_rows(dtype, "cpu")
    good, place = x[~excluded_B].clone(), x.data_ptr()
    y = blank_rows_(x, excluded_B)
    assert y.data_ptr() == place and torch.equal(y[~excluded_B], good) and not y[excluded_B].any(), dtype
    x, excluded_B = bad_rows(dtype, "cpu")
    blank_rows_(x, torch.zeros_like(excluded_B))
    assert x[1].isnan().any() and x[4].isinf().all(), dtype
    blank_rows_(x[:, :0].contiguous(), excluded_B)
"""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


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
