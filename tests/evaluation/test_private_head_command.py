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
from evaluation.private_head.methods import METHODS, accuracy
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
    ledger = tmp_path / "out/private_heads/dp-ls-epsilon-2/ledger.jsonl"
    assert release["ledger"] == str(ledger) and release["delta"] == 1e-5 and 1.99 < release["epsilon"] <= 2
    assert exact_delta(spent(ledger), release["epsilon"]) <= 1e-5
    assert "given what made the features" in release["covers"] and record["formal_guarantee"] is False
    assert 0.7 < record["scalars"]["dp-ls/epsilon-2/accuracy"] < 0.97 and "without_privacy" not in record["details"]
    assert list((tmp_path / "out/private/evaluation").glob("private-head-*.json"))
    with pytest.raises(ValueError, match="holds a finished head; choose another folder"):
        run("--method", "dp-ls", "--target_epsilon", "2", "--delta", "1e-5", "--option", "ridge=0.05")


def test_next_to_what_it_would_be_without_privacy(run: Any, tmp_path: Path) -> None:
    save_digits(tmp_path, 300)
    told = ("--method", "dp-gd", "--target_epsilon", "4", "--compare", "--option", "max_grad_norm=0.8")
    scalars = run(*told)["scalars"]
    x, y, x_test, y_test = digits()
    plain = without_noise(Rows(x[:300], y[:300]), 10, "dp-gd", {"max_grad_norm": 0.8})
    assert scalars["dp-gd/without_privacy/accuracy"] == pytest.approx(accuracy(plain, x_test, y_test))
    assert scalars["dp-gd/epsilon-4/accuracy"] < scalars["dp-gd/without_privacy/accuracy"] + 0.05
    assert scalars["regression/without_privacy/accuracy"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--method", "dp-ls", "--target_epsilon", "1", "--option", "sigma=1"], "no option 'sigma'"),
        (["--method", "dp-ls", "--target_epsilon", "1", "--option", "ridge=low"], "write NAME=NUMBER"),
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


def test_a_row_decides_about_itself_alone() -> None:
    """An undecodable image, a missing label, one out of range: a row of zeros, and no other row or count changes."""
    x, y, _, _ = digits()
    x, y, usable = x[:6].astype(np.float32), y[:6] % 3, np.ones(6, dtype=bool)
    plain = private_rows(Features(x.copy(), y, usable), 3)
    for change in ("undecodable", "label", "negative"):
        bad_y, bad_usable = y.copy(), usable.copy()
        bad_y[2] = {"undecodable": y[2], "label": 3, "negative": -1}[change]
        bad_usable[2] = change != "undecodable"
        found = private_rows(Features(x.copy(), bad_y, bad_usable), 3)
        assert not found.features_ND[2].any() and len(found.features_ND) == 6
        assert 0 <= found.labels_N.min() <= found.labels_N.max() < 3
        assert np.array_equal(np.delete(found.features_ND, 2, 0), np.delete(plain.features_ND, 2, 0))
        assert np.array_equal(np.delete(found.labels_N, 2), np.delete(plain.labels_N, 2))


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
