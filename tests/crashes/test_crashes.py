"""Every crash is explored: no charge is forgotten, no coin or noise comes twice, and no honest crash is refused (contracts 9, 10)."""

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.crashes.disk import Event, Killed, Recorder, States, Sync, Tree, put
from tests.crashes.program import MIRROR, OWNER, RUN, prepare, problem, start


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory, where there is one."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        yield tmp_path_factory.mktemp("disk")
        return
    import tempfile

    with tempfile.TemporaryDirectory(dir=base) as folder:
        yield Path(folder)


def recorded(root: Path, number: int, kill_after: int | None = None, log: Recorder | None = None) -> Recorder:
    """The record of one start, or of another one that goes on from the page cache of the one before."""
    recorder = log or Recorder(root)
    recorder.kill_after = kill_after
    with pytest.MonkeyPatch.context() as patch:
        recorder.watching(patch)
        try:
            start(root, number, lambda what: recorder.note(Event(what)))
        except Killed:
            pass
    return recorder


@dataclass
class Found:
    """Counts and problems of an exploration."""

    points: int = 0
    raw: int = 0
    states: int = 0
    problems: list[str] = field(default_factory=list)

    def check(self, root: Path, tree: Tree, happened: list[Any], where: str) -> bool:
        put(root, tree)
        self.states += 1
        wrong = problem(root, happened)
        if wrong is not None:
            self.problems.append(f"{where}: {wrong}")
        return wrong is None


def first_start(root: Path) -> Recorder:
    prepare(root)
    return recorded(root, 1)


def explore(root: Path, *, share: float = 1.0, depth: int = 1, seed: int = 0) -> Found:
    """All crash points of a run, and of the resumes from each state of the disk that they leave.

    Args:
        share: the part of the states that are tried.
        depth: 1: the run crashes; 2: so does the resume.
    """
    found, chosen, seen = Found(), random.Random(seed), set[Any]()
    states = States()
    recorder = first_start(root)
    states.add(recorder, [])
    found.points, found.raw = len(recorder.log) + 1, states.raw
    for key, happened in states.trees.items():
        if chosen.random() >= share or not found.check(root, dict(key), happened, "crash"):
            continue
        if depth > 1:
            put(root, dict(key))
            resumed, again = recorded(root, 2), States()
            again.add(resumed, happened)
            found.points, found.raw = found.points + len(resumed.log) + 1, found.raw + again.raw
            for second, later in again.trees.items():
                identity = hash((second, tuple(map(str, later))))
                if identity not in seen and chosen.random() < share:
                    seen.add(identity)
                    found.check(root, dict(second), later, "crash, resume, crash")
    return found


def explore_kills(root: Path, *, share: float = 1.0, seed: int = 0) -> Found:
    """The program is killed at every point, the next start goes on from the page cache, and then the power is cut at any point."""
    found, chosen, seen = Found(), random.Random(seed), set[Any]()
    base = root / "first"
    base.mkdir()
    length = len(first_start(base).log)
    for point in range(1, length):
        if chosen.random() >= share:
            continue
        put(base, {})
        prepare(base)
        recorder, states = recorded(base, 1, kill_after=point), States()
        recorded(base, 2, log=recorder)
        states.add(recorder, [], first=point)
        found.points, found.raw = found.points + len(recorder.log) - point + 1, found.raw + states.raw
        for key, happened in states.trees.items():
            identity = hash((key, tuple(map(str, happened))))
            if identity not in seen and chosen.random() < share:
                seen.add(identity)
                found.check(base, dict(key), happened, f"kill after {point}, resume, crash")
    return found


PARTS = {
    "ledger": f"{RUN}/ledger",
    "private": f"{RUN}/private",
    "checkpoints": f"{RUN}/checkpoints",
    "mirror": MIRROR,
    "owner": OWNER,
}
"""What somebody may bring back from a backup: the run's files, the mirror elsewhere, and the data owner's ledger. A copy of the run
folder that is started beside the original is the three first, brought back together."""


def explore_rollbacks(root: Path, *, share: float = 1.0, seed: int = 0) -> Found:
    """After a crash and a resume that ended at several places, any parts are those of any earlier moment.

    Accepted are only disks that charge all noise, but for the one case that nobody can find: ledger, private/ and mirror come from
    the same backup, and the owner's ledger does too, or has noted no later line.
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
                if chosen.random() >= share:
                    continue
                places = tuple(PARTS[part] for part in parts)
                tree = {n: c for n, c in newest.items() if not n.startswith(places)} | {
                    n: c for n, c in old.items() if n.startswith(places)
                }
                put(root, tree)
                found.states += 1
                wrong = problem(root, happened)
                if wrong is None or wrong.startswith(REFUSED):
                    continue
                noted = [line for line in (tree[OWNER] or b"").splitlines() if b'"position":' in line]
                lines = (tree.get(f"{RUN}/ledger.jsonl") or b"").count(b"\n")
                behind = not noted or json.loads(noted[-1])["position"] < lines
                if not ({"ledger", "private", "mirror"} <= set(parts) and behind):
                    found.problems.append(f"{' and '.join(parts)} brought back: {wrong}")
    return found


REFUSED = ("refused: PrivacyStateRefused", "refused: PrivacyConfigError", "refused: ConfigError")


def test_contract_9_every_tenth_state_after_a_crash_is_accepted_and_charges_what_was_drawn(root: Path) -> None:
    found = explore(root, share=0.1)
    assert not found.problems, found.problems[:3]
    assert found.states > 30
