"""Keeps the memory that one micro-batch frees and the next one needs again in the process.

glibc gives the top of the heap back to the system when enough of it is free, which is at the end of
every micro-batch. The next one then touches each page anew: about 3 % of a step of clipped training
on two CPU cores, and more in virtual machines (benchmarks/README.md). CUDA's allocator keeps its
memory by itself.
"""

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc's limit (mallopt(3)): smaller tensors come from the heap, larger ones are mapped alone."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc's malloc keep freed memory; returns whether it took effect.

    It takes none with another C library, or where the user has tuned or replaced malloc.
    """
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    never_trims = bool(mallopt(M_TRIM_THRESHOLD, -1))
    return never_trims and bool(mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD))


def give_back_freed_memory() -> None:
    """Gives free memory that glibc's malloc keeps back to the system.

    Called once per logical batch, after its last micro-batch: the memory of its activations is in
    the heap, and the gradient, whose tensors are mapped one by one, would need its memory on top.
    Called once after the self-check of a start, too, which holds several copies of the model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
