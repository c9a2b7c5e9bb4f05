"""A private training run by each launcher between two hosts, and what a good one leaves behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import quiet_environment
from tests.e2e.launch import TRAIN, kill_group, ledger_lines, train_arguments
from tests.hosts.hosts import Network, why_not

BIN = Path(sys.executable).parent
STEPS = 2
WITHIN = 180
MACHINE = "OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n"
"""What ranks need here; ssh carries nothing, so it stands in .deepspeed_env."""
ROOT_MAY_RUN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def needs(*programs: str) -> None:
    """Skips where a program is missing."""
    reason = why_not(*programs)
    if reason:
        pytest.skip(reason)


def tiny(run_dir: Path, *more: str, steps: int = STEPS) -> list[str]:
    return train_arguments(run_dir, f"train.num_steps={steps}", "heldout.num_captions=0", *more)


def check(run_dir: Path, said: str, code: int, num_hosts: int = 2) -> None:
    assert code == 0, said[-5000:]
    assert f"done: {STEPS} steps, epsilon" in said and "terminate called" not in said
    assert num_hosts == 1 or "2 ranks on 2 hosts (node1, node2)" in said, said[-5000:]
    kinds = [line["type"] for line in ledger_lines(run_dir)]
    each = ["intent", "done", "checkpoint"]
    assert kinds == ["open", "session", *each * STEPS, "close"]
    shutil.rmtree(run_dir)


def pdsh(hosts: Network, run_dir: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    needs("pdsh")
    command = ["deepspeed", "--hostfile", str(hosts.folder / "hostfile"), TRAIN, *tiny(run_dir, *more)]
    environment = {"DS_ENV_FILE": str(hosts.folder / "deepspeed_env"), **environment}
    return hosts.hosts["node1"].run(command, timeout=WITHIN, **environment)


def openmpi(hosts: Network, run_dir: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    needs("ompi_info")
    command = ["launch_scripts/cluster/openmpi.sh", str(hosts.folder / "hostfile"), *tiny(run_dir, *more)]
    environment = {"DS_ENV_FILE": str(hosts.folder / "deepspeed_env"), **ROOT_MAY_RUN_MPI, **environment}
    return hosts.hosts["node1"].run(command, timeout=WITHIN, **environment)


def openmpi_with_variables(hosts: Network, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """With a variable that .deepspeed_env carries to the other host, where it is compared."""
    forwarded = run_dir.with_suffix(".deepspeed_env")
    forwarded.write_text(MACHINE + "GLOO_SOCKET_IFNAME=eth0\n")
    more = {"DS_ENV_FILE": str(forwarded), "GLOO_SOCKET_IFNAME": "eth0"}
    return openmpi(hosts, run_dir, **more)


def mpich(hosts: Network, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """The wheel's mpirun, which carries the whole environment to the other host."""
    command = [str(BIN / "mpirun"), "-n", "2", "-ppn", "1", "-hosts", "node1,node2", sys.executable, "-u", TRAIN]
    environment = quiet_environment(MASTER_ADDR="node1")
    wanted = {k: environment[k] for k in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "MASTER_ADDR")}
    return hosts.hosts["node1"].run([*command, *tiny(run_dir)], timeout=WITHIN, **wanted)


def torchrun(hosts: Network, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """One agent on each host, started alike."""
    command = ["launch_scripts/cluster/torchrun.sh", *tiny(run_dir)]
    wanted = {"HEAD": "node1", "NNODES": "2", "GPUS": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    other = hosts.hosts["node2"].popen(command, output=hosts.folder / "torchrun-node2.log", **wanted)
    try:
        result = hosts.hosts["node1"].run(command, timeout=WITHIN, **wanted)
        assert other.wait(timeout=60) == result.returncode
    finally:
        kill_group(other)
    return result


def deepspeed_slurm(hosts: Network, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """The launcher needs a hostfile to see more than this machine; srun chooses the nodes."""
    command = [
        *("deepspeed", "--hostfile", str(hosts.folder / "hostfile"), "--launcher", "slurm", "--no_ssh_check"),
        *("--master_addr", "node1", "--launcher_args=-N2", TRAIN),
    ]
    return hosts.hosts["head"].run(
        [*command, *tiny(run_dir)],
        timeout=WITHIN,
        SLURM_CONF=str(hosts.folder / "slurm" / "slurm.conf"),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
