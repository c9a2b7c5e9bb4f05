"""Gaussian noise for the shard that this process owns: fp64, drawn once, from fresh entropy of the operating system.

Why fp64: single-precision normals have bounded support (5.77 standard deviations on CPU, 6.76 on CUDA). An output beyond the
edge is possible only if an example is present, which alone costs more delta than a delta of 1e-9 allows. Every
finite generator has such an edge; ours are far out, and what is left is computed (privacy/accounting/group_privacy.py) and
charged in delta.
Why not torch's CPU generator: it is a Mersenne twister that keeps 32 bits of its seed, so two of 65,000 draws would
share a stream. Nothing here is ever stored or derived from a seed or a step number, so no noise can come twice (contract 7).

Stated assumptions: AES-256-CTR (CPU) and Philox (CUDA) are indistinguishable from random; the gaps between neighbouring
doubles of a noised sum (Mironov 2012) reveal nothing, which is argued from their size, not proven.
"""

import math
import os
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from .rounded_normal import draw_rounded_normal

_CHUNK = 1 << 18
MOST_DRAWN = 1 << 24
"""Normals of one draw: 128 MiB, however large the shard is."""


class NoiseSource(Protocol):
    """Draws standard normals, and rounded ones for certified arithmetic; tests inject their own."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        """(count,) float64 on `device`, independent of every other draw in any process."""
        ...

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        """(count,) int64 on `device`, exactly round(N(0, deviation^2)), independent like the other draws."""
        ...


class SystemNoise:
    """Noise keyed by fresh operating-system entropy at every call: AES-256-CTR on CPU, Philox on CUDA, then Box-Muller."""

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        if device.type == "cuda":
            return box_muller(philox_words(device), count, device)
        stream = _aes_stream()

        def words(number: int) -> Tensor:
            raw = torch.frombuffer(bytearray(stream.update(bytes(8 * number))), dtype=torch.int64)
            return raw.bitwise_and_(0x7FFF_FFFF_FFFF_FFFF)

        return box_muller(words, count, torch.device("cpu")).to(device)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(draw_rounded_normal(deviation, count, self)).to(device)

    def uniform_words(self, count: int) -> np.ndarray:
        """See `privacy.rounded_normal.WordSource`."""
        return np.frombuffer(_aes_stream().update(bytes(8 * count)), dtype="<u8")


def _aes_stream() -> CipherContext:
    """A stream under a key of its own; one key never gives more than 2^64 blocks, so the counter starts at zero."""
    return Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()


def philox_words(device: torch.device) -> Callable[[int], Tensor]:
    """Uniform words on `device` from Philox; the key is new at every call.

    A torch generator takes 64 bits of key; two of them, XORed, take 128: a large training draws 10^9 times, and two of 10^9
    keys of 64 bits would be equal with a probability of 3 %.
    """
    streams = [
        torch.Generator(device).manual_seed(int.from_bytes(os.urandom(8), "little", signed=True)) for _ in range(2)
    ]

    def words(number: int) -> Tensor:
        first, second = (
            torch.empty(number, dtype=torch.int64, device=device).random_(generator=stream) for stream in streams
        )
        return first.bitwise_xor_(second)

    return words


def box_muller(words: Callable[[int], Tensor], count: int, device: torch.device) -> Tensor:
    """(count,) standard normals in float64 from uniform integers (Box and Muller 1958).

    Args:
        words: number -> (number,) int64, uniform in [0, 2^63).
    """
    out = torch.empty(count, dtype=torch.float64, device=device)
    # On CPU in pieces that stay in the cache; on CUDA in pieces whose temporaries take 256 MiB.
    piece = _CHUNK if device.type == "cpu" else 16 * _CHUNK
    for start in range(0, count, piece):
        size = min(piece, count - start)
        half = (size + 1) // 2
        drawn = words(2 * half)
        # In (0, 1]; near zero, where the tail is made, a double resolves every one of the 2^63 values.
        uniforms = drawn.double().add_(0.5).mul_(2.0**-63)
        radius = uniforms[:half].log_().mul_(-2.0).sqrt_()
        angle = uniforms[half:].mul_(2 * math.pi)
        pair = torch.cat([radius * angle.cos(), radius * angle.sin()])
        out[start : start + size] = pair[:size]
    return out


def add_noise(values: Tensor, std: float, source: NoiseSource) -> None:
    """values += N(0, std^2) on each coordinate.

    Args:
        values: float64, a shard of the reduced clipped sum that this process alone owns.
        std: noise_multiplier times the clipper's sensitivity; 0 draws nothing.

    Raises:
        TypeError: the values are not float64.
        ValueError: std is negative or not finite, which must never pass for "no noise".
    """
    if values.dtype != torch.float64:
        raise TypeError(f"noise is added in float64, not {values.dtype}")
    if not 0 <= std < math.inf:
        raise ValueError(f"the standard deviation of noise is {std}; it must be a finite number, 0 or larger")
    if std > 0:
        for some in values.view(-1).split(MOST_DRAWN):
            some.add_(source.standard_normal(some.numel(), values.device), alpha=std)


def add_rounded_noise(values: Tensor, deviation: float, source: NoiseSource) -> None:
    """values += round(N(0, deviation^2)) on each coordinate, in whole numbers.

    Args:
        values: int64, a shard of the reduced clipped sum that this process alone owns, in units of the lattice.
        deviation: in the same unit (`privacy.lattice.Lattice.noise_deviation`); positive, since this arithmetic is for
            runs with noise only.

    Raises:
        TypeError: the values are not int64.
        ValueError: the deviation is not a positive finite number.
    """
    if values.dtype != torch.int64:
        raise TypeError(f"rounded noise is added in int64, not {values.dtype}")
    if not 0 < deviation < math.inf:
        raise ValueError(f"the standard deviation of rounded noise is {deviation}; it must be positive and finite")
    for some in values.view(-1).split(MOST_DRAWN):
        some.add_(source.rounded_normal(deviation, some.numel(), values.device))
