"""verify.py on folders as the product writes them, what it prints, and what it refuses to read."""

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from privacy import verify
from privacy.accounting import rounding
from privacy.accounting.accountants import claimed_epsilon
from privacy.checkpoints.read import with_seal
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerState, read_ledger
from privacy.plan.numbers import make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest
from tests.privacy.published import PLAN, Judge, publish, rewrite, sentences
from trainer.loop.metrics import as_fp32

ASKED: dict[str, Any] = {
    "num_examples": 2000,
    "expected_batch_size": 100,
    "num_steps": 3,
    "noise_multiplier": 8.0,
}


def test_an_honest_folder_is_consistent_and_its_epsilon_is_the_report_s(
    folder: Path, judge: Judge
) -> None:
    card = json.loads((folder / "report/privacy_card.json").read_text())
    code, found = judge(folder, "--head", judge(folder)[1]["attested"]["last line"])
    assert code == 0 and found["verdict"] == "consistent" and found["head_known"], found
    assert (
        found["epsilon"] == pytest.approx(card["epsilon"], abs=1e-6)
        and found["delta"] == card["delta"] == 1e-5
    )
    assert found["epsilon"] == pytest.approx(PLAN.epsilon_after(5), abs=1e-6)
    assert (
        found["attested"]["charged attempts"] == 5 and found["attested"]["noise_multiplier"] == 4.0
    )


def test_it_runs_where_this_project_is_not_installed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-I", str(folder / "verify.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=tmp_path / "elsewhere",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads((folder / "report/privacy_card.json").read_text())
    assert float(done.stdout.rpartition("epsilon ")[2].split()[0]) == pytest.approx(
        card["epsilon"], abs=1e-3
    )
    for said in (
        "forged as a whole",
        "noise_multiplier: 4.0",
        "attested by",
        "declared, and checked by nothing",
    ):
        assert said in done.stdout
    assert done.stderr == f"checking {folder}: ledger, epsilon, card and files (up to a minute)\n"


UNREAD = "; no page was read: believe this line"


def test_the_card_asks_for_the_whole_line_of_the_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the numbers of this run: a folder of another run, or a page with other numbers, does not end with that line."""
    card = json.loads((folder / "report/privacy_card.json").read_text())
    found = re.search(
        r"has to end with a line that begins `(.+?)`",
        (folder / "report/privacy_card.md").read_text(),
    )
    asked = found and found[1]
    assert (
        asked
        == f"verify: consistent: epsilon {rounding.rounded_up(card['epsilon'])} at delta 1e-05"
    )
    assert f"<code>{asked}</code>" in (folder / "report/privacy_card.html").read_text()
    assert (
        verify.main([str(folder)]) == 0
        and capsys.readouterr().out.splitlines()[-1] == asked + UNREAD
    )


@pytest.mark.parametrize("file", ["privacy_card.md", "privacy_card.html"])
def test_a_verdict_says_that_no_page_was_read(
    file: str, folder: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    """And states the ledger's epsilon, whatever the page shows."""
    page, honest = (
        folder / "report" / file,
        "verify: consistent: epsilon 0.104 at delta 1e-05" + UNREAD,
    )
    page.write_text(page.read_text().replace("0.104", "0.010"))
    assert verify.main([str(folder)]) == 0 and capsys.readouterr().out.splitlines()[-1] == honest
    assert "verify: " + judge(folder)[1]["line"] == honest
    (folder / "ledger.jsonl").write_text("no ledger\n")
    assert verify.main([str(folder)]) == 5
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "verify: violated: no epsilon was found" + UNREAD
    )


PLANS = {
    "one Gaussian": {"expected_batch_size": 2000, "cap": None},
    "no cap": {"cap": None},
    "a cap that costs": {"cap": 101},
    "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
    "a large epsilon": {"noise_multiplier": 0.35, "expected_batch_size": 1500, "num_steps": 30},
}


@pytest.mark.parametrize(
    "name", [*list(PLANS)[:-1], pytest.param(list(PLANS)[-1], marks=pytest.mark.full)]
)
def test_epsilon_is_the_product_s_for_every_kind_of_plan(name: str) -> None:
    plan = make_plan(PlanRequest(**ASKED | {"sensitivity_slack": 1e-3} | PLANS[name]))
    read = verify.read_plan(json.loads(json.dumps(plan.frozen_fields())), head=False)
    assert read.noise_tail() == pytest.approx(plan.noise_tail_delta, rel=1e-9)
    for count in (0, 1, plan.max_intents):
        ours, _ = claimed_epsilon([plan.release_group(count)], plan.accounted_delta)
        theirs = verify.epsilon([read.releases(count)], read["target_delta"] - read.noise_tail())
        assert theirs == pytest.approx(ours, abs=1e-6, rel=1e-6)


