"""A heartbeat beside the collectives: a dead rank ends all ranks within a minute, a slow one only draws a warning.

Collectives cannot tell a dead rank from a long step, and their timeouts are hours. So two threads of every rank keep contact
over a store connection of their own. One talks to the store: it tells that this rank lives and how far it has come, and fetches
what the others tell. It may block for ever on a store that does not answer. The other judges from what was fetched and when,
never blocks, and ends the process. Rank 0 judges all ranks; the others judge rank 0 and obey its verdict.

A rank is dead when its heartbeat stops, which does not depend on how long its step takes: it was killed, stopped by SIGSTOP, cut
off, or held the interpreter lock in one C call for longer than `DEAD_AFTER`. A rank that fails says so with its last words.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch.distributed as dist

INTERVAL = 1.0
"""Seconds between beats."""
DEAD_AFTER = 30.0
"""Seconds without a beat."""
SUSPECT_AFTER = 8.0
"""The same once a rank has seen a connection break: then somebody is gone, and the question is only who."""
LINGER = 3.0
"""Seconds that the store's host gives the others to read a verdict, and that a lost store may be a normal end."""
SLOW_AFTER = 60.0
"""Seconds behind the others until the first warning; then after twice as long, and so on."""


class Verdict(NamedTuple):
    """Why all ranks end."""

    message: str
    exit_code: int
    said: bool
    """Whether the message is on the console already."""


def end_process(message: str, exit_code: int) -> NoReturn:
    """From any thread, whatever the main thread is doing; what is written durably stays whole."""
    if message:
        os.write(2, f"{message}\n".encode())
    os._exit(exit_code)


