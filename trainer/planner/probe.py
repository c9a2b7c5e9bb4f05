"""Measures memory and FLOPs of one micro-batch of the real clipped sum on the meta device.

Meta tensors have no values, so each size of micro-batch is measured and none extrapolated: the
captioner's head, for one, works in another way above a certain size. The operations are those of
the CPU path. On CUDA some fp32 copies of bf16 tensors do not exist, so the peak is an upper bound
there. Scratch memory inside of kernels is not counted.
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

# The one private module here; torch's flop_counter is built on it too.
from torch.utils._python_dispatch import TorchDispatchMode
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
    # torch counts `addmm`, but not its in-place form, which the accumulators use; `addmv_` sums
    # written-out gradients by weight.
    torch.ops.aten.addmm_: lambda total, a, b, *_, **__: int(2 * a[0] * a[1] * b[1]),
    torch.ops.aten.addmv_: lambda total, a, b, *_, **__: int(2 * a[0] * a[1]),
}
"""FLOPs, from shapes, of operations of clipping that torch does not count."""


def count_flops(work: Callable[[], object]) -> int:
    """Counts the floating-point operations of matrix products and attention in `work()`.

    A product of two numbers and its sum are two operations.
    """
    with FlopCounterMode(display=False, custom_mapping=dict(CLIPPING_FORMULAS)) as counter:
        work()
    return int(counter.get_total_flops())


@contextmanager
def with_fused_attention() -> Iterator[None]:
    """Makes meta tensors take the fused attention of CPU and CUDA, which keeps no attention matrix.

    torch would write the matrix out. A TorchFunctionMode is off during a backward pass, where
    checkpointed blocks run again, so the function is replaced instead.
    """

    def fused(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False
    ) -> Any:
        """Calls the kernel that takes every dtype and mask, and has a formula for its FLOPs."""
        if attn_mask is not None:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        outputs = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, 0.0, is_causal
        )
        return outputs[0]

    original = F.scaled_dot_product_attention
    # It takes the arguments that our models pass.
    F.scaled_dot_product_attention = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


class MemoryTimeline(TorchDispatchMode):
    """Counts the live bytes of new tensors after every operation, on any device.

    Every tensor is counted from birth to death, since models and clipping modes keep different
    tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.live_bytes: list[int] = []
        self._live = 0
        self._bytes_of_storage: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _plain_tensors((args, kwargs)):
            self._count(tensor, is_new=False)
        outputs = func(*args, **(kwargs or {}))
        for tensor in _plain_tensors(outputs):
            self._count(tensor, is_new=True)
        self.live_bytes.append(self._live)
        return outputs

    def _count(self, tensor: Tensor, *, is_new: bool) -> None:
        """Counts a storage that an operation made; an input's storage is older and counts as 0."""
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps one Python object per living storage
        if key in self._bytes_of_storage:
            return
        self._bytes_of_storage[key] = storage.nbytes() if is_new else 0
        self._live += self._bytes_of_storage[key]

        def forget() -> None:
            self._live -= self._bytes_of_storage.pop(key)

        weakref.finalize(storage, forget)


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested arguments that have a storage; wrappers as DTensor have none."""
    if type(tree) in (Tensor, torch.nn.Parameter):
        if tree.layout == torch.strided:
            yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _plain_tensors(branch)
    elif isinstance(tree, dict):
        yield from _plain_tensors(list(tree.values()))


class Probe:
    """Measures memory and operations of a micro-batch of a task's model.

    Args:
        machine: gives compute dtype and activation checkpointing.
        plan: makes the clipper.
        rows: of one rank in a logical batch, for which sums have room
            (`privacy.step.batches.max_rows`).
        weights_of_one_pass: the engine gathers weights for one pass only, so that two passes need
            two forwards.
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
        # `cpu_checkpointing` copies a block's inputs, which meta tensors cannot do: they count as
        # if they stayed on the device.
        checkpoint_blocks(self.module, replace(machine, checkpoint_on_cpu=False))

        self._plan = plan
        self._num_rows = rows
        self._weights_of_one_pass = weights_of_one_pass
        self.clipped = self._clipper("bookkeeping")
        # A plan needs the peak of a size several times.
        self.peak = cache(self._peak)

    def _clipper(self, mode: Mode) -> ClippedSum:
        """Returns a clipper whose sums take micro-batches of every size."""

        def unlimited(
            shapes: Mapping[str, torch.Size], grid: Grid, device: torch.device
        ) -> LocalSums:
            return LocalSums(shapes, replace(grid, rows=None), device)

        clipped = clipper_of(
            self._plan, self.module, mode=mode, accumulator=unlimited, rows=self._num_rows
        )
        if isinstance(clipped, TwoPassSum):
            clipped.keeps_graph &= not self._weights_of_one_pass
        return clipped

    def _set_mode(self, mode: Mode) -> None:
        """Replaces the clipper by one of another mode."""
        if self.clipped.mode not in (mode, "certified"):
            self.clipped.detach()
            self.clipped = self._clipper(mode)

    def inputs(self, size: int) -> dict[str, Tensor]:
        """Returns inputs of `size` examples on the meta device."""
        inputs = {}
        for name, (shape, row_dtype) in self._rows.items():
            dtype = self._dtype if row_dtype.is_floating_point else row_dtype
            inputs[name] = torch.empty(size, *shape, dtype=dtype, device=META)
        return inputs

    def _run(self, size: int) -> int:
        """Clips the part of a micro-batch that clipping takes at once, and returns its size."""
        part = min(size, EXAMPLES_PER_PART)
        if isinstance(self.clipped, CertifiedSum):
            part = self.clipped.size_of_part(part)
        is_padding_B = torch.zeros(part, dtype=torch.bool, device=META)
        self.clipped.add_micro_batch(self.module, self.inputs(part), is_padding_B)
        return part

    def _peak(self, mode: Mode, size: int) -> int:
        """Returns the peak of live bytes in a micro-batch, without weights and sums.

        Inputs are included.
        """
        self._set_mode(mode)
        # Makes the sums outside of the timeline: they do not count here.
        self.clipped.accumulator.start(0)
        with with_fused_attention(), MemoryTimeline() as timeline:
            part = self._run(size)
        self.clipped.zero_()
        other_inputs = 0
        if size > part:
            other_inputs = sum(x.nbytes for x in self.inputs(size - part).values())
        return max(timeline.live_bytes, default=0) + other_inputs

    def flops(self, mode: Mode, size: int) -> int:
        """Returns the operations of matrix products and attention per row of a micro-batch.

        A row of padding takes as many as an example.
        """
        self._set_mode(mode)
        parts: list[int] = []
        with with_fused_attention():
            total = count_flops(lambda: parts.append(self._run(size)))
        self.clipped.zero_()
        return total // parts[0]


def plain_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Counts forward and backward of a non-private micro-batch in fp32, without checkpointing."""
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    parameters = [p for p in model.parameters() if p.requires_grad]

    def differentiate() -> None:
        loss = model(**inputs).sum()
        torch.autograd.grad(loss, parameters, allow_unused=True)

    with with_fused_attention():
        return count_flops(differentiate)
