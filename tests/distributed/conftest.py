"""Hosts for the tests of launchers, and what these measured as a table at the end."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from privacy.clipping import clipped_sum
from tests.hosts.hosts import SSH_PROGRAMS, Network, network, why_not
from tests.hosts.launchers import MACHINE
from tests.hosts.slurm import PROGRAMS, Slurm

COLUMNS = ("launcher", "hosts", "seconds")


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
    """On these hosts."""
    reason = why_not(*PROGRAMS)
    if reason:
        pytest.skip(reason)
    made = Slurm(hosts, "head")
    made.start()
    return made


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Runs an action, and notes launcher, hosts and seconds for the table."""

    def measure(launcher: str, where: str, action: Callable[[], None]) -> None:
        start = time.monotonic()
        action()
        for name, value in (("launcher", launcher), ("hosts", where), ("seconds", f"{time.monotonic() - start:.1f}")):
            record_property(name, value)

    return measure


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        tuple(str(dict(report.user_properties)[column]) for column in COLUMNS)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and "launcher" in dict(report.user_properties)
    ]
    if rows:
        terminalreporter.section("launchers")
        for row in (COLUMNS, *rows):
            terminalreporter.write_line(f"{row[0]:<32} {row[1]:<16} {row[2]:>7}")


@pytest.fixture(autouse=True)
def sums_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are so small that all their gradients would be written out; ranks are told, too."""
    monkeypatch.setattr(clipped_sum, "WRITTEN_ENTRIES", 0)
