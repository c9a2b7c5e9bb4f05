"""Ports that somebody else has: every rank says so at once, and not after the time that a slow rank is given."""

import socket
import time
from collections.abc import Iterator

import pytest

from trainer.ranks import rendezvous
from trainer.ranks.rendezvous import Place, RendezvousError, connect, meet

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


def test_the_host_of_the_store_finds_its_port_taken(listener: socket.socket) -> None:
    place = Place("127.0.0.1", listener.getsockname()[1], is_host=True)
    with pytest.raises(RendezvousError, match="something else has that port; choose another MASTER_PORT"):
        connect(place, PATIENCE)


def test_a_guest_meets_something_that_is_no_store(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.5)
    place = Place("127.0.0.1", listener.getsockname()[1], is_host=False)
    with pytest.raises(RendezvousError, match="something else has that port; choose another MASTER_PORT"):
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
