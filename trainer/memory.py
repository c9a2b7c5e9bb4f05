"""Measures the memory that a machine has free for this process, and that a piece of work takes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from privacy.ranks.allocator import give_back_freed_memory

USABLE = 0.8
"""Part of the available memory that is used.

The rest is for scratch memory inside of operations and for fragmentation."""
STATUS = Path("/proc/self/status")


def taken_memory(work: Callable[[], object], device: torch.device) -> int | None:
    """Runs `work` and returns its peak of bytes; None where the system does not say.

    CUDA: the bytes that torch allocates. CPU: growth of the resident memory of this process,
    libraries that are loaded meanwhile included.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - allocated
    give_back_freed_memory()
    # Resets the high-water mark. Where that is forbidden, an earlier mark counts, which may be more
    # than the work takes.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    resident = _in_kilobytes(STATUS, "VmRSS")
    work()
    peak = _in_kilobytes(STATUS, "VmHWM")
    return None if resident is None or peak is None else max(0, peak - resident)


def available_memory(
    device: torch.device, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns the bytes that this process could still take; None where the system does not say.

    CUDA: the free bytes of the device, and the unused bytes of torch's allocator. CPU: the least of
    the machine's free bytes and of those that each control group (container, batch job) around this
    process still allows.
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
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            # In a container the path may be the host's, of which only the root is mounted.
            if folder == root or root in folder.parents:
                limits += _allowed_by(folder)
    return min(limits, default=None)


def total_memory(proc: Path = Path("/proc")) -> int | None:
    """Returns the bytes of main memory in this machine; None where the system does not say."""
    return _in_kilobytes(proc / "meminfo", "MemTotal")


def _in_kilobytes(file: Path, key: str) -> int | None:
    """Returns the bytes that a line of a kernel's file states in kilobytes."""
    for line in _text(file).splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _allowed_by(group: Path) -> list[int]:
    """Returns the bytes that a control group still allows, in a list that is empty without a limit.

    Cached files count as free: the kernel drops them before it refuses memory.
    """
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _text(group / limit_file).strip()
        usage = _text(group / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            stat = dict[str, str]()
            for line in _text(group / "memory.stat").splitlines():
                words = line.split()
                if len(words) == 2:
                    stat[words[0]] = words[1]
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            return [max(0, int(limit) - int(usage) + cached)]
    return []


def _text(path: Path) -> str:
    """Returns the file's text, or "" where the kernel offers no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
