"""launch_scripts/audit.py on a real run, which is consistent; bad input is one line. Broken ones: tests/privacy/audit."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import alone, train_arguments

AUDIT = "launch_scripts/audit.py"


def report(kind: str, run_dir: Path, *more: str) -> dict[str, Any]:
    """The one JSON object on stdout."""
    result = alone([kind, "--run_dir", str(run_dir), "--json", *more], script=AUDIT)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["exit_code"] == 0 and {"verdict", "checks", "false_alarm_rate"} <= set(found)
    assert found["false_alarm_rate"] < 1e-3
    numbers = set() if kind == "schedule" else {"sentence", "statistic", "p_value", "threshold"}
    for check in found["checks"]:
        assert {"name", "outcome"} | numbers <= set(check)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with canaries in its data, and their folder."""
    folder = tmp_path_factory.mktemp("audit")
    canaries, run_dir = folder / "canaries", folder / "run"
    made = alone(
        ["canaries", "--output", str(canaries), "--num_canaries", "100", "--image_size", "32"],
        script=AUDIT,
    )
    assert made.returncode == 0, made.stderr
    assert (canaries / "coins.json").stat().st_mode & 0o777 == 0o600
    shards = f'data.shards="data/demo/train-*.tar,{canaries}"'
    result = alone(
        ["--engine", "local", *train_arguments(run_dir, shards, "heldout.num_captions=0")]
    )
    assert result.returncode == 0, result.stderr
    return run_dir, canaries


def test_ledger_and_schedule_of_a_true_run(finished: tuple[Path, Path]) -> None:
    for kind in ("ledger", "schedule"):
        found = report(kind, finished[0])
        assert found["verdict"] == "consistent"
    assert set().union(*found["checks"]) == {"name", "outcome"}, (
        "numbers of a schedule tell batch sizes, which are private"
    )


def test_canaries_of_a_small_run_refute_nothing(finished: tuple[Path, Path]) -> None:
    run_dir, canaries = finished
    found = report("run", run_dir, "--canaries", str(canaries))
    assert {check["name"]: check["outcome"] for check in found["checks"]}[
        "canaries_in_data"
    ] == "ok"
    assert "gross mistakes" in found["note"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ledger"], "--run_dir"),
        (["ledger", "--run_dir", "/nowhere"], "does not exist"),
        (["ledger", "--run_dir", "tests"], "no ledger.jsonl"),
        (["mechanism", "--run_dir", "tests"], "no ledger.jsonl"),
        (["mechanism", "--run_dir", "tests", "--ranks", "0"], "--ranks"),
        (["run", "--run_dir", "tests"], "--canaries"),
        (["canaries", "--output", "tests"], "not empty"),
        (["oracle", "--run_dir", "tests"], "oracle"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    result = alone(arguments, script=AUDIT)
    assert result.returncode == 2 and says in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
