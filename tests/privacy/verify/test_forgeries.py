"""verify.py against folders that somebody forged: each row is one forgery, and what is said of it.

What the ledger alone contradicts is in tests/privacy/test_ledger_damage.py, where the library's reader is asked, too.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privacy.checkpoints.read import with_seal
from privacy.ledger.chain import hash_line
from tests.privacy.published import Judge, Records, rewrite, sentences


def drop(kind: str, which: int = 0) -> Callable[[Records], None]:
    def edit(records: Records) -> None:
        del records[[n for n, record in enumerate(records) if record["type"] == kind][which]]

    return edit


def plan_of(**fields: Any) -> Callable[[Records], None]:
    return lambda records: records[0]["plan"].update(fields)


def of_kind(kind: str, edit: Callable[[dict[str, Any]], object]) -> Callable[[Records], None]:
    return lambda records: [edit(record) for record in records if record["type"] == kind] and None


def more_noise_everywhere(records: Records) -> None:
    """Lowers epsilon, and no line contradicts another."""
    records[0]["plan"]["noise_multiplier"] = 5.0
    for record in records:
        if record["type"] == "intent":
            record["releases"][0]["std"] = 5.0


REWRITTEN: dict[str, tuple[Callable[[Records], Any], str]] = {
    "second session dropped": (drop("session", 1), "ok"),
    "checkpoint dropped": (
        drop("checkpoint"),
        "checkpoints: step-00000004: manifest.json is not the one",
    ),
    "more noise everywhere": (
        more_noise_everywhere,
        "plan: config.toml asks for noise_multiplier = 4.0",
    ),
    "a little more noise": (
        lambda records: records[4]["releases"][0].update(std=4.01),
        "line 5: gradient states std",
    ),
    "a larger delta": (plan_of(target_delta=1e-3), "plan: config.toml asks for target_delta"),
    "more reserve": (plan_of(reserved_attempts=9), "plan: config.toml asks for reserved_attempts"),
    "no reserve": (
        plan_of(reserved_attempts=0),
        "order: 5 attempts are charged where 4 are allowed",
    ),
    "another cap": (plan_of(cap=None), "plan: config.toml asks for cap"),
    "another sampling key": (
        lambda records: records[0].update(key_commitment="cd" * 32),
        "card: the card's opened.key",
    ),
    "half of a norm": (
        of_kind("done", lambda one: one.update(noised_norm=one["noised_norm"] / 2)),
        "noise: less noise was drawn than stated, by the norm of step 1",
    ),
    "more coordinates": (
        lambda records: records[0].update(noised_coordinates=90_000),
        "noise: less noise was drawn",
    ),
    "no norm": (
        lambda records: records[3].pop("noised_norm"),
        "noise: `done` of step 1 does not state what was noised",
    ),
    "no number of coordinates": (lambda records: records[0].pop("noised_coordinates"), "undecided"),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_an_edit_of_the_ledger_that_was_chained_again_is_found(
    name: str, folder: Path, judge: Judge
) -> None:
    edit, said = REWRITTEN[name]
    rewrite(folder, edit)
    code, found = judge(folder)
    assert code == {"ok": 0, "undecided": 6}.get(said, 5), sentences(found)
    assert said in ("ok", "undecided") or said in sentences(found), sentences(found)


def cut_lines(count: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
        (folder / "ledger.jsonl").write_bytes(b"".join(lines[:-count]))

    return edit


def card_says(place: str, value: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        card = json.loads((folder / "report/privacy_card.json").read_text())
        *parts, last = place.split(".")
        inner = card
        for part in parts:
            inner = inner[part]
        assert inner[last] != value
        inner[last] = value
        (folder / "report/privacy_card.json").write_text(json.dumps(card))

    return edit


def card_hides(value: float, key: str, *places: str) -> Callable[[Path], None]:
    """States another epsilon, and keeps the honest one under a key that reads like its place."""

    def edit(folder: Path) -> None:
        card = json.loads((folder / "report/privacy_card.json").read_text())
        inner = card
        for place in places:
            inner = inner[place]
        honest, inner["epsilon"] = inner["epsilon"], value
        card[key] = {"epsilon": honest} if key == "" else honest
        (folder / "report/privacy_card.json").write_text(json.dumps(card))

    return edit


def text_of(place: str, before: str, after: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / place).read_text()
        assert before in text
        (folder / place).write_text(text.replace(before, after, 1))

    return edit


def metrics_say(*lines: str) -> Callable[[Path], None]:
    """Before the honest line."""

    def edit(folder: Path) -> None:
        honest = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text("\n".join([*lines, honest]))

    return edit


def added(place: str, text: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / place).parent.mkdir(exist_ok=True)
        with (folder / place).open("a") as file:
            file.write(text)

    return edit


def of_step_0(renamed: bool) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        place = folder / "checkpoints/step-00000004"
        manifest = json.loads((place / "manifest.json").read_text()) | {"step": 0, "files": {}}
        (place / "weights.safetensors").unlink()
        (place / "manifest.json").write_text(json.dumps(with_seal(manifest)))
        place.rename(place.with_name("step-00000000")) if renamed else None

    return edit


CHECKPOINT = "checkpoints/step-00000004"
NOT_RECORDED = "manifest.json is not the one that the ledger recorded"
ENTRY = '{"step": 4, "privacy/epsilon": 0.01, "privacy/charged_attempts": 5'
BY_HAND: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "a line edited": (
        text_of("ledger.jsonl", '"step":1', '"step":2'),
        5,
        "line 3: step 2 skips step 1",
    ),
    "the last line edited": (
        text_of("ledger.jsonl", '"finished"', '"stopped"'),
        5,
        "card is of a line that the ledger lacks",
    ),
    "a key twice": (
        text_of("ledger.jsonl", '"step":1', '"step":1,"step":1'),
        5,
        "line 3: it is not a ledger record: a key",
    ),
    "the end cut": (cut_lines(1), 5, "card is of a line that the ledger lacks"),
    "the last steps cut": (cut_lines(6), 5, "checkpoints: step-00000004 remembers another line"),
    "card: epsilon": (
        card_says("epsilon", 0.01),
        5,
        "the card's epsilon is 0.01, and the ledger gives",
    ),
    "card: other words": (card_says("warnings", ["none"]), 0, ""),
    "card: a number twice": (
        text_of("report/privacy_card.json", "{", '{"epsilon": 0.01,'),
        5,
        "stands twice",
    ),
    "card: an empty key": (card_hides(1e-6, ""), 5, "the card's epsilon is 1e-06"),
    "card: a key with a dot": (
        card_hides(1e-6, "accounting.epsilon", "accounting"),
        5,
        "the card's accounting.epsilon is",
    ),
    "metrics: a training loss": (
        metrics_say('{"step": 4, "train/loss": 2.5}'),
        5,
        "shows train/loss, which no run publishes",
    ),
    "metrics: a batch size": (
        metrics_say('{"step": 4, "train/batch_size": 99}'),
        5,
        "shows train/batch_size, which no run",
    ),
    "metrics: another norm": (
        metrics_say('{"step": 4, "optimizer/noised_grad_norm": 9.5}'),
        5,
        "= 9.5, which no line of",
    ),
    "metrics: a bound": (
        metrics_say('{"step": 4, "privacy/clipping_bound": 1.001}'),
        5,
        "shows privacy/clipping_bound, which no run publishes",
    ),
    "held-out: a training loss": (
        added("evaluation/heldout.jsonl", '{"step": 4, "train_loss": 2}\n'),
        5,
        "shows train_loss",
    ),
    "manifest": (text_of(f"{CHECKPOINT}/manifest.json", '"random"', '"imported"'), 5, NOT_RECORDED),
    "manifest of step 0": (of_step_0(False), 5, "is of step 0"),
    "manifest of step 0, renamed": (of_step_0(True), 5, NOT_RECORDED),
    "a checkpoint renamed": (
        lambda folder: (folder / CHECKPOINT).rename(folder / "checkpoints/step-00000001"),
        5,
        "is of step 4",
    ),
    "weights": (
        text_of(f"{CHECKPOINT}/weights.safetensors", "weights", "weight5"),
        5,
        "has another hash",
    ),
    "weights gone": (
        lambda folder: (folder / f"{CHECKPOINT}/weights.safetensors").unlink(),
        6,
        "is missing",
    ),
    "a later result": (
        added("evaluation/heldout.jsonl", '{"step":9}\n'),
        5,
        "step 9, which the ledger never finished",
    ),
    "later metrics": (
        added("metrics.jsonl", '{"step":9}\n'),
        5,
        "step 9, which the ledger never finished",
    ),
    "metrics: an attempt": (
        added("metrics.jsonl", '{"step": 2, "attempt": 2}\n'),
        5,
        "attempt 2 of step 2, where",
    ),
    "metrics: a start": (
        added("metrics.jsonl", '{"step": 0, "attempt": 2}\n'),
        5,
        "attempt 2 of step 0, where",
    ),
    "metrics: both starts": (
        added("metrics.jsonl", '{"step": 0, "attempt": 0}\n{"step": 0, "attempt": 1}\n'),
        0,
        "",
    ),
    "metrics: both attempts": (
        added("metrics.jsonl", '{"step": 2, "attempt": 0}\n{"step": 2, "attempt": 1}\n'),
        0,
        "",
    ),
    "metrics: epsilon": (
        text_of("metrics.jsonl", 'epsilon": 0', 'epsilon": -0'),
        5,
        "metrics: epsilon -0",
    ),
    "metrics: epsilon twice": (metrics_say(ENTRY + ', "privacy/epsilon": 9}'), 5, "stands twice"),
    "metrics: an earlier line": (metrics_say(ENTRY + "}"), 5, "epsilon 0.01 after 5, where it is"),
    "metrics: charges of another step": (
        metrics_say(ENTRY.replace("4", "1") + "}"),
        5,
        "as the ledger never stood",
    ),
    "metrics: fewer charges": (
        metrics_say(ENTRY.replace("5", "1") + "}"),
        5,
        "shows 1 charges, as the ledger never",
    ),
    "metrics: no charges": (
        metrics_say('{"step": 0, "privacy/epsilon": 0.0}'),
        5,
        "shows None charges",
    ),
    "metrics: words": (
        metrics_say(ENTRY.replace("0.01", '"0.01 (one person)"') + "}"),
        5,
        "states epsilon 0.01 (one",
    ),
    "metrics: a loss that is no number": (metrics_say('{"step": 4, "heldout/loss": NaN}'), 0, ""),
    "metrics: NaN hides an epsilon": (
        metrics_say(ENTRY + "}", ENTRY.replace("0.01", "NaN") + "}"),
        5,
        "states epsilon nan",
    ),
    "metrics: no entry": (
        added("metrics.jsonl", "epsilon is 0.01\n"),
        5,
        "neither an entry nor the beginning",
    ),
    "metrics: a mark before it": (
        added("metrics.jsonl", "\ufeff" + ENTRY + "}\n"),
        5,
        "neither an entry nor the beginning",
    ),
    "metrics: torn too often": (
        added("metrics.jsonl", '{"step"\n' * 2),
        5,
        "no restart of the ledger explains it",
    ),
    "metrics: torn": (added("metrics.jsonl", '{"step": 4, "privacy/ch\n'), 0, ""),
    "metrics: torn early": (added("metrics.jsonl", '{"st'), 0, ""),
    "config gone": (lambda folder: (folder / "config.toml").unlink(), 6, "config.toml is missing"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_an_edit_by_hand_is_found(name: str, folder: Path, judge: Judge) -> None:
    edit, code, said = BY_HAND[name]
    edit(folder)
    got, found = judge(folder)
    assert got == code and said in sentences(found) + sentences(found, "inconclusive"), found[
        "checks"
    ]


def test_a_configuration_that_would_eat_all_memory_is_bad_input(folder: Path, judge: Judge) -> None:
    (folder / "config.toml").write_text("a" + ".a" * 60_000 + " = 1")
    code, found = judge(folder)
    assert code == 2 and "more than 100 parts" in json.dumps(found)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        (
            "privacy",
            "max_examples_per_owner",
            1,
            "max_examples_per_owner = 1, and the ledger has None",
        ),
        ("privacy", "shared_ledger", "all.jsonl", "shared_ledger = True, and the ledger has False"),
        ("privacy", "simulation", True, "config.toml has a simulation"),
    ],
)
def test_a_key_of_the_configuration_that_the_plan_does_not_have_is_violated(
    section: str, key: str, value: Any, said: str, folder: Path, judge: Judge
) -> None:
    path = folder / "config.toml"
    path.write_text(
        path.read_text().replace(f"[{section}]\n", f"[{section}]\n{key} = {json.dumps(value)}\n")
    )
    code, found = judge(folder)
    assert code == 5 and said in sentences(found), found


def test_a_kept_head_finds_what_nothing_in_the_folder_can(folder: Path, judge: Judge) -> None:
    """A ledger that was cut back to its checkpoint, with all that says more taken away."""
    last = hash_line((folder / "ledger.jsonl").read_bytes().splitlines()[-1])
    assert judge(folder, "--head", last)[0] == 0
    cut_lines(1)(folder)
    shutil.rmtree(folder / "report")
    code, found = judge(folder)
    assert code == 0 and found["attested"]["state of the run"] == "open"
    code, found = judge(folder, "--head", last)
    assert code == 5 and "lacks the line" in sentences(found)


@pytest.mark.parametrize("factor", [1 - 1e-6, 1 - 3e-7, 0.5, 1.0, 1.5])
def test_an_epsilon_of_metrics_and_card_is_never_below_the_truth(
    factor: float, folder: Path, judge: Judge
) -> None:
    line = json.loads((folder / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(
        json.dumps(line | {"privacy/epsilon": factor * line["privacy/epsilon"]}) + "\n"
    )
    assert judge(folder)[0] == (0 if factor >= 1 else 5)
    (folder / "metrics.jsonl").unlink()
    path = folder / "report/privacy_card.json"
    card = json.loads(path.read_text())
    card["epsilon"] = card["accounting"]["epsilon"] = factor * card["epsilon"]
    path.write_text(json.dumps(card))
    assert judge(folder)[0] == (0 if factor >= 1 else 5)
