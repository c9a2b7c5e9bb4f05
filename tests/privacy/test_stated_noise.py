"""A ledger written anew, with a chain that fits: no number in an intent lowers epsilon."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from privacy import verify
from privacy.adaptive_clipping import AdaptiveClipping
from privacy.errors import PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import step_releases
from tests.privacy.ledger_files import rechained


def plan(**changed: Any) -> PrivacyPlan:
    fields = {
        "num_examples": 2000, "expected_batch_size": 100, "num_steps": 6, "noise_multiplier": 4.0, "max_grad_norm": 0.7,
        "target_delta": 1e-5, "reserved_attempts": 8, "sensitivity_slack": 1e-4,
    }  # fmt: skip
    return make_plan(PlanRequest(**fields | changed))


PLANS = {
    "plain": plan(),
    "no cap": plan(cap=None),
    "adaptive": plan(adaptive_clipping=AdaptiveClipping(0.5, 0.2, 6.0)),
    "small noise": plan(
        noise_multiplier=0.25, allow_small_noise=True, num_examples=200, expected_batch_size=20, cap=None
    ),
}
CHANGES = {
    "doubled": lambda x: 2 * x,
    "halved": lambda x: x / 2,
    "one more": lambda x: x + 1,
    "one less": lambda x: x - 1,
    "a millionth more": lambda x: x * (1 + 1e-6),
    "negative": lambda x: -x,
    "zero": lambda x: 0,
    "huge": lambda x: 1e300,
}


def numbers(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every number in it."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if type(item) in (int, float) and key != "seq":
            yield value, key
        yield from numbers(item)


@pytest.mark.parametrize(
    "own",
    [pytest.param(own, id=name, marks=[pytest.mark.full] * (name == "small noise")) for name, own in PLANS.items()],
)
def test_contract_10_no_number_of_an_intent_written_anew_lowers_epsilon(own, tmp_path, no_fsync):
    """Four steps, the third of them killed and tried again: each number of each intent, changed in every way."""
    path = tmp_path / "ledger.jsonl"
    releases = step_releases(own.noise_multiplier, own.max_grad_norm, own.adaptive_clipping)
    with Ledger.create(path, {"plan": own.frozen_fields(), "key_commitment": "ab" * 32}) as ledger:
        for steps in ([1, 2, 3], [3, 4]):
            ledger.start_session({})
            for step in steps:
                ledger.intent(step, ledger.state.attempts[step], releases)
                if step != 3 or steps[0] == 3:
                    ledger.done(step, ledger.state.attempts[step] - 1)
    honest, records = read_ledger(path).epsilon(), [json.loads(line) for line in path.read_bytes().splitlines()]
    assert rechained(records) == path.read_bytes() and read_ledger(path).num_charged == 5
    places = [(i, n) for i, r in enumerate(records) if r["type"] == "intent" for n in range(len(list(numbers(r))))]
    assert len(places) == 5 * (2 + 2 * len(releases))
    for index, number in places:
        for name, change in CHANGES.items():
            forged = copy.deepcopy(records)
            container, key = list(numbers(forged[index]))[number]
            container[key] = change(container[key])
            path.write_bytes(rechained(forged))
            try:
                found = read_ledger(path).epsilon()
            except PrivacyStateRefused:
                with pytest.raises(verify.Violated):
                    verify.read_ledger(path)
                continue
            assert found >= honest, (index, key, name)
