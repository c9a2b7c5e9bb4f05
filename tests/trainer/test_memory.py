"""What a piece of work takes of the memory, and what is read of the machine's limits."""

from pathlib import Path

import pytest
import torch

from trainer import memory
from trainer.memory import available_memory, taken_memory

CPU = torch.device("cpu")


def numbers(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes << 18)


@pytest.mark.skipif(not memory.STATUS.exists(), reason="this system has no /proc")
def test_work_takes_what_it_holds_at_its_highest_point() -> None:
    def work() -> None:
        numbers(150)
        both = numbers(100), numbers(100)
        del both
        numbers(30)

    _ = numbers(400)  # an earlier peak does not count, and neither does what stays
    stays = numbers(50)
    del _
    taken = taken_memory(work, CPU)
    assert taken is not None and 190 <= taken / 2**20 < 230
    taken = taken_memory(lambda: None, CPU)
    assert taken is not None and taken / 2**20 < 20
    assert len(stays)


def test_a_system_that_does_not_say_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "missing")
    assert taken_memory(lambda: None, CPU) is None


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
