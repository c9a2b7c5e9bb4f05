"""Freed memory is used again, counted in page faults of a process of its own: malloc's settings cannot be taken back."""

import json
import platform
from pathlib import Path

import pytest

from tests.processes import ROOT, quiet_environment, run_python

COUNT = """
import ctypes, json, resource
from privacy.ranks.allocator import give_back_freed_memory, keep_freed_memory

C = ctypes.CDLL(None)
C.malloc.restype = ctypes.c_void_p
PR_SET_THP_DISABLE = 41
C.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page would hide 512 pages that are touched anew

# Blocks of malloc itself: where torch puts its own small objects decides whether the default gives back anything at all.
def step():
    blocks = [C.malloc(2**22) for _ in range(4)]
    for block in blocks:
        C.memset(ctypes.c_void_p(block), 1, 2**22)
    for block in blocks:
        C.free(ctypes.c_void_p(block))

def faults(after_each_step):
    counts = []
    for _ in range(8):  # the first ones settle where the blocks lie
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        after_each_step()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sum(counts[4:])

default = faults(lambda: None)
assert keep_freed_memory({})
print(json.dumps({"default": default, "kept": faults(lambda: None), "given back": faults(give_back_freed_memory)}))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's")
def test_the_next_step_touches_no_new_pages(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(COUNT)
    faults = json.loads(
        run_python([tmp_path / "count.py"], env=quiet_environment(PYTHONPATH=str(ROOT))).stdout
    )
    assert faults["kept"] < 0.05 * faults["default"], faults
    assert faults["kept"] < 0.05 * faults["given back"], faults
