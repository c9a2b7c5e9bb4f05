"""How much memory work takes, and how much there is.

Layer inputs, output gradients, attention maps, recomputed activations: what is alive when depends on the model and the clipping
mode, and any list of it by hand would be wrong for the next model. So every tensor is counted from birth to death, on the meta
device too (trainer/planner/probe.py). Scratch memory inside an operation is not seen.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # the one private name here: flop_counter is built on it too


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


def available_memory(
    device: torch.device, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that this process could still take on `device`; None where nobody says.

    CUDA: free on the device, and what torch's allocator holds unused. CPU: the least of what the machine has left and what
    each control group (container, batch job) around this process still allows.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    machine = _meminfo(proc / "meminfo", "MemAvailable")
    limits = [] if machine is None else [machine]
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers != "" and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups  # version 1 and version 2
        below = root / path.lstrip("/")
        for folder in (below, *below.parents):
            # In a container the path may be the host's, of which only the root is mounted.
            if folder == root or root in folder.parents:
                limits += _allowed_by(folder)
    return min(limits, default=None)


def total_memory(proc: Path = Path("/proc")) -> int | None:
    """Bytes of main memory in this machine; None where nobody says."""
    return _meminfo(proc / "meminfo", "MemTotal")


def _meminfo(meminfo: Path, key: str) -> int | None:
    for line in _text(meminfo).splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _allowed_by(group: Path) -> list[int]:
    """Bytes that a control group still allows, where it has a limit; cached files are given up before memory is refused."""
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
        if limit.isdigit() and used.isdigit():
            stat = dict(
                line.split()
                for line in _text(group / "memory.stat").splitlines()
                if len(line.split()) == 2
            )
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            return [max(0, int(limit) - int(used) + cached)]
    return []


def _text(path: Path) -> str:
    """The text of a file, which is empty where the kernel offers no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
