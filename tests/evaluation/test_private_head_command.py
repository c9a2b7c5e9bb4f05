"""The command: ledger and claim, what is refused, what one example's row can do, the sweep."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from scipy import stats

from evaluation.features import Features
from evaluation.options import HeadMethod
from evaluation.private_head.command import private_rows
from evaluation.private_head.methods import METHODS
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import without_noise
from tests.evaluation.commands import evaluate
from tests.evaluation.digits import digits, save_digits


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    train, test = save_digits(tmp_path)
    common = [
        "private-head",
        "--train",
        train,
        "--test",
        test,
        "--num_classes",
        "10",
        "--output",
        str(tmp_path / "out"),
    ]
    return lambda *arguments: evaluate(monkeypatch, capsys, *common, *arguments)


def exact_delta(mu: float, epsilon: float) -> float:
    return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu))


def spent(ledger: Path) -> float:
    """mu of all releases of all intents."""
    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    releases = [release for record in records if record["type"] == "intent" for release in record["releases"]]
    return math.sqrt(sum((r["sensitivity"] / r["std"]) ** 2 for r in releases))


def test_one_head(run: Any, tmp_path: Path) -> None:
    record = run("--method", "dp-ls", "--target_epsilon", "2", "--delta", "1e-5", "--option", "ridge=0.05")
    [release] = record["released_with_differential_privacy"]
    ledger = tmp_path / "out/private_heads/dp-ls-epsilon-2-0/ledger.jsonl"
    assert release["ledger"] == str(ledger) and release["delta"] == 1e-5 and 1.99 < release["epsilon"] <= 2
    assert exact_delta(spent(ledger), release["epsilon"]) <= 1e-5
    assert "given what made the features" in release["covers"] and record["formal_guarantee"] is False
    assert 0.7 < record["scalars"]["dp-ls/epsilon-2/accuracy"] < 0.97 and "without_privacy" not in record["details"]
    assert list((tmp_path / "out/private/evaluation").glob("private-head-*.json"))
    with pytest.raises(ValueError, match="holds a finished head; choose another folder"):
        run("--method", "dp-ls", "--target_epsilon", "2", "--delta", "1e-5", "--option", "ridge=0.05")


def test_sweep_with_joint_epsilon(run: Any, tmp_path: Path) -> None:
    save_digits(tmp_path, 300)
    record = run(
        "--method", "dp-ls", "dp-gd", "--sweep", "0.5", "4", "--repeats", "2", "--delta", "1e-5", "--data_is_public",
        "--option", "dp-gd.max_grad_norm=0.8",
    )  # fmt: skip
    rows = {(row["method"], row.get("epsilon")): row["accuracy"] for row in record["table"]}
    assert rows["dp-ls", 0.5] < rows["dp-ls", 4] <= rows["dp-ls, without privacy", None] + 0.05
    assert len(record["released_with_differential_privacy"]) == 8
    assert record["details"]["options"] == {"dp-ls": {}, "dp-gd": {"max_grad_norm": 0.8}}
    together = record["details"]["all_heads_together"]
    mu = math.sqrt(sum(spent(path) ** 2 for path in tmp_path.glob("out/private_heads/*/ledger.jsonl")))
    assert exact_delta(mu, together["epsilon"]) == pytest.approx(1e-5, rel=1e-3) and together["epsilon"] > 4


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--method", "dp-ls"], "exactly one of --target_epsilon and --sweep"),
        (["--method", "dp-ls", "dp-gd", "--target_epsilon", "1"], "are a sweep"),
        (["--method", "dp-ls", "--sweep", "1", "--repeats", "2"], "data that are declared public"),
        (["--method", "dp-ls", "--target_epsilon", "1", "--option", "sigma=1"], "no option 'sigma'"),
        (["--method", "dp-ls", "--target_epsilon", "1", "--option", "ridge=low"], "write NAME=NUMBER"),
        (["--method", "dp-ls", "--target_epsilon", "1", "--option", "dp-fc.lr=1"], "dp-fc is not among"),
        (["--method", "dp-ls", "--target_epsilon", "1", "--num_classes", "0"], "--num_classes is required"),
        (["--method", "dp-ls", "--target_epsilon", "-1"], "epsilon"),
        (["--method", "dp-x", "--target_epsilon", "1"], "invalid choice"),
    ],
)
def test_refused(run: Any, tmp_path: Path, arguments: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        run(*arguments)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("out/private_heads/*/ledger.jsonl"))


def test_every_method_of_the_library_is_offered() -> None:
    assert set(get_args(HeadMethod)) == set(METHODS)


@pytest.mark.parametrize("centre", [False, True])
def test_a_row_decides_about_itself_alone(centre: bool) -> None:
    """An undecodable image, a missing label, one out of range: a row of zeros, and no other row or count changes."""
    x, y, _, _ = digits()
    x, y, usable = x[:6].astype(np.float32), y[:6] % 3, np.ones(6, dtype=bool)
    plain = private_rows(Features(x, y, usable), 3, centre=centre)
    plain_x, plain_y = plain.features_ND[:], plain.labels_N
    for change in ("undecodable", "label", "negative"):
        bad_y, bad_usable = y.copy(), usable.copy()
        bad_y[2] = {"undecodable": y[2], "label": 3, "negative": -1}[change]
        bad_usable[2] = change != "undecodable"
        found = private_rows(Features(x, bad_y, bad_usable), 3, centre=centre)
        found_x, found_y = found.features_ND[:], found.labels_N
        assert not found_x[2].any() and len(found_x) == 6 and 0 <= found_y.min() <= found_y.max() < 3
        assert np.array_equal(np.delete(found_x, 2, 0), np.delete(plain_x, 2, 0))
        assert np.array_equal(np.delete(found_y, 2), np.delete(plain_y, 2))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_row_of_zeros_adds_nothing_whatever_its_label(method: str) -> None:
    """Without this, leaving an example out as zeros would not be leaving it out."""
    x, y, _, _ = digits()
    x, y = x[:100].copy(), y[:100].copy()
    x[7] = 0
    other = y.copy()
    other[7] = (y[7] + 1) % 10
    weights = [without_noise(Rows(x, labels), 10, method) for labels in (y, other)]
    assert np.array_equal(weights[0], weights[1])
