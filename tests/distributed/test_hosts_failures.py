"""Runs between hosts that cannot begin, and ranks that die: one readable line, and nobody left behind."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e import test_launches as lost
from tests.e2e.launch import TRAIN, count, kill_group
from tests.e2e.test_failures import FAILING
from tests.hosts.hosts import Network, wait_until
from tests.hosts.launchers import needs, openmpi, pdsh, tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


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


def exit_codes(run_dir: Path) -> list[int]:
    """What the ranks of failing_train.py have ended with."""
    return [int(line.split()[1]) for line in run_dir.with_name(f"{run_dir.name}.codes").read_text().splitlines()]


@pytest.mark.parametrize(
    ("where", "victim", "number"),
    [
        (where, victim, number)
        for where in ("node1", "head")
        for victim in ("pdsh", "deepspeed")
        for number in lost.SIGNALS
        if (victim, number) != ("deepspeed", signal.SIGKILL)  # pdsh goes on, and so do the ranks
    ],
)
def test_a_lost_launcher_between_hosts(
    hosts: Network, tmp_path: Path, where: str, victim: str, number: signal.Signals
) -> None:
    """Typed on a host that trains, or on a login node. The ranks save at a step boundary, and nobody is left behind."""
    needs("pdsh")
    run_dir, log = tmp_path / "run", tmp_path / "log"
    settings = tiny(run_dir, "train.checkpoint_every=1000", "train.log_every=1", steps=4000)
    launcher = hosts.hosts[where].popen(
        ["deepspeed", "--hostfile", str(hosts.folder / "hostfile"), FAILING, "none", "-1", "0", "0", *settings], output=log,
        DS_ENV_FILE=str(hosts.folder / "deepspeed_env"),
    )  # fmt: skip
    try:
        lost.wait_for_steps(run_dir, launcher, log)
        found = [
            pid
            for pid, words in lost.processes(run_dir).items()
            if victim in (Path(words[0]).name, Path(words[1]).name)
        ]
        os.kill(max(found), number)
        if (victim, number) == ("pdsh", signal.SIGINT):  # asks for another one within a second, and tells its state
            time.sleep(0.3)
            os.kill(max(found), number)
        wait_until(lambda: not lost.ranks_of(run_dir, FAILING), f"the end of all ranks\n{log.read_text()}", within=60)
    finally:
        for pid in lost.processes(run_dir):
            os.kill(pid, signal.SIGKILL)
        kill_group(launcher)
    assert exit_codes(run_dir) == [7, 7], log.read_text()
    done = count(run_dir, "done")
    assert count(run_dir, "intent") == done, "the running step was finished"
    assert (run_dir / "checkpoints" / "LATEST").read_text() == f"step-{done:08d}\n", "and saved"


class TestRefusals:
    """What does not fit together between hosts is one line that names rank, host and reason, and exit 2."""

    def test_a_variable_that_did_not_reach_the_other_host(self, hosts: Network, tmp_path: Path) -> None:
        """The run of test_launchers.py has it in .deepspeed_env."""
        result = openmpi(hosts, tmp_path / "run", GLOO_SOCKET_IFNAME="eth0")
        self._is_refused(
            result,
            "rank 1 (host node2) differs from rank 0 (host node1): GLOO_SOCKET_IFNAME is not set, but set on rank 0",
            ".deepspeed_env",
        )
        assert not (tmp_path / "run").exists()

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
