"""Accelerators by name, as their makers' data sheets state them; what ranks send in a step, and how long that takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from privacy.clipping.clipped_sum import Mode
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName
from trainer.errors import ConfigError
from trainer.planner.memory import FP32, FP64, Shares, Trainable, bucket_parts
from trainer.run.memory_estimate import total_memory


@dataclass(frozen=True)
class Gpu:
    """One accelerator, or one CPU core.

    Attributes:
        memory: bytes; None for the memory of this machine, shared by the ranks of a node.
        fp32_peak, bf16_peak: FLOP/s of dense matrix products; None where the device has no units for that.
        memory_bandwidth: bytes/s.
        node_bandwidth: bytes/s in one direction to the other devices of the node.
        network_bandwidth: bytes/s in one direction that each device has to other nodes, in the maker's reference system.
        gpus_per_node: how many the reference system has.
    """

    name: str
    memory: int | None
    fp32_peak: float
    bf16_peak: float | None
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int = 8

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s of dense products in the compute dtype.

        Raises:
            ConfigError: the device cannot compute in it.
        """
        peak = self.bf16_peak if dtype == torch.bfloat16 else self.fp32_peak
        if peak is None:
            raise ConfigError(f"--gpu {self.name} has no bf16 matrix units: use a ds_config without bf16")
        return peak

    def memory_per_rank(self, ranks_on_node: int, proc: Path = Path("/proc")) -> int:
        """Bytes for one rank, one rank per device.

        Raises:
            ConfigError: this machine does not say how much memory it has.
        """
        whole = self.memory * ranks_on_node if self.memory is not None else total_memory(proc)
        if whole is None:
            raise ConfigError(f"--gpu {self.name}: this machine does not say how much memory it has; name another")
        return whole // ranks_on_node


# Decimal gigabytes, as in the data sheets: a driver shows up to 5 % more. fp32 is without TF32, which training leaves off.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA V100 data sheet (SXM2): 15.7 TFLOP/s fp32, no bf16, 900 GB/s, NVLink 300 GB/s both ways; DGX-1: four EDR
        # InfiniBand adapters (100 Gb/s) for eight GPUs.
        Gpu("v100-32gb", 32 * 10**9, 15.7e12, None, 900e9, 150e9, 6.25e9),
        # NVIDIA A100 data sheet (SXM4): 19.5 TFLOP/s fp32, 312 bf16 dense, NVLink 600 GB/s both ways; DGX A100: one HDR
        # adapter (200 Gb/s) for each GPU.
        Gpu("a100-40gb", 40 * 10**9, 19.5e12, 312e12, 1555e9, 300e9, 25e9),
        Gpu("a100-80gb", 80 * 10**9, 19.5e12, 312e12, 2039e9, 300e9, 25e9),
        # NVIDIA H100 data sheet (SXM5): 67 TFLOP/s fp32, 1,979 bf16 with sparsity, 989 dense; 3.35 TB/s; NVLink 900 GB/s both
        # ways; DGX H100: one NDR adapter (400 Gb/s) for each GPU.
        Gpu("h100-80gb", 80 * 10**9, 67e12, 989e12, 3.35e12, 450e9, 50e9),
        # NVIDIA H200 data sheet (SXM): as the H100, 141 GB at 4.8 TB/s.
        Gpu("h200-141gb", 141 * 10**9, 67e12, 989e12, 4.8e12, 450e9, 50e9),
        # One core of a small x86 server, one rank each: large fp32 products reach 86 to 99 GFLOP/s (benchmarks/README.md), and
        # most gain nothing from bf16. The links are guesses: shared memory, and 10 Gb/s Ethernet.
        Gpu("cpu", None, 90e9, 90e9, 10e9, 1e9, 1.25e9, gpus_per_node=2),
    )
}


