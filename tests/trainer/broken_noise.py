"""Deliberate mistakes in the source of the noise, to be found by the audit of the mechanism."""

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privacy.noise import SystemNoise
from trainer.ranks import distributed


class OneSeed:
    """torch.manual_seed(seed) with the same seed on every rank."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(1)

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(self._generator.standard_normal(count))


class Replayed:
    """A generator that is seeded again for every step."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(np.random.default_rng((distributed.rank(), count)).standard_normal(count))

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return (self.standard_normal(count, device) * deviation).round().long()


class SinglePrecision:
    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return torch.randn(count, dtype=torch.float32).double()


class HalfReversed(SystemNoise):
    """The second half is minus the first half reversed: half of the entropy, and a sum of zero."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        draw = super().standard_normal(count, device)
        half = count // 2
        draw[count - half :] = -draw[:half].flip(0)
        return draw


class EndsAtThree(SystemNoise):
    """No value beyond 3 standard deviations, and the stated variance."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        draw = super().standard_normal(count, device)
        while (beyond := draw.abs() > 3).any():
            draw[beyond] = super().standard_normal(int(beyond.sum()), device)
        return draw / 0.98658


class OfTheStepBefore(SystemNoise):
    """The second half of a tensor is the first half one step before."""

    def __init__(self) -> None:
        self._before: dict[int, Tensor] = {}

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        draw, half = super().standard_normal(count, device), count // 2
        before = self._before.get(count)
        self._before[count] = draw[:half].clone()
        if before is not None:
            draw[count - half :] = before
        return draw


class SixteenBits:
    """Each draw is seeded with two bytes."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        seed = int.from_bytes(os.urandom(2), "little")
        return torch.from_numpy(np.random.default_rng(seed).standard_normal(count))


SOURCES: dict[str, Any] = {
    "same_seed_on_all_ranks": OneSeed,
    "replayed_noise": Replayed,
    "single_precision_noise": SinglePrecision,
    "second_half_minus_the_first_reversed": HalfReversed,
    "noise_ends_at_three": EndsAtThree,
    "half_of_the_noise_of_the_step_before": OfTheStepBefore,
    "sixteen_bits_of_entropy": SixteenBits,
}
