"""One micro-batch of the real clipped sum on the meta device: its memory timeline and its FLOPs, without a single number.

Meta tensors have shapes and no values, so a model of any size costs microseconds an operation, and every size of micro-batch
can be asked for itself: nothing is extrapolated (the captioner's head, for one, works in another way above a certain size).
What is alive when depends on the model and the clipping mode, and any list of it by hand would be wrong for the next model: so
every tensor is counted from birth to death. The operations are those of the CPU path, with the fused attention that CPU and
CUDA both have. On CUDA some fp32 copies of bf16 tensors do not exist, so the peak is an upper bound there; scratch memory inside
of kernels is not seen.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # the one private name here: flop_counter is built on it too
from torch.utils.flop_counter import FlopCounterMode

from privacy.certified.certified_sum import CertifiedSum
from privacy.clipping import ClippedSum, TwoPassSum
from privacy.clipping.clipped_sum import Mode
from privacy.plan.numbers import PrivacyPlan
from privacy.run.mechanism import clipper_of
from privacy.sums.grid import EXAMPLES_PER_PART, Grid
from privacy.sums.local import LocalSums
from trainer.config.machine import MachineSettings
from trainer.engines.blocks import checkpoint_blocks
from trainer.tasks import TrainingTask

META = torch.device("meta")


CLIPPING_FORMULAS: Mapping[Any, Callable[..., int]] = {
    # torch counts `addmm`, but not the in-place form that the accumulators use; `addmv` sums written-out gradients by weight.
    torch.ops.aten.addmm_: lambda total, a, b, *_, **__: int(2 * a[0] * a[1] * b[1]),
    torch.ops.aten.addmv_: lambda total, a, b, *_, **__: int(2 * a[0] * a[1]),
}
"""FLOPs of what clipping does and torch does not count, from shapes."""


def count_flops(work: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and attention in `work()`; a product of two numbers and its sum are two."""
    with FlopCounterMode(display=False, custom_mapping=dict(CLIPPING_FORMULAS)) as counter:
        work()
    return int(counter.get_total_flops())


@contextmanager
def with_fused_attention() -> Iterator[None]:
    """Takes the fused kernel of CPU and CUDA, which keeps no attention matrix; for meta tensors torch would write it out.

    (A TorchFunctionMode would not do: it is off during a backward pass, where checkpointed blocks run again.)
    """

    def fused(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False
    ) -> Any:
        """The kernel that takes every dtype and mask, by its own name: it has a formula for its FLOPs too."""
        if attn_mask is not None:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype).expand(
                *query.shape[:-1], key.shape[-2]
            )
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, 0.0, is_causal
        )[0]

    written_out = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = fused  # type: ignore[assignment]  # it takes what our models give
    try:
        yield
    finally:
        F.scaled_dot_product_attention = written_out


class MemoryTimeline(TorchDispatchMode):
    """Live bytes of the tensors that are made while it is active, after every operation; on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.live_bytes: list[int] = []
        self._live = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _plain_tensors((args, kwargs)):
            self._meet(tensor, is_new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in _plain_tensors(out):
            self._meet(tensor, is_new=True)
        self.live_bytes.append(self._live)
        return out

    def _meet(self, tensor: Tensor, *, is_new: bool) -> None:
        """Counts a storage that an operation made; one that is first met as an input was there before."""
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object per living storage
        if key in self._known:
            return
        self._known[key] = storage.nbytes() if is_new else 0
        self._live += self._known[key]

        def forget() -> None:
            self._live -= self._known.pop(key)

        weakref.finalize(storage, forget)


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors with a storage of their own in nested arguments; wrappers like DTensor have none."""
    if type(tree) in (Tensor, torch.nn.Parameter):
        if tree.layout == torch.strided:
            yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _plain_tensors(item)
    elif isinstance(tree, dict):
        yield from _plain_tensors(list(tree.values()))


