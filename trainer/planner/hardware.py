"""Accelerators by name: memory, peak rates and links, as their makers' data sheets state them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.errors import ConfigError
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
        gpus_per_node: of the reference system.
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
        found = self.bf16_peak if dtype == torch.bfloat16 else self.fp32_peak
        if found is None:
            raise ConfigError(f"--gpu {self.name} has no bf16 matrix units: use a ds_config without bf16")
        return found

    def memory_per_rank(self, ranks_on_node: int, proc: Path = Path("/proc")) -> int:
        """Bytes for one rank, one rank per device.

        Raises:
            ConfigError: this machine does not say how much memory it has.
        """
        found = self.memory * ranks_on_node if self.memory is not None else total_memory(proc)
        if found is None:
            raise ConfigError(f"--gpu {self.name}: this machine does not say how much memory it has; name another")
        return found // ranks_on_node


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


def find_gpu(name: str) -> Gpu:
    """
    Raises:
        ConfigError: unknown; the line lists the choices.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is unknown; choose one of {', '.join(GPUS)}")
    return GPUS[name]
