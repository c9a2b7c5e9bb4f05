"""A run of three steps on the real ledger, mirror, record of attempts, shared ledger and checkpoints, without the training.

Rank 0's code runs; what another rank does follows rank 0's acknowledgement, so the noise of all ranks counts as drawn in the very
moment in which `intent` returns. Keys, nonces and temporary names follow from the number of the start, so that equal histories
leave equal disks.
"""

import contextlib
import hashlib
import itertools
import json
import pickle
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

import privacy.checkpoints.write
import privacy.ledger.shared_records
from privacy.checkpoints.read import Checkpoint, has_checkpoints, set_aside_newer
from privacy.checkpoints.write import CheckpointWriter, Retention
from privacy.files import durable
from privacy.ledger import chain, records, shared
from privacy.ledger.chain import ChainState
from privacy.ledger.ledger import Ledger
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest
from privacy.ranks.engine import Piece, ShardState
from privacy.run.run import begins_again, load_newest
from privacy.run.run_ledger import RunLedger
from privacy.step.batches import StepBatch
from privacy.step.run_folder import RunFolder

STEPS = 3
PLAN = make_plan(
    PlanRequest(
        num_examples=2000,
        expected_batch_size=100,
        num_steps=STEPS,
        noise_multiplier=4.0,
        target_delta=1e-5,
        reserved_attempts=9,
        sensitivity_slack=1e-4,
    )
)
RUN, MIRROR, OWNER = "runs/one", "elsewhere/mirror.jsonl", "owner/shared.jsonl"
WEIGHTS = {"weight": torch.Size([2])}
Note = Callable[[Any], None]


@contextlib.contextmanager
def quick(number: int) -> Iterator[pytest.MonkeyPatch]:
    """One rank without a process group, no accounting, and secrets that follow from the number of the start."""
    count = itertools.count()

    def token(size: int = 32) -> bytes:
        return hashlib.shake_256(f"{number} {next(count)}".encode()).digest(size)

    def save_file(
        tensors: dict[str, torch.Tensor], path: Path
    ) -> None:  # what safetensors does, through the file layer
        descriptor = durable.create_file(path, 0o600)
        with contextlib.closing(open(descriptor, "rb")):
            durable.write(descriptor, save(tensors))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_bytes", token)
        patch.setattr(secrets, "token_hex", lambda size: token(size).hex())
        patch.setattr("privacy.run.run_ledger.environment", dict)
        patch.setattr(
            privacy.ledger.shared_records, "total_epsilon", lambda *_arguments, **_more: 0.1
        )
        patch.setattr(privacy.checkpoints.write, "save_file", save_file)
        yield patch


def prepare(root: Path) -> None:
    """What is there, durable, before a run begins: the places of mirror and shared ledger, and the latter."""
    for name in ("elsewhere", "owner", "runs"):
        (root / name).mkdir()
    with quick(0):
        SharedLedger.create(root / OWNER, epsilon=2.0, delta=1e-5)


@contextlib.contextmanager
def opened(root: Path) -> Iterator[tuple[RunLedger, Checkpoint | None]]:
    """The privacy state and the newest checkpoint, as a start of the trainer opens them."""
    folder = RunFolder(root / RUN)
    folder.enter()
    ledger, key = open_run_state(
        folder.ledger,
        folder.key,
        PLAN,
        data_manifest=b"data",
        mirror=root / MIRROR,
        members=folder.members,
        shared=SharedTerms(root / OWNER, "one"),
        has_checkpoint=has_checkpoints(folder.checkpoints),
        mend_at_once=False,
    )
    with ledger:
        run = RunLedger(ledger, key, PLAN, members=folder.members)
        resumed = load_newest(folder, run, None)
        if not run.is_closed:
            begins_again(folder, run, resumed, may_restart=False)
            folder.begin()
            if resumed is not None:
                set_aside_newer(folder.checkpoints, resumed.path.name)
        run.on_main(Ledger.mend)
        yield run, resumed


