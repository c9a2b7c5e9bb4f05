"""The console command of the library judges a run of one's own as its loop claimed it; a mistake is one line and an exit code."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from privacy.command.main import main
from privacy.plan.numbers import PrivacyPlan
from tests.privacy.loop.own import N, make

NUMBERS = ["--num_examples", str(N), "--expected_batch_size", "15", "--num_steps", "3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A finished run, and the epsilon that its loop ended with; the bounds while it goes on take seconds, and are left out."""
    folder = tmp_path_factory.mktemp("own") / "run"
    after = PrivacyPlan.epsilon_after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PrivacyPlan,
            "epsilon_after",
            lambda plan, count: after(plan, count) if count == 3 else 1.0,
        )
        with make(folder, num_steps=3, noise_multiplier=16.0) as loop:
            list(loop)
    return folder, loop.epsilon


def test_plan_report_and_loop_state_one_epsilon(
    run: tuple[Path, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan of these numbers, the card of the finished run and its loop; `--json` prints one object and nothing else."""
    folder, epsilon = run
    monkeypatch.setattr(
        "privacy.card.ledger_card.epsilon_of_several", lambda *_arguments: None
    )  # takes seconds
    assert main(["plan", *NUMBERS, "--noise_multiplier", "16", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["report", str(folder), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert planned["epsilon"] == card["epsilon"] == epsilon < planned["epsilon_with_reserve"]
    assert planned["delta"] == card["delta"] == 1 / (2 * N)
    assert main(["plan", *NUMBERS, "--noise_multiplier", "16"]) == 0
    said = re.match(r"epsilon ([0-9.]+) at delta ", capsys.readouterr().out)
    assert (
        said is not None and epsilon <= float(said[1]) < epsilon + 1e-3
    )  # rounded, and never down
    assert (folder / "report" / "privacy_card.html").is_file()


def test_the_judges_pass_a_run_and_no_run_with_a_changed_step(
    run: tuple[Path, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, changed = run[0], tmp_path / "changed"
    assert main(["audit", "ledger", str(whole), "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["verdict"] == "consistent"
    assert (
        judged["ledger_sha256"] == hashlib.sha256((whole / "ledger.jsonl").read_bytes()).hexdigest()
    )
    assert (
        main(["audit", "schedule", str(whole)]) == 0
        and "audit schedule: consistent" in capsys.readouterr().out
    )
    shutil.copytree(whole, changed)
    text = (changed / "ledger.jsonl").read_text()
    assert '"step":2' in text
    (changed / "ledger.jsonl").write_text(text.replace('"step":2', '"step":1'))
    for judge in (["audit", "ledger"], ["audit", "schedule"], ["verify"], ["report"]):
        assert main([*judge, str(changed)]) in (4, 5), judge
        assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "plan/report/audit/verify"),
        (["train"], "train"),
        (["plan", *NUMBERS], "--target_epsilon"),
        (["plan", *NUMBERS, "--noise_multiplier", "many"], "many"),
        (
            ["plan", *NUMBERS, "--noise_multiplier", "1", "--target_epsilon", "3"],
            "not allowed with",
        ),
        (["plan", *NUMBERS, "--noise_multiplier", "0"], "no formal guarantee"),
        (
            ["plan", "--num_examples", "5", *NUMBERS[2:], "--noise_multiplier", "1"],
            "larger than the data",
        ),
        (["audit", "run", "nowhere"], "launch_scripts/audit.py run of a clone"),
        (["audit", "mechanism", "nowhere"], "launch_scripts/audit.py mechanism of a clone"),
        (["audit", "ledger", "nowhere"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert not list(tmp_path.iterdir())


def test_a_package_of_the_extra_that_is_missing_is_named(
    run: tuple[Path, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "privacy.card.run_card", None)
    assert main(["report", str(run[0])]) == 2
    assert "pip install 'auditable-dp[card]'" in capsys.readouterr().err
