"""No field of a ledger, a plan, a manifest, a configuration or a card is passed over: a change is violated or named.

The forger makes numbers and hashes fit again, and where the ledger is changed, no card is left that says something else.
"""

import contextlib
import functools
import json
import math
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.adaptive_clipping import AdaptiveClipping
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from tests.privacy.published import ASKED, PLAN, Judge, publish, rewrite, sentences

Place = tuple[str | int, ...]
ADAPTIVE = AdaptiveClipping(target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, unclipped_num_std=9.0)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"adaptive_clipping": ADAPTIVE, "target_delta": 1e-6},
    "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
    "informal": {"noise_multiplier": 0.0},
}
IDENTIFIERS = {"nonce", "key_commitment"}
"""Random names: one is as good as another, as long as none comes twice."""
FITTED = {"seq", "previous", "type", "digest"}
"""What `rewrite` makes fit again."""
CHOICES = [
    ("poisson", "shuffle"), ("flat", "automatic", "grouped"), ("floating", "certified"),
    ("finished", "stopped", "budget_spent"), ("zero_out", "replace_one"), ("c0ffee", "decade"), ("random", "imported"),
    ("private", "public"),
]  # fmt: skip
"""Words of which another one of its row is a lie that still reads well."""


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of each kind of plan; the adaptive one's ledger says as much as a ledger can."""
    base, opened = tmp_path_factory.mktemp("kinds"), {
        "max_examples_per_owner": 3, "unit": "one labelled image", "accountant": "dp-accounting 0", "data_hmac": "cd" * 32,
        "tuning": "none", "deduplication": "by bytes",
    }  # fmt: skip

    @functools.cache
    def folder(name: str) -> Path:
        more = opened if name == "adaptive" else {}
        return publish(base / name, make_plan(PlanRequest(**ASKED | KINDS[name])), steps=3 if more else 4, **more)

    return folder


