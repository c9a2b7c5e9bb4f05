"""No field of a card is passed over: whatever is changed in one is violated, or listed as not attested."""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.adaptive_clipping import AdaptiveClipping
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from tests.privacy.published import publish
from tests.privacy.verify.judging import KEY, Judge, sentences

Place = tuple[str | int, ...]
ASKED: dict[str, Any] = {
    "num_examples": 2000, "expected_batch_size": 100, "num_steps": 4, "noise_multiplier": 4.0, "target_delta": 1e-5,
    "reserved_attempts": 4, "sensitivity_slack": 1e-3,
}  # fmt: skip
ADAPTIVE = AdaptiveClipping(target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, unclipped_num_std=9.0)


@pytest.fixture(scope="session")
def folders(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A plain run, one whose ledger says as much as a ledger can, and one without a guarantee."""
    base = tmp_path_factory.mktemp("cards")
    opened = {
        "max_examples_per_owner": 3, "unit": "one labelled image", "accountant": "dp-accounting 0", "data_hmac": "cd" * 32,
        "tuning": "none", "deduplication": "by bytes",
    }  # fmt: skip
    plans = {
        "adaptive": ASKED | {"adaptive_clipping": ADAPTIVE, "target_delta": 1e-6},
        "informal": ASKED | {"noise_multiplier": 0.0},
    }

    @functools.cache
    def folder(name: str) -> Path:
        if name == "plain":
            return original
        more = opened if name == "adaptive" else {}
        return publish(base / name, KEY, make_plan(PlanRequest(**plans[name])), steps=3 if more else 4, **more)

    return folder


CHOICES = [
    ("poisson", "shuffle"), ("flat", "automatic", "grouped"), ("floating", "certified"),
    ("finished", "stopped", "budget_spent"), ("zero_out", "replace_one"), ("c0ffee", "decade"), ("random", "imported"),
    ("private", "public"),
]  # fmt: skip
"""Words of which another one of its row is a lie that still reads well."""


def leaves(tree: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every number, word, truth value and null, and every list and object that is empty."""
    parts: list[tuple[str | int, Any]] = []
    if isinstance(tree, dict | list) and tree:
        parts = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    for name, inner in parts:
        yield from leaves(inner, (*place, name))
    if not parts:
        yield place, tree


def others(value: Any) -> list[Any]:
    """What a forger may put there."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int | float):
        hair = (
            [math.nextafter(value, -math.inf) if isinstance(value, int) else value * (1 - 2e-6)]
            if abs(value) > 1e-7
            else []
        )
        return [*hair, value + 1, value * 0.98 if value else -1, -value if value else 0.5, str(value), None, [], {}]
    if isinstance(value, str):
        known = [words for words in CHOICES if value in words]
        return [value + "x", "", None, 0.01, [], *(other for words in known for other in words if other != value)]
    return [0.01, "0.01", [0.01], {"epsilon": 0.01}, None, "", [], {}]


@contextlib.contextmanager
def changed(card: Any, place: Place, value: Any) -> Iterator[Any]:
    """The card with another value at a place, for as long as the statement lasts."""
    inner = card
    for part in place[:-1]:
        inner = inner[part]
    missing = isinstance(inner, dict) and place[-1] not in inner
    before = None if missing else inner[place[-1]]
    inner[place[-1]] = value
    yield card
    if missing:
        del inner[place[-1]]
    else:
        inner[place[-1]] = before


def verdict(card: Any, expected: dict[str, Any]) -> list[str] | None:
    """The places that nothing attests, or whose bounds are larger than they need be; None for a card that is violated."""
    stated = verify.leaves(card)
    found = {
        place: verify.compare("the card", stated.get(place, ...), value, place) for place, value in expected.items()
    }
    if any(outcome not in ("", "larger") for outcome in found.values()):
        return None
    larger = [place for place, outcome in found.items() if outcome]
    return [place for place in stated if place not in expected] + larger


def expectation(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    ledger = verify.read_ledger(folder / "ledger.jsonl")
    read, card = verify.Folder(folder, ledger, None), json.loads((folder / "report/privacy_card.json").read_text())
    ends = {f"provenance.ledger.{name}": card["provenance"]["ledger"][name] for name in ("lines", "last_line_sha256")}
    return card, verify.card_fields(read, ledger) | ends


@pytest.mark.parametrize("name", ["plain", "informal", pytest.param("adaptive", marks=pytest.mark.full)])
def test_every_change_of_a_card_is_violated_or_listed(name: str, folders: Callable[[str], Path], judge: Judge) -> None:
    code, found = judge(folders(name))
    assert code == 0, sentences(found) + sentences(found, "inconclusive")
    card, expected = expectation(folders(name))
    assert verdict(card, expected) == found["card_not_attested"]
    attested = 0
    for place, value in leaves(card):
        if any(isinstance(part, int) and part % 9 for part in place[:-1]):
            continue
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
        for other in others(value):
            if other == value and type(other) is type(value):
                continue
            with changed(card, place, other) as forged:
                now = verdict(forged, expected)
            covered = now is not None and any(where == one or where.startswith((f"{one}.", f"{one}[")) for one in now)
            under = now is not None and any(one.startswith((f"{where}.", f"{where}[")) for one in now)
            assert now is None or covered or under, f"{where}: {value!r} -> {other!r} passes"
            attested += now is None
    assert attested > 150


def test_the_claim_and_the_mechanism_are_among_what_is_compared(folders: Callable[[str], Path]) -> None:
    _, expected = expectation(folders("adaptive"))
    claim = {"epsilon", "delta", "formal_guarantee", "reasons", "steps_done", "attempts_charged"}
    numbers = {f"accounting.{name}" for name in ("epsilon", "epsilon_planned", "epsilon_with_reserve", "epsilon_rdp")}
    mechanism = {f"plan.{name}" for name in ("noise_multiplier", "max_grad_norm", "sensitivity_slack")}
    sampling = {"plan.sample_rate", "plan.cap", "sampling.key_commitment_sha256"}
    assert claim | numbers | mechanism | sampling <= expected.keys()


@pytest.mark.parametrize("digits", [1e-3, 1e-9])
def test_a_card_may_state_more_and_never_less_than_it_spent(digits: float, folder: Path, judge: Judge) -> None:
    path = folder / "report/privacy_card.json"
    card = json.loads(path.read_text())
    for sign in (1, -1):
        forged = json.loads(json.dumps(card))
        forged["epsilon"] = forged["accounting"]["epsilon"] = card["epsilon"] + sign * digits
        path.write_text(json.dumps(forged))
        code, found = judge(folder)
        assert code == (0 if sign > 0 else 5), found["checks"]
        assert sign < 0 or digits < 1e-6 or "larger than they need be are the bounds epsilon" in sentences(found, "ok")


def test_files_that_nothing_judges_are_named(folder: Path, judge: Judge) -> None:
    (folder / "evaluation").mkdir()
    names = [
        "evaluation/zero-shot-step-00000004-00000000.json",
        "README.txt",
        "environment.json",
        "report/audit-run.json",
    ]
    for name in names:
        (folder / name).write_text('{"epsilon": 0.01, "verdict": "consistent"}')
    code, found = judge(folder)
    said = json.dumps(found["declared"])
    assert code == 0 and all(name in said for name in names), found["declared"]
