"""A heartbeat apart from the collectives: a dead rank ends all ranks within a minute, a slow or late one only draws a warning.

Collectives cannot tell a dead rank from a long step, and their timeouts are hours. So two threads of every rank keep contact
over a store connection of their own. One talks to the store: it reports that this rank lives and how far it has come, and
fetches what the others report. It may block for ever on a store that does not answer. The other judges from what was fetched
and when, never blocks, and ends the process. Rank 0 judges all ranks; the others judge rank 0 and obey its verdict.

A rank is dead when its heartbeat stops, which does not depend on how long its step takes, and nobody sees its process live: it
was killed, or cut off. Where its process lives on the watcher's host, the rank is late, as on a machine with too much to do, and
the run waits until `Timing.late_after`. A rank that fails leaves its last words.

Ranks can also all live and wait for ever: for a collective that one of them never joins, or for a device or a network card that
is gone. A rank moves when its main thread is elsewhere in the program than at the last beat, when it takes up a micro-batch or a
phase of a step, and all the while that it waits for data, whose readers have limits of their own. When no rank has moved for
long, they end (`Timing.still_after`). Hours of hashing, a compilation or a long step are many moves; one call of one library
would have to last as long. Dealing the examples of a step is no wait for data. Whatever a rank waits for, rank 0 says so after a
minute (`Wait`).
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from privacy.errors import say
from trainer.ranks.discovery import HEARTBEAT_SECONDS, process_state

LINGER = 3.0
"""Seconds that the store's host gives the others to read a verdict, and that a lost store may be a normal end."""
STILL_TIMES = 20
"""Ranks may all stand still for so many times as long as they have before."""
ROOT = f"{Path(__file__).resolve().parents[2]}{os.sep}"


class Timing(NamedTuple):
    """Seconds.

    Attributes:
        interval: between beats.
        dead_after: without a beat of a rank that nobody sees live.
        late_after: without a beat of a rank whose process is seen to run.
        stopped_after: the same of one that SIGSTOP or a debugger has stopped.
        suspect_after: as `dead_after` once a rank has seen a connection break: somebody is gone, and the question is only who.
        slow_after: behind the others until the first warning; the next comes after twice as long, and so on.
        still_after: without a move of any rank; longer where all have stood still for long before (STILL_TIMES).
    """

    interval: float = 1.0
    dead_after: float = HEARTBEAT_SECONDS
    late_after: float = 20 * HEARTBEAT_SECONDS
    stopped_after: float = 50.0
    suspect_after: float = 8.0
    slow_after: float = 60.0
    still_after: float = 1800.0


class Wait(NamedTuple):
    """What the main thread of a rank waits for ("" for nothing), from when on, and whether it counts as moving meanwhile."""

    what: str = ""
    since: float = 0.0
    moves: bool = False


class Beat(NamedTuple):
    """What a rank reports: a number that shows that it lives, twice its step (and 1 once that is charged), and its moves.

    `waits_for` is what it has waited for during the last `waited` seconds.
    """

    number: int = 0
    position: int = 0
    moves: int = 0
    place: str = "its start"
    waits_for: str = ""
    waited: float = 0.0


class Verdict(NamedTuple):
    """Why all ranks end."""

    message: str
    exit_code: int
    is_printed: bool


def end_process(message: str, exit_code: int) -> NoReturn:
    """Ends this process from any thread, whatever the main thread is doing; what is written durably stays whole."""
    if message:
        with contextlib.suppress(OSError):  # nobody may be left to read it
            os.write(2, f"{message}\n".encode())
    os._exit(exit_code)


def standing() -> tuple[object, str]:
    """Where the main thread is: what changes when it goes on, and its innermost line of this project in words."""
    places, words = [], ""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        places.append((code, frame.f_lasti))
        if (
            not words
            and code.co_filename.startswith(ROOT)
            and "site-packages" not in code.co_filename
        ):
            words = f"{code.co_name} ({code.co_filename.removeprefix(ROOT)}:{frame.f_lineno})"
        frame = frame.f_back
    return places, words or Beat().place


