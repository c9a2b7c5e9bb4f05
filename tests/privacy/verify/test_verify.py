"""verify.py against forgers: what is changed in a published folder is found, and named."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.ledger.records import read_ledger
from privacy.ledger.signature import SigningKey, fingerprint
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from tests.privacy.ledger_files import rechained
from tests.privacy.published import PLAN, Records, card_says, cut_lines, edited_line, publish, rewrite, text_of
from tests.privacy.verify.judging import KEY, Judge, sentences

FORGER = SigningKey(os.urandom(32))


def test_an_honest_folder_is_consistent_and_its_epsilon_is_the_report_s(folder: Path, judge: Judge) -> None:
    card = json.loads((folder / "report/privacy_card.json").read_text())
    code, found = judge(folder, "--fingerprint", fingerprint(KEY.public))
    assert code == 0 and found["verdict"] == "consistent" and found["signer_known"], found
    assert found["epsilon"] == pytest.approx(card["epsilon"], abs=1e-6) and found["delta"] == card["delta"] == 1e-5
    assert found["epsilon"] == pytest.approx(PLAN.epsilon_after(5), abs=1e-6)
    assert found["attested"]["charged attempts"] == 5
    assert "owner of the training data" in found["not_stated"]


def test_it_runs_where_this_project_is_not_installed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-I", str(folder / "verify.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads((folder / "report/privacy_card.json").read_text())
    assert float(done.stdout.rpartition("epsilon ")[2].split()[0]) == pytest.approx(card["epsilon"], abs=1e-4)
    for said in ("attests nothing about who signed", "NOT STATED", "attested by", "declared, and checked by nothing"):
        assert said in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in (tmp_path / "copy").iterdir())


def test_it_says_first_what_it_will_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything that takes long; after two seconds each check is named, and --json says nothing of it."""
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert verify.main([str(folder)]) == 0
    monkeypatch.undo()
    said = capsys.readouterr()
    lines = len((folder / "ledger.jsonl").read_bytes().splitlines())
    names = [check.__name__.removeprefix("check_") for check in verify.CHECKS]
    first = f"checking {lines} lines of the ledger, then epsilon, card and files"
    assert said.err.splitlines() == [first, *(f"checking {name}" for name in names[2:])]
    assert said.out.splitlines()[-1].startswith("verify: consistent")

    def cut(path: Path) -> None:
        raise verify.BadInput("cut here")

    monkeypatch.setattr(verify, "read_ledger", cut)
    assert verify.main([str(folder)]) == 2
    assert capsys.readouterr().err.splitlines() == [first, "error: cut here"]
    assert verify.main([str(folder), "--json"]) == 2 and capsys.readouterr().err == "error: cut here\n"


PLANS = {
    "one Gaussian": {"expected_batch_size": 2000, "cap": None},
    "no cap": {"cap": None},
    "a cap that costs": {"cap": 101},
    "three groups that take turns": {"bands": 3},
    "two groups, and a cap that costs": {"bands": 2, "cap": 101, "num_examples": 2002},
    "a delta for Renyi": {"target_delta": 1e-13},
    "a large epsilon": {"noise_multiplier": 0.35, "expected_batch_size": 1500, "num_steps": 30},
}


@pytest.mark.parametrize("name", [*list(PLANS)[:-1], pytest.param(list(PLANS)[-1], marks=pytest.mark.full)])
def test_epsilon_is_the_product_s_for_every_kind_of_plan(name: str, tmp_path: Path, judge: Judge) -> None:
    from privacy.accounting.accountants import claimed_epsilon

    asked: dict[str, Any] = {"num_examples": 2000, "expected_batch_size": 100, "num_steps": 3, "noise_multiplier": 4.0}
    plan = make_plan(PlanRequest(**asked | {"sensitivity_slack": 1e-3} | PLANS[name]))
    read = verify.read_plan(json.loads(json.dumps(plan.frozen_fields())), head=False)
    assert read.noise_tail() == pytest.approx(plan.noise_tail_delta, rel=1e-9)
    for count in (0, 1, plan.max_intents):
        ours, _ = claimed_epsilon([plan.release_group(count)], plan.accounted_delta)
        theirs = verify.epsilon([read.releases(count)], read["target_delta"] - read.noise_tail())
        assert theirs == pytest.approx(ours, abs=1e-6, rel=1e-6)


# Edits of the ledger's records by somebody who makes numbers, hashes, signatures, manifests and card fit again with another key.


def drop(kind: str, which: int = 0) -> Callable[[Records], None]:
    def edit(records: Records) -> None:
        del records[[n for n, record in enumerate(records) if record["type"] == kind][which]]

    return edit


