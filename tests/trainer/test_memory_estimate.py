"""The memory estimate against the kernel's own count, and what is read of the machine's limits."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.clipping import ClippedSum
from tests.privacy.clipping.test_modes import Blocks
from tests.processes import ROOT, quiet_environment, run_python
from trainer.run.memory_estimate import MemoryTimeline, available_memory, predict_peak

FACTOR = 1.25
"""How far the estimate may be from what the process really takes; measured: 1.00 to 1.01."""
CPU = torch.device("cpu")


def live(work: Callable[[], object]) -> list[int]:
    with MemoryTimeline() as timeline:
        kept = work()
    del kept
    return timeline.live_bytes


def test_every_tensor_is_counted_from_birth_to_death() -> None:
    before = torch.zeros(1000)

    def work() -> Tensor:
        x = before + 1  # 4000
        view = x.view(10, 100)  # no memory of its own
        y = view.square().sum()  # 8000, then 8004
        del x, view
        before.add_(1)  # in place, and not ours
        return y * 2  # the square and the view are gone: 4 + 4

    assert live(work) == [4000, 4000, 8000, 8004, 4, 8]


@pytest.mark.parametrize("count", [2, 3, 8, 32])
def test_two_small_runs_predict_the_timeline_of_a_large_one_exactly(count: int) -> None:
    model = Blocks(checkpointed=True)
    for mode in ("bookkeeping", "two_pass"):
        total = ClippedSum(model, 1.0, mode=mode, self_check=False)  # type: ignore[arg-type]

        def work(size: int, total: ClippedSum = total) -> None:
            total.zero_()
            total.add_micro_batch(model, {"x": torch.randn(size, 9, 16)}, torch.zeros(size, dtype=torch.bool))

        assert predict_peak(work, count) == pytest.approx(max(live(lambda: work(count))), rel=1e-3)
        total.detach()


# What this process measures of itself, in a process of its own.


def measure(width: int, depth: int, tokens: int, count: int) -> list[dict[str, Any]]:
    """Predicted and real peaks for each mode, with and without activation checkpointing."""
    torch.set_num_threads(1)
    found = []
    for checkpointed in (False, True):
        for mode in ("bookkeeping", "two_pass"):
            model = Blocks(checkpointed=checkpointed, width=width, depth=depth)
            total = ClippedSum(model, 1.0, mode=mode, self_check=False)  # type: ignore[arg-type]

            def work(size: int, model: Any = model, total: Any = total) -> None:
                inputs = {"x": torch.randn(size, tokens, width)}
                total.zero_()
                total.add_micro_batch(model, inputs, torch.zeros(size, dtype=torch.bool))

            predicted = predict_peak(work, count)
            total.zero_()  # else its sums were there before
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
            before = process_memory("VmRSS")
            work(count)
            found.append(
                {"predicted": predicted, "measured": process_memory("VmHWM") - before, "case": [checkpointed, mode]}
            )
            total.detach()
    return found


def process_memory(name: str) -> int:
    """Bytes, by the name that /proc/self/status has for them: VmRSS, VmHWM."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


MEASURE = """
import ctypes, json
from trainer.run.allocator import M_MMAP_THRESHOLD
# Every allocation by itself, so that what is freed goes back to the system at once.
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
from tests.trainer.test_memory_estimate import measure
print(json.dumps(measure(128, 4, 64, 24)))
"""


def test_the_estimate_is_what_the_process_really_takes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MEASURE)
    done = run_python([tmp_path / "program.py"], env=quiet_environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    for row in rows:
        assert 1 / FACTOR <= row["predicted"] / row["measured"] <= FACTOR, row
    peaks = {tuple(row["case"]): row["measured"] for row in rows}
    assert peaks[True, "two_pass"] < 0.5 * peaks[True, "bookkeeping"]  # checkpointing favours two passes


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