def start(
    root: Path, number: int, note: Note, opening: Callable[[RunLedger], None] = lambda run: None
) -> None:
    """One start of the program, to the end of the run.

    Args:
        note: learns of noise that is drawn, as (nonce, step, attempt), and of the end.
        opening: looks at the ledger as it was opened.
    """
    with quick(number), opened(root) as (run, resumed):
        opening(run)
        if run.is_closed:
            return
        nonce = run.start_session()
        if resumed is not None:
            run.adopt(resumed)
        writer = CheckpointWriter(
            RunFolder(root / RUN).checkpoints, Retention(1), published=run.checkpoint
        )
        first = 1 if resumed is None else resumed.step + 1
        for step in range(first, STEPS + 1):
            plan = StepBatch(step, np.arange(step), np.zeros((step, 2), np.uint64), 1)
            run.note(plan, micro_batch_size=40)
            run.intent(step, releases=[release_of_step(PLAN.noise_multiplier, PLAN.max_grad_norm)])
            note((nonce.hex(), step, run.attempts.get(step, 0)))
            run.done(step)
            if step != 2:
                state = ShardState(Piece("weight", 0, 2), {"param": torch.full((2,), float(step))})
                facts = {"ledger": run.position(), "charged_attempts": run.num_charged}
                writer.save(step, [state], WEIGHTS, facts)
        run.close_run()
        note("closed")


_read_chain, _from_frozen = chain.read_chain, PrivacyPlan.from_frozen


class Remembered:
    """What judging one disk teaches about the next: most of their files are equal, so most of what a start computes is.

    For the judged starts of one exploration, during which nothing but the disk differs. Only functions of bytes are remembered,
    by all that they read, and each caller gets a copy of its own. What is refused is computed anew, because its message names
    the file. A start still reads and writes every file itself.

    Attributes:
        states: the disks that were judged, each with what had happened.
    """

    def __init__(self) -> None:
        self.states = set[int]()
        self._chains = dict[tuple[type[ChainState], bytes], bytes]()
        self._plans = dict[str, PrivacyPlan]()

    def is_new(self, disk: frozenset[tuple[str, bytes | None]], happened: list[Any]) -> bool:
        """Whether this state was not asked about before."""
        identity, known = hash((disk, tuple(map(str, happened)))), len(self.states)
        self.states.add(identity)
        return len(self.states) > known

    def read_chain(self, data: bytes, state: ChainState, name: str) -> bytes:
        assert not state.hashes, "a new state"
        key = type(state), data
        if key not in self._chains:
            tail = _read_chain(data, state, name)
            self._chains[key] = pickle.dumps((state.__dict__, tail))
        known, tail = pickle.loads(self._chains[key])
        state.__dict__.update(known)
        return bytes(tail)

    def from_frozen(self, frozen: Mapping[str, Any]) -> PrivacyPlan:
        key = repr(frozen)
        if key not in self._plans:
            self._plans[key] = _from_frozen(frozen)
        return self._plans[key]

    def watching(self, patch: pytest.MonkeyPatch) -> None:
        """Puts itself into the code that a judged start runs, and makes nothing durable: no power cut follows."""
        for module in (chain, records, shared):
            patch.setattr(module, "read_chain", self.read_chain)
        patch.setattr(PrivacyPlan, "from_frozen", self.from_frozen)
        for name in ("fsync", "fsync_directory", "fsync_path"):
            patch.setattr(durable, name, lambda _: None)


def charged(root: Path, remembered: Remembered) -> tuple[set[tuple[str, int, int]], int, bool]:
    """What the ledger says to the next start: its intents by name, everything that is charged, and whether the run is closed."""
    with quick(99) as patch:
        remembered.watching(patch)
        with opened(root) as (run, _):
            state = run._on_main.ledger.state
            intents = {(intent.nonce, intent.step, intent.attempt) for intent in state.intents}
            return intents, state.num_charged, run.is_closed


def problem(root: Path, happened: list[Any], remembered: Remembered) -> str | None:
    """What is wrong with opening a disk after `happened`: a refusal, a charge that is forgotten, an end that is undone."""
    try:
        intents, number, is_closed = charged(root, remembered)
    except Exception as error:  # whatever ends the program
        return f"refused: {type(error).__name__}: {error}"
    draws = [event for event in happened if event != "closed"]
    if len(set(draws)) != len(draws):
        return "coins and noise were used twice"
    named = set(draws)
    if not named <= intents or number < len(draws):
        return f"forgotten: {len(named - intents)} of {len(draws)} draws"
    if number > PLAN.max_intents:
        return "an honest crash went beyond the budget"
    if "closed" in happened and not is_closed:
        return "the end is undone"
    mirror, ledger = (root / MIRROR).read_bytes(), (root / RUN / "ledger.jsonl").read_bytes()
    if mirror != ledger:
        return "the mirror differs from the ledger that was opened"
    json.loads(ledger.splitlines()[-1])
    return None