def double(kind: str, which: int = 0) -> Callable[[Records], None]:
    def edit(records: Records) -> None:
        place = [n for n, record in enumerate(records) if record["type"] == kind][which]
        records.insert(place, json.loads(json.dumps(records[place])))

    return edit


def swap(first: int, second: int) -> Callable[[Records], None]:
    def edit(records: Records) -> None:
        records[first], records[second] = records[second], records[first]

    return edit


def change(kind: str, which: int = 0, **fields: Any) -> Callable[[Records], None]:
    def edit(records: Records) -> None:
        [record for record in records if record["type"] == kind][which].update(fields)

    return edit


def plan_of(**fields: Any) -> Callable[[Records], None]:
    def edit(records: Records) -> None:
        records[0]["plan"].update(fields)

    return edit


def noise(std: float, sensitivity: float = 1.0, name: str = "gradient") -> Callable[[Records], None]:
    return change("intent", 1, releases=[{"name": name, "std": std, "sensitivity": sensitivity}])


def both(*edits: Callable[[Records], None]) -> Callable[[Records], None]:
    def edit(records: Records) -> None:
        for one in edits:
            one(records)

    return edit


def more_noise_everywhere(records: Records) -> None:
    """Lowers epsilon, and no line contradicts another (part (e) of the finding)."""
    records[0]["plan"]["noise_multiplier"] = 5.0
    for record in records:
        if record["type"] == "intent":
            record["releases"][0]["std"] = 5.0


