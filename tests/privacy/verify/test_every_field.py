"""No field of a ledger, a plan, a manifest, a configuration or the metrics is passed over: a change is violated or named.

The forger makes numbers and hashes fit again, and no card is left that says something else.
"""

import json
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from tests.privacy.published import PLAN, publish, rewrite
from tests.privacy.verify.judging import Judge, sentences
from tests.privacy.verify.test_card_fields import ADAPTIVE, ASKED, Place, changed, leaves, others
from trainer.config.recipe import PrivacySection, RunConfig

IDENTIFIERS = {"nonce", "key_commitment"}
"""Random names: one is as good as another, as long as none comes twice."""
FITTED = {"seq", "previous", "type", "digest"}
"""What `rewrite` makes fit again."""
DECLARED = {
    "commit", "accountant", "unit", "tuning", "deduplication", "data_hmac", "environment", "mirror", "params_digest",
    "reason",
}  # fmt: skip
"""What verify.py names as the word of whoever wrote the ledger; the time of the first start is named in words."""


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders without a card."""
    base, made = tmp_path_factory.mktemp("ledgers"), dict[str, Path]()
    more = {
        "unit": "one labelled image",
        "accountant": "dp-accounting 0",
        "data_hmac": "cd" * 32,
        "max_examples_per_owner": 3,
    }
    plans: dict[str, dict[str, Any]] = {
        "plain": {},
        "adaptive": {"adaptive_clipping": ADAPTIVE},
        "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
    }

    def folder(name: str) -> Path:
        if name not in made:
            plan = make_plan(PlanRequest(**ASKED | plans[name]))
            made[name] = publish(base / name, plan, **more if name == "plain" else {})
            shutil.rmtree(made[name] / "report")
        return made[name]

    return folder


def named(found: dict[str, Any]) -> str:
    return json.dumps(found.get("declared"))


def mutations(tree: Any, rng: random.Random, share: float) -> Iterator[tuple[Place, Any]]:
    """Places and other values, a share of all of them; `...` stands for a field that is left out."""
    for place, value in leaves(tree):
        for other in [*others(value), ...]:
            if (other != value or isinstance(other, bool) != isinstance(value, bool)) and rng.random() < share:
                yield place, other


def edited(tree: Any, place: Place, value: Any) -> Any:
    copy = json.loads(json.dumps(tree))
    with changed(copy, place, value if value is not ... else None):
        if value is ...:
            inner = copy
            for part in place[:-1]:
                inner = inner[part]
            del inner[place[-1]]
        return json.loads(json.dumps(copy))


def search(original: Path, tmp_path: Path, judge: Judge, share: float) -> int:
    """Every line's every field; returns how many edits were found."""
    rng, violated, passed = random.Random(7), 0, []
    records = [json.loads(line) for line in (original / "ledger.jsonl").read_bytes().splitlines()]
    for number, record in enumerate(records):
        body = {name: value for name, value in record.items() if name not in FITTED}
        for place, value in mutations(body, rng, share):
            folder = Path(shutil.copytree(original, tmp_path / "forged"))
            forged = {"type": record["type"], "time_utc": record["time_utc"], **edited(body, place, value)}

            def put(all_records: list[dict[str, Any]], at: int = number, one: dict[str, Any] = forged) -> None:
                all_records[at] = one

            rewrite(folder, put)
            code, found = judge(folder)
            shutil.rmtree(folder)
            violated += code != 0
            where = f"{record['type']} {number + 1}: {place} -> {value!r}"
            excused = place[0] in IDENTIFIERS or (place[0] in DECLARED and (value is ... or place[0] in named(found)))
            if code == 0 and not excused and place[0] != "time_utc":
                passed.append(where)
    assert not passed, passed
    return violated


@pytest.mark.parametrize("name", ["plain", "adaptive"])
def test_a_change_of_a_ledger_is_violated_or_named(
    name: str, ledgers: Callable[[str], Path], tmp_path: Path, judge: Judge
) -> None:
    assert search(ledgers(name), tmp_path, judge, 0.06) > 10


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["plain", "adaptive", "certified"])
def test_every_change_of_a_ledger_is_violated_or_named(
    name: str, ledgers: Callable[[str], Path], tmp_path: Path, judge: Judge
) -> None:
    assert search(ledgers(name), tmp_path, judge, 1) > 300


@pytest.mark.parametrize("name", ["open", "session", "intent", "done", "checkpoint", "close"])
def test_a_field_that_no_line_has_is_violated(
    name: str, ledgers: Callable[[str], Path], tmp_path: Path, judge: Judge
) -> None:
    folder = Path(shutil.copytree(ledgers("plain"), tmp_path / "forged"))
    rewrite(folder, lambda records: next(one for one in records if one["type"] == name).update(epsilon=0.01))
    code, found = judge(folder)
    assert code == 5 and "states ['epsilon'], which this verifier does not know" in sentences(found)


