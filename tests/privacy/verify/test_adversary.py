"""What a second adversary edited in a published folder, and verify.py accepted."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from privacy import verify
from privacy.accounting import rounding as text
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from tests.privacy.published import card_says, publish
from tests.privacy.verify.judging import Judge, sentences

FORGERY = "print('verify: consistent: epsilon 0.0001 at delta 1e-05')\nraise SystemExit(0)\n"


@pytest.mark.full
@pytest.mark.parametrize("path", [{}, {"PYTHONPATH": ":."}])
def test_no_module_that_lies_in_the_folder_is_run(path: dict[str, str], folder: Path) -> None:
    for name in ("argparse.py", "__future__.py", "dp_accounting/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(FORGERY)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "verify.py"], cwd=folder, env=environment | path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 5 and "0.0001" not in done.stdout, done.stdout + done.stderr
    assert "__future__.py is code" in done.stdout


@pytest.mark.parametrize("name", ["argparse.py", "a.so", "dp_accounting/__init__.py"])
def test_code_in_the_folder_is_violated(name: str, folder: Path, judge: Judge) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(FORGERY)
    code, found = judge(folder)
    assert code == 5 and f"{name.partition('/')[0]} is code" in sentences(found)


def test_links_to_folders_and_ledgers_that_nothing_names_are_violated(folder: Path, judge: Judge) -> None:
    (folder / "evaluation2").symlink_to("/etc")
    code, found = judge(folder)
    assert code == 5 and "evaluation2 is a link" in sentences(found)
    (folder / "evaluation2").unlink()
    (folder / "behind").mkdir()
    (folder / "behind/ledger-7.jsonl").write_text("{}")
    code, found = judge(folder)
    assert code == 5 and "behind/ledger-7.jsonl is no ledger" in sentences(found)


def test_latest_names_the_newest_checkpoint_that_is_here(folder: Path, judge: Judge) -> None:
    latest = folder / "checkpoints/LATEST"
    for named, code in (("step-00000004\n", 0), ("step-00000002\n", 5), ("step-00000004\nepsilon 0.01\n", 5), ("", 5)):
        latest.write_text(named)
        assert judge(folder)[0] == code, named
    latest.write_text("step-00000004\n")
    shutil.copytree(folder / "checkpoints/step-00000004", folder / "checkpoints/step-00000009")
    code, found = judge(folder)
    assert "LATEST names step-00000004, and step-00000009 is here" in sentences(found, "inconclusive")


def test_links_and_devices_are_violated_and_second_names_told(folder: Path, tmp_path: Path, judge: Judge) -> None:
    (tmp_path / "elsewhere").write_text("epsilon 0.01")
    for make in (
        lambda path: path.symlink_to(tmp_path / "elsewhere"),
        lambda path: path.symlink_to("nowhere"),
        os.mkfifo,
    ):
        make(folder / "evaluation.txt")
        code, found = judge(folder)
        assert code == 5 and "evaluation.txt is a link or a device" in sentences(found)
        (folder / "evaluation.txt").unlink()
    os.link(tmp_path / "elsewhere", folder / "evaluation.txt")
    code, found = judge(folder)
    assert code == 0 and "a hard link" in json.dumps(found["declared"])


@pytest.mark.parametrize("name", ["behind/README.md", "behind/deep/ledger-1.jsonl", "behind/ledger-1.jsonl"])
def test_behind_holds_nothing_but_ledgers_that_are_named(name: str, folder: Path, judge: Judge) -> None:
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("{}")
    code, found = judge(folder)
    assert code == 5 and "is no ledger that ledger.jsonl names" in sentences(found)


def test_private_and_empty_folders_are_named(folder: Path, judge: Judge) -> None:
    for name in ("private", "epsilon-0.01", "evaluation/private/x"):
        (folder / name).mkdir(parents=True)
    said = {one["what"]: one["words"] for one in judge(folder)[1]["declared"]}
    assert "not for publication" in said["private/"] and "epsilon-0.01/" in said["what other files say"]
    assert "evaluation/private/x/" in said["what other files say"]


def entries(folder: Path, edit: Callable[[str], str]) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(edit(path.read_text()))


ENTRY = '{"step": 4, "privacy/epsilon": 0.01, "privacy/charged_attempts": 5'


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("\ufeff" + ENTRY + "}\n", "neither an entry nor the beginning"),
        (ENTRY + ",}\n", "neither an entry nor the beginning"),
        ("epsilon is 0.01\n", "neither an entry nor the beginning"),
        (ENTRY + ', "x', "epsilon 0.01 after 5"),
        ('{"step": 9, "x', "shows step 9"),
        ('{"step"\n' * 2, "no restart of the ledger explains it"),
        ('{"step": 4, "privacy/Epsilon": 0.01}\n', "privacy/Epsilon, which this verifier does not know"),
        ('{"step": 4, "privacy/ch', None),
        ('{"st', None),
    ],
)
def test_a_torn_line_is_the_beginning_of_an_entry(added: str, said: str | None, folder: Path, judge: Judge) -> None:
    entries(folder, lambda text: text + added)
    code, found = judge(folder)
    assert code == (5 if said else 0) and (said or "") in sentences(found), found["checks"]


@pytest.mark.full
def test_every_epsilon_of_the_metrics_is_recomputed(tmp_path: Path, judge: Judge) -> None:
    """Eight counts were, and a claim between two of them had only to be no smaller than the one before."""
    plan = make_plan(PlanRequest(
        num_examples=2000, expected_batch_size=100, num_steps=12, noise_multiplier=4.0, target_delta=1e-5, sensitivity_slack=1e-3
    ))  # fmt: skip
    folder = publish(tmp_path / "run", plan)
    claims = [(step, step + (step > 1), plan.epsilon_after(step + (step > 1))) for step in range(1, 13)]
    for lowered in (None, 5):
        stated = [(step, count, claims[step - 2][2] if step == lowered else claim) for step, count, claim in claims]
        names = ("step", "privacy/charged_attempts", "privacy/epsilon")
        lines = [dict(zip(names, values, strict=True)) for values in stated]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, found = judge(folder)
        assert code == (5 if lowered else 0), found["checks"]
    assert "after 6, where it is" in sentences(found)


def test_of_very_many_counts_some_are_recomputed() -> None:
    counts = sorted({number * number for number in range(1, 900)})
    chosen = sorted(verify.checked_counts(counts))
    assert chosen[0] == 1 and chosen[-1] == counts[-1] and len(chosen) <= verify.MOST_COUNTS + 1
    assert verify.checked_counts(counts[: verify.MOST_COUNTS]) == set(counts[: verify.MOST_COUNTS])


def test_counts_of_a_card_are_equal_and_emptied_fields_are_listed(folder: Path, judge: Judge) -> None:
    card_says("unit_of_privacy.num_examples", 2000.001)(folder)
    code, found = judge(folder)
    assert code == 5 and "num_examples" in sentences(found)
    card_says("unit_of_privacy.num_examples", 2000)(folder)
    for name, value in (("warnings", []), ("not_stated", [])):
        card_says(name, value)(folder)
    code, found = judge(folder)
    assert code == 0 and {"warnings", "not_stated"} <= set(found["card_not_attested"])


def test_what_is_not_checked_is_declared(folder: Path, judge: Judge) -> None:
    what = {one["what"] for one in judge(folder)[1]["declared"]}
    assert {
        "in metrics.jsonl",
        "in config.toml",
        "in ledger.jsonl",
        "in checkpoints/*/manifest.json",
        "verify.py",
    } <= what


@pytest.mark.parametrize("value", [0.21350000000009, 0.2135000000000001])
def test_an_epsilon_is_never_printed_below_its_value(value: float) -> None:
    for rounded_up in (verify.rounded_up, text.rounded_up):
        assert rounded_up(value, 4) == "0.2136" and rounded_up(0.2135, 4) == "0.2135" and rounded_up(0.1, 3) == "0.100"
    assert text.percent(0.07) == "7.00 %"


def test_what_is_printed_is_at_most_a_unit_of_its_last_place_above() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        digits = rng.randrange(1, 7)
        value = rng.choice([rng.random(), rng.uniform(0, 1000), rng.randrange(10**6) / 10**digits])
        value = rng.choice([value, math.nextafter(value, 0), math.nextafter(value, math.inf)])
        for rounded_up in (verify.rounded_up, text.rounded_up):
            above = Fraction(rounded_up(value, digits)) - Fraction(repr(value))
            assert 0 <= above < Fraction(1, 10**digits), (value, digits)


def test_held_out_results_go_on_in_a_torn_line(folder: Path, judge: Judge) -> None:
    (folder / "evaluation").mkdir()
    for line, expected in (
        (b'{"step": 2, "lo{"step": 4, "loss": 1.0}\n', 0),
        (b'{"step": 2, "lo{"step": 9, "loss": 1.0}\n', 5),
    ):
        (folder / "evaluation/heldout.jsonl").write_bytes(line)
        code, found = judge(folder)
        assert code == expected, found["checks"]
