"""Every launcher between two hosts (tests/hosts): the real command, a real private run, and a whole ledger.

`make test-all` runs one of them, `make test-cluster` the others.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.launch import TRAIN, kill_group, ledger_lines, train_arguments
from tests.hosts.hosts import SSH_PROGRAMS, Network, network, wait_until, why_not
from tests.hosts.slurm import PROGRAMS, Slurm

BIN = Path(sys.executable).parent
STEPS = 2
WITHIN = 180
HERE = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
"""What ranks need here; ssh carries nothing, so it stands in .deepspeed_env."""
ROOT_MAY_RUN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def needs(*programs: str) -> None:
    """Skips where a program is missing."""
    if reason := why_not(*programs):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """head, node1 and node2, with sshd on the nodes."""
    needs(*SSH_PROGRAMS)
    with network(tmp_path_factory.mktemp("hosts"), "head", "node1", "node2") as made:
        made.hosts["node1"].start_sshd()
        made.hosts["node2"].start_sshd()
        (made.folder / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
        (made.folder / "deepspeed_env").write_text(
            "".join(f"{name}={value}\n" for name, value in HERE.items())
        )
        yield made


@pytest.fixture(scope="module")
def slurm(hosts: Network) -> Slurm:
    """On these hosts."""
    needs(*PROGRAMS)
    made = Slurm(hosts, "head")
    made.start()
    return made


def tiny(run_dir: Path) -> list[str]:
    return train_arguments(run_dir, f"train.num_steps={STEPS}", "heldout.num_captions=0")


def check(run_dir: Path, said: str, code: int = 0) -> None:
    assert code == 0, said[-5000:]
    assert f"done: {STEPS} steps, epsilon" in said and "terminate called" not in said
    assert "2 ranks on 2 hosts (node1, node2)" in said, said[-5000:]
    kinds = [line["type"] for line in ledger_lines(run_dir)]
    assert kinds == ["open", "session", *["intent", "done", "checkpoint"] * STEPS, "close"]


Ended = subprocess.CompletedProcess[str]


def pdsh(hosts: Network, run_dir: Path) -> Ended:
    needs("pdsh")
    command = ["deepspeed", "--hostfile", str(hosts.folder / "hostfile"), TRAIN, *tiny(run_dir)]
    return hosts.hosts["node1"].run(
        command, timeout=WITHIN, DS_ENV_FILE=str(hosts.folder / "deepspeed_env")
    )


def openmpi(hosts: Network, run_dir: Path) -> Ended:
    """With a variable that .deepspeed_env carries to the other host, where it is compared."""
    needs("ompi_info")
    forwarded = run_dir.with_suffix(".deepspeed_env")
    forwarded.write_text((hosts.folder / "deepspeed_env").read_text() + "GLOO_SOCKET_IFNAME=eth0\n")
    command = ["launch_scripts/cluster/openmpi.sh", str(hosts.folder / "hostfile"), *tiny(run_dir)]
    more = {"DS_ENV_FILE": str(forwarded), "GLOO_SOCKET_IFNAME": "eth0", **ROOT_MAY_RUN_MPI}
    return hosts.hosts["node1"].run(command, timeout=WITHIN, **more)


def mpich(hosts: Network, run_dir: Path) -> Ended:
    """The wheel's mpirun, which carries the whole environment to the other host."""
    command = [
        str(BIN / "mpirun"),
        "-n",
        "2",
        "-ppn",
        "1",
        "-hosts",
        "node1,node2",
        sys.executable,
        "-u",
        TRAIN,
    ]
    return hosts.hosts["node1"].run(
        [*command, *tiny(run_dir)], timeout=WITHIN, MASTER_ADDR="node1", **HERE
    )


def torchrun(hosts: Network, run_dir: Path) -> Ended:
    """One agent on each host, started alike."""
    command = ["launch_scripts/cluster/torchrun.sh", *tiny(run_dir)]
    wanted = {"HEAD": "node1", "NNODES": "2", "GPUS": "1", **HERE}
    other = hosts.hosts["node2"].popen(
        command, output=hosts.folder / "torchrun-node2.log", **wanted
    )
    try:
        result = hosts.hosts["node1"].run(command, timeout=WITHIN, **wanted)
        assert other.wait(timeout=60) == result.returncode
    finally:
        kill_group(other)
    return result


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(pdsh, marks=pytest.mark.full),
        *(pytest.param(one, marks=pytest.mark.cluster) for one in (openmpi, mpich, torchrun)),
    ],
)
def test_a_run_on_two_hosts(
    hosts: Network, tmp_path: Path, launcher: Callable[[Network, Path], Ended]
) -> None:
    result = launcher(hosts, tmp_path / "run")
    check(tmp_path / "run", result.stdout, result.returncode)


@pytest.mark.cluster
def test_deepspeed_with_slurm(hosts: Network, slurm: Slurm, tmp_path: Path) -> None:
    """The launcher needs a hostfile to see more than this machine; srun chooses the nodes."""
    command = [
        *(
            "deepspeed",
            "--hostfile",
            str(hosts.folder / "hostfile"),
            "--launcher",
            "slurm",
            "--no_ssh_check",
        ),
        *("--master_addr", "node1", "--launcher_args=-N2", TRAIN, *tiny(tmp_path / "run")),
    ]
    result = slurm.head.run(
        command, timeout=WITHIN, SLURM_CONF=str(slurm.folder / "slurm.conf"), **HERE
    )
    check(tmp_path / "run", result.stdout, result.returncode)


@pytest.mark.cluster
def test_sbatch_with_srun(slurm: Slurm, tmp_path: Path) -> None:
    """The shipped batch script; the sampling key stays in its file."""
    log, run_dir = tmp_path / "job.log", tmp_path / "run"
    number = slurm.submit(
        "-N2", f"--output={log}", "launch_scripts/cluster/slurm.sbatch", *tiny(run_dir)
    )
    key = run_dir / "private" / "sampling.key"
    wait_until(
        lambda: (log.exists() and slurm.has_ended(number)) or key.exists(),
        "the run's key",
        within=WITHIN,
    )
    environments = slurm.environments()
    wait_until(lambda: slurm.has_ended(number), "the end of the job", within=WITHIN)
    said = log.read_text()
    assert slurm.state(number) == "COMPLETED", said
    secret = key.read_bytes()
    assert key.stat().st_mode & 0o777 == 0o600
    spooled = [p.read_bytes() for p in slurm.folder.rglob("*") if p.is_file()]
    ranks = [
        set(e.split(b"\0")) for e in environments if b"SLURM_PROCID" in e and b"SLURM_STEP_ID" in e
    ]
    assert ranks, "ranks were running when we looked"
    assert all(b"SLURM_CPUS_PER_TASK=8" in rank for rank in ranks), (
        "as many as the shipped recipes have workers"
    )
    for content in (*environments, *spooled, log.read_bytes()):
        assert secret not in content and secret.hex().encode() not in content
    check(run_dir, said)
