"""What is counted of tensors, and what is read of the machine's limits; test_planner.py has the kernel's own count."""

from pathlib import Path

import torch
from torch import Tensor

from trainer.run.memory_estimate import MemoryTimeline, available_memory

CPU = torch.device("cpu")


def test_every_tensor_is_counted_from_birth_to_death() -> None:
    before = torch.zeros(1000)

    def work() -> Tensor:
        x = before + 1  # 4000
        view = x.view(10, 100)  # no memory of its own
        y = view.square().sum()  # 8000, then 8004
        del x, view
        before.add_(1)  # in place, and not ours
        return y * 2  # the square and the view are gone: 4 + 4

    with MemoryTimeline() as timeline:
        kept = work()
    del kept
    assert timeline.live_bytes == [4000, 4000, 8000, 8004, 4, 8]


# What the machine says


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       1000 kB\nMemFree:          10 kB\nMemAvailable:    400 kB\n"


def test_the_least_of_machine_and_control_groups_is_available(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert available_memory(CPU, proc, cgroups) is None
    write(proc, meminfo=MEMINFO)
    assert available_memory(CPU, proc, cgroups) == 400 * 1024
    write(proc, self__cgroup="0::/job/step\n")
    for folder, limit, used in (("job", "300000", "100000"), ("job/step", "max", "50000")):
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
        (cgroups / folder / "memory.max").write_text(f"{limit}\n")
        (cgroups / folder / "memory.current").write_text(f"{used}\n")
    assert available_memory(CPU, proc, cgroups) == 200000
    (cgroups / "job" / "memory.stat").write_text("anon 5\ninactive_file 30000\n")
    assert available_memory(CPU, proc, cgroups) == 230000
