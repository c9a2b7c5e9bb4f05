"""Whoever interrupts, edits or repeats private heads gets no ledger that says less, or something else, than was released."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.private_head.methods import METHODS
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import spent_in, train_head
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.ledger.run_state import SharedTerms
from privacy.ledger.shared import SharedLedger

RANDOM = np.random.default_rng(0)
FEATURES, LABELS = RANDOM.normal(size=(200, 6)), RANDOM.integers(0, 3, 200)


class Killed(BaseException):
    pass


def head(
    output: Path, method: str = "dp-gd", epsilon: float = 1.0, features: np.ndarray = FEATURES, **more: Any
) -> None:
    train_head(Rows(features, LABELS), 3, method, epsilon=epsilon, output=output, **more)


def killed_at(where: str, output: Path, **more: Any) -> None:
    """As if the program ended before that record."""

    def kill(*_arguments: object, **_more: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, where, kill)
        with pytest.raises(Killed):
            head(output, **more)


def cut(output: Path, lines: int = 2) -> None:
    whole = (output / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (output / "ledger.jsonl").write_bytes(b"".join(whole[:lines]))


AGAIN: dict[str, dict[str, Any]] = {
    "another method": {"method": "dp-ls"},
    "other words": {"covers": "nobody"},
    "another option": {"options": {"max_grad_norm": 0.5}},
    "another epsilon": {"epsilon": 2.0},
    "other data": {"features": FEATURES + 1},
    "data in another order": {"features": FEATURES[::-1].copy()},
}


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize("where", ["start_session", "intent"])
def test_what_was_begun_is_not_finished_as_something_else(tmp_path: Path, where: str, name: str) -> None:
    killed_at(where, tmp_path)
    with pytest.raises(PrivacyConfigError):
        head(tmp_path, **AGAIN[name])
    assert not read_ledger(tmp_path / "ledger.jsonl").intents and not (tmp_path / "head.safetensors").exists()
    head(tmp_path)
    assert read_ledger(tmp_path / "ledger.jsonl").num_charged == 1


def in_the_middle(output: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHODS["dp-gd"], "fit", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            head(output)


@pytest.mark.parametrize("begin", [in_the_middle, lambda output: killed_at("done", output), head])
@pytest.mark.parametrize(
    "damage", [cut, lambda output: cut(output, 1), lambda output: (output / "ledger.jsonl").unlink()]
)
def test_a_charge_that_is_cut_away_is_missed(
    tmp_path: Path, begin: Callable[[Path], None], damage: Callable[[Path], None]
) -> None:
    """Another head in the folder, and the sum over all heads, would be of fewer releases than there were."""
    head(tmp_path / "other")
    begin(tmp_path / "one")
    assert spent_in(tmp_path).num_releases == 2
    damage(tmp_path / "one")
    with pytest.raises(PrivacyStateRefused):
        head(tmp_path / "one")
    if (tmp_path / "one/ledger.jsonl").exists():
        with pytest.raises(PrivacyStateRefused, match="contradict each other"):
            spent_in(tmp_path)


def test_a_copy_of_a_head_that_was_begun_is_finished_once_in_the_owner_s_ledger(tmp_path: Path) -> None:
    owner, one = tmp_path / "owner.jsonl", tmp_path / "one"
    SharedLedger.create(owner, epsilon=5.0, delta=1e-2)
    terms = SharedTerms(owner, "one")
    killed_at("intent", one, shared=terms)
    shutil.copytree(one, tmp_path / "two")
    head(one, shared=terms)
    with pytest.raises(PrivacyStateRefused, match="another copy of this run went on"):
        head(tmp_path / "two", shared=terms)
    assert not (tmp_path / "two/head.safetensors").exists()
