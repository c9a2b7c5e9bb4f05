"""Every launcher between two hosts (tests/hosts): the real command, a real private run, and a whole ledger."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, free_port, quiet_environment
from tests.e2e.launch import TRAIN, count, kill_group, ledger_lines, train_arguments
from tests.hosts.hosts import SSH_PROGRAMS, Network, network, wait_until, why_not
from tests.hosts.slurm import PROGRAMS, Slurm

BIN = Path(sys.executable).parent
STEPS = 2
WITHIN = 180
MACHINE = "OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n"
"""What ranks need here; ssh carries nothing, so it stands in .deepspeed_env."""
ROOT_MAY_RUN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """head, node1 and node2, with sshd on the nodes."""
    reason = why_not(*SSH_PROGRAMS)
    if reason:
        pytest.skip(reason)
    with network(tmp_path_factory.mktemp("hosts"), "head", "node1", "node2") as made:
        made.hosts["node1"].start_sshd()
        made.hosts["node2"].start_sshd()
        (made.folder / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
        (made.folder / "deepspeed_env").write_text(MACHINE)
        yield made


@pytest.fixture(scope="module")
def slurm(hosts: Network) -> Slurm:
    reason = why_not(*PROGRAMS)
    if reason:
        pytest.skip(reason)
    made = Slurm(hosts, "head")
    made.start()
    return made


def needs(*programs: str) -> None:
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
    assert kinds == ["open", "session", *["intent", "done", "checkpoint"] * STEPS, "close"]
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


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    def measure(launcher: str, where: str, action: Callable[[], None]) -> None:
        start = time.monotonic()
        action()
        for name, value in (("launcher", launcher), ("hosts", where), ("seconds", f"{time.monotonic() - start:.1f}")):
            record_property(name, value)

    return measure


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("deepspeed, pdsh over ssh", pdsh),
        *(
            pytest.param(name, launcher, marks=pytest.mark.full)
            for name, launcher in [
                ("deepspeed --launcher openmpi", openmpi),
                ("mpirun (mpich wheel) over ssh", mpich),
                ("torchrun, two agents", torchrun),
            ]
        ),
    ],
)
def test_a_run_on_two_hosts(
    hosts: Network, tmp_path: Path, measured: Callable[..., None], name: str, launcher: Callable
) -> None:
    def run() -> None:
        result = launcher(hosts, tmp_path / "run")
        check(tmp_path / "run", result.stdout, result.returncode)

    measured(name, "node1, node2", run)


@pytest.mark.full
def test_deepspeed_with_slurm(hosts: Network, slurm: Slurm, tmp_path: Path, measured: Callable[..., None]) -> None:
    def run() -> None:
        result = deepspeed_slurm(hosts, tmp_path / "run")
        check(tmp_path / "run", result.stdout, result.returncode)

    measured("deepspeed --launcher slurm", "node1, node2", run)


def test_sbatch_with_srun(slurm: Slurm, tmp_path: Path, measured: Callable[..., None]) -> None:
    """The shipped batch script; the sampling key stays in its file."""

    def run() -> None:
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
        assert any(b"SLURM_PROCID" in e for e in environments), "ranks were running when we looked"
        for content in (*environments, *spooled, log.read_bytes()):
            assert secret not in content and secret.hex().encode() not in content
        check(run_dir, said, 0)

    measured("sbatch slurm.sbatch (srun)", "node1, node2", run)


@pytest.mark.full
def test_mpirun_without_root(tmp_path: Path, measured: Callable[..., None]) -> None:
    """The mpich wheel on this machine alone; a killed rank ends all."""

    def run() -> None:
        command = [str(BIN / "mpirun"), "-n", "2", sys.executable, "-u", TRAIN, *tiny(tmp_path / "run")]
        environment = quiet_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WITHIN, check=False
        )
        check(tmp_path / "run", result.stdout + result.stderr, result.returncode, num_hosts=1)

    measured("mpirun (mpich wheel)", "1", run)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_under_mpirun_ends_all(tmp_path: Path, victim: int) -> None:
    run_dir = tmp_path / "run"
    command = [str(BIN / "mpirun"), "-n", "2", sys.executable, "-u", TRAIN, *tiny(run_dir, steps=4000)]
    environment = quiet_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: count(run_dir, "done") >= 2 or launcher.poll() is not None, "two steps", within=WITHIN)
        ranks = {rank: pid for pid, rank in ranks_of(run_dir)}
        assert set(ranks) == {0, 1}, (tmp_path / "log").read_text()
        os.kill(ranks[victim], signal.SIGKILL)
        assert launcher.wait(timeout=60) != 0
        wait_until(lambda: not ranks_of(run_dir), "the end of all ranks", within=10)
    finally:
        for pid, _ in ranks_of(run_dir):
            os.kill(pid, signal.SIGKILL)
        kill_group(launcher)


def ranks_of(run_dir: Path) -> list[tuple[int, int]]:
    """(process, rank) of what trains in this run folder, under mpirun."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        rank = re.search(rb"(?:^|\0)PMI_RANK=(\d+)", environment)
        if (
            TRAIN.encode() in command
            and str(run_dir).encode() in command
            and rank is not None
            and b"mpirun" not in command
        ):
            found.append((int(folder.name), int(rank[1])))
    return found