_CALLED_BY_TORCH = {
    "Tesla V100-SXM2-32GB": "v100-32gb", "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb", "NVIDIA H200": "h200-141gb",
}  # fmt: skip


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of this device, by the data sheet of the accelerator that it names itself; None for others and for CPUs."""
    name = _CALLED_BY_TORCH.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if name is None else GPUS[name].peak(dtype)


def find_gpu(name: str) -> Gpu:
    """The accelerator of this name; ConfigError lists the choices."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is unknown; choose one of {', '.join(GPUS)}")
    return GPUS[name]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends, if nothing is sent twice: in every micro-batch, and once per logical batch."""

    weights_per_micro_batch: float
    weights_per_step: float
    sums_per_micro_batch: float
    sums_per_step: float

    def per_step(self, micro_batches: float) -> float:
        each = self.weights_per_micro_batch + self.sums_per_micro_batch
        return micro_batches * each + self.weights_per_step + self.sums_per_step


@dataclass(frozen=True)
class Network:
    """Rates per GPU and in one direction.

    Attributes:
        node_bandwidth: bytes/s within a node.
        network_bandwidth: bytes/s between nodes.
        reached: share of either that large collectives reach.
        hop_latency: seconds; a ring over W ranks has W - 1 hops.
    """

    node_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int = 8
    reached: float = 0.8
    hop_latency: float = 5e-6

    def seconds(self, num_bytes: float, world_size: int) -> float:
        """The time of one ring over all ranks in which each sends `num_bytes`."""
        if num_bytes == 0:
            return 0.0
        slowest = self.node_bandwidth if world_size <= self.gpus_per_node else self.network_bandwidth
        return num_bytes / (slowest * self.reached) + (world_size - 1) * self.hop_latency


def exposed_seconds(
    traffic: Traffic, network: Network, world_size: int, micro_batches: float, compute_seconds: float
) -> float:
    """Seconds of communication that no computation hides, in one logical step.

    Weights are gathered while the previous block computes; the reduction of sums is not overlapped.
    """
    hidden = network.seconds(traffic.weights_per_micro_batch, world_size)
    exposed = micro_batches * max(0.0, hidden - compute_seconds / micro_batches)
    exposed += micro_batches * network.seconds(traffic.sums_per_micro_batch, world_size)
    exposed += network.seconds(traffic.weights_per_step, world_size)
    return exposed + network.seconds(traffic.sums_per_step, world_size)


def traffic(
    trainable: Trainable,
    shares: Shares,
    engine: EngineName,
    machine: MachineSettings,
    *,
    mode: Mode,
    accumulation: str,
    world_size: int,
) -> Traffic:
    """What a rank sends by the engines' rules. Sums are exact (`trainer.ranks.distributed.traffic` counts the same).

    Weights are an estimate: a block's weights are gathered once per forward and once per backward, and DeepSpeed's cache of live
    parameters, which may save half of that, is not counted on.
    """
    others = (world_size - 1) / world_size
    weight_bytes = machine.compute_dtype.itemsize * (trainable.count + trainable.frozen)
    # Clipped sums are reduced in fp64, and replicas exchange noised gradients in fp32.
    kept = sum(bucket_parts(trainable, world_size)) if accumulation == "sharded" else shares.owned
    reduced, gathered = float(FP64 * (world_size - 1) * kept), 0
    if engine == "local":
        gathered = FP32 * (world_size - 1) * shares.owned
    elif engine == "fsdp":
        gathered = FP32 * (world_size // (machine.shard_group_size or world_size) - 1) * shares.owned
    sums = (0.0, reduced + gathered)
    if accumulation == "sharded":  # from the ranks that keep the sums to the owners: at most a rank's whole part
        sums = (reduced, reduced / max(world_size - 1, 1) + gathered)
    passes = 2 if mode == "two_pass" else 1
    if engine == "deepspeed" and machine.stage == 3:
        return Traffic(2 * passes * weight_bytes * others, 0.0, *sums)
    if engine == "fsdp":
        ranks = machine.shard_group_size or world_size
        share = machine.compute_dtype.itemsize * (ranks - 1) / ranks
        blocks = sum(trainable.blocks)
        if machine.stage == 3:
            rest = trainable.count + trainable.frozen - blocks
            return Traffic(passes * share * (2 * blocks + rest), 0.0, *sums)
        return Traffic(0.0, weight_bytes * (ranks - 1) / ranks, *sums)
    if engine == "fairscale":
        return Traffic(0.0, FP32 * trainable.count * others, *sums)
    if engine == "deepspeed":
        return Traffic(0.0, machine.compute_dtype.itemsize * trainable.count * others, *sums)
    return Traffic(0.0, 0.0, *sums)  # every rank steps the whole model; its gradients are among the sums
