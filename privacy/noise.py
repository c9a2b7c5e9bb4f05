"""Gaussian noise for the shard that this process owns: fp64, drawn once, from fresh entropy of the operating system.

Why fp64: single-precision normals have bounded support (5.77 standard deviations on CPU, 6.76 on CUDA). An output beyond the
edge is possible only if an example is present, which alone costs more delta than a delta of 1e-9 allows. Why not torch's
CPU generator: it is a Mersenne twister that keeps 32 bits of its seed, so two of 65,000 draws would share a stream.
Nothing here is ever stored or derived from a seed or a step number, so no noise can come twice (contract 7).
"""

import os
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class NoiseSource(Protocol):
    """Draws standard normals; tests inject their own."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        """(count,) float64 on `device`, independent of every other draw in any process."""
        ...


class SystemNoise:
    """Noise keyed by fresh operating-system entropy at every call."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        if device.type == "cuda":
            generator = torch.Generator(device).manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
            return torch.randn(count, generator=generator, device=device, dtype=torch.float64)
        philox = np.random.Philox(key=int.from_bytes(os.urandom(16), "little"))
        return torch.from_numpy(np.random.Generator(philox).standard_normal(count)).to(device)


def add_noise(values: Tensor, std: float, source: NoiseSource) -> None:
    """values += N(0, std^2) on each coordinate.

    Args:
        values: float64, a shard of the reduced clipped sum that this process alone owns.
        std: noise_multiplier times the clipper's sensitivity; 0 draws nothing.
    """
    if values.dtype != torch.float64:
        raise TypeError(f"noise is added in float64, not {values.dtype}")
    if std > 0 and values.numel() > 0:
        values.add_(source.standard_normal(values.numel(), values.device).view_as(values), alpha=std)
