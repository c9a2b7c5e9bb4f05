"""How many operations of torch a micro-batch launches, counted on the meta device: what the host of a GPU has to issue in time.

Views and allocations launch nothing and do not count. Attention is one fused operation, as on CPU and CUDA; a Triton kernel is
one, and so is every cast, sum and copy around it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from privacy.clipping import accumulators, clipped_sum, contributions, triton_norm
from trainer.planner.probe import with_fused_attention

aten = torch.ops.aten
LAUNCH_NOTHING = {aten.empty, aten.empty_like, aten.new_empty, aten._unsafe_view, aten.promote_types}


class _Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.overloadpacket not in LAUNCH_NOTHING
        return func(*args, **(kwargs or {}))


class _Kernel:
    """A Triton kernel that does nothing but count."""

    def __init__(self, launches: _Launches) -> None:
        self._launches = launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **settings: Any) -> None:
        self._launches.count += 1


@contextmanager
def _as_on_cuda(launches: _Launches) -> Iterator[None]:
    """Tensors of the meta device take the way of CUDA's: Triton kernels, products of bf16 in fp32, rows blanked unseen."""
    kernels = ModuleType("privacy.clipping.kernels")
    vars(kernels).update(pair_of_tiles=_Kernel(launches), zero_excluded_rows=_Kernel(launches), ROW_BLOCK=1024)
    with ExitStack() as stack:
        for target, name, value in (
            (contributions, "_has_bf16_units", lambda device: True),
            (contributions, "WIDENED_ENTRIES", contributions.WIDENED_ENTRIES[1:] * 2),
            (contributions, "has_fp32_products_of_bf16", lambda device: True),
            (accumulators, "has_fp32_products_of_bf16", lambda device: True),
            (contributions, "_in_place", lambda x: x.is_contiguous()),
            (clipped_sum, "needs_blanking", lambda is_finite_B: True),
            (triton_norm, "can_run", lambda a_BTd, g_BTp: a_BTd.dtype in triton_norm.DTYPES),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.dict(sys.modules, {kernels.__name__: kernels}))
        yield


def count_operations(step: Callable[[], object], *, as_on_cuda: bool) -> int:
    """Operations that `step()` launches, where its tensors are of the meta device."""
    with with_fused_attention():
        step()  # what is made once is made
        with _Launches() as launches, _as_on_cuda(launches) if as_on_cuda else ExitStack():
            step()
    return launches.count