REWRITTEN: dict[str, tuple[Callable[[Records], None], str]] = {
    "open dropped": (drop("open"), "ledger: ledger.jsonl: line 1: the first record"),
    "open doubled": (double("open"), "line 2: the first record"),
    "session dropped": (drop("session"), "line 2: an intent outside of a session"),
    "session doubled": (double("session"), "line 3: the session nonce was used before"),
    "second session dropped": (drop("session", 1), "ok"),
    "intent dropped": (drop("intent"), "line 3: `done` without its intent"),
    "retry dropped": (drop("intent", 1), "attempt 1 of step 2, where 0 is next"),
    "intent doubled": (double("intent"), "line 4: attempt 0 of step 1, where 1 is next"),
    "done dropped": (drop("done"), "line 4: step 2 begins while step 1 is not done"),
    "done doubled": (double("done"), "line 5: `done` without its intent"),
    "done before intent": (swap(2, 3), "line 3: `done` without its intent"),
    "steps swapped": (both(swap(8, 10), swap(9, 11)), "line 9: step 4 does not follow step 2"),
    "checkpoint doubled": (double("checkpoint"), "ok"),
    "checkpoint dropped": (drop("checkpoint"), "checkpoints: step-00000004 remembers another line"),
    "checkpoint of a step to come": (swap(3, 12), "a checkpoint of step 4, which is not done"),
    "close doubled": (double("close"), "a record after `close`"),
    "close of fewer charges": (change("close", num_charged=4), "line 15: `close` states other charges than 5"),
    "close for no reason": (change("close", reason="tired"), "`close` needs a known reason"),
    "a record of no type": (change("done", 1, type="repair"), "`repair` states ['attempt', 'step']"),
    "more noise in one line": (noise(5.0), "gradient states std, sensitivity = 5, 1; the plan has 4, 1"),
    "another sensitivity": (noise(4.0, 0.5), "gradient states std, sensitivity = 4, 0.5"),
    "more noise by its ratio": (noise(8.0, 2.0), "gradient states std"),
    "another release": (noise(4.0, 1.0, "weights"), "other releases than the plan has"),
    "no release": (change("intent", 0, releases=[]), "line 3: an intent lists its releases"),
    "more noise everywhere": (more_noise_everywhere, "plan: config.toml asks for noise_multiplier = 4.0"),
    "a smaller rate": (plan_of(sample_rate=0.01), "line 1: sample_rate is not"),
    "a smaller threshold": (plan_of(sampling_threshold="1"), "line 1: sampling_threshold is not"),
    "a smaller batch": (plan_of(expected_batch_size=50), "line 1: sampling_threshold is not"),
    "a larger delta": (plan_of(target_delta=1e-3), "plan: config.toml asks for target_delta"),
    "fewer steps": (plan_of(num_steps=3), "step must be an integer from 1 to 3"),
    "more reserve": (plan_of(reserved_attempts=9), "plan: config.toml asks for reserved_attempts"),
    "no reserve": (plan_of(reserved_attempts=0), "budget: 5 attempts are charged where 4 are allowed"),
    "another cap": (plan_of(cap=None), "plan: config.toml asks for cap"),
    "another adjacency": (plan_of(adjacency="replace_one"), "adjacency must be zero_out"),
    "a claim without grounds": (plan_of(enabled=False), "formal_guarantee does not follow"),
    "less slack": (plan_of(sensitivity_slack=0.0), "line 1: sensitivity_slack must be 0.001"),
    "another sampling key": (change("open", key_commitment="cd" * 32), "card: the card's sampling.key_commitment"),
    "another time": (change("intent", 0, time_utc="2020"), "ok"),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_an_edit_that_was_chained_and_signed_again_is_found(name: str, folder: Path, judge: Judge) -> None:
    edit, said = REWRITTEN[name]
    rewrite(folder, FORGER, edit)
    code, found = judge(folder)
    if said == "ok":  # changes nothing that anything depends on, but who signed
        assert code == 0, sentences(found)
    else:
        assert code == 5 and any(part in sentences(found) for part in said.split("|")), sentences(found)
    code, found = judge(folder, "--fingerprint", fingerprint(KEY.public))
    assert code == 5 and found["verdict"] == "violated"


MANIFEST, WEIGHTS = "checkpoints/step-00000004/manifest.json", "checkpoints/step-00000004/weights.safetensors"
BY_HAND: dict[str, tuple[Callable[[Path], None], int, str]] = {
    **{
        f"line {number} edited": (
            edited_line(number, b'"time_utc":"2', b'"time_utc":"3'),
            5,
            f"line {number + 1}: the chain",
        )
        for number in range(1, 16)
    },
    "last line edited": (
        edited_line(16, b'"time_utc":"2', b'"time_utc":"3'),
        5,
        "card is of a line that the ledger lacks",
    ),
    "a signature edited": (
        edited_line(14, b'"signature":"', b'"signature":"0'),
        5,
        "line 14: a signature has 64 bytes",
    ),
    "a space": (edited_line(3, b'"step":1', b'"step": 1'), 5, "line 3: it is not in canonical form"),
    "a key twice": (
        edited_line(3, b'"step":1', b'"step":1,"step":1'),
        5,
        "line 3: it is no ledger record: a key stands twice",
    ),
    "the last line cut": (cut_lines(1), 5, "card is of a line that the ledger lacks"),
    "the end cut": (cut_lines(2), 5, "card is of a line that the ledger lacks"),
    "the checkpoint cut": (cut_lines(4), 5, "checkpoints: step-00000004: manifest.json|card is of a line"),
    "the last steps cut": (cut_lines(8), 5, "checkpoints: step-00000004 remembers another line"),
    "card: epsilon": (card_says("epsilon", 0.01), 5, "the card's epsilon is 0.01, and the ledger gives"),
    "card: epsilon of the accounting": (card_says("accounting.epsilon", 0.01), 5, "the card's accounting.epsilon"),
    "card: delta": (card_says("delta", 1e-9), 5, "the card's delta is 1e-09"),
    "card: planned": (card_says("accounting.epsilon_planned", 0.01), 5, "the card's accounting.epsilon_planned"),
    "card: attempts": (card_says("attempts_charged", 4), 5, "the card's attempts_charged is 4"),
    "card: sigma": (card_says("plan.noise_multiplier", 9), 5, "the card's plan.noise_multiplier"),
    "card: steps": (card_says("steps_done", 9), 5, "the card's steps_done is 9"),
    "card: guarantee": (card_says("formal_guarantee", False), 5, "the card's formal_guarantee is False"),
    "manifest": (
        text_of(MANIFEST, '"random"', '"imported"'),
        5,
        "manifest.json is not the one that the ledger recorded",
    ),
    "weights": (text_of(WEIGHTS, "weights", "weight5"), 5, "weights.safetensors has another hash"),
    "metrics: steps": (text_of("metrics.jsonl", '"step": 4', '"step": 5'), 5, "metrics.jsonl: line 1 shows step 5"),
    "metrics: epsilon": (
        text_of("metrics.jsonl", '"privacy/epsilon": 0', '"privacy/epsilon": -0'),
        5,
        "metrics: epsilon -0",
    ),
    "config: noise": (text_of("config.toml", "= 4.0", "= 4.5"), 5, "plan: config.toml asks for noise_multiplier = 4.5"),
    "config: steps": (
        text_of("config.toml", "num_steps = 4", "num_steps = 5"),
        5,
        "config.toml has train.num_steps = 5",
    ),
    "config gone": (lambda folder: (folder / "config.toml").unlink(), 6, "config.toml is missing"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_an_edit_by_hand_is_found_and_the_line_named(name: str, folder: Path, judge: Judge) -> None:
    edit, code, said = BY_HAND[name]
    edit(folder)
    got, found = judge(folder)
    text = sentences(found) + sentences(found, "inconclusive")
    assert got == code and any(part in text for part in said.split("|")), text


@pytest.mark.full
def test_only_a_kept_fingerprint_finds_a_folder_that_was_forged_as_a_whole(
    tmp_path: Path, judge: Judge, capsys: Any
) -> None:
    """Fewer charges than there were, in a folder that the product itself might have written under another key."""
    forged = publish(tmp_path / "forged", FORGER, make_plan(PlanRequest(
        num_examples=2000, expected_batch_size=100, num_steps=2, noise_multiplier=9.0, target_delta=1e-5, sensitivity_slack=1e-3
    )))  # fmt: skip
    code, found = judge(forged)
    assert code == 0 and not found["signer_known"]
    assert "attests nothing about who signed" in sentences(found, "ok")
    assert verify.main([str(forged)]) == 0 and "forged as a whole" in capsys.readouterr().out
    code, found = judge(forged, "--fingerprint", fingerprint(KEY.public))
    assert code == 5 and "signature: the ledger's key is" in sentences(found)
    assert judge(forged, "--fingerprint", fingerprint(FORGER.public))[0] == 0


def test_an_older_card_is_said_to_be_old(tmp_path: Path, judge: Judge) -> None:
    folder = publish(tmp_path / "run", KEY, steps=3)
    card = (folder / "report/privacy_card.json").read_text()
    more = [
        {"type": "intent", "step": 4, "attempt": 0, "releases": [{"name": "gradient", "std": 4.0, "sensitivity": 1.0}]}
    ]
    rewrite(folder, KEY, lambda records: records.extend(more))
    (folder / "report/privacy_card.json").write_text(card)
    code, found = judge(folder)
    assert code == 6 and "1 attempts were charged since" in sentences(found, "inconclusive")


def test_a_torn_line_is_charged_where_an_intent_could_stand(folder: Path, tmp_path: Path, judge: Judge) -> None:
    run = publish(tmp_path / "open", KEY, steps=3)
    (run / "report/privacy_card.json").unlink()
    before = read_ledger(run / "ledger.jsonl").num_charged
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b'{"seq":14,"type":"in')
    assert judge(run)[1]["attested"]["charged attempts"] == before + 1 == read_ledger(run / "ledger.jsonl").num_charged
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(b'{"seq"')
    code, found = judge(folder)
    assert code == 5 and "line 17: a torn line where no line can be written" in sentences(found)


def test_without_a_signature_it_is_not_called_consistent(folder: Path, judge: Judge) -> None:
    rewrite(folder, KEY, lambda records: None)
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    assert [line["type"] for line in lines].count("signature") == 2
    del lines[0]["signer"]
    (folder / "ledger.jsonl").write_bytes(rechained([line for line in lines if line["type"] != "signature"]))
    (folder / "report/privacy_card.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    code, found = judge(folder)
    assert code == 6 and "nothing in it is signed" in sentences(found, "inconclusive")


def test_what_is_declared_is_listed_and_what_is_not_stated_is_flagged(folder: Path, judge: Judge) -> None:
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(f'{text}\ndataset_owner = "a hospital\\u0007"\n')
    assert tomllib.loads((folder / "config.toml").read_text())
    code, found = judge(folder)
    words = {one["what"]: one["words"] for one in found["declared"]}
    assert code == 0 and words["owner of the training data"] == "a hospital\N{REPLACEMENT CHARACTER}"
    assert "purpose of the training data" in found["not_stated"]


def test_a_run_without_a_guarantee_claims_nothing(tmp_path: Path, judge: Judge) -> None:
    plan = make_plan(PlanRequest(
        num_examples=2000, expected_batch_size=100, num_steps=2, noise_multiplier=0.0, target_delta=1e-5, sensitivity_slack=1e-3
    ))  # fmt: skip
    folder = publish(tmp_path / "run", KEY, plan)
    code, found = judge(folder)
    assert code == 0 and found["epsilon"] is None and found["formal_guarantee"] is False, sentences(found)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace("null", "0.5"))
    assert judge(folder)[0] == 5


def test_a_card_that_states_a_number_twice_is_violated(folder: Path, judge: Judge) -> None:
    """Readers differ in which of two equal keys they take."""
    card = folder / "report/privacy_card.json"
    card.write_text(card.read_text().replace("{", '{"epsilon": 0.01,', 1))
    code, found = judge(folder)
    assert code == 5 and "stands twice" in sentences(found, "violated")
