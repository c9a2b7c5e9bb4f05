"""Lists accelerators by name, with the numbers of their makers' data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.errors import ConfigError
from trainer.memory import total_memory


@dataclass(frozen=True)
class Gpu:
    """One accelerator, or one CPU core.

    Attributes:
        memory: bytes; None for the memory of this machine, shared by the ranks of a node.
        fp32_peak, bf16_peak: FLOP/s of dense matrix products.
        memory_bandwidth: bytes/s.
        called_by_torch: `torch.cuda.get_device_name`.
        gpus_per_node: number of accelerators in the maker's reference system.
    """

    name: str
    memory: int | None
    fp32_peak: float
    bf16_peak: float
    memory_bandwidth: float
    called_by_torch: str = ""
    gpus_per_node: int = 8

    def peak(self, dtype: torch.dtype) -> float:
        """Returns FLOP/s of dense products in the compute dtype."""
        return self.bf16_peak if dtype == torch.bfloat16 else self.fp32_peak

    def memory_per_rank(self, ranks_on_node: int, proc: Path = Path("/proc")) -> int:
        """Returns the bytes for one rank, with one rank per device.

        Raises:
            ConfigError: this machine does not say how much memory it has.
        """
        if self.memory is not None:
            return self.memory
        machine_memory = total_memory(proc)
        if machine_memory is None:
            raise ConfigError(
                f"--gpu {self.name}: this machine does not say how much memory it has; name another"
            )
        return machine_memory // ranks_on_node


# Decimal gigabytes, as in the data sheets: a driver shows up to 5 % more. fp32 is without TF32,
# which the trainer's matrix products do not use.
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # A100 data sheet (SXM4): 19.5 TFLOP/s fp32, 312 bf16 dense.
        Gpu("a100-40gb", 40 * 10**9, 19.5e12, 312e12, 1555e9, "NVIDIA A100-SXM4-40GB"),
        Gpu("a100-80gb", 80 * 10**9, 19.5e12, 312e12, 2039e9, "NVIDIA A100-SXM4-80GB"),
        # H100 data sheet (SXM5): 67 TFLOP/s fp32, 1,979 bf16 with sparsity, 989 dense; 3.35 TB/s.
        Gpu("h100-80gb", 80 * 10**9, 67e12, 989e12, 3.35e12, "NVIDIA H100 80GB HBM3"),
        # H200 data sheet (SXM): as the H100, 141 GB at 4.8 TB/s.
        Gpu("h200-141gb", 141 * 10**9, 67e12, 989e12, 4.8e12, "NVIDIA H200"),
        # One core of a small x86 server, one rank each: large fp32 products reach 86 to 99 GFLOP/s
        # (benchmarks/README.md), and most gain nothing from bf16.
        Gpu("cpu", None, 90e9, 90e9, 10e9, gpus_per_node=2),
    )
}


def gpu_of(device: torch.device) -> Gpu | None:
    """Returns the accelerator of a device's name, or a CPU; None for an unlisted accelerator."""
    if device.type == "cpu":
        return GPUS["cpu"]
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu for gpu in GPUS.values() if name and gpu.called_by_torch == name), None)


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Returns FLOP/s of this device by its data sheet; None for CPUs and unlisted accelerators."""
    gpu = gpu_of(device) if device.type == "cuda" else None
    return None if gpu is None else gpu.peak(dtype)


def find_gpu(name: str) -> Gpu:
    """Returns the accelerator of this name.

    Raises:
        ConfigError: no accelerator has this name; lists the choices.
    """
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is unknown; choose one of {', '.join(GPUS)}")
    return GPUS[name]
