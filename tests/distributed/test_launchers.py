"""Every launcher between two hosts (tests/hosts): the real command, a real private run, and a whole ledger.

`make test-all` runs one of them, `make test-cluster` the others.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.hosts import Network, wait_until
from tests.hosts.launchers import (
    WITHIN,
    check,
    deepspeed_slurm,
    mpich,
    openmpi_with_variables,
    pdsh,
    tiny,
    torchrun,
)
from tests.hosts.slurm import Slurm


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(pdsh, marks=pytest.mark.full),
        *(pytest.param(one, marks=pytest.mark.cluster) for one in (openmpi_with_variables, mpich, torchrun)),
    ],
)
def test_a_run_on_two_hosts(hosts: Network, tmp_path: Path, launcher: Callable) -> None:
    result = launcher(hosts, tmp_path / "run")
    check(tmp_path / "run", result.stdout, result.returncode)


@pytest.mark.cluster
def test_deepspeed_with_slurm(hosts: Network, slurm: Slurm, tmp_path: Path) -> None:
    result = deepspeed_slurm(hosts, tmp_path / "run")
    check(tmp_path / "run", result.stdout, result.returncode)


@pytest.mark.cluster
def test_sbatch_with_srun(slurm: Slurm, tmp_path: Path) -> None:
    """The shipped batch script; the sampling key stays in its file."""
    log, run_dir = tmp_path / "job.log", tmp_path / "run"
    number = slurm.submit("-N2", f"--output={log}", "launch_scripts/cluster/slurm.sbatch", *tiny(run_dir))
    key = run_dir / "private" / "sampling.key"
    wait_until(lambda: (log.exists() and slurm.has_ended(number)) or key.exists(), "the run's key", within=WITHIN)
    environments = slurm.environments()
    wait_until(lambda: slurm.has_ended(number), "the end of the job", within=WITHIN)
    said = log.read_text()
    assert slurm.state(number) == "COMPLETED", said
    secret = key.read_bytes()
    assert key.stat().st_mode & 0o777 == 0o600
    spooled = [p.read_bytes() for p in slurm.folder.rglob("*") if p.is_file()]
    ranks = [set(e.split(b"\0")) for e in environments if b"SLURM_PROCID" in e and b"SLURM_STEP_ID" in e]
    assert ranks, "ranks were running when we looked"
    assert all(b"SLURM_CPUS_PER_TASK=8" in rank for rank in ranks), "as many as the shipped recipes have workers"
    for content in (*environments, *spooled, log.read_bytes()):
        assert secret not in content and secret.hex().encode() not in content
    check(run_dir, said, 0)
