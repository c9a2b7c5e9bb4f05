"""Noise for the comparison of two runs with a fixed key and nonce: equal data then give equal runs."""

import torch


class SeededNoise:
    """No noise for anything but a comparison of two runs."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def standard_normal(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.randn(count, dtype=torch.float64, generator=self._generator).to(device)
