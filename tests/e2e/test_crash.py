"""SIGKILL at every named point of a step: nothing is spent twice, nothing is forgotten (contract 9)."""

import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from privacy.audit.folder import ledger_audit, schedule_audit
from privacy.ledger.records import read_ledger
from privacy.sampling.keys import SamplingKey
from tests.e2e.crashing_train import POINTS
from tests.e2e.launch import alone, count, kill_group, ledger_lines, start_ranks, train_arguments
from tests.e2e.test_kill import check_chain, check_nothing_is_shared
from tests.privacy.ledger_epsilon import recompute

CRASHING, RECORDING = "tests/e2e/crashing_train.py", "tests/e2e/recording_train.py"


def arguments(run_dir: Path, steps: int, reserve: int) -> list[str]:
    return train_arguments(
        run_dir, "--engine", "local", f"train.num_steps={steps}", f"privacy.reserved_attempts={reserve}",
        "heldout.num_captions=0",
    )  # fmt: skip


def check_account(run_dir: Path, steps: int) -> None:
    """Chain, charges and epsilon; the last by a script that knows nothing of this project."""
    state = read_ledger(run_dir / "ledger.jsonl")
    check_chain(run_dir)
    check_nothing_is_shared(run_dir)
    assert state.closed == "finished"
    assert {line["step"] for line in ledger_lines(run_dir) if line["type"] == "done"} == set(range(1, steps + 1))
    assert state.num_charged >= count(run_dir, "intent") >= count(run_dir, "done")
    charged, epsilon = recompute(run_dir / "ledger.jsonl")
    assert charged == state.num_charged and state.epsilon() == pytest.approx(epsilon, rel=1e-6)


def crash_at(points: tuple[str, ...], run_dir: Path, *changes: str) -> None:
    steps, noise = 2 * len(POINTS), str(run_dir.with_suffix(".noise"))
    for number, point in enumerate(points):
        before = count(run_dir, "intent")
        started = [*arguments(run_dir, steps, 20), *changes]
        done = alone([point, str(2 + number % 2), *started], script=CRASHING, NOISE_LOG=noise)
        assert done.returncode == -9, (point, done.stderr[-2000:])
        assert count(run_dir, "intent") > before or point in ("before_intent", "in_record", "in_ledger_write")
    done = alone([*arguments(run_dir, steps, 20), *changes], script=RECORDING, NOISE_LOG=noise)
    assert done.returncode == 0, done.stderr[-2000:]
    assert count(run_dir, "torn") == count(run_dir, "repair") == points.count("in_ledger_write")
    check_account(run_dir, steps)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_contract_9_a_crash_at_every_point(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    crash_at(POINTS, run_dir)
    for report in (ledger_audit(run_dir), schedule_audit(run_dir)):
        assert "violated" not in report.verdict, report.to_text()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_contract_9_forty_kills_on_two_ranks(tmp_path: Path) -> None:
    """Every named point in turn, the count of passages at random, and every sixth kill at a random moment from outside."""
    run_dir, steps, kills, chance = tmp_path / "run", 120, 40, random.Random(0)
    noise, log = str(run_dir.with_suffix(".noise")), run_dir.with_suffix(".log")
    common = [a for a in arguments(run_dir, steps, 2 * kills + 2) if a not in ("--engine", "local")]
    for kill in range(kills):
        point = [*POINTS, "outside"][kill % (len(POINTS) + 1)]
        passages = chance.randint(1, 4) if point != "in_ledger_write" else chance.randint(2, 9)
        outside = point == "outside"
        started = common if outside else [point, str(passages), *common]
        ranks = start_ranks(started, 2, log, script=RECORDING if outside else CRASHING, NOISE_LOG=noise)
        deadline, wanted = time.monotonic() + 180, len(ledger_lines(run_dir)) + chance.randint(1, 8)
        while all(rank.poll() is None for rank in ranks) and not (outside and len(ledger_lines(run_dir)) >= wanted):
            assert time.monotonic() < deadline, (point, log.read_text()[-3000:])
            time.sleep(0.01)
        for rank in ranks:
            kill_group(rank)
        assert any(rank.returncode == -9 for rank in ranks), (point, log.read_text()[-3000:])
    ranks = start_ranks(common, 2, log, script=RECORDING, NOISE_LOG=noise)
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0], log.read_text()[-3000:]
    check_account(run_dir, steps)


def test_contract_1_and_7_a_copied_run_folder_continued_twice_shares_no_coins_and_no_noise(tmp_path: Path) -> None:
    first, steps = tmp_path / "run", 8
    noise = [str(tmp_path / f"noise-{which}") for which in range(3)]
    done = alone(["before_done", "4", *arguments(first, steps, 20)], script=CRASHING, NOISE_LOG=noise[0])
    assert done.returncode == -9
    copies = [tmp_path / "left", tmp_path / "right"]
    shared = count(first, "intent")
    members: list[list[np.ndarray]] = []
    for copy, record in zip(copies, noise[1:], strict=True):
        shutil.copytree(first, copy)
        done = alone(arguments(copy, steps, 20), script=RECORDING, NOISE_LOG=record)
        assert done.returncode == 0, done.stderr[-2000:]
        state, nonce, own = read_ledger(copy / "ledger.jsonl"), b"", []
        key = SamplingKey.load(copy / "private" / "sampling.key", state.opened["key_commitment"])
        for line in ledger_lines(copy):
            nonce = bytes.fromhex(line["nonce"]) if line["type"] == "session" else nonce
            if line["type"] == "intent":
                own.append(state.plan.sampler.members(key.coin_key(nonce, line["attempt"]), line["step"]))
        members.append(own)
    for left in members[0][shared:]:
        assert all(len(np.intersect1d(left, right)) <= 8 for right in members[1])  # 24 of 3,000 twice: 0.2 on average
    draws = [Path(record).read_text().split() for record in noise]
    assert len({draw for record in draws for draw in record}) == sum(map(len, draws))
