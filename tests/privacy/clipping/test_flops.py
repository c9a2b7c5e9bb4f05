"""What clipping costs in FLOPs, counted by torch on the meta device."""

from unittest.mock import patch

import pytest
import torch

from benchmarks.step import CPU_WORKLOADS, CUDA_WORKLOADS, flop_ratios
from models.config import VitConfig


@pytest.mark.parametrize(
    ("name", "bookkeeping", "two_pass"),
    [
        ("vit_s_16", 1.15, 1.55),
        pytest.param("dpcap_base", 1.08, 1.45, marks=pytest.mark.full),
        pytest.param("dpcap_large", 1.06, 1.45, marks=pytest.mark.full),
    ],
)
@patch(
    "benchmarks.step.VitConfig", lambda **how: VitConfig(**how | {"depth": 4})
)  # of twelve equal blocks
def test_flops_against_non_private_training(name: str, bookkeeping: float, two_pass: float) -> None:
    workload = (CPU_WORKLOADS | CUDA_WORKLOADS)[name]
    found = flop_ratios(workload, torch.device("meta"), torch.float32, ["bookkeeping", "two_pass"])
    assert 1 < found["bookkeeping"] <= bookkeeping
    assert 4 / 3 < found["two_pass"] <= two_pass
