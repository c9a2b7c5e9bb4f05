"""How ranks meet: who is missing is named, and a port that somebody else has at once, not after the time of a slow rank."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from trainer.errors import RemoteError
from trainer.ranks import distributed, rendezvous
from trainer.ranks.discovery import Process, Ranks, discover_ranks
from trainer.ranks.rendezvous import Place, RendezvousError, connect, find_store, meet

PATIENCE = 45.0
AT_ONCE = 10.0


@pytest.fixture(autouse=True)
def started() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < AT_ONCE


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


@pytest.mark.parametrize("is_host", [True, False])
def test_a_port_that_something_else_has(
    listener: socket.socket, is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.5)
    place = Place("127.0.0.1", listener.getsockname()[1], is_host)
    with pytest.raises(
        RendezvousError, match="something else has that port; choose another MASTER_PORT"
    ):
        connect(place, PATIENCE)


def test_a_guest_waits_for_a_host_that_comes_late(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(RendezvousError, match="refused"):
        connect(Place("127.0.0.1", port, is_host=False), 0.5)
    host = connect(Place("127.0.0.1", port, is_host=True), PATIENCE)
    host.set("word", "1")
    assert connect(Place("127.0.0.1", port, is_host=False), PATIENCE).get("word") == b"1"


def test_a_rank_that_comes_to_the_store_of_another_run_changes_nothing_there() -> None:
    first = connect(Place("127.0.0.1", 0, is_host=True), PATIENCE)
    for rank in (0, 1):
        first.set(f"here/{rank}", "host")
        first.set(f"beat/{rank}", "5:3")
    with pytest.raises(RendezvousError, match=r"another run is at .* and has a rank 1 already"):
        meet(first, 1, 2, Place("127.0.0.1", 1, is_host=False), PATIENCE)
    assert first.get("beat/1") == b"5:3"


def meet_all(ranks: list[int], world_size: int, seconds: float = 20) -> dict[int, object]:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place, found = Place("127.0.0.1", host.port, False), dict[int, object]()

    def one(rank: int) -> None:
        try:
            found[rank] = meet(connect(place, 10), rank, world_size, place, seconds)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_all_are_here() -> None:
    found = meet_all([0, 1, 2], 3)
    assert found[0] == found[1] == found[2] and len(found[0]) == 3  # type: ignore[arg-type]


def test_who_is_missing_is_named_once() -> None:
    found = meet_all([0, 2], 4, seconds=0.5)
    assert isinstance(found[0], RendezvousError) and found[0].exit_code == 2
    assert str(found[0]).startswith("rank 1, 3 of 4 did not come")
    assert isinstance(found[2], RemoteError) and found[2].exit_code == 2


def find_all(port: int, world_size: int) -> list[tuple[dist.Store, Place]]:
    """What every rank finds; rank 0 looks last."""
    found: dict[int, tuple[dist.Store, Place]] = {}

    def one(rank: int) -> None:
        found[rank] = find_store("127.0.0.1", port, rank, world_size, 10)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in reversed(range(world_size))]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(20)
    return [found[rank] for rank in range(world_size)]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def test_rank_0_keeps_a_store_of_its_own_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's may go, and the ranks still talk."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = find_all(agents.port, 3)
    assert {place.port for _, place in found} != {agents.port} and len(
        {place.port for _, place in found}
    ) == 1
    assert [place.is_host for _, place in found] == [True, False, False]
    del agents
    found[2][0].set("key", "value")
    assert found[1][0].get("key") == found[0][0].get("key") == b"value"
    again = connect(found[1][1], 5)
    assert again.get("key") == b"value", "the heartbeat's own connection"


def test_ranks_of_a_host_that_came_back_meet_those_of_an_agent_that_has_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each agent counts its own restarts; the place of the attempt that failed is still in their common store."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents, found = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []

    def one(rank: int, restarts: str) -> None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        found.append(find_store("127.0.0.1", agents.port, rank, 2, 3))

    one(0, "0")
    found.pop()  # its process has ended
    other = threading.Thread(target=one, args=(1, "1"))
    other.start()
    time.sleep(0.3)
    one(0, "0")
    other.join(10)
    (first, its_place), (second, place) = found
    first.set("key", "value")
    assert second.get("key") == b"value" and its_place.port == place.port


@pytest.mark.parametrize("agent", [False, True])
def test_one_process_needs_no_port(monkeypatch: pytest.MonkeyPatch, agent: bool) -> None:
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store, place = find_store("127.0.0.1", 1, 0, 1, 5)
    store.set("key", "value")
    assert place.is_host and store.get("key") == b"value"


def test_a_group_that_would_find_no_threads_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with few processes gloo would wait for its own thread for ever; what was started is left by none."""
    before, begin = threading.active_count(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if threading.active_count() > before + 3:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(dist, "init_process_group", lambda **_: pytest.fail("waits for ever"))
    monkeypatch.setattr(distributed, "export_ranks", lambda *_: None)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        distributed.start(Ranks())
    assert threading.active_count() == before


@pytest.mark.parametrize("by_hand", [True, False])
def test_variables_that_a_launcher_left_in_a_shell_are_named(
    monkeypatch: pytest.MonkeyPatch, *, by_hand: bool
) -> None:
    above = () if by_hand else (Process("1", "torchrun"),)
    monkeypatch.setattr(distributed, "launcher_processes", lambda: above)
    ranks = discover_ranks(
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    )
    with pytest.raises(RendezvousError, match="rank 1 of 2 did not come") as missed:
        distributed.start(ranks, rendezvous_seconds=0.5)
    hint = "RANK=0 and WORLD_SIZE=2, and no launcher has started this process: to train alone, unset them"
    assert (hint in str(missed.value)) == by_hand


def test_rank_0_is_missed_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RendezvousError, match="rank 0 did not come"):
        find_store("127.0.0.1", agents.port, 1, 2, 0.5)
