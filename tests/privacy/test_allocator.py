"""Freed memory is used again, counted in page faults of a process of its own: malloc's settings cannot be taken back."""

import platform
from pathlib import Path

import pytest

from tests.processes import ROOT, quiet_environment, run_python

COUNT = """
import resource, sys
import torch
from privacy.step.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory({})

def step():
    kept = [torch.ones(2**20) for _ in range(16)]

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(what: str, folder: Path) -> int:
    (folder / "count.py").write_text(COUNT)
    done = run_python([folder / "count.py", what], env=quiet_environment(PYTHONPATH=str(ROOT)))
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's")
def test_the_next_step_touches_no_new_pages(tmp_path: Path) -> None:
    assert page_faults("keep", tmp_path) < 0.25 * page_faults("default", tmp_path)
