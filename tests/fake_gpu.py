"""A GPU made of main memory: after `install()` this process computes on `cuda`, with the CPU's arithmetic and CUDA's rules.

Tensors on it are real tensors of torch's device type CUDA, and each operation on them ends in a kernel of ours, which runs the
CPU's on the same memory. So torch itself refuses to mix devices, to read a GPU's tensor as an array of numpy, and so on. The
kernels refuse what only a CUDA build would, and note for what the host waits in a step: a line "PHASE<tab>KIND<tab>OPERATION<tab>
PLACE" of $FAKE_GPU_NOTES.

What it does not show: speed, the order of queued work (all streams are one), kernels made by Triton or torch.compile (which count
as not available here), fused attention, and how a GPU rounds.
"""

import contextlib
import ctypes
import functools
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

from privacy.clipping import ClippedSum
from privacy.numerics import fused
from privacy.step.step import train_step

ROOT = Path(__file__).resolve().parents[1]
ROOMS = tuple(
    f"{ROOT / room}{os.sep}" for room in ("trainer", "privacy", "models", "data", "evaluation")
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
ON_SIZES = {"as_strided", "view", "_reshape_alias", "unfold", "set_", "is_set_to"}
"""Operations on sizes, strides and storages alone: the CPU's kernels do them on any device."""
IN_PLACE_VIEWS = {
    "as_strided_",
    "squeeze_",
    "unsqueeze_",
    "transpose_",
    "t_",
    "detach_",
    "_to_copy",
}
"""They run on any device by themselves, or call what does."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""They take indices from the CPU too, and copy them; for masks the host waits, to know how many are set."""
WAITING = {
    *(
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "bincount",
        "_unique",
        "_unique2",
    ),
    *("unique_dim", "unique_consecutive", "repeat_interleave"),
    "embedding_dense_backward",  # it counts its segments
}
"""They return a value, or a size that depends on values."""

pinned: dict[int, Tensor] = {}
"""Page-locked memory by its address; kept for good, so that no address comes twice."""
generators: dict[int, torch.Generator] = {}
"""Those of the GPU, by address, which is all of them that a kernel sees."""
in_micro_batches = False
"""Whether `train_step` is between its first line and the end of its last micro-batch."""
_kept: list[object] = []


def note(kind: str, operation: str) -> None:
    """Writes down a wait, or a copy from memory that is not pinned, with the line of ours that it comes from."""
    frame: types.FrameType | None = sys._getframe(1)
    place, is_in_step = "?", in_micro_batches
    while frame is not None:
        if place == "?" and frame.f_code.co_filename.startswith(ROOMS):
            place = f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_code.co_qualname}"
        is_in_step = is_in_step or frame.f_code is train_step.__code__
        if frame.f_code.co_name == "assert_ints_same_as_other_ranks":
            return  # DeepSpeed compares the order of layers over ranks, in the forwards that it learns it from
        frame = frame.f_back
    if is_in_step:
        with open(os.environ["FAKE_GPU_NOTES"], "a") as notes:
            notes.write(
                f"{'micro-batch' if in_micro_batches else 'step'}\t{kind}\t{operation}\t{place}\n"
            )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def on(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of `device` in the memory of `tensor`, with the same sizes and strides: DLPack, told another device."""
    capsule = torch._C._to_dlpack(tensor)
    place = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    (ctypes.c_int32 * 2).from_address(place)[:] = [{"cpu": 1, "cuda": 2}[device.type], 0]
    return torch._C._from_dlpack(capsule)  # type: ignore[no-any-return]


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of all operations that compute."""
    packet, to = op._schema.name.removeprefix("aten::"), kwargs.get("device")
    same: dict[int, Tensor] = {}  # the GPU's tensors, by the CPU's of the same memory
    aliases, others = [], []
    if packet in WAITING:
        note("wait", packet)

    def unwrap(value: Any, *, in_list: bool = False) -> Any:
        if isinstance(value, list | tuple):
            return [unwrap(item, in_list=True) for item in value]
        if isinstance(value, Generator.__base__) and value._cdata not in generators:  # type: ignore[arg-type]
            raise RuntimeError(f"{op}: Expected a 'cuda' device type for generator but found 'cpu'")
        if not isinstance(value, Tensor):
            return CPU if isinstance(value, torch.device) else value
        is_index = in_list and packet in INDEXED
        if is_index and (not value.is_cuda or value.dtype in (torch.bool, torch.uint8)):
            note("wait", packet)
        if value.is_cuda:
            aliases.append(on(CPU, value))
            same[id(aliases[-1])] = value
            return aliases[-1]
        if not is_index and (value.dim() > 0 or in_list):  # a number may come from the CPU
            others.append(value)
        return value

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return same[id(value)] if id(value) in same else on(CUDA, value)

    args, kwargs = tuple(map(unwrap, args)), {key: unwrap(value) for key, value in kwargs.items()}
    if others and same:
        raise RuntimeError(
            f"{op}: Expected all tensors to be on the same device, but found cuda:0 and cpu"
        )
    result = (fp32_product if op._overloadname.startswith("dtype") else op)(*args, **kwargs)
    return result if to is not None and torch.device(to).type == "cpu" else tree_map(wrap, result)


def fp32_product(*operands: Any, out: Tensor | None = None, **scale: float) -> Tensor:
    """A product of bf16 in fp32, which torch has on CUDA alone."""
    *matrices, dtype = operands
    x, y = (matrix.to(dtype) for matrix in matrices[-2:])
    product = x @ y
    if len(matrices) == 3:
        product = product * scale.get("alpha", 1) + matrices[0] * scale.get("beta", 1)
    return product if out is None else out.copy_(product)


def on_sizes(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op.redispatch(CPU_KERNELS, *args, **kwargs)


def copy(op: Any, self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between devices and on the GPU, with what the host waits for."""
    if not self.is_cuda and not (non_blocking and self.is_pinned()):
        note("wait", "copy to the CPU")
    if not source.is_cuda:
        if not non_blocking:
            note("wait", "copy to the GPU")
        elif not source.is_pinned():
            note("unpinned", "copy to the GPU")
    target = on(CPU, self) if self.is_cuda else self
    target.copy_(on(CPU, source) if source.is_cuda else source)
    return self


def resize(op: Any, self: Tensor, size: list[int], **_: Any) -> Tensor:
    """In new memory where the old is too small; nothing of ours reads what was there."""
    if torch.Size(size).numel() * self.element_size() > self.untyped_storage().nbytes():
        self.set_(torch.empty(size, dtype=self.dtype, device=self.device))
    return self.as_strided_(size, torch.empty(size, device="meta").stride())


def copy_all(op: Any, self: list[Tensor], source: list[Tensor], non_blocking: bool = False) -> None:
    for one, other in zip(self, source, strict=True):
        copy(op, one, other, non_blocking)


OWN = {"copy_": copy, "resize_": resize, "_foreach_copy_": copy_all}


def collective(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Gloo does NCCL's part in the same memory."""
    args, kwargs = tree_map(
        lambda x: on(CPU, x) if isinstance(x, Tensor) and x.is_cuda else x, (args, kwargs)
    )
    return tree_map(lambda x: on(CUDA, x) if isinstance(x, Tensor) else x, op(*args, **kwargs))


class Nccl(dist.ProcessGroupGloo):
    """What a process group calls for tensors of the GPU: nothing, since `collective` gives gloo the CPU's."""

    Options = types.SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(dist.PrefixStore("cuda", store), rank, size, options._timeout)

    def get_error(self) -> Any:
        return types.SimpleNamespace(name="SUCCESS")


class Generator(torch.Generator):
    """Says that it is of the device that it was asked for; draws as the CPU's."""

    device = CPU

    def __new__(cls, device: Any = CPU) -> "Generator":
        generator = super().__new__(cls)
        generator.device = torch.device(device)
        if generator.device.type == "cuda":
            generators[generator._cdata] = generator
        return generator


class Stream:
    """The one queue of work, which is always empty; also its events, which have always come."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def synchronize(self) -> None:
        note("wait", "synchronize")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


def pin(tensor: Tensor, *_: object) -> Tensor:
    """A copy in memory that counts as page-locked."""
    if tensor.is_cuda:
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    if tensor.is_pinned():
        return tensor
    locked = tensor.detach().clone()
    pinned[locked.untyped_storage().data_ptr()] = locked
    return locked


def is_pinned(tensor: Tensor, *_: object) -> bool:
    return not tensor.is_cuda and tensor.untyped_storage().data_ptr() in pinned


def resize_storage(storage: torch.UntypedStorage, size: int) -> None:
    """Memory that is given back keeps its size, and holds NaN, so that whoever reads it is seen."""
    if storage.device.type == "cpu":
        return torch._C.StorageBase.resize_(storage, size)
    if size == 0:
        torch.empty(0, dtype=torch.uint8, device=CUDA).set_(storage).fill_(0xFF)
    elif size > storage.nbytes():
        raise RuntimeError(
            f"a storage of the GPU of {storage.nbytes()} bytes does not grow to {size}"
        )


def install() -> None:
    """Makes the GPU; before any backward, which starts a thread for each device."""
    _make_device()
    _register_kernels()
    rank = os.environ.get("RANK", 0)
    gpu = types.SimpleNamespace(
        uuid=f"GPU-{rank}", name="NVIDIA H100 80GB HBM3", total_memory=80 << 30
    )
    for names, answer in (
        (
            "_lazy_init set_device set_stream empty_cache ipc_collect reset_peak_memory_stats set_rng_state",
            None,
        ),
        ("set_rng_state_all manual_seed manual_seed_all", None),
        ("is_available is_initialized is_bf16_supported", True),
        ("current_device _exchange_device _maybe_exchange_device", 0),
        ("memory_allocated max_memory_allocated memory_reserved max_memory_reserved", 1 << 30),
        ("current_stream default_stream", Stream()),
        ("device_count", 1),
        ("get_device_name", gpu.name),
        ("get_device_properties", gpu),
        ("get_device_capability", (9, 0)),
        ("mem_get_info", (70 << 30, 80 << 30)),
        ("memory_stats", {}),
        ("get_rng_state", torch.zeros(16, dtype=torch.uint8)),
        ("get_rng_state_all", []),
        ("stream", contextlib.nullcontext()),
    ):
        for name in names.split():
            setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.cuda.synchronize = lambda *_, **__: note("wait", "synchronize")
    torch.cuda.Stream, torch.cuda.Event, torch.Generator = Stream, Stream, Generator  # type: ignore[misc]
    torch.accelerator.is_available = lambda *_, **__: True
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    torch.accelerator.set_device_index = lambda *_: None
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"
    Tensor.pin_memory, Tensor.is_pinned, Tensor.record_stream = pin, is_pinned, lambda *_: None  # type: ignore[assignment]
    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign, assignment]
    distributed_c10d.is_nccl_available = lambda: True
    distributed_c10d.ProcessGroupNCCL = Nccl

    if "deepspeed" in sys.modules:  # it has asked already
        from deepspeed.accelerator import cuda_accelerator, set_accelerator

        set_accelerator(cuda_accelerator.CUDA_Accelerator())
    fused.can_compile = lambda device: False  # type: ignore[assignment]
    for name, begins in (
        ("zero_", True),
        ("require_repeated", False),
    ):  # around the micro-batches of `train_step`
        setattr(ClippedSum, name, _marked(getattr(ClippedSum, name), begins))


def _marked(method: Any, begins: bool) -> Any:
    def call(self: ClippedSum) -> None:
        global in_micro_batches
        method(self)
        if sys._getframe(1).f_code is train_step.__code__:
            in_micro_batches = begins

    return call


def _call(kernel: Any, room: Any, packet: str, overload: str, *args: Any, **kwargs: Any) -> Any:
    return kernel(getattr(getattr(room, packet), overload), *args, **kwargs)


def _register_kernels() -> None:
    """Ours for every operation of torch that has no kernel for all devices, or one that computes; and for collectives."""
    rooms = {room: torch.library.Library(room, "IMPL") for room in ("_", "aten", "c10d")}
    _kept.append(rooms)
    rooms["_"].fallback(compute, "CUDA")
    for name in torch._C._dispatch_get_all_op_names():
        room, _, op = name.partition("::")
        packet, _, overload = op.partition(".")
        has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
        if room == "c10d" and has("CUDA"):
            kernel: Any = collective
        elif room != "aten" or packet in IN_PLACE_VIEWS or has("CUDA"):
            continue
        elif packet in ON_SIZES or packet in OWN:
            kernel = OWN.get(packet, on_sizes)
        elif has("CompositeExplicitAutograd") or has("CompositeExplicitAutogradNonFunctional"):
            returned = [
                value.alias_info
                for value in torch._C._get_schema(f"aten::{packet}", overload).returns
            ]
            if any(
                alias is not None and not alias.is_write for alias in returned
            ):  # a view, made by another operation
                continue
            kernel = compute
        else:
            continue
        call = functools.partial(
            _call, kernel, getattr(torch.ops, room), packet, overload or "default"
        )
        rooms[room].impl(op, call, "CUDA", allow_override=True)


def _make_device() -> None:
    """Gives this build the two C++ objects without which nothing runs on CUDA, by their addresses.

    The device guard becomes torch's own that does nothing, which it has for CUDA builds that find no GPU. It puts it there when
    the present one, of which a CPU build has none, counts no device; so one comes first whose every answer is 0. And the hooks
    of CUDA answer everything with 0, but "yes" when they are asked whether there is CUDA: then it is autograd's accelerator.
    """
    folder, word = Path(torch.__file__).parent / "lib", ctypes.c_void_p
    answers = [ctypes.CFUNCTYPE(ctypes.c_int)(lambda answer=answer: answer) for answer in (0, 1)]
    no, yes = (ctypes.cast(answer, word).value for answer in answers)
    methods = (word * 102)(*[no] * 102)
    guard = word(ctypes.addressof(methods))
    guards = (word * 2).in_dll(
        ctypes.CDLL(folder / "libc10.so"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[1] = ctypes.addressof(guard)  # by the numbers of device types: the CPU's is 0
    torch._C._ensureCUDADeviceGuardSet()

    get_hooks = ctypes.CDLL(folder / "libtorch_cpu.so")._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.POINTER(word)
    hooks, first = get_hooks(), 2 * ctypes.sizeof(word)
    # What C++ keeps in front, and the two methods that free the hooks, stay.
    methods[:4] = (word * 4).from_address(hooks[0] - first)[:]
    hooks[0] = ctypes.addressof(methods) + first
    _kept.extend([answers, methods])
    for number in range(4, len(methods)):  # which one asks for CUDA is seen by trying
        methods[number] = yes
        if torch.accelerator.current_accelerator() == torch.device("cuda"):
            return
        methods[number] = no
    raise RuntimeError(
        f"torch {torch.__version__} keeps its hooks of CUDA elsewhere: follow it here"
    )
