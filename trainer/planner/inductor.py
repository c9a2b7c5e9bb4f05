"""What inductor, torch.compile's own compiler, makes of a function for CUDA: how many kernels, and how much they move.

No GPU, CUDA or Triton is needed, because nothing runs: the function is traced with fake CUDA tensors, inductor fuses and writes
the code, and stops before a kernel is built. The GPU that it writes for is an H100. What it needs of torch is private, and all of
it is in this file; tests/trainer/test_roofline.py fails when torch changes it.
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


class H100(NamedTuple):
    """What torch says of this device, as far as inductor asks."""

    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    total_memory: int = 80 * 10**9
    L2_cache_size: int = 50 * 2**20


class Kernels(NamedTuple):
    """What a function becomes.

    Attributes:
        launches: how many there are.
        moved: bytes that all of them read and write, each buffer once a kernel.
        code: as inductor wrote it.
    """

    launches: int
    moved: int
    code: str


class _Written(Exception):
    """Inductor has written the code, which is not to be built."""


def kernels_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Kernels:
    """Compiles `function(*arguments)` for CUDA, as far as its code; asked again for equal shapes, it remembers.

    Args:
        arguments: tensors of any device, and other hashable values, in lists and tuples; shapes are taken as fixed.
    """
    leaves, tree = tree_flatten(arguments)
    shapes = (
        _Shape(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves
    )
    return _kernels(function, tree, tuple(shapes))


class _Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@functools.cache
def _kernels(function: Callable[..., Any], tree: TreeSpec, leaves: tuple[Any, ...]) -> Kernels:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch.fx.experimental.proxy_tensor import make_fx

    places = [i for i, x in enumerate(leaves) if isinstance(x, _Shape)]

    def pure(*tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns what the function returns and what it writes to: fake tensors of another device cannot be written back."""
        copies = [x.clone() for x in tensors]
        before = [x._version for x in copies]
        values = list(leaves)
        for place, copy in zip(places, copies, strict=True):
            values[place] = copy
        result = function(*tree_unflatten(values, tree))
        written = [x for x, version in zip(copies, before, strict=True) if x._version != version]
        return tuple(x for x in tree_leaves((result, written)) if isinstance(x, Tensor))

    found: list[Kernels] = []

    def stop(graph: GraphLowering) -> None:
        code = graph.codegen()[0].value
        found.append(
            Kernels(
                code.count(".run(") + code.count("extern_kernels."), graph.count_bytes()[0], code
            )
        )
        raise _Written

    # Inductor calls what torch will rename.
    with (
        ExitStack() as stack,
        torch.no_grad(),
        warnings.catch_warnings(action="ignore", category=FutureWarning),
    ):
        for target, answers in _as_if_there_was_a_gpu().items():
            for name, answer in answers.items():
                stack.enter_context(mock.patch(f"{target}.{name}", answer))
        stack.enter_context(mock.patch.object(GraphLowering, "_compile_to_module", stop))
        stack.enter_context(
            torch._inductor.config.patch(fx_graph_cache=False, joint_graph_constant_folding=False)
        )
        stack.enter_context(FakeTensorMode())
        shapes = [leaves[place] for place in places]
        fake = [
            torch.empty_strided(s.size, s.stride, dtype=s.dtype, device="cuda:0") for s in shapes
        ]
        try:
            compile_fx(make_fx(pure)(*fake), fake)
        except Exception:  # inductor wraps what stops it
            if not found:
                raise
    return found[0]


def _as_if_there_was_a_gpu() -> dict[str, dict[str, Callable[..., Any]]]:
    """What inductor asks a GPU: where it asks, by what names, and the answers."""
    return {
        "torch.cuda": {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": lambda device=None: H100(),
            "get_device_capability": lambda device=None: (9, 0),
            "get_rng_state": lambda: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state: None,
            "_exchange_device": lambda device: 0,
            "_maybe_exchange_device": lambda device: 0,
        },
        "torch._dynamo.device_interface.CudaInterface": {
            "get_device_properties": staticmethod(lambda device=None: H100()),
            "get_compute_capability": staticmethod(lambda device=None: 90),
        },
        "torch._inductor.scheduler": {"has_triton": lambda: True},
        "torch.utils._triton": {"triton_hash_with_backend": lambda: ""},
        # Patterns of attention, for which it makes real tensors.
        "torch._inductor.fx_passes.joint_graph": {"lazy_init": lambda device=None: None},
    }
