"""What a micro-batch takes on a GPU, on paper: every operation, by its FLOPs and by the bytes that it moves.

FLOPs alone hide what clipping costs, half of which is reading and writing. So one micro-batch runs on the meta device, where
nothing is computed, in the branches that CUDA takes. Each operation of torch is one launch. It takes the longer of two times:
its FLOPs at the rate of the units that do them, and its bytes, inputs read once and outputs written once, at that of the memory.
The second cache is never assumed: what one operation has written the next one reads from memory. All rates are a fixed share of
the data sheet (`hardware.REACHED_BF16`, ...), so the sum of these times is a **paper bound**. It leaves out gaps between
launches, tiles that stand out over a matrix, and everything that only a measurement can say.

A function under torch.compile counts as few kernels as inductor makes of it for CUDA (inductor.py); without a GPU nothing else
can tell. Views and allocations launch nothing.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from privacy.clipping import ClippedSum
from trainer.planner.hardware import GPUS, Gpu
from trainer.planner.inductor import kernels_of
from trainer.planner.probe import CLIPPING_FORMULAS, META, with_fused_attention

aten = torch.ops.aten
LAUNCH_NOTHING = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten._unsafe_view,
    aten.promote_types,
}
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, *CLIPPING_FORMULAS}
OVERWRITES = {aten.copy_, aten.zero_, aten.fill_, aten.random_}
"""In place, but what was there before is not read."""
FILLS = {
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
}
"""They take the shape of their input alone."""


@dataclass
class Row:
    """All operations of one kind.

    Attributes:
        part: of the step, by the caller's name for it.
        dtypes: of the operands; they decide which units of the GPU compute.
        moved: bytes read and written in the device's memory.
        seconds: the longer of computing and moving, launch by launch.
    """

    part: str
    operation: str
    dtypes: str
    launches: int = 0
    flops: int = 0
    moved: int = 0
    seconds: float = 0.0


class OperationCounter(TorchDispatchMode):
    """Counts every operation while it is active, on any device; `rows` by part of the work, operation and dtypes."""

    def __init__(self, gpu: Gpu = GPUS["h100-80gb"]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.part = "model"
        self.rows: dict[tuple[str, str, str], Row] = {}
        self._gpu, self._is_inside_kernel = gpu, False

    def total(self, what: str) -> Any:
        """The sum of one attribute over all rows: "launches", "flops", "seconds"."""
        return sum(getattr(row, what) for row in self.rows.values())

    def add(
        self, operation: str, operands: list[Tensor], moved: int, flops: int = 0, launches: int = 1
    ) -> None:
        """Counts one operation, or as much again in each of several launches."""
        names = {
            str(x.dtype).removeprefix("torch.")
            for x in operands
            if x.is_floating_point() and x.dim() > 0
        }
        key = self.part, operation, "+".join(sorted(names))
        row = self.rows.setdefault(key, Row(*key))
        row.launches += launches
        row.flops += launches * flops
        row.moved += launches * moved
        row.seconds += launches * max(
            flops / self._gpu.reached_flops(row.dtypes), moved / self._gpu.reached_bandwidth
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if self._is_inside_kernel or func.is_view or packet in LAUNCH_NOTHING:
            return out
        given = (
            dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            | kwargs
        )
        written = [
            given[argument.name]
            for argument in func._schema.arguments
            if argument.name in given and argument.alias_info and argument.alias_info.is_write
        ]
        is_overwritten = packet in OVERWRITES or "out" in kwargs
        skipped = {id(x) for x in tree_leaves(written)} if is_overwritten else set()
        read = [
            x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) not in skipped
        ]
        read = [] if packet in FILLS else read
        flops = 0
        if packet in CLIPPING_FORMULAS:
            flops = CLIPPING_FORMULAS[packet](
                *(x.shape if isinstance(x, Tensor) else x for x in args)
            )
        elif packet in flop_registry:
            shapes = [
                x for x in args if not isinstance(x, torch.dtype)
            ]  # torch's formulas do not know `out_dtype`
            flops = flop_registry[packet](
                *shapes, **{k: x for k, x in kwargs.items() if k != "out"}, out_val=out
            )
        # A product's operands decide the unit, and not what it is added to; attention's first one.
        operands = read if flops == 0 else read[-2:] if packet in PRODUCTS else read[:1]
        self.add(packet.__name__, operands, moved_bytes(read, (out, written)), flops)
        return out

    def launch_fused(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], for_all_sizes: bool
    ) -> Any:
        """Stands in for `privacy.arithmetic.fused.launch`: counts what inductor makes of the function for CUDA."""
        self._is_inside_kernel, before = True, self._is_inside_kernel
        try:
            made = kernels_of(
                function, arguments
            )  # what inductor calls while it traces is launched by nobody
            result = function(*arguments)
        finally:
            self._is_inside_kernel = before
        if not before:
            tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
            each = made.moved // made.launches
            self.add(f"compiled {function.__name__}", tensors, each, launches=made.launches)
        return result


def moved_bytes(read: list[Tensor], written: Any) -> int:
    """Bytes of different entries: an expanded dimension is one row, and a matrix that meets itself is read once."""

    def size(x: Tensor) -> int:
        return (
            prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)
            * x.element_size()
        )

    def place(
        x: Tensor,
    ) -> tuple[object, ...]:  # the same for the same entries in memory, transposed or not
        return (
            x.untyped_storage()._cdata,
            x.storage_offset(),
            *sorted(zip(x.shape, x.stride(), strict=True)),
        )

    made = {id(x): x for x in tree_leaves(written) if isinstance(x, Tensor)}
    return sum(map(size, {place(x): x for x in read}.values())) + sum(map(size, made.values()))


@contextmanager
def as_on_cuda(counter: OperationCounter) -> Iterator[None]:
    """Tensors of the meta device take the way of CUDA's: products of bf16 in fp32, compiled functions, rows blanked unseen."""

    class Blanking:
        """Stands in for the Triton kernel that blanks excluded rows, which are seldom: it reads a byte each."""

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: counter.add("zero_excluded_rows", [], grid[0])

    kernels = ModuleType("privacy.arithmetic.kernels")
    vars(kernels).update(zero_excluded_rows=Blanking(), ROW_BLOCK=1024)
    contributions = importlib.import_module("privacy.gradients.per_example_gradients")
    seams: dict[str, Any] = {
        "gradients.per_example_gradients._has_bf16_units": lambda device: True,
        "gradients.per_example_gradients.has_fp32_products_of_bf16": lambda device: True,
        "gradients.per_example_gradients._in_place": lambda x: x.is_contiguous(),
        "gradients.per_example_gradients.WIDENED_ENTRIES": contributions.WIDENED_ENTRIES[1:] * 2,
        "sums.totals.has_fp32_products_of_bf16": lambda device: True,
        "sums.totals.adds_term_by_term": lambda x: x.dtype != torch.float64,
        "clipping.clipped_sum.needs_blanking": lambda is_finite_B: True,
        "arithmetic.fused.launch": counter.launch_fused,
    }
    with ExitStack() as stack:
        for name, value in seams.items():
            stack.enter_context(mock.patch(f"privacy.{name}", value))
        # Not `patch.dict`, which would also forget what is imported meanwhile, inductor with it.
        sys.modules[kernels.__name__] = kernels
        stack.callback(sys.modules.pop, kernels.__name__)
        yield