class Heartbeat:
    """Start it once all ranks have met.

    Args:
        connect: makes a store connection that nobody else uses.
        hosts: by rank, for messages.
        speaks: whether this rank says so when rank 0 is gone with its store; not all of a thousand need to.
        end: ends the process with (message, exit code).
    """

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        rank: int,
        hosts: Sequence[str],
        *,
        speaks: bool = True,
        interval: float = INTERVAL,
        dead_after: float = DEAD_AFTER,
        suspect_after: float = SUSPECT_AFTER,
        slow_after: float = SLOW_AFTER,
        end: Callable[[str, int], None] = end_process,
        warn: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self._connect = connect
        self.rank = rank
        self._hosts = list(hosts)
        self._speaks = speaks
        self._interval = interval
        self._dead_after = dead_after
        self._suspect_after = suspect_after
        self._slow_after = slow_after
        self._end = end
        self._warn = warn
        self._watched = [r for r in range(len(hosts)) if r != rank] if rank == 0 else [0]
        self._leaving = threading.Event()
        self._wake = threading.Event()
        self._position = 0
        # What this rank wants to tell; the talking thread takes it from here.
        self._own: Verdict | None = None
        self._saw_broken_connection = False
        # What the talking thread has found.
        now = time.monotonic()
        self._contact = now
        self._beats = dict.fromkeys(self._watched, ("", now))  # last value, and when it changed
        self._verdict: Verdict | None = None
        self._suspicion = False
        self._lost: str | None = None
        self._posted = threading.Event()
        self._all_know = threading.Event()
        # Of the judging thread alone.
        self._leader, self._leader_since, self._next_warning = 0, now, slow_after

    def start(self) -> None:
        for target in (self._talk, self._judge):
            threading.Thread(target=target, name=f"heartbeat{target.__name__}", daemon=True).start()

    def note(self, position: int) -> None:
        """How far this rank has come; never decreases. Ranks that stay behind the furthest draw a warning."""
        self._position = position

    def fail(self, message: str, exit_code: int, *, said: bool = True) -> None:
        """Last words: all ranks end with this exit code. Returns when the others can know; the caller then exits.

        Args:
            said: whether the message is on the console already; otherwise rank 0 says it, unless it fails itself.
        """
        self._own = Verdict(message, exit_code, said)
        self._wake.set()
        self._posted.wait(LINGER)
        if self.rank == 0:  # perhaps the store's host
            self._all_know.wait(LINGER)

    def wait_for_the_cause(self) -> None:
        """After a broken connection: some rank is gone, and once it is known which, the judge ends this process.

        Returns when that did not happen: then the error was this rank's own.
        """
        self._saw_broken_connection = True
        self._wake.set()
        self._leaving.wait(self._suspect_after + 2 * self._interval + LINGER)

    def leave(self) -> None:
        """All ranks have finished; from here on nobody's silence means anything."""
        self._leaving.set()
        self._wake.set()

    # The talking thread.

    def _talk(self) -> None:
        try:
            store, count = self._connect(), 0
            while not self._leaving.is_set():
                count += 1
                self._exchange(store, count)
                self._wake.wait(self._interval)
                self._wake.clear()
        except Exception as error:  # whatever the store raises, the judge decides what it means
            self._lost = str(error).split("\n")[0]

    def _exchange(self, store: dist.Store, count: int) -> None:
        store.set(f"beat/{self.rank}", f"{count}:{self._position}")
        if self._own is not None and not self._posted.is_set():
            store.compare_set("verdict", "", json.dumps(self._own))  # the first counts
            self._posted.set()
        if self._saw_broken_connection:
            store.set("suspicion", "1")
        keys = [f"beat/{r}" for r in self._watched]
        for r, value in zip(self._watched, store.multi_get(keys), strict=True):
            if value.decode() != self._beats[r][0]:
                self._beats[r] = (value.decode(), time.monotonic())
        self._suspicion = store.check(["suspicion"])
        if store.check(["verdict"]):
            self._verdict = Verdict(*json.loads(store.get("verdict")))
            store.set(f"knows/{self.rank}", "1")
            if self.rank == 0 and store.check([f"knows/{r}" for r in self._watched]):
                self._all_know.set()
        self._contact = time.monotonic()

    # The judging thread.

    def _judge(self) -> None:
        previous = time.monotonic()
        while not self._leaving.wait(self._interval / 2):
            now = time.monotonic()
            if now - previous > self._interval + 5:  # this whole process was stopped: others may not have been silent
                self._contact = now
                self._beats = {r: (value, now) for r, (value, _) in self._beats.items()}
            previous = now
            if self._verdict is not None:
                self._obey(self._verdict)
            elif self._lost is not None:
                self._store_is_lost(f"the store that rank 0 keeps is gone: {self._lost}")
            elif now - self._contact > self._dead_after:
                self._store_is_lost(f"no answer from the store for {self._dead_after:.0f} s")
            else:
                self._look_for_the_dead(now)
                if self.rank == 0:
                    self._look_for_the_slow(now)

    def _obey(self, verdict: Verdict) -> None:
        """Another rank has said why; this one ends in silence. The store's host waits until all have read it."""
        if self._own is not None:
            self._leaving.wait(2 * LINGER)  # `fail` is on its way out, with its own words
        elif self.rank == 0:
            self._all_know.wait(LINGER)
        if not self._leaving.is_set():
            silent = verdict.said or self.rank != 0 or self._own is not None
            self._end("" if silent else verdict.message, verdict.exit_code)

    def _store_is_lost(self, reason: str) -> None:
        if not self._leaving.wait(LINGER):  # a normal end on rank 0 closes the store too
            self._end(self._words([0], reason) if self._speaks else "", 1)

    def _look_for_the_dead(self, now: float) -> None:
        limit = self._suspect_after if self._suspicion else self._dead_after
        silence = {r: now - since for r, (_, since) in self._beats.items()}
        if max(silence.values()) <= limit:
            return
        dead = [
            r for r, seconds in silence.items() if seconds > limit - 2 * self._interval
        ]  # a whole host goes at once
        words = self._words(dead, f"no heartbeat for {limit:.0f} s")
        self.fail(words, 1)
        first = self._verdict is None or self._verdict.message == words
        self._end(words if first and (self.rank == 0 or self._speaks) else "", 1)

    def _look_for_the_slow(self, now: float) -> None:
        positions = {r: int(value.split(":")[1]) for r, (value, _) in self._beats.items() if value}
        leader = max([self._position, *positions.values()])
        if leader > self._leader:
            self._leader, self._leader_since, self._next_warning = leader, now, self._slow_after
        behind = [r for r in [*positions, 0] if positions.get(r, self._position) < leader]
        if behind and now - self._leader_since > self._next_warning:
            self._warn(f"warning: {self._name(behind)} slow: others wait for {now - self._leader_since:.0f} s (alive)")
            self._next_warning *= 2

    def _words(self, ranks: list[int], reason: str) -> str:
        return f"error: {self._name(ranks)} dead ({reason}); all ranks end, and the same command resumes"

    def _name(self, ranks: list[int]) -> str:
        """ "rank 3 (host node7) is", "ranks 1, 2 (hosts a, b) are"; at most eight."""
        shown, more = ranks[:8], f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        hosts = list(dict.fromkeys(self._hosts[r] for r in shown))
        several = "s" if len(ranks) > 1 else ""
        return (
            f"rank{several} {', '.join(map(str, shown))}{more} (host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}) "
            f"{'are' if several else 'is'}"
        )
