"""A heartbeat beside the collectives: a dead rank ends all ranks within a minute, a slow one is
warned of.

Collectives cannot tell a dead rank from a long step, and their timeouts are hours. So two threads
of every rank use a store connection of their own. One talks to the store: it reports the life and
progress of this rank, and fetches the reports of the others; it may block for ever if the store
does not answer. The other judges the reports and their age, never blocks, and ends the process.
Rank 0 judges all ranks; the others judge rank 0 and obey its verdict.

A rank is dead when its heartbeat stops, however long its step takes, and its process is not seen to
live: it was killed, or cut off. If its process lives on the watcher's host, the rank is late, as on
    a
busy machine, and the run waits until `Timing.late_after`. A rank that fails posts its last words.

Ranks can also all live and wait for ever: for a collective that one of them never joins, or for a
lost device or network card. A rank moves when its main thread is elsewhere in the program than at
the last beat, when it begins a micro-batch or a phase of a step, and as long as it waits for data,
whose readers have limits of their own. When no rank has moved for long, they end
(`Timing.still_after`). Hours of hashing, a compilation or a long step are many moves; one call of
one library would have to last as long. A wait for the examples of a step is not a wait for data.
After a minute rank 0 prints every wait (`Wait`).
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
"""Seconds for others to read a verdict, and for which a lost store may be a normal end."""
STILL_TIMES = 20
"""Ranks may all stand still for so many times their longest standstill so far."""
ROOT = f"{Path(__file__).resolve().parents[2]}{os.sep}"


class Timing(NamedTuple):
    """The limits of the heartbeat, in seconds.

    Attributes:
        interval: between beats.
        dead_after: without a beat of a rank whose process is not seen to live.
        late_after: without a beat of a rank whose process is seen to run.
        stopped_after: without a beat of a rank that SIGSTOP or a debugger has stopped.
        suspect_after: as `dead_after`, once a rank has seen a connection break: some rank is gone,
            and only its number is unknown.
        slow_after: behind the others until the first warning; the next comes after twice as long,
            and so on.
        still_after: without a move of any rank; longer after long standstills (STILL_TIMES).
    """

    interval: float = 1.0
    dead_after: float = HEARTBEAT_SECONDS
    late_after: float = 20 * HEARTBEAT_SECONDS
    stopped_after: float = 50.0
    suspect_after: float = 8.0
    slow_after: float = 60.0
    still_after: float = 1800.0


class Wait(NamedTuple):
    """A wait of a rank's main thread.

    Attributes:
        subject: as "a micro-batch is read"; "" if the thread does not wait.
        since: the time of its start.
        moves: whether the rank counts as moving meanwhile.
    """

    subject: str = ""
    since: float = 0.0
    moves: bool = False


class Beat(NamedTuple):
    """A report of a rank.

    Attributes:
        number: grows with every beat, which shows that the rank lives.
        position: twice its step, and 1 more once the step is charged.
        moves: the number of its moves.
        place: the line of this project at which its main thread is.
        waits_for: the subject of its wait, which has lasted `waited` seconds.
    """

    number: int = 0
    position: int = 0
    moves: int = 0
    place: str = "its start"
    waits_for: str = ""
    waited: float = 0.0


class Verdict(NamedTuple):
    """The reason why all ranks end, and their exit code."""

    message: str
    exit_code: int
    is_printed: bool


def end_process(message: str, exit_code: int) -> NoReturn:
    """Ends this process from any thread; files that were written durably stay complete."""
    if message:
        # The reader of the console may be gone.
        with contextlib.suppress(OSError):
            os.write(2, f"{message}\n".encode())
    os._exit(exit_code)


def standing() -> tuple[object, str]:
    """Returns the position of the main thread.

    It is an object that changes when the thread goes on, and the thread's innermost line of this
    project in words.
    """
    stack = []
    line = ""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        stack.append((code, frame.f_lasti))
        if not line and file.startswith(ROOT) and "site-packages" not in file:
            line = f"{code.co_name} ({file.removeprefix(ROOT)}:{frame.f_lineno})"
        frame = frame.f_back
    return stack, line or Beat().place


@dataclass(eq=False)
class Heartbeat:
    """The heartbeat of this rank; it is started once all ranks have met.

    Attributes:
        connect: makes a store connection of the heartbeat's own.
        hosts: each rank's host name, for messages.
        processes: each rank's `process_identity`.
        speaks: whether this rank prints that rank 0 is gone with its store; not all of a thousand
            need to.
        wait: the present wait of the main thread, which sets it.
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
        start = time.monotonic()
        self._watched = list(range(1, len(self.hosts))) if self.rank == 0 else [0]
        self._leaving = threading.Event()
        self._wake = threading.Event()
        # The main thread sets these, and the talking thread reads them.
        self._position = 0
        self._num_notes = 0
        self.wait = Wait()
        self.standing = standing
        self._last_words: Verdict | None = None
        self._saw_broken_connection = False
        # The talking thread sets these.
        self._contact = start
        # rank -> its last beat, and when it came
        self._beats = dict.fromkeys(self._watched, (Beat(), start))
        self._own_beat = Beat()
        self._last_position: object = object()
        self._verdict: Verdict | None = None
        self._suspicion = False
        self._store_error: str | None = None
        self._posted = threading.Event()
        self._all_know = threading.Event()
        # Only the judging thread uses these.
        self._leader = 0
        self._leader_since = start
        self._next_warning = self.timing.slow_after
        self._next_late = self.timing.dead_after
        self._next_wait = self.timing.slow_after
        self._moves: list[int] = []
        self._still_since = start
        self._longest_standstill = 0.0

    def start(self) -> None:
        """Starts the talking and the judging thread."""
        for target in (self._talk, self._judge):
            threading.Thread(target=target, name=f"heartbeat{target.__name__}", daemon=True).start()

    def note(self, position: int | None = None) -> None:
        """Counts a move of this rank, and sets its position, which never decreases.

        Ranks that stay behind the furthest one draw a warning.
        """
        if position is not None:
            self._position = position
        self._num_notes += 1

    def fail(self, message: str, exit_code: int, *, is_printed: bool = True) -> None:
        """Posts last words, with which all ranks end; the caller then exits.

        Returns when the others can have read them.

        Args:
            is_printed: whether the message is on the console already; otherwise rank 0 prints it,
                unless it fails itself.
        """
        self._last_words = Verdict(message, exit_code, is_printed)
        self._wake.set()
        self._posted.wait(LINGER)
        if self.rank == 0:
            # This process may keep the store.
            self._all_know.wait(LINGER)

    def wait_for_the_cause(self) -> None:
        """Waits after a broken connection until the judge knows the lost rank and ends this
        process.

        Returns if the judge finds no lost rank: then the error is this rank's.
        """
        self._saw_broken_connection = True
        self._wake.set()
        self._leaving.wait(self.timing.suspect_after + 2 * self.timing.interval + LINGER)

    def leave(self) -> None:
        """Ends the heartbeat after all ranks have finished, when silence means nothing any more."""
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
        store = None
        count = 0
        while not self._leaving.is_set():
            count += 1
            try:
                store = store or self.connect()
                stack, line = self.standing()
                wait = self.wait
                position = (stack, self._num_notes)
                has_moved = wait.moves or position != self._last_position
                self._last_position = position
                self._own_beat = Beat(
                    count,
                    self._position,
                    self._own_beat.moves + has_moved,
                    line,
                    wait.subject,
                    time.monotonic() - wait.since if wait.subject else 0.0,
                )
                store.set(f"beat/{self.rank}", json.dumps(self._own_beat))
                if self._last_words is not None and not self._posted.is_set():
                    # The first verdict counts.
                    store.compare_set("verdict", "", json.dumps(self._last_words))
                    self._posted.set()
                if self._saw_broken_connection:
                    store.set("suspicion", "1")
                reports = store.multi_get([f"beat/{rank}" for rank in self._watched])
                for rank, report in zip(self._watched, reports, strict=True):
                    beat = Beat(*json.loads(report))
                    if beat != self._beats[rank][0]:
                        self._beats[rank] = (beat, time.monotonic())
                self._suspicion = store.check(["suspicion"])
                if store.check(["verdict"]):
                    self._verdict = Verdict(*json.loads(store.get("verdict")))
                    store.set(f"knows/{self.rank}", "1")
                    if self.rank == 0 and store.check([f"knows/{rank}" for rank in self._watched]):
                        self._all_know.set()
                self._contact = time.monotonic()
            except Exception as error:
                # The store raises several types; the judge decides what they mean.
                store = None
                reason = str(error).split("\n")[0]
                if re.search("time ?out|timed out|no answer", reason) is None:
                    self._store_error = reason
                    return
                # The store may only be late, and is asked again.
            self._wake.wait(self.timing.interval)
            self._wake.clear()

    # The judging thread.

    def _judge(self) -> None:
        previous_time = time.monotonic()
        timing = self.timing
        while not self._leaving.wait(timing.interval / 2):
            time_now = time.monotonic()
            if time_now - previous_time > timing.interval + 5:
                # This process was stopped, so others may not have been silent.
                self._contact = time_now
                self._still_since = time_now
                self._beats = {rank: (beat, time_now) for rank, (beat, _) in self._beats.items()}
            previous_time = time_now
            if self._verdict is not None:
                self._obey(self._verdict)
            elif self._store_error is not None:
                # A normal end of rank 0 closes the store, too.
                if not self._leaving.wait(LINGER):
                    reason = f"the store that rank 0 keeps is gone: {self._store_error}"
                    self.end(self._words([0], reason) if self.speaks else "", 1)
            else:
                self._look_for_the_dead(time_now)
                if self.rank == 0:
                    self._look_for_the_slow_and_the_still(time_now)

    def _obey(self, verdict: Verdict) -> None:
        """Ends this process by a verdict, in silence if another rank prints the reason."""
        if self._last_words is not None:
            # `fail` is already ending this process, and has a message of its own.
            self._leaving.wait(2 * LINGER)
        elif self.rank == 0:
            # The store's host waits until all ranks have read the verdict.
            self._all_know.wait(LINGER)
        if not self._leaving.is_set():
            is_silent = verdict.is_printed or self.rank != 0 or self._last_words is not None
            self.end("" if is_silent else verdict.message, verdict.exit_code)

    def _look_for_the_dead(self, time_now: float) -> None:
        timing = self.timing
        if time_now - self._contact > timing.dead_after:
            sign = "no answer from the store"
            limit = timing.dead_after
            silences = {0: time_now - self._contact}
        else:
            sign = "no heartbeat"
            limit = timing.dead_after
            if self._suspicion:
                limit = min(timing.suspect_after, timing.dead_after)
            silences = {rank: time_now - since for rank, (_, since) in self._beats.items()}
        longest = max(silences.values())
        if longest <= limit:
            self._next_late = limit
            return
        # All ranks of a host are lost at once, with beats of slightly different age.
        silent_ranks = [
            rank for rank, silence in silences.items() if silence > limit - 2 * timing.interval
        ]
        # rank -> letter of its process state, "" if it is not seen to live
        states = {}
        for rank in silent_ranks:
            states[rank] = "R" if rank == self.rank else process_state(self.processes[rank])
        patience = {"": 0.0, "T": timing.stopped_after, "t": timing.stopped_after}
        lost_ranks = []
        for rank, state in states.items():
            if silences[rank] > patience.get(state, timing.late_after):
                lost_ranks.append(rank)
        ranks = lost_ranks or list(states)
        is_seen = any(states[rank] for rank in ranks)
        is_stopped = all(states[rank] in patience for rank in ranks)
        reason = f"{sign} for {longest if is_seen else limit:.0f} s"
        if is_seen:
            process = f"its process {'is stopped' if is_stopped else 'lives'}"
            reason += f", {process}, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs"
        if lost_ranks:
            self._give_up(self._words(ranks, reason, "dead" if is_stopped else "late"))
        elif longest > self._next_late:
            self._next_late = 2 * longest
            if self.speaks:
                self.warn(f"warning: {self._are(ranks)} late: {reason}; the run waits")

    def _look_for_the_slow_and_the_still(self, time_now: float) -> None:
        beats = {rank: beat for rank, (beat, _) in self._beats.items()}
        beats[0] = self._own_beat
        leader = max(beat.position for beat in beats.values())
        if leader > self._leader:
            self._leader = leader
            self._leader_since = time_now
            self._next_warning = self.timing.slow_after
        slow_ranks = [rank for rank, beat in beats.items() if beat.position < leader]
        delay = time_now - self._leader_since
        if slow_ranks and delay > self._next_warning:
            self.warn(
                f"warning: {self._are(slow_ranks)} slow: others wait for {delay:.0f} s (alive)"
            )
            self._next_warning *= 2
        self._look_for_the_waiting(beats)
        # All processes may live and still wait for ever.
        moves = [beat.moves for beat in beats.values()]
        standstill = time_now - self._still_since
        silence = time_now - min(since for _, since in self._beats.values())
        # Other rules judge silent ranks, which are late or dead.
        is_silent = silence > min(self.timing.dead_after, self.timing.still_after / 2)
        limit = max(self.timing.still_after, STILL_TIMES * self._longest_standstill)
        if moves != self._moves or is_silent:
            if not is_silent:
                self._longest_standstill = max(self._longest_standstill, standstill)
            self._moves = moves
            self._still_since = time_now
        elif standstill > limit:
            ranks_by_place: dict[str, list[int]] = {}
            for rank, beat in sorted(beats.items()):
                ranks_by_place.setdefault(beat.place, []).append(rank)
            places = []
            for place, ranks in ranks_by_place.items():
                places.append(f"{named_ranks(ranks, self.hosts)} in {place}")
            step = f"in step {leader // 2}" if leader > 1 else "before the first step"
            self._give_up(
                f"error: no rank has moved for {standstill:.0f} s {step} ({'; '.join(places)}): "
                "a collective that some rank never joins, or a GPU or network card that is gone; "
                "all ranks end, and the same command resumes"
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
        for subject, ranks in ranks_by_wait.items():
            names = named_ranks(ranks, self.hosts)
            verb = "have" if len(ranks) > 1 else "has"
            self.warn(f"{names} {verb} waited for {longest:.0f} s: {subject}")

    def _give_up(self, message: str) -> None:
        self.fail(message, 1)
        is_first = self._verdict is None or self._verdict.message == message
        self.end(message if is_first and self.speaks else "", 1)

    def _words(self, ranks: list[int], reason: str, verdict: str = "dead") -> str:
        way_out = "all ranks end, and the same command resumes"
        return f"error: {self._are(ranks)} {verdict} ({reason}); {way_out}"

    def _are(self, ranks: list[int]) -> str:
        return f"{named_ranks(ranks, self.hosts)} {'are' if len(ranks) > 1 else 'is'}"


def named_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Names at most eight ranks and their hosts: "rank 3 (host node7)", "ranks 1, 2 (hosts a, b)".

    Args:
        hosts: each rank's host name.
    """
    first_ranks = ranks[:8]
    numbers = ", ".join(map(str, first_ranks))
    if len(ranks) > 8:
        numbers += f" and {len(ranks) - 8} more"
    host_names = list(dict.fromkeys(hosts[rank] for rank in first_ranks))
    rank_noun = "ranks" if len(ranks) > 1 else "rank"
    host_noun = "hosts" if len(host_names) > 1 else "host"
    return f"{rank_noun} {numbers} ({host_noun} {', '.join(host_names)})"
