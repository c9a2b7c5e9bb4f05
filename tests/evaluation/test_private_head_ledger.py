"""evaluate.py private-head: claim, card and audit; whoever interrupts, edits or repeats heads gets no ledger that says less."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import load_file

from data.errors import DataError
from evaluation.features import Features
from evaluation.linear_probe import cross_validated_regression
from evaluation.private_head import run as head_command
from evaluation.private_head.methods import METHODS, accuracy
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import (
    Whitening,
    joint_cost_of,
    private_rows,
    train_head,
    without_noise,
)
from privacy import verify
from privacy.audit.run_audit import ledger_audit
from privacy.card.render import to_markdown
from privacy.card.run_card import write_card
from privacy.errors import BudgetSpent, PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.ledger.run_state import SharedTerms
from privacy.ledger.shared import SharedLedger
from tests.evaluation.conftest import Evaluate
from tests.evaluation.support import digits, exact_delta, save_digits, spent
from trainer.card_of_run import build_card
from trainer.errors import ConfigError

RANDOM = np.random.default_rng(0)
FEATURES, LABELS = RANDOM.normal(size=(200, 6)), RANDOM.integers(0, 3, 200)
GIVEN = "the examples of shards:a.tar, given the encoder, whose epsilon is to be added where it has seen them"


@pytest.fixture
def run(tmp_path: Path, run: Evaluate) -> Evaluate:
    train, test = save_digits(tmp_path, 300)
    sources = ("--train", train, "--test", test)
    common = ("private-head", *sources, "--num_classes", "10", "--output", str(tmp_path / "out"))
    return lambda *arguments: run(*common, *arguments)


@patch.object(
    head_command, "cross_validated_regression", partial(cross_validated_regression, num_folds=2)
)
def test_one_head_next_to_what_it_would_be_without_privacy(run: Evaluate, tmp_path: Path) -> None:
    told = (
        "--method",
        "dp-ls",
        "--target_epsilon",
        "2",
        "--delta",
        "1e-5",
        "--option",
        "ridge=0.05",
        "--compare",
    )
    record = run(*told)
    [release] = record["released_with_differential_privacy"]
    ledger = tmp_path / "out/private_heads/dp-ls-epsilon-2/ledger.jsonl"
    assert (
        release["ledger"] == str(ledger)
        and release["delta"] == 1e-5
        and 1.99 < release["epsilon"] <= 2
    )
    assert exact_delta(spent(ledger), release["epsilon"]) <= 1e-5
    assert (
        "given what made the features" in release["covers"] and record["formal_guarantee"] is False
    )
    assert list((tmp_path / "out/private/evaluation").glob("private-head-*.json"))
    x, y, x_test, y_test = digits()
    plain = accuracy(
        without_noise(Rows(x[:300], y[:300]), 10, "dp-ls", {"ridge": 0.05}), x_test, y_test
    )
    scalars = record["scalars"]
    assert scalars["dp-ls/without_privacy/accuracy"] == pytest.approx(plain)
    assert 0.3 < scalars["dp-ls/epsilon-2/accuracy"] < plain + 0.05
    assert scalars["regression/without_privacy/accuracy"] > 0.9
    with pytest.raises(ValueError, match="has a finished head already; name another folder"):
        run(*told)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            ["--method", "dp-ls", "--target_epsilon", "1", "--num_classes", "0"],
            "--num_classes is required",
        ),
        (["--method", "dp-ls", "--target_epsilon", "-1"], "epsilon"),
        (["--method", "dp-x", "--target_epsilon", "1"], "invalid choice"),
    ],
)
def test_refused(run: Evaluate, tmp_path: Path, arguments: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        run(*arguments)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("out/private_heads/*/ledger.jsonl"))


def test_whitening_on_public_pictures_lets_classes_be_seen(run: Evaluate, tmp_path: Path) -> None:
    """Digits, all of them far from zero, are whitened on as many others."""
    x, y, x_test, y_test = digits()
    x, x_test = x + 100 * x[0], x_test + 100 * x[0]
    np.savez(tmp_path / "train.npz", features=x[:900], labels=y[:900])
    np.savez(tmp_path / "test.npz", features=x_test, labels=y_test)
    np.savez(tmp_path / "others.npz", features=x[900:], labels=np.zeros(300, dtype=np.int64))
    whiten_on = ["--whiten_on", f"features:{tmp_path}/others.npz"]
    told = ["--method", "dp-ls", "--target_epsilon", "4", "--delta", "1e-5"]
    [plain] = run(*told, "--heads", str(tmp_path / "plain"))["scalars"].values()
    [found] = run(*told, *whiten_on)["scalars"].values()
    assert plain < 0.4 < 0.6 < found  # the noise is drawn anew each time
    folder = tmp_path / "out/private_heads/dp-ls-epsilon-4"
    assert json.loads((folder / "head.json").read_text())["whitened_on"] == whiten_on[1]
    opened = read_ledger(folder / "ledger.jsonl").opened
    assert (
        opened["head"]["whitened_on"] == whiten_on[1]
        and len(opened["head"]["whitened_on_sha256"]) == 64
    )
    assert verify.verify(folder)[0] == 0
    head = load_file(folder / "head.safetensors")  # for features as they were
    right = (x_test @ head["weight"].T + head["bias"]).argmax(1) == y_test
    assert right.mean() == pytest.approx(found)


@pytest.mark.filterwarnings("error")  # a warning would tell of an example
def test_a_row_is_whitened_by_itself_and_by_public_pictures_alone() -> None:
    x_ND = digits()[0].astype(np.float32) + 3
    public = Features(x_ND[:600].copy(), np.zeros(600, dtype=np.int64), np.arange(600) > 0)
    whitening = Whitening.of(public)
    public.values_ND[0] = np.nan  # not usable
    assert np.array_equal(Whitening.of(public).matrix_DD, whitening.matrix_DD)
    found_ND = x_ND[:600].copy()
    whitening.apply(found_ND)
    varies = np.linalg.eigvalsh(np.cov(found_ND[1:].T))
    assert (
        np.abs(found_ND[1:].mean(0)).max() < 1e-4
        and varies.max() < 1.01
        and np.median(varies) > 0.9
    )
    for hostile in (np.nan, np.inf, 3e38, 0.0):
        other_ND = x_ND[:600].copy()
        other_ND[7] = hostile
        whitening.apply(other_ND)
        assert hostile != 0 or not other_ND[7].any(), "a row of zeros stands for no example"
        assert np.array_equal(np.delete(other_ND, 7, 0), np.delete(found_ND, 7, 0))
    with pytest.raises(DataError, match="all usable pictures have equal features"):
        Whitening.of(
            Features(x_ND[:1].repeat(9, 0), np.zeros(9, dtype=np.int64), np.ones(9, dtype=bool))
        )
    with pytest.raises(DataError, match="no picture can be used"):
        Whitening.of(
            Features(np.full((9, 4), np.inf), np.zeros(9, dtype=np.int64), np.ones(9, dtype=bool))
        )


def test_whitening_on_private_or_other_features_is_refused(run: Evaluate, tmp_path: Path) -> None:
    np.savez(tmp_path / "narrow.npz", features=np.eye(9), labels=np.zeros(9, dtype=np.int64))
    for source, match in (
        ("train", "is not public"),
        ("./test", "is not public"),
        ("narrow", "of another width"),
    ):
        with pytest.raises(ConfigError, match=match):
            run(
                "--method",
                "dp-ls",
                "--target_epsilon",
                "1",
                "--whiten_on",
                f"features:{tmp_path}/{source}.npz",
            )
    assert not list(tmp_path.glob("out/private_heads/*/ledger.jsonl"))


def test_fewer_classes_than_have_names_are_refused(
    run: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = head_command.load_inputs

    def named(*arguments: Any, **options: Any) -> Any:
        inputs = load(*arguments, **options)
        assert inputs is not None
        inputs.features["train"] = replace(
            inputs.features["train"], class_names=tuple("abcdefghijk")
        )
        return inputs

    monkeypatch.setattr(head_command, "load_inputs", named)
    with pytest.raises(
        ConfigError, match=r"--num_classes 10 leaves out label 10 \(k\): the data name 11 classes"
    ):
        run("--method", "dp-ls", "--target_epsilon", "1")
    assert not list(tmp_path.glob("out/private_heads/*/ledger.jsonl"))


def test_a_row_decides_about_itself_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """An undecodable image, a missing label, one out of range: a row of zeros, and no other row or count changes."""
    x, y, _, _ = digits()
    x, y, usable = x[:6].astype(np.float32), y[:6] % 3, np.ones(6, dtype=bool)
    plain = private_rows(Features(x.copy(), y, usable), 3)
    for change in ("undecodable", "label", "negative"):
        bad_y, bad_usable = y.copy(), usable.copy()
        bad_y[2] = {"undecodable": y[2], "label": 3, "negative": -1}[change]
        bad_usable[2] = change != "undecodable"
        found = private_rows(Features(x.copy(), bad_y, bad_usable), 3)
        assert capsys.readouterr().err.startswith(
            "private: 1 of 6 training examples are unusable or have no label below 3"
        )
        assert not found.features_ND[2].any() and len(found.features_ND) == 6
        assert 0 <= found.labels_N.min() <= found.labels_N.max() < 3
        assert np.array_equal(
            np.delete(found.features_ND, 2, 0), np.delete(plain.features_ND, 2, 0)
        )
        assert np.array_equal(np.delete(found.labels_N, 2), np.delete(plain.labels_N, 2))


def test_card_verifier_and_audit_tell_what_was_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And find an epsilon in head.json that is too small."""
    folder = tmp_path / "head"
    train_head(
        Rows(FEATURES[:60], LABELS[:60]),
        3,
        "dp-newton",
        epsilon=1.0,
        delta=1e-3,
        output=folder,
        covers=GIVEN,
    )
    card = build_card(folder)
    page = to_markdown(card).casefold()
    assert card.epsilon == pytest.approx(1.0, rel=1e-2) and card.epsilon <= 1.0
    for said in (
        "dp-newton",
        "one labelled example",
        GIVEN,
        "full batch",
        "gradient[0]",
        "hessians[0]",
        "ridge",
    ):
        assert said.casefold() in page, said
    for wrong in (
        "DP-SGD",
        "AES-256",
        "image-text pair",
        "optimizer",
        "divisor",
        "Poisson",
        "Whole batches",
    ):
        assert wrong.casefold() not in page, wrong
    write_card(folder, card)
    assert (folder / "verify.py").read_bytes() == Path(verify.__file__).read_bytes()
    assert (
        verify.main([str(folder), "--json"]) == 0 and ledger_audit(folder).verdict == "consistent"
    )
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(card.epsilon, abs=1e-6)
    stated = json.loads((folder / "head.json").read_text())
    (folder / "head.json").write_text(json.dumps(stated | {"epsilon": 0.001}))
    assert (
        verify.main([str(folder)]) == 5
        and "head.json's epsilon is 0.001" in capsys.readouterr().out
    )
    audit = ledger_audit(folder)
    assert audit.verdict != "consistent" and "head.json" in str(audit)


