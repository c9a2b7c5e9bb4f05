"""The heartbeat's verdicts, with real stores and short times; whole processes are in tests/e2e/test_failures.py."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from trainer.ranks import distributed, heartbeat
from trainer.ranks.discovery import process_identity, process_state
from trainer.ranks.heartbeat import Beat, Heartbeat, Timing, Wait
from trainer.ranks.rendezvous import Place, connect

FAST = Timing(interval=0.05, dead_after=0.6, suspect_after=0.25, slow_after=0.3)


class World:
    """Ranks that are threads of this process, each with its own connection; what they would print and exit with."""

    def __init__(self, processes: Sequence[str], timing: Timing) -> None:
        self.processes, self.timing = processes, timing
        self.host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.hosts = [f"node{r // 2}" for r in range(len(processes))]
        self.ends: dict[int, tuple[str, int]] = {}
        self.warnings: list[str] = []
        for r in range(len(processes)):
            self.host.set(f"beat/{r}", "[]")
        self.ranks = [self.rank(r) for r in range(len(processes))]
        for rank in self.ranks:
            rank.start()

    def connection(self) -> dist.Store:
        return dist.TCPStore(
            "127.0.0.1",
            self.host.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )

    def rank(self, r: int, connect: Callable[[], dist.Store] | None = None) -> Heartbeat:
        made = Heartbeat(
            connect or self.connection, r, self.hosts, processes=self.processes, timing=self.timing
        )

        def end(message: str, exit_code: int) -> None:
            self.ends[r] = (message, exit_code)
            made.leave()

        made.end, made.warn = end, self.warnings.append  # type: ignore[method-assign]
        return made

    def all_end(self, *ranks: int) -> None:
        wait_until(lambda: set(ranks) <= self.ends.keys())

    @property
    def said(self) -> list[str]:
        return [message for message, _ in self.ends.values() if message]


@pytest.fixture(autouse=True)
def short_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LINGER", 0.5)


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(processes: Sequence[str], **timing: float) -> World:
        made.append(World(processes, FAST._replace(**timing)))
        return made[-1]

    yield make
    for rank in (rank for world in made for rank in world.ranks):
        rank.leave()


UNSEEN = [""] * 3
"""Three ranks whose processes nobody sees."""
SEEN = [process_identity(os.getpid())] * 3


@pytest.fixture
def world(worlds: Callable[..., World]) -> World:
    return worlds(UNSEEN)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_silent_rank_is_named(world: World) -> None:
    world.ranks[2].leave()  # its threads stop without a word
    world.all_end(0, 1)
    assert {code for _, code in world.ends.values()} == {1}
    assert world.said == [
        "error: rank 2 (host node1) is dead (no heartbeat for 1 s); all ranks end, and the same command resumes"
    ]


def test_a_silent_rank_0(world: World) -> None:
    """Under a launcher that keeps the store, the others find out by its beats."""
    world.ranks[0].leave()
    world.all_end(1, 2)
    assert all("rank 0 (host node0) is dead" in line for line in world.said) and world.said


@pytest.mark.parametrize("is_printed", [True, False])
def test_a_failing_rank_ends_the_others_with_its_code(world: World, is_printed: bool) -> None:
    """In silence; what it did not say itself, rank 0 says. The first of two failures counts."""
    world.ranks[1].fail("error on rank 1: made", 4, is_printed=is_printed)
    world.ranks[1].leave()
    world.ranks[2].fail("said", 5)
    world.all_end(0, 2)
    assert world.ends == {0: ("" if is_printed else "error on rank 1: made", 4), 2: ("", 4)}


def test_a_broken_connection_shortens_the_patience(world: World) -> None:
    world.ranks[2].leave()
    started = time.monotonic()
    waiting = threading.Thread(target=world.ranks[1].wait_for_the_cause)
    waiting.start()
    world.all_end(0, 1)
    waiting.join(5)
    assert not waiting.is_alive()
    assert "no heartbeat for 0 s" in world.said[0] and time.monotonic() - started < 15


def test_a_store_that_is_gone(world: World) -> None:
    def unreachable() -> dist.Store:
        raise dist.DistNetworkError("Connection reset\nframes")

    world.rank(1, unreachable).start()
    world.all_end(1)
    said, code = world.ends[1]
    assert (
        code == 1
        and "rank 0 (host node0) is dead" in said
        and "Connection reset" in said
        and "frames" not in said
    )


@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_rank_whose_process_lives_is_late(
    silent: int, worlds: Callable[..., World]
) -> None:
    world = worlds(SEEN)
    world.ranks[silent].leave()
    wait_until(lambda: len(world.warnings) > 1)
    warning = re.compile(
        rf"warning: rank {silent} \(host node{silent // 2}\) is late: no heartbeat for \d+ s, its process lives, "
        r"load \d+ on \d+ CPUs; the run waits"
    )
    assert not world.ends and all(warning.fullmatch(line) for line in world.warnings), (
        world.warnings
    )


def test_who_is_late_for_too_long_ends_all(worlds: Callable[..., World]) -> None:
    world = worlds(SEEN, late_after=1.2)
    world.ranks[2].leave()
    world.all_end(0, 1)
    (said,) = world.said
    assert said.startswith(
        "error: rank 2 (host node1) is late (no heartbeat for 1 s, its process lives, load "
    )


def test_processes_are_seen_as_they_are(worlds: Callable[..., World]) -> None:
    """Of three silent ranks: one that was killed, one of another host, one that is stopped."""
    found = []
    for number in (signal.SIGKILL, signal.SIGSTOP):
        child = subprocess.Popen(["sleep", "60"])
        found.append(process_identity(child.pid))
        assert process_state(found[-1]) in ("S", "R", "D")
        child.send_signal(number)
        if number == signal.SIGKILL:
            wait_until(lambda: process_state(found[0]) == "")  # before anybody waits for it
            child.wait()
    try:
        wait_until(lambda: process_state(found[1]) == "T")
        assert (
            process_state(found[0])
            == process_state("")
            == process_state("elsewhere pid:[1] 1 1")
            == ""
        )
        assert process_state(SEEN[0].rpartition(" ")[0] + " 1") == "", (
            "another process has its number"
        )
        world = worlds([SEEN[0], found[1]], stopped_after=1.5)
        world.ranks[1].leave()
        world.all_end(0)
        assert (
            "is late: no heartbeat" in world.warnings[0]
            and "its process is stopped, load" in world.warnings[0]
        )
        assert world.said[0].startswith("error: rank 1 (host node0) is dead (no heartbeat for ")
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_answers_late_is_asked_again(rank: int, worlds: Callable[..., World]) -> None:
    """Nothing was heard of anybody for longer than the limit, since the first times end before any beat."""
    world = worlds(SEEN)
    for one in world.ranks:
        one.leave()
    store, late = connect(Place("127.0.0.1", world.host.port, False), 5), iter(range(30))
    for key in ("beat/0", "beat/1", "beat/2"):
        store.set(key, "[1]")

    def late_store() -> dist.Store:
        if next(late, None) is not None:
            raise dist.DistStoreError("wait timeout after 45000ms, keys: /attempt-0/beat/1\nframes")
        return store

    watcher = world.rank(rank, late_store)
    watcher.start()
    wait_until(lambda: world.warnings)
    assert world.warnings[0].startswith(
        "warning: rank 0 (host node0) is late: no answer from the store for 1 s, its process lives"
    )
    wait_until(lambda: watcher._beats[2 if rank == 0 else 0][0] == Beat(1))
    watcher.leave()
    assert not world.ends


def test_a_slow_rank_only_draws_warnings(world: World) -> None:
    for rank in (0, 2):
        world.ranks[rank].note(5)
    wait_until(lambda: len(world.warnings) > 1)
    assert all("rank 1 (host node0) is slow" in line for line in world.warnings)
    assert not world.ends


def test_ranks_that_all_stand_still_end_and_the_line_says_where(
    worlds: Callable[..., World],
) -> None:
    """All processes live and beat: a collective that rank 1 never joins, or a device that is gone."""
    world = worlds(UNSEEN, still_after=0.4)
    for rank, place in zip(
        world.ranks, ("agree (a.py:3)", "synchronize (b.py:4)", "agree (a.py:3)"), strict=True
    ):
        rank.standing = lambda place=place: (place, place)  # type: ignore[method-assign, misc]
        rank.note(7)
    world.all_end(0, 1, 2)
    assert {code for _, code in world.ends.values()} == {1}
    (line,) = world.said
    assert re.match(r"error: no rank has moved for \d+ s in step 3 \(", line), line
    assert (
        "ranks 0, 2 (hosts node0, node1) in agree (a.py:3); rank 1 (host node0) in synchronize (b.py:4)"
        in line
    )


@pytest.mark.parametrize(
    "way",
    [
        "micro-batches",
        "a silent rank",
        *(pytest.param(way, marks=pytest.mark.full) for way in ("elsewhere", "data")),
    ],
)
def test_a_slow_run_is_not_ended_while_any_rank_moves(
    way: str, worlds: Callable[..., World]
) -> None:
    """Hashing and compiling are many places; a rank that waits for data moves; who is silent is late, which has its own time."""
    world = worlds(SEEN, still_after=0.4)
    for rank in world.ranks:
        rank.standing = lambda: ("one place", "")  # type: ignore[method-assign]
    last = world.ranks[2]
    if way == "elsewhere":
        last.standing = lambda: (time.monotonic(), "")  # type: ignore[method-assign]
    elif way == "data":
        last.wait = Wait("a micro-batch is read", time.monotonic(), moves=True)
    elif way == "a silent rank":
        last.leave()
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        if way == "micro-batches":
            last.note()
        time.sleep(0.1)
    assert not world.ends


def test_what_ranks_wait_for_is_said_after_a_minute(worlds: Callable[..., World]) -> None:
    """All ranks deal for ever: rank 0 says so, of those that it has heard of by then, and again only after twice as long."""
    world = worlds(SEEN, slow_after=0.3)
    for rank in world.ranks:
        rank.wait = Wait("the examples of the next step are dealt", time.monotonic())
    wait_until(lambda: world.warnings)
    assert re.fullmatch(
        r"ranks? 0.* \(hosts? node0.*\) (has|have) waited for \d+ s: the examples of the next step are dealt",
        world.warnings[0],
    )
    assert world.ranks[0]._next_wait >= 2 * 0.3


def test_dealing_inside_a_wait_for_data_is_no_wait_for_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader pulls a plan when it wants its ids: while that is drawn, a rank that stands still is seen to stand still."""
    beat = Heartbeat(lambda: dist.HashStore(), 0, ["node0", "node0"])
    monkeypatch.setattr(distributed, "_heartbeat", beat)
    waits: list[Wait] = []

    def plans() -> Iterator[Any]:
        for step in (1, 2):
            waits.append(beat.wait)
            yield step

    def batches(dealt: Iterator[Any]) -> Iterator[Any]:
        for step in dealt:
            waits.append(beat.wait)
            yield step

    assert list(distributed.reading(batches(distributed.dealing(plans())), "data")) == [1, 2]
    assert [wait.moves for wait in waits] == [False, True] * 2
    assert beat.wait == Wait()
