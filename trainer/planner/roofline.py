"""What a micro-batch takes on a GPU, on paper: every operation, by its FLOPs and by the bytes that it moves.

FLOPs alone hide what clipping costs, half of which is reading and writing. So one micro-batch runs on the meta device, where
nothing is computed, in the branches that CUDA takes. Each operation of torch is one launch. It takes the longer of two times:
its FLOPs at the rate of the units that do them, and its bytes, inputs read once and outputs written once, at that of the memory.
The second cache is never assumed: what one operation has written the next one reads from memory. All rates are a fixed share of
the data sheet (REACHED), so the sum of these times is a **paper bound**. It leaves out gaps between launches, tiles that stand
out over a matrix, and everything that only a measurement can say.

A function under torch.compile counts as few kernels as inductor makes of it for CUDA (inductor.py); without a GPU nothing else
can tell. Views and allocations launch nothing.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from privacy.clipping import ClippedSum
from trainer.planner.hardware import Gpu
from trainer.planner.inductor import kernels_of
from trainer.planner.probe import CLIPPING_FORMULAS, META, with_fused_attention

aten = torch.ops.aten
LAUNCH_NOTHING = {aten.empty, aten.empty_like, aten.new_empty, aten._unsafe_view, aten.promote_types}
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, *CLIPPING_FORMULAS}
OVERWRITES = {aten.copy_, aten.zero_, aten.fill_, aten.random_}
"""In place, but what was there before is not read."""
FILLS = {aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros_like, aten.ones_like, aten.full_like}
"""Of their input they take the shape alone."""


class Work(NamedTuple):
    """What one operation does.

    Attributes:
        moved: bytes read and written in the device's memory.
        cached: bytes that a handwritten kernel reads again and again, from the second cache.
    """

    flops: int = 0
    moved: int = 0
    cached: int = 0


@dataclass
class Row:
    """All operations of one kind.

    Attributes:
        part: of the step, as the caller calls it.
        dtypes: of the operands, which say what units compute.
        works: what they do, and how many launches do just that.
    """

    part: str
    operation: str
    dtypes: str
    works: Counter[Work] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        return self.works.total()

    @property
    def flops(self) -> int:
        return sum(work.flops * count for work, count in self.works.items())

    @property
    def moved(self) -> int:
        return sum(work.moved * count for work, count in self.works.items())

    def seconds(self, gpu: Gpu) -> float:
        """Each launch takes as long as the longest of its computing and moving."""
        flops = gpu.reached_flops(self.dtypes)
        return sum(
            count * max(work.flops / flops, work.moved / gpu.reached_bandwidth, work.cached / gpu.reached_cache)
            for work, count in self.works.items()
        )


class OperationCounter(TorchDispatchMode):
    """Counts every operation while it is active, on any device; `rows` by part of the work, operation and dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.part = "model"
        self.rows: dict[tuple[str, str, str], Row] = {}
        self._is_inside_kernel = False

    @property
    def launches(self) -> int:
        return sum(row.launches for row in self.rows.values())

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.rows.values())

    def add(self, operation: str, operands: list[Tensor], work: Work, launches: int = 1) -> None:
        """Counts one operation, or as much again in each of several launches."""
        names = {str(x.dtype).removeprefix("torch.") for x in operands if x.is_floating_point() and x.dim() > 0}
        key = self.part, operation, "+".join(sorted(names))
        self.rows.setdefault(key, Row(*key)).works[work] += launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        if self._is_inside_kernel or func.is_view or packet in LAUNCH_NOTHING:
            return out
        written = [
            x for argument, x in _arguments(func, args, kwargs) if argument.alias_info and argument.alias_info.is_write
        ]
        is_overwritten = packet in OVERWRITES or "out" in kwargs
        skipped = {id(x) for x in tree_leaves(written)} if is_overwritten else set()
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) not in skipped]
        read = [] if packet in FILLS else read
        made = {id(x): x for x in tree_leaves((out, written)) if isinstance(x, Tensor)}
        flops = 0
        if packet in CLIPPING_FORMULAS:
            flops = CLIPPING_FORMULAS[packet](*(x.shape if isinstance(x, Tensor) else x for x in args))
        elif packet in flop_registry:
            shapes = [x for x in args if not isinstance(x, torch.dtype)]  # torch's formulas do not know `out_dtype`
            flops = flop_registry[packet](*shapes, **{k: x for k, x in kwargs.items() if k != "out"}, out_val=out)
        moved = sum(map(num_bytes, read)) + sum(map(num_bytes, made.values()))
        # A product's operands decide the unit, and not what it is added to; attention's first one.
        operands = read if flops == 0 else read[-2:] if packet in PRODUCTS else read[:1]
        self.add(packet.__name__, operands, Work(flops, moved))
        return out

    def launch_fused(self, function: Callable[..., Any], arguments: tuple[Any, ...], for_all_sizes: bool) -> Any:
        """Stands in for `privacy.clipping.fused.launch`: counts what inductor makes of the function for CUDA."""
        made = kernels_of(function, arguments)
        self._is_inside_kernel, before = True, self._is_inside_kernel
        try:
            result = function(*arguments)
        finally:
            self._is_inside_kernel = before
        if not before:
            tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
            each = Work(moved=made.moved // made.launches)
            self.add(f"compiled {function.__name__}", tensors, each, made.launches)
        return result


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """(argument of the operation's schema, value)."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]
        elif position < len(args):
            yield argument, args[position]


def num_bytes(x: Tensor) -> int:
    """Bytes of a tensor's different entries: an expanded dimension is one row."""
    return prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0) * x.element_size()