def count_operations(
    step: Callable[[], object],
    *,
    on_cuda: bool = True,
    gpu: Gpu = GPUS["h100-80gb"],
    clipped: ClippedSum | None = None,
) -> OperationCounter:
    """Counts what `step()` launches, where its tensors are of the meta device; twice, since what is made once is made then.

    Args:
        clipped: what the step adds to, whose parts are then told apart: the model, the norms layer by layer, the sums.
    """
    counter = OperationCounter(gpu)
    with (
        with_fused_attention(),
        as_on_cuda(counter) if on_cuda else nullcontext(),
        ExitStack() as stack,
    ):
        step()
        counter.rows.clear()
        if clipped is not None:
            recorder, factors = clipped._record(), clipped._factors
            report = recorder.report

            def reporting(call: Any) -> None:
                before, counter.part = counter.part, "norms"
                report(call)
                counter.part = before

            def from_here(*arguments: Any) -> Any:
                counter.part = "sums"
                return factors(*arguments)

            stack.enter_context(mock.patch.object(recorder, "report", reporting))
            stack.enter_context(mock.patch.object(clipped, "_factors", from_here))
        with counter:
            step()
    return counter


def roofline(
    clipped: ClippedSum, model: nn.Module, inputs: dict[str, Tensor], gpu: Gpu
) -> tuple[OperationCounter, OperationCounter]:
    """Counts one micro-batch by `clipped`, and by autograd, which adds to the gradients of earlier micro-batches.

    Args:
        model: on the meta device, in its compute dtype, as are the inputs.
    """
    is_padding_B = torch.zeros(len(next(iter(inputs.values()))), dtype=torch.bool, device=META)
    private = count_operations(
        lambda: clipped.add_micro_batch(model, inputs, is_padding_B), gpu=gpu, clipped=clipped
    )
    clipped.zero_()
    return private, count_operations(lambda: model(**inputs).sum().backward(), gpu=gpu)
