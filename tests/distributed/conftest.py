"""Hosts for the tests of launchers."""

from collections.abc import Iterator

import pytest

from privacy.clipping import clipped_sum
from tests.hosts.hosts import SSH_PROGRAMS, Network, network, why_not
from tests.hosts.launchers import MACHINE
from tests.hosts.slurm import PROGRAMS, Slurm


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


@pytest.fixture(autouse=True)
def sums_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are so small that all their gradients would be written out; ranks are told, too."""
    monkeypatch.setattr(clipped_sum, "WRITTEN_ENTRIES", 0)


@pytest.fixture(scope="module")
def sums_products_in_all() -> Iterator[None]:
    """The same for ranks that a whole module shares."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clipped_sum, "WRITTEN_ENTRIES", 0)
        yield
