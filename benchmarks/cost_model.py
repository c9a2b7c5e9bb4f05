"""What a logical step would take on many GPUs, from bytes and FLOPs that were measured on two ranks.

A model, not a measurement: every assumption is a field of `Assumptions` and is written beside the numbers.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Assumptions:
    """Rates are per GPU and in one direction; sources in the comments."""

    matrix_peak: float = 989e12  # FLOP/s, H100 SXM, bf16, dense (data sheet)
    utilisation: float = 0.4  # share of the peak that a vision transformer of this width reaches, clipping included
    gpus_per_node: int = 8
    node_bandwidth: float = 450e9  # bytes/s, NVLink 4 (data sheet)
    network_bandwidth: float = 50e9  # bytes/s, one 400 Gb/s adapter per GPU
    bandwidth_reached: float = 0.8  # share of either that large collectives reach
    hop_latency: float = 5e-6  # s; a ring over W ranks has W - 1 hops
    expected_batch_size: int = 1_310_720  # DP-Cap's logical batch
    micro_batch_size: int = 64
    weight_bytes_scale: float = 0.5  # weights travel in bf16; they were measured in fp32
    overlap: str = "weights are gathered while the previous block computes; the reduction of sums is not overlapped"
    left_out: str = "data loading, noise, optimizer step, stragglers, failures; reading the ledger's acknowledgement"


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank of two sent, per parameter of the model: with every micro-batch, and once per logical batch."""

    weights_per_micro_batch: float
    weights_per_step: float
    sums_per_micro_batch: float
    sums_per_step: float


def project(
    traffic: Traffic, flops_per_example: float, num_parameters: int, num_gpus: int, given: Assumptions
) -> dict[str, Any]:
    """Seconds of one logical step on `num_gpus`, and where they go."""
    examples = given.expected_batch_size / num_gpus
    micro_batches = math.ceil(examples / given.micro_batch_size)
    compute = examples * flops_per_example / (given.matrix_peak * given.utilisation)

    def seconds(bytes_of_two: float) -> float:
        """Of a ring over all ranks: a rank of W sends (W - 1) / W of the whole, one of two sends half."""
        share = 2 * (num_gpus - 1) / num_gpus
        slowest = given.node_bandwidth if num_gpus <= given.gpus_per_node else given.network_bandwidth
        if bytes_of_two == 0:
            return 0.0
        sent = bytes_of_two * num_parameters * share
        return sent / (slowest * given.bandwidth_reached) + (num_gpus - 1) * given.hop_latency

    scale = given.weight_bytes_scale
    hidden = seconds(traffic.weights_per_micro_batch * scale)
    exposed = micro_batches * max(0.0, hidden - compute / micro_batches)
    exposed += micro_batches * seconds(traffic.sums_per_micro_batch)
    exposed += seconds(traffic.weights_per_step * scale) + seconds(traffic.sums_per_step)
    return {
        "gpus": num_gpus,
        "micro_batches": micro_batches,
        "compute_seconds": compute,
        "exposed_communication_seconds": exposed,
        "step_seconds": compute + exposed,
        "efficiency": compute / (compute + exposed),
        "examples_per_second": given.expected_batch_size / (compute + exposed),
    }


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