@dataclass(eq=False)
class Heartbeat:
    """Start it once all ranks have met.

    Attributes:
        connect: makes a store connection that nobody else uses.
        hosts: each rank's host name, for messages.
        processes: each rank's `process_identity`.
        speaks: whether this rank prints that rank 0 is gone with its store; not all of a thousand need to.
    """

    connect: Callable[[], dist.Store]
    rank: int
    hosts: Sequence[str]
    processes: Sequence[str] = ()
    speaks: bool = True
    timing: Timing = Timing()  # noqa: RUF009 - never changed

    def __post_init__(self) -> None:
        self.processes = self.processes or [""] * len(self.hosts)
        self.speaks = self.speaks or self.rank == 0
        rank, hosts, now = self.rank, self.hosts, time.monotonic()
        self._watched = [r for r in range(len(hosts)) if r != rank] if rank == 0 else [0]
        self._leaving = threading.Event()
        self._wake = threading.Event()
        # The talking thread takes these from here.
        self._position = self._noted = 0
        self.wait, self.standing = Wait(), standing
        self._last_words: Verdict | None = None
        self._saw_broken_connection = False
        # The talking thread puts these here.
        self._contact = now
        self._beats = dict.fromkeys(self._watched, (Beat(), now))  # last one, and when it came
        self._mine, self._stood = Beat(), object()
        self._verdict: Verdict | None = None
        self._suspicion = False
        self._lost: str | None = None
        self._posted = threading.Event()
        self._all_know = threading.Event()
        # Only the judging thread uses these.
        self._leader, self._leader_since, self._next_warning = 0, now, self.timing.slow_after
        self._next_late = self.timing.dead_after
        self._next_wait = self.timing.slow_after
        self._moves: list[int] = []
        self._still_since, self._longest = now, 0.0

    def start(self) -> None:
        for target in (self._talk, self._judge):
            threading.Thread(target=target, name=f"heartbeat{target.__name__}", daemon=True).start()

    def note(self, position: int | None = None) -> None:
        """This rank moves; how far it has come never decreases. Ranks that stay behind the furthest draw a warning."""
        self._position = self._position if position is None else position
        self._noted += 1

    def fail(self, message: str, exit_code: int, *, is_printed: bool = True) -> None:
        """Posts last words: all ranks end with this exit code. Returns when the others can know; the caller then exits.

        Args:
            is_printed: whether the message is on the console already; otherwise rank 0 prints it, unless it fails itself.
        """
        self._last_words = Verdict(message, exit_code, is_printed)
        self._wake.set()
        self._posted.wait(LINGER)
        if self.rank == 0:  # perhaps the store's host
            self._all_know.wait(LINGER)

    def wait_for_the_cause(self) -> None:
        """Waits after a broken connection: some rank is gone, and once it is known which, the judge ends this process.

        Returns when that did not happen: then the error is this rank's.
        """
        self._saw_broken_connection = True
        self._wake.set()
        self._leaving.wait(self.timing.suspect_after + 2 * self.timing.interval + LINGER)

    def leave(self) -> None:
        """All ranks have finished; from here on nobody's silence means anything."""
        self._leaving.set()
        self._wake.set()

    def end(self, message: str, exit_code: int) -> None:
        """Ends the process."""
        end_process(message, exit_code)

    def warn(self, line: str) -> None:
        """Prints a warning."""
        say(line, folds=True)

    # The talking thread.

    def _talk(self) -> None:
        store, count = None, 0
        while not self._leaving.is_set():
            count += 1
            try:
                store = store or self.connect()
                where, place = self.standing()
                wait = self.wait
                moves = self._mine.moves + (wait.moves or self._stood != (where, self._noted))
                waited = time.monotonic() - wait.since if wait.what else 0.0
                self._stood = (where, self._noted)
                self._mine = Beat(count, self._position, moves, place, wait.what, waited)
                store.set(f"beat/{self.rank}", json.dumps(self._mine))
                if self._last_words is not None and not self._posted.is_set():
                    store.compare_set(
                        "verdict", "", json.dumps(self._last_words)
                    )  # the first counts
                    self._posted.set()
                if self._saw_broken_connection:
                    store.set("suspicion", "1")
                heard = store.multi_get([f"beat/{r}" for r in self._watched])
                for r, value in zip(self._watched, heard, strict=True):
                    if (beat := Beat(*json.loads(value))) != self._beats[r][0]:
                        self._beats[r] = (beat, time.monotonic())
                self._suspicion = store.check(["suspicion"])
                if store.check(["verdict"]):
                    self._verdict = Verdict(*json.loads(store.get("verdict")))
                    store.set(f"knows/{self.rank}", "1")
                    if self.rank == 0 and store.check([f"knows/{r}" for r in self._watched]):
                        self._all_know.set()
                self._contact = time.monotonic()
            except Exception as error:  # whatever the store raises, the judge decides what it means
                store, reason = None, str(error).split("\n")[0]
                if (
                    re.search("time ?out|timed out|no answer", reason) is None
                ):  # it may be late, and is asked again
                    self._lost = reason
                    return
            self._wake.wait(self.timing.interval)
            self._wake.clear()

    # The judging thread.

    def _judge(self) -> None:
        previous, timing = time.monotonic(), self.timing
        while not self._leaving.wait(timing.interval / 2):
            now = time.monotonic()
            if (
                now - previous > timing.interval + 5
            ):  # this whole process was stopped: others may not have been silent
                self._contact = self._still_since = now
                self._beats = {r: (beat, now) for r, (beat, _) in self._beats.items()}
            previous = now
            if self._verdict is not None:
                # Another rank has said why; this one ends in silence. The store's host waits until all have read it.
                verdict = self._verdict
                if self._last_words is not None:
                    self._leaving.wait(
                        2 * LINGER
                    )  # `fail` is on its way out, with words of its own
                elif self.rank == 0:
                    self._all_know.wait(LINGER)
                if not self._leaving.is_set():
                    is_silent = verdict.is_printed or self.rank != 0 or self._last_words is not None
                    self.end("" if is_silent else verdict.message, verdict.exit_code)
            elif self._lost is not None:
                if not self._leaving.wait(LINGER):  # a normal end on rank 0 closes the store too
                    words = self._words([0], f"the store that rank 0 keeps is gone: {self._lost}")
                    self.end(words if self.speaks else "", 1)
            else:
                self._look_for_the_dead(now)
                if self.rank == 0:
                    self._look_for_the_slow_and_the_still(now)

    def _look_for_the_dead(self, now: float) -> None:
        timing, what = self.timing, "no heartbeat"
        limit = (
            min(timing.suspect_after, timing.dead_after) if self._suspicion else timing.dead_after
        )
        silence = {r: now - since for r, (_, since) in self._beats.items()}
        if now - self._contact > timing.dead_after:
            limit, silence, what = (
                timing.dead_after,
                {0: now - self._contact},
                "no answer from the store",
            )
        longest = max(silence.values())
        if longest <= limit:
            self._next_late = limit
            return
        # A whole host goes at once.
        silent = [r for r in silence if silence[r] > limit - 2 * timing.interval]
        states = {r: "R" if r == self.rank else process_state(self.processes[r]) for r in silent}
        patience = {"": 0.0, "T": timing.stopped_after, "t": timing.stopped_after}
        given_up = [
            r for r, state in states.items() if silence[r] > patience.get(state, timing.late_after)
        ]
        ranks = given_up or list(states)
        seen, is_stopped = any(states[r] for r in ranks), all(states[r] in patience for r in ranks)
        reason = f"{what} for {longest if seen else limit:.0f} s"
        if seen:
            process = f"its process {'is stopped' if is_stopped else 'lives'}"
            reason += f", {process}, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs"
        if given_up:
            self._give_up(self._words(ranks, reason, "dead" if is_stopped else "late"))
        elif longest > self._next_late:
            self._next_late = 2 * longest
            if self.speaks:
                self.warn(f"warning: {self._are(ranks)} late: {reason}; the run waits")

    def _look_for_the_slow_and_the_still(self, now: float) -> None:
        beats = {r: beat for r, (beat, _) in self._beats.items()} | {0: self._mine}
        leader = max(beat.position for beat in beats.values())
        if leader > self._leader:
            self._leader, self._leader_since, self._next_warning = (
                leader,
                now,
                self.timing.slow_after,
            )
        behind = [r for r, beat in beats.items() if beat.position < leader]
        if behind and now - self._leader_since > self._next_warning:
            waited = f"others wait for {now - self._leader_since:.0f} s (alive)"
            self.warn(f"warning: {self._are(behind)} slow: {waited}")
            self._next_warning *= 2
        self._look_for_the_waiting(beats)
        # Or every process lives, and yet nothing will ever happen again.
        moves, still = [beat.moves for beat in beats.values()], now - self._still_since
        silence = now - min(since for _, since in self._beats.values())
        is_silent = silence > min(self.timing.dead_after, self.timing.still_after / 2)
        if (
            moves != self._moves or is_silent
        ):  # who is silent is late or dead, by rules of their own
            self._longest = self._longest if is_silent else max(self._longest, still)
            self._moves, self._still_since = moves, now
        elif still > max(self.timing.still_after, STILL_TIMES * self._longest):
            places: dict[str, list[int]] = {}
            for r, beat in sorted(beats.items()):
                places.setdefault(beat.place, []).append(r)
            waits = "; ".join(
                f"{named_ranks(ranks, self.hosts)} in {place}" for place, ranks in places.items()
            )
            step = f"in step {leader // 2}" if leader > 1 else "before the first step"
            self._give_up(
                f"error: no rank has moved for {still:.0f} s {step} ({waits}): "
                "a collective that some rank never joins, or a GPU or network card that is gone; all ranks end, and the same "
                "command resumes"
            )

    def _look_for_the_waiting(self, beats: Mapping[int, Beat]) -> None:
        longest = max(beat.waited for beat in beats.values())
        if longest <= self.timing.slow_after:
            self._next_wait = self.timing.slow_after
        if longest <= self._next_wait:
            return
        self._next_wait = 2 * longest
        ranks_by_wait: dict[str, list[int]] = {}
        for rank, beat in sorted(beats.items()):
            if beat.waited > self.timing.slow_after:
                ranks_by_wait.setdefault(beat.waits_for, []).append(rank)
        for what, ranks in ranks_by_wait.items():
            have = "have" if len(ranks) > 1 else "has"
            self.warn(f"{named_ranks(ranks, self.hosts)} {have} waited for {longest:.0f} s: {what}")

    def _give_up(self, words: str) -> None:
        self.fail(words, 1)
        first = self._verdict is None or self._verdict.message == words
        self.end(words if first and self.speaks else "", 1)

    def _words(self, ranks: list[int], reason: str, verdict: str = "dead") -> str:
        return f"error: {self._are(ranks)} {verdict} ({reason}); all ranks end, and the same command resumes"

    def _are(self, ranks: list[int]) -> str:
        return f"{named_ranks(ranks, self.hosts)} {'are' if len(ranks) > 1 else 'is'}"


def named_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Names at most eight ranks and their hosts: "rank 3 (host node7)", "ranks 1, 2 (hosts a, b)".

    Args:
        hosts: each rank's host name.
    """
    shown, rest = ranks[:8], f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    at = list(dict.fromkeys(hosts[rank] for rank in shown))
    return (
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, shown))}{rest} "
        f"(host{'s' if len(at) > 1 else ''} {', '.join(at)})"
    )
