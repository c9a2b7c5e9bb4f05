"""Memory that one micro-batch frees and the next one needs again stays with the process, until the last one.

glibc gives the top of the heap back to the system whenever enough of it is free, which is at the end of every micro-batch. The
next one then touches each page anew: about 3 % of a step of clipped training on two CPU cores, and more in virtual machines
(benchmarks/README.md). CUDA's allocator keeps its memory by itself.
"""

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc accepts no more (mallopt(3)): tensors below it come from the heap, those above are mapped each by itself."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Sets glibc's malloc so; returns whether it took effect. Not on other C libraries, nor where the user tuned it."""
    if any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, -1)) and bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    )


def give_back_freed_memory() -> None:
    """Returns what is free to the system, where glibc's malloc keeps it.

    Called once per logical batch, after its last micro-batch: activations lie in the heap, and the gradient, whose tensors are
    mapped each by itself, would come on top of them. And once after the self-check of a start, which holds several copies of the
    whole model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
