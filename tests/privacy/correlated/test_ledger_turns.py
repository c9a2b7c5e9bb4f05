"""Charges by group in the ledger: whose turn an attempt is, what is refused, and an account by three who do not share code."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.accounting.epsilon_table import EpsilonTable
from privacy.audit.second_sampler import read_attempts
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.plan import PrivacyPlan, make_plan, require_equal
from privacy.plan_request import PlanRequest
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.ledger_files import ENVIRONMENT, RELEASE, rechained, take_step

REQUEST = PlanRequest(
    num_examples=2001, expected_batch_size=60, num_steps=9, noise_multiplier=4.0, target_delta=1e-5, reserved_attempts=15,
    sensitivity_slack=1e-3, bands=3,
)  # fmt: skip
PLAN = make_plan(REQUEST)
OPTIMISED = replace(REQUEST, bands=2, strategy="optimised", coefficients=(0.8, 0.5))


def create(folder: Path, plan: PrivacyPlan = PLAN) -> Ledger:
    return Ledger.create(folder / "ledger.jsonl", {"plan": plan.frozen_fields(), "key_commitment": "ab" * 32})


def random_history(folder: Path, plan: PrivacyPlan, chance: random.Random) -> Path:
    """Sessions that end between records, inside one, or between an intent and its `done`; checkpoints are gone back to."""
    path = folder / "ledger.jsonl"
    create(folder, plan).release()
    saved = 0
    while read_ledger(path).num_charged < plan.max_intents - 1 and saved < plan.num_steps:
        ledger = Ledger.open(path)
        ledger.start_session(ENVIRONMENT)
        for step in range(saved + 1, plan.num_steps + 1):
            if ledger.budget_spent() or chance.random() < 0.2:
                break
            if chance.random() < 0.2:
                ledger.intent(step, ledger.next_attempt(step), [RELEASE], ledger.state.next_group)
                break
            take_step(ledger, step)
            if chance.random() < 0.5:
                ledger.checkpoint(step, f"step-{step:08d}", "cd" * 32)
                saved = step
        ledger.release()
        state = read_ledger(path)
        if chance.random() < 0.4 and (state.may_take_intent or state.pending is not None):
            with path.open("ab") as file:
                file.write(b'{"seq":' * chance.randint(1, 3))
    return path


MANY = [pytest.param(bands, seed, marks=pytest.mark.full) for bands in (2, 3, 5) for seed in range(3, 20)]


@pytest.mark.parametrize(("bands", "seed"), [(2, 0), (3, 1), (3, 2), *MANY])
def test_contract_10_every_attempt_is_charged_to_the_group_that_it_drew_from(
    tmp_path: Path, bands: int, seed: int
) -> None:
    """By the ledger, by verify.py, by a script that reads lines alone; a torn line takes the turn of its place."""
    plan, chance = make_plan(replace(REQUEST, bands=bands)), random.Random(seed)
    path = random_history(tmp_path, plan, chance)
    state, read = read_ledger(path), verify.read_ledger(path)
    lines = [
        json.loads(line) for line in path.read_bytes().splitlines() if line.startswith(b"{") and line.endswith(b"}")
    ]
    turns = Counter(line["group"] for line in lines if line["type"] == "intent")
    assert state.num_charged == sum(turns.values()) + state.charged_torn == read.charged()
    (group,) = state.charged_groups()
    # The group with most: never less than what the intents name, and more by the torn lines at most.
    assert max(turns.values()) <= group.count <= max(turns.values()) + state.charged_torn
    assert group.num_examples == -(-2001 // bands)
    theirs = read.plan.releases(read.charged())
    assert (theirs.releases, theirs.num_examples, theirs.rate) == (group.count, group.num_examples, group.sample_rate)
    charged, epsilon = recompute(path)
    assert charged == state.num_charged and state.epsilon() == pytest.approx(epsilon, rel=1e-5)
    left = plan.target_delta - read.plan.noise_tail()
    assert verify.epsilon([theirs], left) == pytest.approx(state.epsilon(), rel=1e-5)
    assert [attempt.before % bands for attempt in read_attempts(lines)] == [
        line["group"] for line in lines if line["type"] == "intent"
    ]
    assert state.num_charged <= plan.max_intents


def test_groups_that_are_not_the_next_in_turn_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    ledger = create(tmp_path)
    ledger.start_session(ENVIRONMENT)
    take_step(ledger, 1)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    for group, words in (
        (0, "turn of group 1"),
        (2, "turn of group 1"),
        (None, "group"),
        (True, "group"),
        (-1, "group"),
    ):
        with pytest.raises(PrivacyStateRefused, match=words):
            ledger.intent(2, 0, [RELEASE], group)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    ledger.intent(2, 0, [RELEASE], 1)


def test_a_retry_needs_a_session_of_its_own(tmp_path: Path) -> None:
    """In the session of the step that did not end, the retry would use the past noise of its first attempt."""
    ledger = create(tmp_path)
    ledger.start_session(ENVIRONMENT)
    ledger.intent(1, 0, [RELEASE], 0)
    with pytest.raises(PrivacyStateRefused, match="a retry in the session"):
        ledger.intent(1, 1, [RELEASE], 1)
    ledger.start_session(ENVIRONMENT)
    ledger.intent(1, 1, [RELEASE], 1)
    ledger.done(1, 1)
    ledger.release()
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_bytes().splitlines()]
    del records[3]  # the second session
    (tmp_path / "ledger.jsonl").write_bytes(rechained(records))
    with pytest.raises(PrivacyStateRefused, match="a retry in the session"):
        read_ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(verify.Violated, match="a retry in the session"):
        verify.read_ledger(tmp_path / "ledger.jsonl")


def test_independent_noise_names_no_groups(tmp_path: Path) -> None:
    ledger = create(tmp_path, make_plan(replace(REQUEST, bands=1)))
    ledger.start_session(ENVIRONMENT)
    with pytest.raises(PrivacyStateRefused, match="group"):
        ledger.intent(1, 0, [RELEASE], 0)
    ledger.intent(1, 0, [RELEASE])


@pytest.mark.parametrize("request_", [REQUEST, OPTIMISED, replace(REQUEST, bands=33)])
def test_what_epsilon_depends_on_is_frozen_and_survives_json(request_: PlanRequest) -> None:
    plan = make_plan(replace(request_, num_steps=40))
    frozen = json.loads(json.dumps(plan.frozen_fields()))
    assert PrivacyPlan.from_frozen(frozen) == plan
    assert frozen["correlated"]["bands"] == plan.bands
    assert tuple(frozen["correlated"]["coefficients"]) == plan.noise_strategy.coefficients
    assert verify.read_plan(frozen, head=False)["bands"] == plan.bands


Edit = Callable[[dict[str, Any]], None]


def of_noise(**fields: Any) -> Edit:
    return lambda plan: plan["correlated"].update(fields)


def scaled(factor: float) -> Edit:
    def edit(plan: dict[str, Any]) -> None:
        plan["correlated"]["coefficients"] = [factor * c for c in plan["correlated"]["coefficients"]]

    return edit


FORGED: dict[str, Edit] = {
    "no correlation": lambda plan: plan.pop("correlated"),
    "one band": of_noise(bands=1),
    "more bands": of_noise(bands=4),
    "longer coefficients": scaled(1.001),
    "shorter coefficients, which are another strategy's": of_noise(coefficients=[0.5, 0.4, 0.3]),
    "optimised by name alone, and growing": of_noise(strategy="optimised", coefficients=[0.1, 0.2, 0.3]),
    "groups by content": of_noise(group_of_example="the hash of its caption"),
    "attempts choose": of_noise(group_of_attempt="any"),
    "one more field": of_noise(slack=0.1),
    "a rate of all examples": lambda plan: plan.update(sample_rate=0.03),
    "a threshold of all examples": lambda plan: plan.update(sampling_threshold=str((60 << 64) // 2001)),
    "shuffled": lambda plan: plan.update(sampling="shuffle"),
    "certified": lambda plan: plan.update(arithmetic="certified", sensitivity_slack=0.0),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_plan_that_says_otherwise_is_refused_by_the_ledger_and_by_the_verifier(name: str, tmp_path: Path) -> None:
    create(tmp_path).release()
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_bytes().splitlines()]
    FORGED[name](records[0]["plan"])
    (tmp_path / "ledger.jsonl").write_bytes(rechained(records))
    with pytest.raises(PrivacyStateRefused) as refused:
        read_ledger(tmp_path / "ledger.jsonl")
    assert "\n" not in str(refused.value)
    with pytest.raises(verify.Violated):
        verify.read_ledger(tmp_path / "ledger.jsonl")


def test_other_optimised_coefficients_are_refused_at_a_resume() -> None:
    plan, other = make_plan(OPTIMISED), make_plan(replace(OPTIMISED, coefficients=(0.9, 0.3)))
    with pytest.raises(PrivacyConfigError, match="coefficients was"):
        require_equal(plan.frozen_fields(), other.frozen_fields(), "ledger.jsonl")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": 0.0}, "no noise to correlate"),
        ({"enabled": False}, "no noise to correlate"),
        ({"bands": 1, "strategy": "optimised"}, "optimised ones are as many as the bands"),
        ({"strategy": "optimised"}, "3 bands and 0 coefficients"),
        ({"coefficients": (0.5, 0.4, 0.3)}, "'square_root' with 3 bands and 3 coefficients"),
        ({"strategy": "optimised", "coefficients": (0.8, 0.5)}, "3 bands and 2 coefficients"),
        ({"strategy": "optimised", "coefficients": (0.8, 0.6, 0.1)}, "norm above 1"),
        ({"strategy": "best"}, "strategy must be 'square_root' or 'optimised'"),
        ({"bands": 4097}, "bands must be less than or equal to 4096"),
    ],
)
def test_strategies_that_do_not_fit_are_refused_in_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PrivacyConfigError, match=words) as refused:
        make_plan(replace(REQUEST, **changes))
    assert "\n" not in str(refused.value)


def test_the_table_counts_turns_of_the_group_with_most_of_them() -> None:
    """Never less than epsilon of the charges, and equal at the planned steps and at the budget."""
    table = PLAN.epsilon_table()
    assert table is not None
    for count in range(1, PLAN.max_intents + 1):
        exact, value = PLAN.epsilon_after(count), table.epsilon(count)
        assert exact is not None and exact * (1 - 1e-9) <= value
        assert PLAN.epsilon_after(table.count_for(count)) == pytest.approx(value, rel=1e-2)
        assert table.count_for(count) >= count
    for count in (PLAN.num_steps, PLAN.max_intents):
        assert table.epsilon(count) == PLAN.epsilon_after(count)
    one = replace(REQUEST, bands=1)
    assert isinstance(make_plan(one).epsilon_table(), EpsilonTable)
