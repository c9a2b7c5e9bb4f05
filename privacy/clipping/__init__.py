"""Flat per-example clipping that computes no weight gradient only to throw it away."""

from collections.abc import Mapping

from .clip_factors import MicroBatchStats
from .clipped_sum import ClippedSum
from .two_passes import TwoPassSum

SUMS: Mapping[str, type[ClippedSum]] = {cls.mode: cls for cls in (ClippedSum, TwoPassSum)}
"""The sums by the recipe's `privacy.clipping_mode`."""

__all__ = ["SUMS", "ClippedSum", "MicroBatchStats", "TwoPassSum"]
