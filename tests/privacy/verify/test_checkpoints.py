"""Which checkpoints may lack their record: verify.py and the trainer say the same of every step and line of a ledger."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.checkpoints.read import sealed
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerState, read_ledger
from privacy.releases import step_releases
from tests.privacy.published import PLAN

FIELDS = {"plan": PLAN.frozen_fields(), "key_commitment": "ab" * 32}


def write(path: Path, rng: random.Random) -> LedgerState:
    """Sessions that go on from anywhere, with and without records of their checkpoints."""
    releases = step_releases(PLAN.noise_multiplier, PLAN.max_grad_norm, None)
    with Ledger.create(path, FIELDS) as ledger:
        for _ in range(rng.randint(1, 3)):
            ledger.start_session({}, restarted=rng.random() < 0.2)
            state = ledger.state
            step = rng.randint(0, state.last_done_step)
            if rng.random() < 0.4:
                ledger.checkpoint(step, f"step-{step:08d}", os.urandom(32).hex())
            while step < PLAN.num_steps and state.num_charged < PLAN.max_intents and rng.random() < 0.8:
                step += 1
                ledger.intent(step, ledger.state.attempts[step], releases)
                if rng.random() < 0.15:
                    break
                ledger.done(step, ledger.state.attempts[step] - 1)
                if rng.random() < 0.4:
                    kept = rng.randint(max(step - 1, 0), step)
                    ledger.checkpoint(kept, f"step-{kept:08d}", os.urandom(32).hex())
        if rng.random() < 0.2:
            ledger.close("stopped")
    return read_ledger(path)


def refused(folder: Path, step: int, line: int, line_hash: str) -> bool:
    place = folder / f"checkpoints/step-{step:08d}"
    place.mkdir(parents=True)
    manifest: dict[str, Any] = {"step": step, "ledger": {"seq": line, "hash": line_hash}, "formal_guarantee": True}
    (place / "manifest.json").write_text(json.dumps(sealed(manifest)))
    try:
        verify.check_checkpoints(verify.Folder(folder, verify.read_ledger(folder / "ledger.jsonl"), None))
    except verify.Violated:
        return True
    except verify.Undecided:
        return False
    finally:
        (place / "manifest.json").unlink()
        place.rmdir()
    raise AssertionError("nobody recorded it")


@pytest.mark.parametrize("seed", [range(6), pytest.param(range(6, 300), marks=pytest.mark.full)], ids=str)
def test_the_verifier_and_the_trainer_follow_one_rule(seed: range, tmp_path: Path) -> None:
    answers = []
    for number in seed:
        folder = tmp_path / str(number)
        folder.mkdir()
        state = write(folder / "ledger.jsonl", random.Random(number))
        for line in range(state.num_lines):
            for step in range(state.last_done_step + 1):
                answers.append(state.may_lack_record(step, line))
                said = refused(folder, step, line, state.hashes[line])
                assert said != answers[-1], f"seed {number}: a checkpoint of step {step} that remembers line {line}"
    assert len(answers) / 2 > sum(answers) > len(answers) / 50