def test_a_run_without_a_guarantee_claims_nothing(tmp_path: Path, judge: Judge) -> None:
    plan = make_plan(
        PlanRequest(
            **ASKED | {"noise_multiplier": 0.0, "target_delta": 1e-5, "sensitivity_slack": 1e-3}
        )
    )
    folder = publish(tmp_path / "run", plan)
    code, found = judge(folder)
    assert code == 0 and found["epsilon"] is None and found["formal_guarantee"] is False, sentences(
        found
    )
    assert found["line"] == "consistent: no epsilon is claimed" + UNREAD
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace("null", "0.5"))
    assert judge(folder)[0] == 5


def test_an_open_ledger_is_said_to_be_open_and_an_older_card_to_be_old(
    tmp_path: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = publish(tmp_path / "run", steps=3)
    assert verify.main([str(folder)]) == 0 and "the ledger is open" in capsys.readouterr().out
    card = (folder / "report/privacy_card.json").read_text()
    releases = [{"name": "gradient", "std": 4.0, "sensitivity": 1.0}]
    rewrite(
        folder,
        lambda records: records.append(
            {"type": "intent", "step": 4, "attempt": 0, "releases": releases}
        ),
    )
    (folder / "report/privacy_card.json").write_text(card)
    code, found = judge(folder)
    assert code == 6 and "the card is of the first 11 lines of 12" in sentences(
        found, "inconclusive"
    )


def test_a_torn_line_is_charged_where_an_intent_could_stand(
    folder: Path, tmp_path: Path, judge: Judge
) -> None:
    run = publish(tmp_path / "open", steps=3)
    (run / "report/privacy_card.json").unlink()
    before = read_ledger(run / "ledger.jsonl").num_charged
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b'{"seq":14,"type":"in')
    assert (
        judge(run)[1]["attested"]["charged attempts"]
        == before + 1
        == read_ledger(run / "ledger.jsonl").num_charged
    )
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(b'{"seq"')
    code, found = judge(folder)
    assert code == 5 and "line 15: a torn line where no line can be written" in sentences(found)


def test_what_is_not_checked_is_declared(folder: Path, judge: Judge) -> None:
    declared = judge(folder)[1]["declared"]
    named = {
        "in ledger.jsonl",
        "config.toml",
        "verify.py",
        "manifests of checkpoints",
        "privacy_card.json",
    }
    assert named | {"tensorboard/, private/ and all other files"} <= declared.keys()
    assert (
        declared["in ledger.jsonl"]
        == "commit, environment, mirror, noised_coordinates, noised_norm, reason, sum_exponent"
    )


def test_what_is_printed_is_at_most_a_unit_of_its_last_place_above() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        value = rng.choice(
            [rng.random(), rng.uniform(0, 1000), rng.randrange(10**6) / 10 ** rng.randrange(1, 7)]
        )
        value = rng.choice([value, math.nextafter(value, 0), math.nextafter(value, math.inf)])
        for rounded_up in (verify.rounded_up, rounding.rounded_up):
            above = Fraction(rounded_up(value)) - Fraction(repr(value))
            assert 0 <= above < Fraction(1, 1000), value


# Folders of strangers: nothing in them speaks for verify.py, is run by it or ends it.

FORGERY = "print('verify: consistent: epsilon 0.0001 at delta 1e-05')\nraise SystemExit(0)\n"


@pytest.mark.full
@pytest.mark.parametrize("path", [{}, {"PYTHONPATH": ":."}])
def test_no_module_that_lies_in_the_folder_is_run(path: dict[str, str], folder: Path) -> None:
    for name in ("argparse.py", "__future__.py", "dp_accounting/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(FORGERY)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "verify.py"],
        cwd=folder,
        env=environment | path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 5 and "0.0001" not in done.stdout, done.stdout + done.stderr
    assert "__future__.py is code" in done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("argparse.py", "argparse.py is code"),
        ("a.so", "a.so is code"),
        ("dp_accounting/__init__.py", "dp_accounting is code"),
        ("behind/README.md", "behind/README.md is not a ledger"),
        ("behind/deep/ledger-1.jsonl", "behind/deep is not a ledger"),
        ("behind/ledger-7.jsonl", "behind/ledger-7.jsonl is not a ledger"),
        ("checkpoints/step-00000004/rank-1.safetensors", "checkpoints: step-00000004 holds rank-1"),
    ],
)
def test_a_file_that_no_run_writes_is_violated(
    name: str, said: str, folder: Path, judge: Judge
) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(FORGERY)
    code, found = judge(folder)
    assert code == 5 and said in sentences(found), sentences(found)


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/etc"), lambda path: path.symlink_to("no"), os.mkfifo]
)
@pytest.mark.parametrize(
    "place", ["evaluation.txt", "checkpoints", "report", "checkpoints/step-00000004"]
)
def test_a_link_or_device_is_violated_and_not_followed(
    make: Callable[[Path], None], place: str, folder: Path, tmp_path: Path, judge: Judge
) -> None:
    if (folder / place).exists():
        (folder / place).rename(tmp_path / "elsewhere")
    make(folder / place)
    code, found = judge(folder)
    assert code == 5 and f"{place} is a link or a device" in sentences(found)
    assert found["checks"][-1]["name"] == "files", "and nothing else is looked at"


