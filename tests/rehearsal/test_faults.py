"""The drill of faults, one launcher a test: see tests/rehearsal/faults.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hosts import SSH_PROGRAMS, why_not
from tests.hosts.slurm import PROGRAMS
from tests.rehearsal.faults import under_slurm, under_torchrun


@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", [under_slurm, under_torchrun])
def test_contract_9_a_host_is_lost_in_a_step_and_its_launcher_starts_the_run_again(
    launcher: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    if reason := why_not(*SSH_PROGRAMS, *PROGRAMS):
        pytest.skip(reason)
    assert launcher(tmp_path / "drill")["repeated_steps"] == 2