class _Kernel:
    """Stands in for a Triton kernel: nothing runs."""

    def __init__(self, count: Callable[..., None]) -> None:
        self._count = count

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **settings: self._count(grid[0], *args, **settings)


@contextmanager
def as_on_cuda(counter: OperationCounter) -> Iterator[None]:
    """Tensors of the meta device take the way of CUDA's: products of bf16 in fp32, compiled functions, rows blanked unseen."""

    def pair_of_tiles(programs: int, a: Tensor, *args: Any, BLOCK_T: int, **_: Any) -> None:
        g = next(x for x in args if isinstance(x, Tensor))
        d, p = a.shape[2], g.shape[2]
        again = programs * 2 * BLOCK_T * (d * a.element_size() + p * g.element_size())
        work = Work(programs * 2 * BLOCK_T**2 * (d + p), num_bytes(a) + num_bytes(g), again)
        counter.add("pair_of_tiles", [a, g], work)

    def zero_excluded_rows(programs: int, *args: Any, **_: Any) -> None:
        counter.add("zero_excluded_rows", [], Work(moved=programs))

    kernels = ModuleType("privacy.clipping.kernels")
    vars(kernels).update(
        pair_of_tiles=_Kernel(pair_of_tiles), zero_excluded_rows=_Kernel(zero_excluded_rows), ROW_BLOCK=1024
    )
    seams: dict[str, dict[str, Any]] = {
        "contributions": {
            "_has_bf16_units": lambda device: True,
            "has_fp32_products_of_bf16": lambda device: True,
            "_in_place": lambda x: x.is_contiguous(),
            "_TOKENS_PER_STRIP": (128, 128),
        },
        "accumulators": {
            "has_fp32_products_of_bf16": lambda device: True,
            "adds_term_by_term": lambda x: x.dtype != torch.float64,
        },
        "clipped_sum": {"needs_blanking": lambda is_finite_B: True},
        "triton_norm": {"can_run": lambda a_BTd, g_BTp: a_BTd.dtype in (torch.float32, torch.bfloat16)},
        "fused": {"launch": counter.launch_fused},
    }
    with ExitStack() as stack:
        for module, values in seams.items():
            if (
                find_spec(f"privacy.clipping.{module}") is not None
            ):  # the same counter reads commits with and without it
                for name, value in values.items():
                    stack.enter_context(mock.patch(f"privacy.clipping.{module}.{name}", value))
        contributions = importlib.import_module("privacy.clipping.contributions")
        widened = contributions.WIDENED_ENTRIES[1:] * 2
        stack.enter_context(mock.patch.object(contributions, "WIDENED_ENTRIES", widened))
        stack.enter_context(mock.patch.dict(sys.modules, {kernels.__name__: kernels}))
        yield


def count_operations(
    step: Callable[[], object], *, on_cuda: bool = True, clipped: ClippedSum | None = None
) -> OperationCounter:
    """Counts what `step()` launches, where its tensors are of the meta device; twice, since what is made once is made then.

    Args:
        clipped: what the step adds to, whose parts are then told apart: the model, the norms layer by layer, the sums.
    """
    counter = OperationCounter()
    with with_fused_attention(), as_on_cuda(counter) if on_cuda else nullcontext():
        step()
        counter.rows.clear()
        with _parts(counter, clipped) if clipped is not None else nullcontext(), counter:
            step()
    return counter


@contextmanager
def _parts(counter: OperationCounter, clipped: ClippedSum) -> Iterator[None]:
    recorder, factors = clipped._record(), clipped._factors
    report = recorder.report

    def reporting(call: Any) -> None:
        before, counter.part = counter.part, "norms"
        report(call)
        counter.part = before

    def from_here(*arguments: Any) -> Any:
        counter.part = "sums"
        return factors(*arguments)

    with mock.patch.object(recorder, "report", reporting), mock.patch.object(clipped, "_factors", from_here):
        yield


@dataclass(frozen=True)
class Roofline:
    """A non-private and a clipped micro-batch.

    Attributes:
        private, non_private: what they count.
    """

    gpu: Gpu
    private: OperationCounter
    non_private: OperationCounter

    @property
    def ratio(self) -> float:
        """Clipped to non-private time."""
        return self.private_seconds / self.non_private_seconds

    @property
    def private_seconds(self) -> float:
        return sum(row.seconds(self.gpu) for row in self.private.rows.values())

    @property
    def non_private_seconds(self) -> float:
        return sum(row.seconds(self.gpu) for row in self.non_private.rows.values())


def roofline(clipped: ClippedSum, model: nn.Module, inputs: dict[str, Tensor], gpu: Gpu) -> Roofline:
    """Of one micro-batch by `clipped`, and by autograd, which adds to the gradients of earlier micro-batches.

    Args:
        model: on the meta device, in its compute dtype, as are the inputs.
    """
    is_padding_B = torch.zeros(len(next(iter(inputs.values()))), dtype=torch.bool, device=META)
    private = count_operations(lambda: clipped.add_micro_batch(model, inputs, is_padding_B), clipped=clipped)
    clipped.zero_()
    return Roofline(gpu, private, count_operations(lambda: model(**inputs).sum().backward()))