class Probe:
    """Asks a task's model what a micro-batch takes.

    Args:
        machine: compute dtype and activation checkpointing.
        plan: makes the clipper.
        rows: of one rank in a logical batch, for which sums have room (`privacy.step.batches.max_rows`).
        weights_of_one_pass: the engine gathers weights for one pass only, so that two passes need two forwards.
    """

    def __init__(
        self,
        task: TrainingTask,
        machine: MachineSettings,
        plan: PrivacyPlan,
        *,
        rows: int,
        weights_of_one_pass: bool,
    ) -> None:
        self.model = task.skeleton()
        """The model on the meta device, in fp32, without activation checkpointing; for counting."""
        self._dtype = machine.compute_dtype
        self._rows = {name: (x.shape[1:], x.dtype) for name, x in task.synthetic_inputs(1).items()}
        self.module = task.skeleton().to(self._dtype)
        # `cpu_checkpointing` copies, which meta tensors cannot do: a block's inputs count as if they stayed.
        checkpoint_blocks(self.module, replace(machine, checkpoint_on_cpu=False))

        self._plan, self._num_rows, self._weights_of_one_pass = plan, rows, weights_of_one_pass
        self.clipped = self._clipper("bookkeeping")
        self.peak = cache(self._peak)  # it is asked again for the same size

    def _clipper(self, mode: Mode) -> ClippedSum:
        def unlimited(
            shapes: Mapping[str, torch.Size], grid: Grid, device: torch.device
        ) -> LocalSums:
            # Micro-batches of every size are tried.
            return LocalSums(shapes, replace(grid, rows=None), device)

        clipped = clipper_of(
            self._plan, self.module, mode=mode, accumulator=unlimited, rows=self._num_rows
        )
        if isinstance(clipped, TwoPassSum):
            clipped.keeps_graph &= not self._weights_of_one_pass
        return clipped

    def _set_mode(self, mode: Mode) -> None:
        if self.clipped.mode not in (mode, "certified"):
            self.clipped.detach()
            self.clipped = self._clipper(mode)

    def inputs(self, size: int) -> dict[str, Tensor]:
        """Inputs of `size` examples on the meta device."""
        return {
            name: torch.empty(
                size, *shape, dtype=self._dtype if dtype.is_floating_point else dtype, device=META
            )
            for name, (shape, dtype) in self._rows.items()
        }

    def _run(self, size: int) -> int:
        """Clips a micro-batch, as many examples of it as clipping works off together, which it returns."""
        part = min(size, EXAMPLES_PER_PART)
        if isinstance(self.clipped, CertifiedSum):
            part = self.clipped.size_of_part(part)
        is_padding_B = torch.zeros(part, dtype=torch.bool, device=META)
        self.clipped.add_micro_batch(self.module, self.inputs(part), is_padding_B)
        return part

    def _peak(self, mode: Mode, size: int) -> int:
        """Bytes alive at the highest point of a micro-batch, inputs included, on top of weights and sums."""
        self._set_mode(mode)
        self.clipped.accumulator.start(0)  # makes the sums, which do not count here
        with with_fused_attention(), MemoryTimeline() as timeline:
            part = self._run(size)
        self.clipped.zero_()
        rest = sum(x.nbytes for x in self.inputs(size - part).values()) if size > part else 0
        return max(timeline.live_bytes, default=0) + rest

    def flops(self, mode: Mode, size: int) -> int:
        """Operations of matrix products and attention for one example of a micro-batch; rows of padding take as many."""
        self._set_mode(mode)
        parts: list[int] = []
        with with_fused_attention():
            counted = count_flops(lambda: parts.append(self._run(size)))
        self.clipped.zero_()
        return counted // parts[0]


def plain_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Forward and backward of a non-private micro-batch in fp32, without checkpointing."""
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    with with_fused_attention():
        return count_flops(
            lambda: torch.autograd.grad(model(**inputs).sum(), trained, allow_unused=True)
        )
