"""Gaussian noise for the shard that this process owns: whole numbers, drawn once.

An owner adds round(N), for a real Gaussian N of standard deviation sigma C / h or a little more, to
its sum S of whole multiples of h. S + round(N) = round(S + N), so the release is a function of the
Gaussian mechanism S + N (docs/sums.md, with the reasons for exact draws). Noise is never stored,
and never derived from a seed or a step number, so none can come twice (contract 7). Assumed:
AES-256-CTR under a fresh key is indistinguishable from random.
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
        """Returns (count,) int64 on `device`, distributed exactly as round(N(0, deviation^2)).

        They are independent of every other draw in any process.
        """
        ...


class SystemNoise:
    """Draws noise from fresh operating-system entropy at every call, expanded by AES-256-CTR.

    Threads of the CPU draw it.
    """

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        """Returns (count,) int64; see `NoiseSource`."""
        drawn = np.empty(count, dtype=np.int64)
        size = -(-count // _num_threads(count, device))
        parts = [drawn[start : start + size] for start in range(0, count, max(size, 1))]

        def fill(part: np.ndarray) -> None:
            part[:] = draw_rounded_normal(deviation, len(part), self)

        if len(parts) > 1:
            with ThreadPoolExecutor(len(parts)) as threads:
                # The list raises errors of threads.
                list(threads.map(fill, parts))
        else:
            for part in parts:
                fill(part)
        return torch.from_numpy(drawn).to(device)

    def uniform_words(self, count: int) -> np.ndarray:
        """Returns (count,) uint64; see `privacy.noise.rounded_normal.WordSource`."""
        return np.frombuffer(_aes_stream().update(bytes(8 * count)), dtype="<u8")


def _num_threads(count: int, device: torch.device) -> int:
    """Returns how many threads draw `count` numbers.

    On CPU at most those that torch may use. Beside an accelerator launchers leave torch one thread,
    which says nothing about idle cores.
    """
    largest = min(MOST_THREADS, os.cpu_count() or 1)
    if device.type == "cpu":
        largest = torch.get_num_threads()
    return max(1, min(largest, count // DRAWN_BY_A_THREAD))


def _aes_stream() -> CipherContext:
    """Returns a stream under a fresh key.

    One key never gives more than 2^64 blocks, so the counter starts at zero.
    """
    return Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()


def add_noise(values: Tensor, deviation: float, source: NoiseSource) -> None:
    """Adds round(N(0, deviation^2)) to each coordinate, in whole numbers.

    Sums stay below 2^62 (`privacy.sums.grid.Grid`) and noise below 2^56, so nothing leaves int64.

    Args:
        values: int64, a shard of the reduced clipped sum that this process alone owns, in units of
            its step.
        deviation: in the same unit (`privacy.noise.rounded_normal.deviation_in_units`); positive,
            since sums without noise have no step.

    Raises:
        TypeError: the values are not int64: noise on a coarser grid than that of the sum would not
            hide the sum's last bits.
        ValueError: the deviation is not a positive number of at most 2^50, and must never pass for
            "no noise".
    """
    if values.dtype != torch.int64:
        raise TypeError(f"noise is added to whole numbers in int64, not to {values.dtype}")
    if not 0 < deviation < math.inf:
        raise ValueError(
            f"the standard deviation of noise is {deviation}; it must be a positive finite number"
        )
    for piece in values.view(-1).split(MOST_DRAWN):
        piece.add_(source.rounded_normal(deviation, piece.numel(), values.device))