class Killed(BaseException):
    pass


def head(
    output: Path,
    method: str = "dp-ls",
    epsilon: float = 1.0,
    features: np.ndarray = FEATURES,
    **more: Any,
) -> None:
    train_head(Rows(features, LABELS), 3, method, epsilon=epsilon, output=output, **more)


def killed_at(owner: type, where: str, output: Path, **more: Any) -> None:
    """As if the program ended before that record, or while the head is computed."""

    def kill(*_arguments: object, **_more: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, where, kill)
        with pytest.raises(Killed):
            head(output, **more)


AGAIN: dict[str, dict[str, Any]] = {
    "another method": {"method": "dp-newton"},
    "other words": {"covers": "nobody"},
    "another option": {"options": {"ridge": 0.5}},
    "another epsilon": {"epsilon": 2.0},
    "other data": {"features": FEATURES + 1},
    "data in another order": {"features": FEATURES[::-1].copy()},
}


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize("where", ["start_session", "intent"])
def test_what_was_begun_is_not_finished_as_something_else(
    tmp_path: Path, where: str, name: str
) -> None:
    killed_at(Ledger, where, tmp_path)
    with pytest.raises(PrivacyConfigError):
        head(tmp_path, **AGAIN[name])
    assert (
        not read_ledger(tmp_path / "ledger.jsonl").intents
        and not (tmp_path / "head.safetensors").exists()
    )
    head(tmp_path)
    assert read_ledger(tmp_path / "ledger.jsonl").num_charged == 1


