"""Gaussian noise for the shard that this process owns: whole numbers, drawn once, from fresh entropy of the operating system.

Clipped sums are whole multiples of a public step h, and so is their noise: an owner adds round(N), for a real Gaussian N of
standard deviation sigma C / h or a little more. For a vector S of whole numbers S + round(N) = round(S + N), so what is released
is a function of S + N, the Gaussian mechanism that the accountant is charged with, and tells no more than that. Its proof asks
nothing of S but that it is whole: neither how large it is, nor how fine h is beside the noise.

Why no normals in double precision, added to sums in double precision: Box-Muller makes a pair of them
from 106 bits, and most pairs of doubles have no such bits behind them, so a sum that is released to its
last bit says which of two neighbours it is of (tests/privacy/loop/test_whole_noise.py). Why exact draws:
single-precision normals end at 5.77 standard deviations, and whatever lies beyond the end of a finite
generator costs delta. `rounded_normal.py` has no such end.

Why not torch's CPU generator: it is a Mersenne twister that keeps 32 bits of its seed, so two of 65,000 draws would
share a stream. Nothing here is ever stored or derived from a seed or a step number, so no noise can come twice (contract 7).
Stated assumption: AES-256-CTR under a fresh key is indistinguishable from random.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from .rounded_normal import draw_rounded_normal

MOST_DRAWN = 1 << 24
"""Numbers of one draw: 128 MiB, however large the shard is."""
DRAWN_BY_A_THREAD = 1 << 17
"""Fewer numbers are not worth a thread: they take about 10 ms."""
MOST_THREADS = 8
"""Threads that draw for an accelerator."""


class NoiseSource(Protocol):
    """Draws rounded normals; tests inject their own."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        """(count,) int64 on `device`, exactly round(N(0, deviation^2)), independent of every other draw in any process."""
        ...


class SystemNoise:
    """Noise from fresh operating-system entropy at every call, expanded by AES-256-CTR, on the CPU and in threads."""

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        drawn, size = np.empty(count, dtype=np.int64), -(-count // _num_threads(count, device))
        parts = [drawn[start : start + size] for start in range(0, count, max(size, 1))]

        def fill(part: np.ndarray) -> None:
            part[:] = draw_rounded_normal(deviation, len(part), self)

        if len(parts) > 1:
            with ThreadPoolExecutor(len(parts)) as threads:
                list(threads.map(fill, parts))  # raises what a thread raised
        else:
            for part in parts:
                fill(part)
        return torch.from_numpy(drawn).to(device)

    def uniform_words(self, count: int) -> np.ndarray:
        """See `privacy.noise.rounded_normal.WordSource`."""
        return np.frombuffer(_aes_stream().update(bytes(8 * count)), dtype="<u8")


def _num_threads(count: int, device: torch.device) -> int:
    """On CPU those that torch may use. Beside an accelerator launchers leave torch one, which says nothing about idle cores."""
    most = (
        torch.get_num_threads() if device.type == "cpu" else min(MOST_THREADS, os.cpu_count() or 1)
    )
    return max(1, min(most, count // DRAWN_BY_A_THREAD))


def _aes_stream() -> CipherContext:
    """A stream under a key of its own; one key never gives more than 2^64 blocks, so the counter starts at zero."""
    return Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()


def add_noise(values: Tensor, deviation: float, source: NoiseSource) -> None:
    """values += round(N(0, deviation^2)) on each coordinate, in whole numbers.

    Sums stay below 2^62 (`privacy.sums.grid.Grid`) and noise below 2^56, so nothing leaves int64.

    Args:
        values: int64, a shard of the reduced clipped sum that this process alone owns, in units of its step.
        deviation: in the same unit (`privacy.noise.rounded_normal.deviation_in_units`); positive, since sums
            without noise have no step.

    Raises:
        TypeError: the values are not int64: noise on a coarser grid than that of the sum would not hide the sum's last bits.
        ValueError: the deviation is not a positive number of at most 2^50, and must never pass for "no noise".
    """
    if values.dtype != torch.int64:
        raise TypeError(f"noise is added to whole numbers in int64, not to {values.dtype}")
    if not 0 < deviation < math.inf:
        raise ValueError(
            f"the standard deviation of noise is {deviation}; it must be a positive finite number"
        )
    for some in values.view(-1).split(MOST_DRAWN):
        some.add_(source.rounded_normal(deviation, some.numel(), values.device))
