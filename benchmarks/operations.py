"""How many operations of torch a micro-batch launches, counted on the meta device: what the host of a GPU has to issue in time.

Views and allocations launch nothing and do not count. Attention is one fused operation, as on CPU and CUDA; what clipping
compiles there counts as many kernels as torch.compile makes of it (KERNELS).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from privacy.clipping import accumulators, clipped_sum, contributions, fused
from trainer.planner.probe import with_fused_attention

aten = torch.ops.aten
LAUNCH_NOTHING = {aten.empty, aten.empty_like, aten.new_empty, aten._unsafe_view, aten.promote_types}


KERNELS = {"_strip": 2, "_layer_norm": 2, "_rms_norm": 2}
"""Kernels of a fused function, where it is not one: inductor ends one where a sum along another dimension begins."""


class _Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.overloadpacket not in LAUNCH_NOTHING
        return func(*args, **(kwargs or {}))

    def fused(self, function: Callable[..., Any], arguments: tuple[Any, ...], for_all_sizes: bool) -> Any:
        """Stands in for `fused.launch`."""
        before = self.count
        result = function(*arguments)
        self.count = before + KERNELS.get(function.__name__, 1)
        return result


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
    """Tensors of the meta device take the way of CUDA's: compiled functions, products of bf16 in fp32, rows blanked unseen."""
    kernels = ModuleType("privacy.clipping.kernels")
    vars(kernels).update(zero_excluded_rows=_Kernel(launches), ROW_BLOCK=1024)
    with ExitStack() as stack:
        for target, name, value in (
            (contributions, "_has_bf16_units", lambda device: True),
            (contributions, "WIDENED_ENTRIES", contributions.WIDENED_ENTRIES[1:] * 2),
            (contributions, "has_fp32_products_of_bf16", lambda device: True),
            (accumulators, "has_fp32_products_of_bf16", lambda device: True),
            (contributions, "_in_place", lambda x: x.is_contiguous()),
            (clipped_sum, "needs_blanking", lambda is_finite_B: True),
            (fused, "launch", launches.fused),
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
