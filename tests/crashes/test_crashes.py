"""Every crash is explored: no charge is forgotten, no coin comes twice, and no honest crash is refused (contracts 9 and 10)."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import privacy.checkpoints.write
import privacy.ledger.run_state
from privacy.files import durable
from privacy.ledger.chain import AppendOnly, ChainFile
from privacy.ledger.shared import Membership, SharedLedger
from privacy.run.run_ledger import RunLedger
from tests.crashes.disk import Names, States, put
from tests.crashes.exploration import (
    DRAWS,
    PLANTED,
    Found,
    explore,
    explore_kills,
    explore_rollbacks,
    first_start,
    recorded,
)
from tests.crashes.program import prepare

SOME: dict[str, tuple[Callable[..., Found], dict[str, Any], int]] = {
    "a crash": (explore, {"share": 0.1}, 50),
    "a crash of the resume": (explore, {"share": 0.012, "depth": 2, "seed": 1}, 30),
    "a kill, a resume and a crash": (explore_kills, {"share": 0.03, "seed": 2}, 30),
    "a copy or a backup": (explore_rollbacks, {"share": 0.008, "seed": 3}, 40),
}
"""What befalls a run, the part of the states after it that is tried, and how many these are at least."""


@pytest.mark.parametrize("after", SOME)
def test_contract_9_no_state_is_refused_or_forgets_a_charge(root: Path, after: str) -> None:
    """What comes from a copy or a backup may be refused."""
    search, part, least = SOME[after]
    found = search(root, **part)
    assert not found.problems, found.problems[:3]
    assert found.states > least


def test_contract_9_nor_one_after_a_kill_while_the_run_is_made(root: Path) -> None:
    """The next start goes on from names that are in the page cache alone, and the power is cut before it has come far."""
    found = Found()
    names = [
        {name for name, _ in step.changes} if isinstance(step, Names) else set()
        for step in first_start(root).log
    ]
    for point in range(
        1, 2 + next(place for place, changed in enumerate(names) if "sampling.key" in changed)
    ):
        put(root, {})
        prepare(root)
        recorder, states = recorded(root, 1, kill_after=point), States()
        recorded(root, 2, kill_after=point + 12, log=recorder)
        states.add(recorder, [], first=point)
        for key, happened in states.trees.items():
            if found.remembered.is_new(key, happened):
                found.check(root, dict(key), happened, f"kill after {point}, resume, crash")
    assert not found.problems, found.problems[:3]
    assert found.states > 50


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("search", [explore, explore_rollbacks])
def test_contract_9_every_state_after_a_crash_and_every_rollback(
    root: Path, search: Callable[..., Found]
) -> None:
    found = search(root)
    print(found)
    assert not found.problems and not found.cut, found.problems[:3]


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", ["crash", "kill"])
def test_contract_9_every_state_after_two_crashes(root: Path, kind: str, part: int) -> None:
    found = (
        explore(root, depth=2, part=(part, 4))
        if kind == "crash"
        else explore_kills(root, part=(part, 4))
    )
    print(found)
    assert not found.problems, found.problems[:3]
    # The page cache of two programs may hold too many changes for all their subsets.
    assert kind == "kill" or not found.cut


# Mistakes in the protocol, planted into the product: the exploration finds each.


def mirror_first(patch: pytest.MonkeyPatch) -> None:
    def append(self: ChainFile[Any], line: bytes, data: bytes) -> None:
        for file in reversed(self._files):
            file.append(data)
        self.state.absorb(line)

    patch.setattr(ChainFile, "_write", append)


def intent_after_the_draw(patch: pytest.MonkeyPatch) -> None:
    """The noise is drawn between the record of the attempt and the intent."""
    real = RunLedger.intent

    def late(self: RunLedger, step: int, **more: Any) -> None:
        note = DRAWS.pop()
        note((self._on_main.ledger.state.nonces[-1], step, self.attempts.get(step, 0)))
        DRAWS.append(note)
        real(self, step, **more)

    patch.setattr(RunLedger, "intent", late)


def intent_without_fsync(patch: pytest.MonkeyPatch) -> None:
    real = AppendOnly.append

    def append(self: AppendOnly, data: bytes) -> None:
        with pytest.MonkeyPatch.context() as inner:
            if b'"type":"intent"' in data:
                inner.setattr(durable, "fsync", lambda descriptor: None)
            real(self, data)

    patch.setattr(AppendOnly, "append", append)


def folder_above_not_synced(patch: pytest.MonkeyPatch) -> None:
    def make(path: Path, mode: int = 0o777) -> None:
        if not path.is_dir():
            durable.make_one_directory(path, mode)

    patch.setattr("privacy.step.run_folder.make_directory", make)


def rename_without_fsync_of_the_file(patch: pytest.MonkeyPatch) -> None:
    def write_new(path: Path, data: bytes, mode: int) -> None:
        descriptor = durable.create_file(path, mode)
        durable.write(descriptor, data)
        os.close(descriptor)
        durable.fsync_directory(path.parent)

    patch.setattr(durable, "write_new", write_new)


def checkpoint_recorded_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    real = privacy.checkpoints.write.CheckpointWriter.save

    def save(self: Any, step: int, *rest: Any) -> None:
        self._published(step, f"step-{step:08d}", "cd" * 32)
        self._published = lambda *_more: None
        real(self, step, *rest)

    patch.setattr(privacy.checkpoints.write.CheckpointWriter, "save", save)


def attempt_recorded_after_the_intent(patch: pytest.MonkeyPatch) -> None:
    real, waiting = RunLedger.intent, list[Any]()
    noted = RunLedger.note
    patch.setattr(RunLedger, "note", lambda self, batch, *, micro_batch_size: waiting.append(batch))

    def first(self: RunLedger, step: int, **more: Any) -> None:
        real(self, step, **more)
        noted(self, waiting.pop(), micro_batch_size=40)

    patch.setattr(RunLedger, "intent", first)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (mirror_first, "mirror"),
        (intent_after_the_draw, "forgotten"),
        (intent_without_fsync, "refused|forgotten"),
        (
            lambda patch: patch.setattr(durable, "fsync_directory", lambda path: None),
            "refused|forgotten",
        ),
        (folder_above_not_synced, "refused|forgotten"),
        pytest.param(rename_without_fsync_of_the_file, "refused", marks=pytest.mark.full),
        (checkpoint_recorded_before_it_is_there, "refused"),
        (attempt_recorded_after_the_intent, "no record of their attempt"),
    ],
)
def test_a_planted_mistake_is_found(
    root: Path, mistake: Callable[[pytest.MonkeyPatch], None], words: str
) -> None:
    PLANTED.append(mistake)
    try:
        found = explore(root, share=0.35, enough=5)
    finally:
        PLANTED.clear()
    assert [line for line in found.problems if re.search(words, line)], found


IGNORED = {
    "witness": [
        (privacy.ledger.run_state, "ledger_gap", lambda lines, state: None),
        (privacy.ledger.run_state, "record_gap", lambda state, lines: None),
    ],
    "owner's ledger": [
        (Membership, "_require_no_fork", lambda self, state: None),
        (SharedLedger, "require_remembered", lambda self, state, shared: None),
    ],
}


@pytest.mark.parametrize("what", IGNORED)
def test_a_witness_or_an_owner_s_ledger_that_is_ignored_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A ledger and its mirror, brought back from a backup, forget what private/ remembers; a copy of the whole run folder and its
    mirror, started again, spends the reservation twice."""
    for owner, name, ignores in IGNORED[what]:
        monkeypatch.setattr(owner, name, ignores)
    found = explore_rollbacks(root, share=0.05, enough=1)
    assert [line for line in found.problems if "forgotten" in line], found