@pytest.mark.full
class TestRefusals:
    """What does not fit together between hosts is one line that names rank, host and reason, and exit 2."""

    def test_a_variable_that_did_not_reach_the_other_host(self, hosts: Network, tmp_path: Path) -> None:
        result = openmpi(hosts, tmp_path / "run", GLOO_SOCKET_IFNAME="eth0")
        self._is_refused(
            result,
            "rank 1 (host node2) differs from rank 0 (host node1): GLOO_SOCKET_IFNAME is not set, but is on rank 0",
            ".deepspeed_env",
        )
        assert not (tmp_path / "run").exists()

    def test_the_same_variable_in_deepspeed_env(self, hosts: Network, tmp_path: Path) -> None:
        forwarded = tmp_path / "deepspeed_env"
        forwarded.write_text(MACHINE + "GLOO_SOCKET_IFNAME=eth0\nSHARDS_TOKEN=1\n")
        result = openmpi(
            hosts, tmp_path / "run", "--require_env=SHARDS_TOKEN", DS_ENV_FILE=str(forwarded), GLOO_SOCKET_IFNAME="eth0"
        )
        check(tmp_path / "run", result.stdout, result.returncode)

    def test_a_required_variable(self, hosts: Network, tmp_path: Path) -> None:
        """pdsh starts all ranks through ssh, the one on this host too."""
        result = pdsh(hosts, tmp_path / "run", "--require_env=SHARDS_TOKEN", SHARDS_TOKEN="1")
        self._is_refused(
            result, "SHARDS_TOKEN is required (--require_env), but not set on ranks 0, 1 (hosts node1, node2)"
        )

    def test_a_run_folder_that_is_not_shared(self, hosts: Network, tmp_path: Path) -> None:
        folder = tmp_path / "not-shared"
        folder.mkdir()
        hosts.hosts["node2"].run(["mount", "-t", "tmpfs", "tmpfs", str(folder)])
        result = pdsh(hosts, folder / "run")
        self._is_refused(
            result, f"run folder {folder}/run: rank 1 (host node2) did not see", "file system that all hosts share"
        )
        assert count(folder / "run", "open") == 0

    def _is_refused(self, result: subprocess.CompletedProcess[str], *words: str) -> None:
        errors = [line for line in result.stdout.splitlines() if "error: " in line and "[ERROR]" not in line]
        assert result.returncode == 2, result.stdout
        assert len(errors) == 1 and all(word in errors[0] for word in words), result.stdout
        assert "Traceback" not in result.stdout


@pytest.mark.full
def test_the_first_run_as_the_documentation_says(hosts: Network, tmp_path: Path, measured: Callable[..., None]) -> None:
    """A newcomer types what docs/clusters.md says, in a copy of the project."""

    def run() -> None:
        needs("pdsh")
        guide = (ROOT / "docs" / "clusters.md").read_text()
        block = re.search(r"^## First run$.*?^```bash\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
        assert block is not None
        copy_project(tmp_path / "project")
        result = hosts.hosts["node1"].run(["bash", "-ec", block[1]], cwd=tmp_path / "project", timeout=WITHIN)
        assert result.returncode == 0, result.stdout
        assert "2 ranks on 2 hosts (node1, node2)" in result.stdout, result.stdout
        run_dir = tmp_path / "project" / "runs" / "two-hosts"
        assert count(run_dir, "close") == 1 and list((run_dir / "report").glob("*.html"))

    measured("docs/clusters.md, First run", "node1, node2", run)


def copy_project(folder: Path) -> None:
    """What is under version control, or could be, and the environment as it is."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