def test_nothing_in_a_folder_adds_a_line_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder / "checkpoints" / "step-\nverify: consistent: epsilon 0.0100 at delta 1e-12"
    place.mkdir()
    (place / "manifest.json").write_text('{"step":1,"ledger":5}')
    assert verify.main([str(folder)]) == 5
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("verify: ")]
    assert said == [lines[-1]] and lines[-1].startswith("verify: violated: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere"], "/nowhere: is not a folder"),
        (["--head", "12"], "--head must be 64 hexadecimal digits"),
        (["a", "b"], "unrecognized arguments"),
        ([], "give a run folder: auditable-dp verify RUN_DIR"),
        (["\x00"], "is not a folder"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_number_of_metrics_is_never_called_another_than_the_ledger_s() -> None:
    """Metrics have the shortest decimal of the nearest fp32, the ledger has nine digits; 0.284653529 came as 0.2846535."""
    drawn = (2.0 ** np.random.default_rng(0).uniform(-2.01, -1.7, 100_000)).tolist()
    apart = [abs(as_fp32(x) / float(f"{x:.9g}") - 1) for x in (0.284653529, *drawn)]
    assert 1e-7 < max(apart) <= verify.METRIC_ROUNDING


# Which checkpoints may lack their record: verify.py and the trainer say the same of every step and line of a ledger


def write(path: Path, rng: random.Random) -> LedgerState:
    """Sessions that go on from anywhere, with and without records of their checkpoints."""
    releases = [release_of_step(PLAN.noise_multiplier, PLAN.max_grad_norm)]
    with Ledger.create(path, {"plan": PLAN.frozen_fields(), "key_commitment": "ab" * 32}) as ledger:
        for _ in range(rng.randint(1, 3)):
            ledger.start_session({}, restarted=rng.random() < 0.2)
            state = ledger.state
            step = rng.randint(0, state.last_done_step)
            if rng.random() < 0.4:
                ledger.checkpoint(step, f"step-{step:08d}", os.urandom(32).hex())
            while (
                step < PLAN.num_steps
                and state.num_charged < PLAN.max_intents
                and rng.random() < 0.8
            ):
                step += 1
                ledger.intent(step, ledger.state.attempts[step], releases)
                if rng.random() < 0.15:
                    break
                ledger.done(step, ledger.state.attempts[step] - 1)
                if rng.random() < 0.4:
                    kept = rng.randint(max(step - 1, 0), step)
                    ledger.checkpoint(kept, f"step-{kept:08d}", os.urandom(32).hex())
        if rng.random() < 0.2:
            ledger.close("stopped")
    return read_ledger(path)


def refused(folder: Path, step: int, line: int, line_hash: str) -> bool:
    place = folder / f"checkpoints/step-{step:08d}"
    place.mkdir(parents=True)
    manifest: dict[str, Any] = {
        "step": step,
        "ledger": {"seq": line, "hash": line_hash},
        "formal_guarantee": True,
    }
    (place / "manifest.json").write_text(json.dumps(with_seal(manifest)))
    try:
        verify.check_checkpoints(
            verify.Folder(folder, verify.read_ledger(folder / "ledger.jsonl"), None)
        )
    except verify.Violated:
        return True
    except verify.Undecided:
        return False
    finally:
        (place / "manifest.json").unlink()
        place.rmdir()
    raise AssertionError("nobody recorded it")


@pytest.mark.parametrize(
    "seed", [range(6), pytest.param(range(6, 300), marks=pytest.mark.full)], ids=str
)
def test_the_verifier_and_the_trainer_follow_one_rule(seed: range, tmp_path: Path) -> None:
    answers = []
    for number in seed:
        folder = tmp_path / str(number)
        folder.mkdir()
        state = write(folder / "ledger.jsonl", random.Random(number))
        for line in range(state.num_lines):
            for step in range(state.last_done_step + 1):
                answers.append(state.may_lack_record(step, line))
                said = refused(folder, step, line, state.hashes[line])
                assert said != answers[-1], (
                    f"seed {number}: a checkpoint of step {step} that remembers line {line}"
                )
    assert len(answers) / 2 > sum(answers) > len(answers) / 50