def test_a_field_that_no_plan_has_is_violated(ledgers: Callable[[str], Path], tmp_path: Path, judge: Judge) -> None:
    folder = Path(shutil.copytree(ledgers("plain"), tmp_path / "forged"))
    rewrite(folder, lambda records: records[0]["plan"].update(epsilon=0.01))
    code, found = judge(folder)
    assert code == 5 and "the frozen plan lacks ['epsilon'], or this verifier" in sentences(found)
    for name, value in (("clipping_function", "automatic"), ("adaptive_clipping", {"epsilon": 0.01})):
        forged = Path(shutil.copytree(ledgers("adaptive"), tmp_path / name))
        rewrite(forged, lambda records: records[0]["plan"].update({name: value}))  # noqa: B023
        assert judge(forged)[0] == 5, name


def test_every_change_of_a_manifest_is_violated_or_named(
    ledgers: Callable[[str], Path], tmp_path: Path, judge: Judge
) -> None:
    """By a forger who records the changed manifest; otherwise its hash differs from the recorded one."""
    original, rng, count = ledgers("plain"), random.Random(1), 0
    manifest = json.loads((original / "checkpoints/step-00000004/manifest.json").read_text())
    free = {"initialisation", "training_data", "seal", "ledger"}  # words, and what `rewrite` makes fit again
    for place, value in mutations(manifest, rng, 1):
        if place[0] in free or (place[0] == "charged_attempts" and value is ...):
            continue
        folder = Path(shutil.copytree(original, tmp_path / "forged"))
        (folder / "checkpoints/step-00000004/manifest.json").write_text(json.dumps(edited(manifest, place, value)))
        rewrite(folder, lambda records: None)
        code, found = judge(folder)
        shutil.rmtree(folder)
        assert code != 0, f"{place} -> {value!r}: {found}"
        count += 1
    assert count > 20 and "in checkpoints/*/manifest.json" in named(judge(original)[1])


def written(tree: dict[str, Any]) -> str:
    """As TOML; what it cannot hold is left out."""
    lines = []
    for section, table in tree.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if value not in (None, {})]
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["plain", "adaptive"])
def test_every_change_of_the_configuration_s_plan_is_violated(
    name: str, ledgers: Callable[[str], Path], tmp_path: Path, judge: Judge
) -> None:
    original, rng, count = ledgers(name), random.Random(2), 0
    tree = tomllib.loads((original / "config.toml").read_text())
    tree["data"]["num_examples"] = 2000
    folder = Path(shutil.copytree(original, tmp_path / "forged"))
    (folder / "config.toml").write_text(written(tree))
    assert judge(folder)[0] == 0
    for place, value in mutations(tree, rng, 0.3):
        if place == ("data", "provenance") or value in (..., None, {}):
            continue  # words; and what is not asked for has its default
        (folder / "config.toml").write_text(written(edited(tree, place, value)))
        code, found = judge(folder)
        assert code == 5, f"{place} -> {value!r}: {found}"
        count += 1
    assert count > 10


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        (None, "epsilon", 0.01, "config.toml has ['epsilon'], which no recipe has"),
        (None, "guarantee", {"epsilon": 0.01}, "config.toml has ['guarantee'], which no recipe has"),
        ("privacy", "cap", 101, "config.toml has ['privacy.cap'], which no recipe has"),
        ("privacy", "epsilon", 0.01, "config.toml has ['privacy.epsilon'], which no recipe has"),
        ("privacy", "max_examples_per_owner", 1, "max_examples_per_owner = 1, and the ledger states None"),
        ("privacy", "shared_ledger", "all.jsonl", "shared_ledger = True, and the ledger states False"),
        ("privacy", "simulation", True, "config.toml has a simulation"),
        ("train", "num_steps", 4.5, "train.num_steps = 4.5, and the ledger states 4"),
        ("data", "num_examples", 2001, "num_examples = 2001, and the plan has 2000"),
    ],
)
def test_a_key_of_the_configuration_that_contradicts_the_ledger_is_violated(
    section: str | None, key: str, value: Any, said: str, folder: Path, judge: Judge
) -> None:
    tree = tomllib.loads((folder / "config.toml").read_text())
    (tree if section is None else tree[section])[key] = value
    top = f"{key} = {value}\n" if section is None and not isinstance(value, dict) else ""
    text = written({name: table for name, table in tree.items() if isinstance(table, dict)})
    (folder / "config.toml").write_text(top + text)
    code, found = judge(folder)
    assert code == 5 and said in sentences(found), found


def test_the_verifier_knows_the_keys_of_recipes_and_plans_and_no_other() -> None:
    assert set(PrivacySection.model_fields) == verify.RECIPE_KEYS and set(RunConfig.model_fields) == verify.TABLES
    assert set(PLAN.frozen_fields()) == verify.PLAN_FIELDS


@pytest.mark.parametrize("value", [5.0, True, "5", None, 4, 6, [], {}])
def test_charges_of_the_metrics_are_counts(value: Any, folder: Path, judge: Judge) -> None:
    line = json.loads((folder / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(json.dumps(line | {"privacy/charged_attempts": value}) + "\n")
    assert judge(folder)[0] == 5


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 - 3e-7, 0.5, 1.0, 1.5])
def test_an_epsilon_of_the_metrics_is_never_below_the_truth(factor: float, folder: Path, judge: Judge) -> None:
    line = json.loads((folder / "metrics.jsonl").read_text())
    line["privacy/epsilon"] *= factor
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert judge(folder)[0] == (0 if factor >= 1 else 5)