@pytest.fixture
def copied(published: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies without a card, each in place of the last one."""

    def copy(name: str) -> Path:
        shutil.rmtree(tmp_path / "forged", ignore_errors=True)
        return Path(shutil.copytree(published(name), tmp_path / "forged", ignore=shutil.ignore_patterns("report")))

    return copy


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
    found: list[Any] = [0.01, "0.01", [0.01], {"epsilon": 0.01}, None, "", [], {}]
    if isinstance(value, bool):
        found = [not value, None]
    elif isinstance(value, int | float):
        hair = math.nextafter(value, -math.inf) if isinstance(value, int) else value * (1 - 2e-6)
        found = [value + 1, value * 0.98 if value else -1, -value if value else 0.5, str(value), None, [], {}]
        found += [hair] if abs(value) > 1e-7 else []
    elif isinstance(value, str):
        found = [value + "x", "", None, 0.01, [], *(word for words in CHOICES if value in words for word in words)]
    return [other for other in found if other != value or type(other) is not type(value)]


@contextlib.contextmanager
def changed(tree: Any, place: Place, value: Any) -> Iterator[Any]:
    """The tree with another value at a place, or for `...` without it, as long as the statement lasts."""
    inner = tree
    for part in place[:-1]:
        inner = inner[part]
    before = inner[place[-1]]
    inner[place[-1]] = value
    if value is ...:
        del inner[place[-1]]
    yield tree
    if value is ... and isinstance(inner, list):
        inner.insert(place[-1], before)
    else:
        inner[place[-1]] = before


def mutations(tree: Any, rng: random.Random, share: float) -> Iterator[tuple[Place, Any, Any]]:
    """(place, other value, tree with it), a share of all of them."""
    for place, value in list(leaves(tree)):
        for other in [*others(value), ...]:
            if rng.random() < share:
                with changed(tree, place, other):
                    copy = json.loads(json.dumps(tree))
                yield place, other, copy


FULL = [pytest.param(name, 1.0, marks=pytest.mark.full) for name in ("plain", "adaptive", "certified")]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "share"), [("plain", 0.06), *FULL])
def test_a_change_of_a_ledger_is_violated_or_named(
    name: str, share: float, copied: Callable[[str], Path], judge: Judge
) -> None:
    """Every line's every field; a rewritten ledger is as legal as the forger can make it."""
    rng, violated, passed = random.Random(7), 0, []
    records = [json.loads(line) for line in (copied(name) / "ledger.jsonl").read_bytes().splitlines()]
    honest = judge(copied(name))[1]["epsilon"]
    for number, record in enumerate(records):
        body = {field: value for field, value in record.items() if field not in (*FITTED, "time_utc")}
        for place, value, edited in mutations(body, rng, share):
            folder = copied(name)
            forged = {"type": record["type"], "time_utc": record["time_utc"], **edited}
            rewrite(folder, lambda all_records: all_records.__setitem__(number, forged))  # noqa: B023
            code, found = judge(folder)
            violated += code != 0
            excused = place[0] in IDENTIFIERS or (place[0] in verify.LOOSE and value is ...)
            # A cap of a row more is another legal plan. It pays less of a thousandth of delta: 3e-8 of epsilon and less here.
            excused |= place == ("plan", "cap") and code == 0 and abs(found["epsilon"] / honest - 1) < 1e-6
            if code == 0 and not excused and place[0] not in found["declared"]["in ledger.jsonl"]:
                passed.append(f"{record['type']} {number + 1}: {place} -> {value!r}")
    assert not passed, passed
    assert violated > (10 if share < 1 else 300)


@pytest.mark.parametrize("name", ["open", "session", "intent", "done", "checkpoint", "close", "plan"])
def test_a_field_that_no_line_and_no_plan_has_is_violated(
    name: str, copied: Callable[[str], Path], judge: Judge
) -> None:
    def edit(records: list[dict[str, Any]]) -> None:
        line = records[0]["plan"] if name == "plan" else next(one for one in records if one["type"] == name)
        line["epsilon"] = 0.01

    folder = copied("plain")
    rewrite(folder, edit)
    code, found = judge(folder)
    assert code == 5 and "['epsilon']" in sentences(found) and "this verifier does not know" in sentences(found)


def test_the_verifier_knows_the_fields_of_plans_and_no_other() -> None:
    assert set(PLAN.frozen_fields()) == verify.PLAN_FIELDS | {verify.NOISE_KIND}


def test_every_change_of_a_manifest_is_violated_or_named(copied: Callable[[str], Path], judge: Judge) -> None:
    """By a forger who records the changed manifest; otherwise its hash differs from the recorded one."""
    rng, count, place_of = random.Random(1), 0, "checkpoints/step-00000004/manifest.json"
    manifest = json.loads((copied("plain") / place_of).read_text())
    free = {"initialisation", "training_data", "seal", "ledger"}  # words, and what `rewrite` makes fit again
    for place, value, edited in mutations(manifest, rng, 1):
        if place[0] in free or (place[0] == "charged_attempts" and value is ...):
            continue
        folder = copied("plain")
        (folder / place_of).write_text(json.dumps(edited))
        rewrite(folder, lambda records: None)
        code, found = judge(folder)
        assert code != 0, f"{place} -> {value!r}: {found}"
        count += 1
    assert count > 20


@pytest.mark.parametrize("name", ["plain", "adaptive"])
def test_every_change_of_the_configuration_s_plan_is_violated(
    name: str, copied: Callable[[str], Path], judge: Judge
) -> None:
    folder, rng, count = copied(name), random.Random(2), 0
    tree = tomllib.loads((folder / "config.toml").read_text())
    tree["data"]["num_examples"] = 2000

    def written(tree: dict[str, Any]) -> None:
        """As TOML; what it cannot hold is left out."""
        lines = []
        for section, table in tree.items():
            lines += [f"[{section}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if value not in (None, {})]
        (folder / "config.toml").write_text("\n".join(lines))

    written(tree)
    assert judge(folder)[0] == 0
    for place, value, edited in mutations(tree, rng, 0.3):
        if place == ("data", "provenance") or value in (..., None, {}):
            continue  # words; and what is not asked for has its default
        written(edited)
        code, found = judge(folder)
        assert code == 5, f"{place} -> {value!r}: {found}"
        count += 1
    assert count > 10


@pytest.mark.parametrize("name", ["plain", "informal", pytest.param("adaptive", marks=pytest.mark.full)])
def test_every_change_of_a_card_s_claim_plan_and_counts_is_violated(
    name: str, published: Callable[[str], Path], judge: Judge
) -> None:
    code, found = judge(published(name))
    assert code == 0, sentences(found) + sentences(found, "inconclusive")
    read = verify.Folder(published(name), verify.read_ledger(published(name) / "ledger.jsonl"), behind=[])
    verify.check_epsilon(read)
    card, expected = json.loads((read.path / "report/privacy_card.json").read_text()), verify.card_fields(read)
    for where, right in expected.items():
        place = tuple(where.split("."))
        for other in [*others(verify.value_at(card, where)), ...]:
            with changed(card, place, other) as forged:
                wrong = verify.compare("", verify.value_at(forged, where), right, where)
            larger = isinstance(right, verify.Bound) and type(other) in (int, float) and other > right
            assert wrong or larger, f"{where}: {right!r} -> {other!r} passes"
    claim = {"epsilon", "delta", "formal_guarantee", "reasons", "steps_done", "attempts_charged", "accounting.epsilon"}
    mechanism = {f"plan.{field}" for field in PLAN.frozen_fields()} - {"plan.target_epsilon"}
    assert claim | mechanism | {"unit_of_privacy.num_examples", "provenance.ledger.lines"} <= expected.keys()
