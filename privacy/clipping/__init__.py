"""Flat per-example clipping by book-keeping: one forward, one backward for activations, no weight gradient twice."""

from .clipped_sum import ClippedSum
from .norms import MicroBatchStats

__all__ = ["ClippedSum", "MicroBatchStats"]
