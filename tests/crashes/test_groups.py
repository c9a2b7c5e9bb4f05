"""Every crash is explored under correlated noise, where groups of examples take turns and are charged for their own."""

from pathlib import Path
from typing import Any

import pytest

from privacy.ledger.records import LedgerState
from privacy.run.ledger import RunLedger
from tests.crashes import program
from tests.crashes.exploration import PLANTED, explore, explore_kills, two_crashes
from tests.crashes.test_crashes import require_no_problem


@pytest.fixture(autouse=True)
def correlated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PLAN", program.CORRELATED)


def test_contract_9_groups_that_take_turns_are_charged_after_every_crash(root: Path) -> None:
    """Nor is a start refused because of the group whose turn it is, wherever lines were torn."""
    for name in ("kills", "crashes"):
        (root / name).mkdir()
    for found in (explore_kills(root / "kills", share=0.015, seed=5), explore(root / "crashes", share=0.04, seed=4)):
        assert not found.problems, found.problems[:3]
        assert found.states > 15


def test_attempts_that_forget_torn_lines_and_lost_sessions_are_found(root: Path) -> None:
    """Every start begins with the first group: the second is never charged for what it does not do, and the first too little."""

    def always_first(patch: pytest.MonkeyPatch) -> None:
        real = RunLedger.start_session

        def start_session(self: RunLedger, **more: Any) -> bytes:
            nonce = real(self, **more)
            self.charged_before = 0
            return nonce

        patch.setattr(RunLedger, "start_session", start_session)
        patch.setattr(LedgerState, "_check_group", lambda self, record: None)

    PLANTED.append(always_first)
    try:
        found = explore_kills(root, share=0.03, seed=6)
    finally:
        PLANTED.clear()
    assert [line for line in found.problems if "drawn from more often" in line or "turn of group" in line], found


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", ["crash", "kill"])
def test_contract_9_every_state_after_two_crashes_under_correlated_noise(root: Path, kind: str, part: int) -> None:
    require_no_problem(two_crashes(root, kind, (part, 4)), kind)
