"""Flat per-example clipping by book-keeping: one forward, one backward for activations, no weight gradient twice."""

from privacy.clipping.clipped_sum import ClippedSum, MicroBatchStats

__all__ = ["ClippedSum", "MicroBatchStats"]
