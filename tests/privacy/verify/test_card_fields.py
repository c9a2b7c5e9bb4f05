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


def verdict(card: Any, expected: Any) -> list[str] | None:
    """The places that are named, as not attested or as larger bounds than they need be; None for a card that is violated."""
    comparison = verify.Comparison("the card")
    try:
        comparison.compare(card, expected)
    except verify.Violated:
        return None
    return comparison.not_attested + comparison.larger


def expectation(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    ledger = verify.read_ledger(folder / "ledger.jsonl")
    read = verify.Folder(folder, ledger, None)
    return json.loads((folder / "report/privacy_card.json").read_text()), verify.expected_card(read, ledger)


@pytest.mark.parametrize(
    ("name", "every"),
    [("plain", 9), pytest.param("adaptive", 9, marks=pytest.mark.full)]
    + [pytest.param(name, 1, marks=pytest.mark.full) for name in ("plain", "adaptive", "informal")],
)
def test_every_change_of_a_card_is_violated_or_listed(
    name: str, every: int, folders: Callable[[str], Path], judge: Judge
) -> None:
    """The points at every `every`-th place of long curves."""
    code, found = judge(folders(name))
    assert code == 0, sentences(found) + sentences(found, "inconclusive")
    card, expected = expectation(folders(name))
    listed = verdict(card, expected)
    assert listed == found["card_not_attested"]
    attested = 0
    for place, value in leaves(card):
        if any(isinstance(part, int) and part % every for part in place[:-1]):
            continue
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
        for other in others(value):
            if other == value and type(other) is type(value):
                continue
            with changed(card, place, other) as forged:
                now = verdict(forged, expected)
            covered = now is not None and any(where == one or where.startswith((f"{one}.", f"{one}[")) for one in now)
            assert now is None or covered, f"{where}: {value!r} -> {other!r} passes"
            attested += now is None
    assert attested > 150


def test_a_field_that_the_verifier_does_not_know_is_violated(folders: Callable[[str], Path]) -> None:
    """So a card that gets a field fails the tests until verify.py knows what to do with it."""
    card, expected = expectation(folders("adaptive"))
    parts = [place for place, _ in leaves(card)]
    objects = {place[:length] for place in parts for length in range(len(place)) if isinstance(place[length], str)}
    known = 0
    for place in objects:
        with changed(card, (*place, "epsilon_new"), 0.01) as forged:
            now = verdict(forged, expected)
        where = ".".join(map(str, place))
        assert now is None or any(where.startswith(one.partition("[")[0]) for one in now), where
        known += now is None
    assert known > 15


def test_all_epsilons_of_a_card_but_two_are_recomputed(folders: Callable[[str], Path]) -> None:
    card, expected = expectation(folders("adaptive"))
    listed = {place for place in verdict(card, expected) or [] if place.startswith("accounting.")}
    words = {"statement", "accountant", "accountant_python", "prv_accountant"}
    assert listed == {f"accounting.{name}" for name in (*words, "epsilon_prv", "epsilon_by_attempts")}
    numbers = card["accounting"]
    for name in ("epsilon_rdp", "epsilon_replace_one", "epsilon_owner", "epsilon_with_reserve"):
        assert numbers[name] > numbers["epsilon"]
    assert numbers["epsilon_group"]["2"] < numbers["epsilon_owner"] < numbers["epsilon_group"]["5"]


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
