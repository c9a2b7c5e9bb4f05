"""SIGKILL at every named point of a step: nothing is spent twice, nothing is forgotten (contract 9)."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from privacy.audit.run_audit import ledger_audit, schedule_audit
from privacy.ledger.records import read_ledger
from tests.e2e.launch import PLANTED, alone, count, train_arguments
from tests.e2e.planted_train import POINTS
from tests.e2e.test_kill import check_finished, members_of
from tests.privacy.ledger_epsilon import recompute


def arguments(run_dir: Path, steps: int, reserve: int) -> list[str]:
    return train_arguments(
        run_dir,
        "--engine",
        "local",
        f"train.num_steps={steps}",
        f"privacy.reserved_attempts={reserve}",
        "heldout.num_captions=0",
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_contract_9_a_crash_at_every_point(tmp_path: Path) -> None:
    """Chain, charges, coins, noise and epsilon; the last by a script that knows nothing of this project."""
    run_dir, steps = tmp_path / "run", 2 * len(POINTS)
    started, noise = arguments(run_dir, steps, 20), str(run_dir.with_suffix(".noise"))
    for number, point in enumerate(POINTS):
        before = count(run_dir, "intent")
        done = alone([f"{point}:{2 + number % 2}", *started], script=PLANTED, NOISE_LOG=noise)
        assert done.returncode == -9, (point, done.stderr[-2000:])
        assert count(run_dir, "intent") > before or point in (
            "before_intent",
            "in_record",
            "in_ledger_write",
        )
    done = alone(["nothing", *started], script=PLANTED, NOISE_LOG=noise)
    assert done.returncode == 0, done.stderr[-2000:]
    assert count(run_dir, "torn") == count(run_dir, "repair") == 1
    check_finished(run_dir, steps)
    charged, epsilon = recompute(run_dir / "ledger.jsonl")
    state = read_ledger(run_dir / "ledger.jsonl")
    assert charged == state.num_charged and state.epsilon() == pytest.approx(epsilon, rel=1e-6)
    for report in (ledger_audit(run_dir), schedule_audit(run_dir)):
        assert "violated" not in report.verdict, report.to_text()


def test_contract_1_and_7_a_copied_run_folder_continued_twice_shares_no_coins_and_no_noise(
    tmp_path: Path,
) -> None:
    first, steps = tmp_path / "run", 4
    noise = [str(tmp_path / f"noise-{which}") for which in range(3)]
    done = alone(
        ["before_done:2", *arguments(first, steps, 20)], script=PLANTED, NOISE_LOG=noise[0]
    )
    assert done.returncode == -9
    copies = [tmp_path / "left", tmp_path / "right"]
    shared = count(first, "intent")
    members: list[list[np.ndarray]] = []
    for copy, record in zip(copies, noise[1:], strict=True):
        shutil.copytree(first, copy)
        done = alone(["alike", *arguments(copy, steps, 20)], script=PLANTED, NOISE_LOG=record)
        assert done.returncode == 0, done.stderr[-2000:]
        members.append(members_of(copy))
    for left in members[0][shared:]:
        assert all(
            len(np.intersect1d(left, right)) <= 8 for right in members[1]
        )  # 24 of 3,000 twice: 0.2 on average
    draws = [Path(record).read_text().split() for record in noise]
    assert len({draw for record in draws for draw in record}) == sum(map(len, draws))
