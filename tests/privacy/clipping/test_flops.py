"""What clipping costs in FLOPs, counted by torch on the meta device; and that the profile adds up."""

import pytest
import torch

from benchmarks.step import CPU_WORKLOADS, CUDA_WORKLOADS, flop_ratios, operations


@pytest.mark.parametrize(
    ("name", "bookkeeping", "two_pass"),
    [
        ("vit_s_16", 1.15, 1.55),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("dpcap_base", 1.08, 1.45), ("dpcap_large", 1.06, 1.45))
        ),
    ],
)
def test_flops_against_non_private_training(name: str, bookkeeping: float, two_pass: float) -> None:
    workload = (CPU_WORKLOADS | CUDA_WORKLOADS)[name]
    found = flop_ratios(workload, torch.device("meta"), torch.float32, ["bookkeeping", "two_pass"])
    assert 1 < found["bookkeeping"] <= bookkeeping
    assert 4 / 3 < found["two_pass"] <= two_pass


@pytest.mark.parametrize(
    ("name", "most"), [("vit_s_16", 11.0), pytest.param("dpcap_large", 3.2, marks=pytest.mark.full)]
)
def test_launches_against_non_private_training(name: str, most: float) -> None:
    """On CPU most are strips of Gram matrices, and 11 element-wise operations for a product that is rounded and added.

    On CUDA, the way that dpcap_large is counted, the latter are one kernel, and most are parts of Gram matrices.
    """
    found = operations((CPU_WORKLOADS | CUDA_WORKLOADS)[name], ["non_private", "bookkeeping"])
    assert 1 < found["bookkeeping"] / found["non_private"] <= most
