"""The noise that the CPU draws for this device: distribution, tails, freshness, memory and speed."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from scipy import stats

from privacy.noise.source import SystemNoise, add_noise
from tests.gpu.checks import Check, Setting

DEVIATION = 0.7 * 2.0**34
"""A usual one, in steps of a sum."""
FAR = 5.2
"""Standard deviations. Single-precision normals end at 5.77 on CPU, and few of them lie beyond this."""
MOMENTS = ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96))
"""(moment, its mean, the variance of one sample of it)."""


def checks(setting: Setting) -> Iterator[Check]:
    source, count = SystemNoise(), setting.choose(20_000_001, 1_000_001)

    def drawn() -> torch.Tensor:
        return source.rounded_normal(DEVIATION, count, setting.device)

    draw = drawn()
    there = draw.device.type == setting.device.type and draw.dtype == torch.int64
    yield Check("noise, device and dtype", there, str(draw.dtype), "int64")
    values = draw.cpu().numpy() / DEVIATION
    buckets = np.histogram(values, stats.norm.ppf(np.linspace(0, 1, 257)))[0]
    p_value = float(stats.chisquare(buckets).pvalue)
    yield Check(
        "noise, 256 buckets", 1e-5 < p_value < 1 - 1e-5, p_value, "p between 1e-5 and 1 - 1e-5"
    )
    off = {n: float((values**n).mean() - mean) * math.sqrt(count / var) for n, mean, var in MOMENTS}
    off[0] = float(np.corrcoef(values[:-1], values[1:])[0, 1]) * math.sqrt(count)
    worst = max(abs(x) for x in off.values())
    yield Check("noise, moments and lag 1", worst < 5, off, "within 5 standard errors (0: lag 1)")
    again = drawn()
    # 1,000 whole numbers among 2e7 others of this deviation: 0.5 coincide by chance.
    common = int(torch.isin(again[:1000], draw).sum())
    yield Check(
        "noise, no draw comes twice", common <= 9, common, "at most 9 values in common by chance"
    )
    rate = count / min(setting.seconds(drawn) for _ in range(3))
    yield Check("noise, speed", True, {"million_samples_per_second": rate / 1e6}, "for the record")
    yield from _tails(setting)
    yield from _memory(setting)


def _tails(setting: Setting) -> Iterator[Check]:
    source, piece, pieces = SystemNoise(), 10_000_000, setting.choose(20, 1)
    beyond = sum(
        int((source.rounded_normal(DEVIATION, piece, setting.device).abs() > FAR * DEVIATION).sum())
        for _ in range(pieces)
    )
    mean = piece * pieces * 2 * stats.norm.sf(FAR)
    # A Poisson count, with a probability of 1e-6 on each side.
    low, high = stats.poisson.ppf(1e-6, mean) - 1, stats.poisson.ppf(1 - 1e-6, mean) + 1
    yield Check(
        f"noise, draws beyond {FAR}",
        bool(low <= beyond <= high),
        beyond,
        f"{mean:.1f} on average, {low:g} to {high:g}",
    )


def _memory(setting: Setting) -> Iterator[Check]:
    """What adding noise to a large shard takes on top of it."""
    if not setting.is_cuda:
        yield Check(
            "noise, temporary memory", None, "no allocator statistics on CPU", "at most 1 GiB"
        )
        return
    values = torch.zeros(
        setting.choose(200_000_000, 20_000_000), dtype=torch.int64, device=setting.device
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_noise(values, DEVIATION, SystemNoise())
    on_top = torch.cuda.max_memory_allocated() - before
    yield Check(
        "noise, temporary memory",
        on_top <= 2**30,
        {"bytes": on_top, "values": len(values)},
        "at most 1 GiB",
    )
