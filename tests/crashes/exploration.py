"""The search for a crash after which a charge is forgotten, a coin comes twice, or an honest start is refused."""

import contextlib
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.crashes.disk import Event, Killed, Recorder, States, Sync, Tree, put
from tests.crashes.program import MIRROR, OWNER, RUN, Note, Remembered, prepare, problem, start

PLANTED: list[Callable[[pytest.MonkeyPatch], None]] = []
"""Mistakes that the recorded programs make; the start that is judged makes none."""
DRAWS: list[Note] = []
"""Where the program that is recorded says that it draws."""


def recorded(
    root: Path, number: int, kill_after: int | None = None, log: Recorder | None = None
) -> Recorder:
    """The record of one start, or of another one that goes on from the page cache of the one before."""
    recorder = log or Recorder(root)
    recorder.kill_after = kill_after
    with pytest.MonkeyPatch.context() as patch:
        recorder.watching(patch)
        for mistake in PLANTED:
            mistake(patch)
        DRAWS[:] = [lambda what: recorder.note(Event(what))]
        with contextlib.suppress(Killed):
            start(root, number, lambda what: recorder.note(Event(what)))
    return recorder


@dataclass
class Found:
    """Counts and problems of an exploration.

    Attributes:
        cut: crash points of which only a part of the states was taken.
    """

    cut: int = 0
    states: int = 0
    problems: list[str] = field(default_factory=list)
    remembered: Remembered = field(default_factory=Remembered, repr=False)

    def check(self, root: Path, tree: Tree, happened: list[Any], where: str) -> bool:
        put(root, tree)
        self.states += 1
        wrong = problem(root, happened, self.remembered)
        if wrong is not None:
            self.problems.append(f"{where}: {wrong}")
        return wrong is None


def first_start(root: Path) -> Recorder:
    prepare(root)
    return recorded(root, 1)


def explore(
    root: Path,
    *,
    share: float = 1.0,
    depth: int = 1,
    seed: int = 0,
    part: tuple[int, int] = (0, 1),
    enough: int = 9999,
) -> Found:
    """All crash points of a run, and of the resumes from each state of the disk that they leave.

    Args:
        share: the part of the states that are tried.
        depth: 1: the run crashes; 2: so does the resume.
        enough: this number of problems ends the search.
        part: (k, n) takes every n-th state after the first crash, from the k-th on.
    """
    found, chosen = Found(), random.Random(seed)
    states = States()
    recorder = first_start(root)
    states.add(recorder, [])
    found.cut += states.cut
    for key, happened in itertools.islice(states.trees.items(), part[0], None, part[1]):
        if len(found.problems) >= enough:
            break
        if chosen.random() >= share or not found.check(root, dict(key), happened, "crash"):
            continue
        if depth > 1:
            put(root, dict(key))
            resumed, again = recorded(root, 2), States()
            again.add(resumed, happened)
            found.cut += again.cut
            for second, later in again.trees.items():
                if chosen.random() < share and found.remembered.is_new(second, later):
                    found.check(root, dict(second), later, "crash, resume, crash")
    return found


def explore_kills(
    root: Path, *, share: float = 1.0, seed: int = 0, part: tuple[int, int] = (0, 1)
) -> Found:
    """The program is killed at every point, the next start goes on from the page cache, and then the power is cut anywhere.

    Args:
        part: (k, n) takes every n-th point, from the k-th on.
    """
    found, chosen = Found(), random.Random(seed)
    base = root / "first"
    base.mkdir()
    length = len(first_start(base).log)
    for point in range(1 + part[0], length, part[1]):
        if chosen.random() >= share:
            continue
        put(base, {})
        prepare(base)
        recorder, states = recorded(base, 1, kill_after=point), States()
        recorded(base, 2, log=recorder)
        states.add(recorder, [], first=point)
        found.cut += states.cut
        for key, happened in states.trees.items():
            if chosen.random() < share and found.remembered.is_new(key, happened):
                found.check(base, dict(key), happened, f"kill after {point}, resume, crash")
    return found


PARTS = {
    "ledger": f"{RUN}/ledger",
    "private": f"{RUN}/private",
    "checkpoints": f"{RUN}/checkpoints",
    "mirror": MIRROR,
    "owner": OWNER,
}
"""What somebody may bring back from a backup: the run's files, the mirror elsewhere, and the data owner's ledger. A copy of the
run folder that is started next to the original is the three first, brought back together."""


def explore_rollbacks(
    root: Path, *, share: float = 1.0, seed: int = 0, enough: int = 9999
) -> Found:
    """After a crash and a resume that ended at several places, any parts are those of any earlier moment.

    Accepted are only disks that charge all noise, but for two cases. Nobody can find that ledger, private/ and mirror come from
    the same backup, if the owner's ledger does too, or has noted no later line. And where all of them are gone, there is another
    run, which reserves its own budget, while that of the first stays reserved.
    """
    found, chosen = Found(), random.Random(seed)
    length = len(first_start(root).log)
    for crash, end in itertools.product((length // 2, length * 3 // 4), (None, 20, 60)):
        put(root, {})
        prepare(root)
        recorder = recorded(root, 1, kill_after=crash)
        recorded(root, 2, kill_after=None if end is None else len(recorder.log) + end, log=recorder)
        moments, image, happened = list[Tree](), recorder.start.copy(), list[Any]()
        for step in recorder.log:
            if isinstance(step, Event):
                happened.append(step.what)
            elif not isinstance(step, Sync):
                image.apply(step)
                moments.append(image.tree())
        newest = moments[-1]
        for old, size in itertools.product(moments[:-1], range(1, len(PARTS) + 1)):
            for parts in itertools.combinations(PARTS, size):
                if chosen.random() >= share or len(found.problems) >= enough:
                    continue
                places = tuple(PARTS[part] for part in parts)
                tree = {n: c for n, c in newest.items() if not n.startswith(places)} | {
                    n: c for n, c in old.items() if n.startswith(places)
                }
                put(root, tree)
                found.states += 1
                wrong = problem(root, happened, found.remembered)
                if wrong is None or wrong.startswith(REFUSED):
                    continue
                if f"{RUN}/ledger.jsonl" not in tree and {"ledger", "private", "mirror"} <= set(
                    parts
                ):
                    reserved = (root / OWNER).read_bytes().count(b'"type":"reserve"')
                    if reserved < 1 + (tree[OWNER] or b"").count(b'"type":"reserve"'):
                        found.problems.append(
                            f"{' and '.join(parts)} brought back: another run has reserved nothing"
                        )
                    continue
                noted = [
                    line for line in (tree[OWNER] or b"").splitlines() if b'"position":' in line
                ]
                lines = (tree.get(f"{RUN}/ledger.jsonl") or b"").count(b"\n")
                behind = not noted or json.loads(noted[-1])["position"] < lines
                if not ({"ledger", "private", "mirror"} <= set(parts) and behind):
                    found.problems.append(f"{' and '.join(parts)} brought back: {wrong}")
    return found


REFUSED = ("refused: PrivacyStateRefused", "refused: PrivacyConfigError", "refused: ConfigError")
