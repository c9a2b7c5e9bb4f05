"""Small ledgers for tests."""

from pathlib import Path

import pytest

from privacy.errors import PrivacyStateRefused
from privacy.ledger.chain import encode_line, hash_line
from privacy.ledger.ledger import Ledger
from privacy.plan.numbers import make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest

# Large noise and few examples: the accountant answers in a fraction of a second.
NUMBERS = {
    "num_examples": 2000,
    "expected_batch_size": 100,
    "num_steps": 6,
    "noise_multiplier": 4.0,
    "target_delta": 1e-5,
    "reserved_attempts": 4,
    "sensitivity_slack": 1e-3,
}
PLAN = make_plan(PlanRequest(**NUMBERS))
RELEASE = {"name": "gradient", "std": 4.0, "sensitivity": 1.0}
ENVIRONMENT = {"commit": "abc"}


def open_fields():
    return {"plan": PLAN.frozen_fields(), "key_commitment": "ab" * 32}


def create(tmp_path, mirror=None):
    return Ledger.create(tmp_path / "ledger.jsonl", open_fields(), mirror)


def take_step(ledger, step):
    attempt = ledger.state.attempts[step]
    plan = ledger.plan
    release = release_of_step(plan.noise_multiplier, plan.max_grad_norm)
    ledger.intent(step, attempt, [release])
    ledger.done(step, attempt)


def written(tmp_path, steps=3, mirror=None):
    """A ledger with one session, `steps` steps and a checkpoint, released."""
    ledger = create(tmp_path, mirror)
    ledger.start_session(ENVIRONMENT)
    for step in range(1, steps + 1):
        take_step(ledger, step)
    ledger.checkpoint(steps, f"step-{steps:08d}", "cd" * 32)
    ledger.release()
    return tmp_path / "ledger.jsonl"


def refused(path, match=None, mirror=None):
    with pytest.raises(PrivacyStateRefused, match=match) as error:
        Ledger.open(path, mirror)
    assert error.value.exit_code == 4
    assert "\n" not in str(error.value)


def rechained(records):
    """A forger's work: changed records, with all numbers and hashes made to fit again."""
    lines = []
    for seq, record in enumerate(records):
        fields = {
            k: v for k, v in record.items() if k not in ("seq", "type", "time_utc", "previous")
        }
        previous = hash_line(lines[-1]) if lines else "0" * 64
        lines.append(encode_line(seq, record["type"], record["time_utc"], previous, fields))
    return b"\n".join(lines) + b"\n"


def break_ledger(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text(
        "".join([*lines[:2], lines[2].replace('"step":1', '"step":2'), *lines[3:]])
    )


def roll_back(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:-2]))


def remove_ledger(run: Path) -> None:
    (run / "ledger.jsonl").unlink()


def foreign_ledger(run: Path) -> None:
    remove_ledger(run)
    ledger = Ledger.create(
        run / "ledger.jsonl", {"plan": PLAN.frozen_fields(), "key_commitment": "cd" * 32}
    )
    ledger.start_session({"commit": "abc"})
    for step in (1, 2, 3):
        take_step(ledger, step)
    ledger.release()