@pytest.mark.parametrize(
    "begin",
    [
        lambda output: killed_at(METHODS["dp-ls"], "fit", output),
        lambda output: killed_at(Ledger, "done", output),
        head,
    ],
)
@pytest.mark.parametrize("lines", [2, 1, None])
def test_a_charge_stays_and_is_missed_where_it_is_cut_away(
    tmp_path: Path, begin: Callable[[Path], None], lines: int | None
) -> None:
    """Another head in the folder, and the sum over all heads, would be of fewer releases than there were."""
    head(tmp_path / "other")
    begin(tmp_path / "one")
    assert joint_cost_of(tmp_path).num_releases == 2
    with pytest.raises(PrivacyConfigError if begin is head else BudgetSpent):
        head(tmp_path / "one")
    ledger = tmp_path / "one/ledger.jsonl"
    whole = ledger.read_bytes().splitlines(keepends=True)
    ledger.unlink()
    if lines is not None:
        ledger.write_bytes(b"".join(whole[:lines]))
    with pytest.raises(PrivacyStateRefused):
        head(tmp_path / "one")
    if lines is not None:
        with pytest.raises(PrivacyStateRefused, match="contradict each other"):
            joint_cost_of(tmp_path)


def test_a_copy_of_a_head_that_was_begun_is_finished_once_in_the_owner_s_ledger(
    tmp_path: Path,
) -> None:
    owner, one = tmp_path / "owner.jsonl", tmp_path / "one"
    SharedLedger.create(owner, epsilon=5.0, delta=1e-2)
    terms = SharedTerms(owner, "one")
    killed_at(Ledger, "intent", one, shared=terms)
    shutil.copytree(one, tmp_path / "two")
    head(one, shared=terms)
    with pytest.raises(PrivacyStateRefused, match="another copy of this run went on"):
        head(tmp_path / "two", shared=terms)
    assert not (tmp_path / "two/head.safetensors").exists()
