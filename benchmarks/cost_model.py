"""What a logical step would take on many GPUs, from bytes and FLOPs that were measured on two ranks.

A model, not a measurement: every assumption is a field of `Assumptions` and is written beside the numbers. Rings and overlap are
the planner's (trainer/planner/hardware.py); there the bytes follow from the engines' rules, here they were counted.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trainer.planner.hardware import GPUS, Network, Traffic, exposed_seconds

H100 = GPUS["h100-80gb"]
NETWORK = Network(H100.node_bandwidth, H100.network_bandwidth, H100.gpus_per_node)


@dataclass(frozen=True)
class Assumptions:
    """Rates are per GPU and in one direction; sources in trainer/planner."""

    matrix_peak: float = H100.peak(torch.bfloat16)  # FLOP/s, bf16, dense
    utilisation: float = 0.4  # share of the peak that a vision transformer of this width reaches, clipping included
    network: Network = NETWORK
    expected_batch_size: int = 1_310_720  # DP-Cap's logical batch
    micro_batch_size: int = 64
    weight_bytes_scale: float = 0.5  # weights travel in bf16; they were measured in fp32
    overlap: str = "weights are gathered while the previous block computes; the reduction of sums is not overlapped"
    left_out: str = "data loading, noise, optimizer step, stragglers, failures; reading the ledger's acknowledgement"


def project(
    measured: Traffic, flops_per_example: float, num_parameters: int, num_gpus: int, given: Assumptions
) -> dict[str, Any]:
    """Seconds of one logical step on `num_gpus`, and where they go.

    Args:
        measured: bytes that one rank of two sent, per parameter of the model.
    """
    examples = given.expected_batch_size / num_gpus
    micro_batches = math.ceil(examples / given.micro_batch_size)
    compute = examples * flops_per_example / (given.matrix_peak * given.utilisation)
    exposed = exposed_seconds(
        _on_more_ranks(measured, num_parameters, num_gpus, given), given.network, num_gpus, micro_batches, compute
    )
    return {
        "gpus": num_gpus,
        "micro_batches": micro_batches,
        "compute_seconds": compute,
        "exposed_communication_seconds": exposed,
        "step_seconds": compute + exposed,
        "efficiency": compute / (compute + exposed),
        "examples_per_second": given.expected_batch_size / (compute + exposed),
    }


def _on_more_ranks(measured: Traffic, num_parameters: int, num_gpus: int, given: Assumptions) -> Traffic:
    """A rank of W sends (W - 1) / W of the whole in a ring, one of two sends half."""
    share = num_parameters * 2 * (num_gpus - 1) / num_gpus
    scale = given.weight_bytes_scale
    return Traffic(
        measured.weights_per_micro_batch * share * scale,
        measured.weights_per_step * share * scale,
        measured.sums_per_micro_batch * share,
        measured.sums_per_step * share,
    )


def projections(
    traffic: dict[str, Traffic], flops_per_example: float, num_parameters: int, sizes: tuple[int, ...]
) -> dict[str, Any]:
    given = Assumptions()
    return {
        "assumptions": {**asdict(given), "flops_per_example": flops_per_example, "parameters": num_parameters},
        "by_engine": {
            name: [project(t, flops_per_example, num_parameters, size, given) for size in sizes]
            for name, t in traffic.items()
        },
    }
