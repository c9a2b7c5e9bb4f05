"""Charges seen from outside: order against durability and release, and numbers of attempts."""

import json
from typing import Any

import numpy as np
import pytest

from privacy.audit.mechanism import SandboxEvents, charge_checks

STEPS = (1, 2, 2, 3)  # step 2 was killed and tried again


def ledger(steps: tuple[int, ...] = STEPS) -> tuple[bytes, list[int]]:
    """A ledger of one session, and the size of the file at the end of each intent."""
    data, ends = b'{"type":"open"}\n{"type":"session","nonce":"00"}\n', []
    for step in steps:
        data += json.dumps({"type": "intent", "step": step}).encode() + b"\n"
        ends.append(len(data))
        data += json.dumps({"type": "done", "step": step}).encode() + b"\n"
    return data, ends


def failed(steps: tuple[int, ...] = STEPS, **changed: Any) -> list[str]:
    """Attempt i is durable at time 100 i + 10, and released from 100 i + 20 on."""
    data, ends = ledger(steps)
    starts = 100 * (1 + np.arange(len(ends)))
    made = 100 * (1 + np.arange(len(STEPS)))
    fields: dict[str, Any] = {
        "ledger": data,
        "secret": bytes(32),
        "steps": STEPS,
        "first_release": made + 20,
        "ledger_durable": np.array([(3, 20), *zip(starts + 10, ends, strict=True)]),
        "folder_durable": np.array([5]),
        "least_entropy": np.full(len(STEPS), 16),
    }
    return [check.name for check in charge_checks(SandboxEvents(**fields | changed)) if check.outcome == "violated"]


def test_an_honest_order_passes() -> None:
    assert failed() == []


def test_what_is_durable_too_late_is_found() -> None:
    _, ends = ledger()
    times = 100 * (1 + np.arange(4))
    for late in range(4):
        durable = times + np.where(np.arange(4) == late, 30, 10)
        found = failed(ledger_durable=np.array(list(zip(durable, ends, strict=True))))
        assert "charge_before_release" in found, late
    never = np.array([(time, end - 1) for time, end in zip(times + 10, ends, strict=True)])
    assert failed(ledger_durable=never[-1:], folder_durable=np.zeros(0)) == [
        "charge_before_release",
        "ledger_name_durable",
    ]


@pytest.mark.parametrize("charged", [(1, 2, 3), (1, 2, 2), (1, 2, 2, 3, 4), (1, 1, 2, 3)])
def test_attempts_and_charges_that_differ_are_found_both_ways(charged: tuple[int, ...]) -> None:
    assert "charged_attempts" in failed(charged)


def test_a_draw_without_enough_entropy_is_found() -> None:
    assert failed(least_entropy=np.array([32, 16, 15, 32])) == ["fresh_entropy"]
    assert failed(folder_durable=np.array([2])) == ["ledger_name_durable"], "before the file was there"
