"""How much memory a machine has left for this process, and how much a piece of work takes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from privacy.ranks.allocator import give_back_freed_memory

USABLE = 0.8
"""This part of the available memory is used; the rest is for scratch memory inside of operations and for fragmentation."""
STATUS = Path("/proc/self/status")


def taken_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Runs `work` and returns the bytes that it takes at its highest point; None where the system does not say.

    CUDA: what torch allocates. CPU: growth of the resident memory of this process, libraries that are loaded meanwhile included.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - allocated
    give_back_freed_memory()
    # Sets the high-water mark back. Where that is forbidden, the mark of an earlier moment stands for more than the work takes.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    resident = _in_kilobytes(STATUS, "VmRSS")
    work()
    most = _in_kilobytes(STATUS, "VmHWM")
    return None if resident is None or most is None else max(0, most - resident)


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
    machine = _in_kilobytes(proc / "meminfo", "MemAvailable")
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
    return _in_kilobytes(proc / "meminfo", "MemTotal")


def _in_kilobytes(file: Path, key: str) -> int | None:
    """Returns, in bytes, what one line of a file of the kernel says."""
    for line in _text(file).splitlines():
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
