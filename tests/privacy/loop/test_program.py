"""Programs with a loop of their own: killed anywhere and started again, on two ranks, under accelerate; and what they publish."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant

from privacy import verify
from tests.distributed.ranks import free_port, rank_environment

ROOT = Path(__file__).resolve().parents[3]
KILLS = 12


def start(run_dir: Path, *arguments: str, ranks: int = 1) -> list[tuple[int, str]]:
    """Exit code and output of every rank."""
    port = str(free_port())
    command = [sys.executable, "-m", "tests.privacy.loop.program", str(run_dir), *arguments]
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (rank_environment(rank, ranks, port) if ranks > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    return [(process.wait(), output) for process in started for output in [process.communicate(timeout=200)[0]]]


def result(ended: tuple[int, str]) -> dict[str, Any]:
    code, output = ended
    assert code == 0, output
    return dict(json.loads(output.splitlines()[-1]))


def recounted(run_dir: Path) -> tuple[int, float, float]:
    """(intents, epsilon, delta) of the ledger's lines by another accountant's front end, without the cap, and sigma by hand."""
    records = [
        json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines() if not line.endswith(" #torn")
    ]
    plan = records[0]["plan"]
    intents = sum(record["type"] == "intent" for record in records)
    charged = intents + sum(record.get("charged", 0) for record in records if record["type"] == "repair")
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    rate = plan["expected_batch_size"] / plan["num_examples"]
    one = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(plan["noise_multiplier"] / 1.001))
    accountant.compose(one, charged)
    return charged, accountant.get_epsilon(plan["target_delta"]), plan["target_delta"]


def require_claim(run_dir: Path, said: dict[str, Any]) -> int:
    """The program's epsilon is the verifier's, and that of somebody who counts lines; returns the charges."""
    code, found = verify.verify(run_dir, None)
    assert code == 0, found
    charged, epsilon, delta = recounted(run_dir)
    assert said["epsilon"] == pytest.approx(found["epsilon"], rel=1e-9) and said["delta"] == delta
    assert said["epsilon"] == pytest.approx(epsilon, rel=2e-3)
    return charged


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_loop_killed_at_random_points_resumes_and_charges_every_attempt(tmp_path: Path) -> None:
    rng = random.Random(20261123)
    for number in range(3):
        run_dir, kills = tmp_path / str(number), 0
        while True:
            at = rng.randint(1, 130) if kills < KILLS // 3 else 10**9
            ((code, output),) = start(run_dir, "--kill_at", str(at))
            if code != -signal.SIGKILL:
                break
            kills += 1
        if code == 3 or "BudgetSpent" in output:  # crashes may use up the reserve; it stops, and says so
            continue
        charged = require_claim(run_dir, result((code, output)))
        assert charged >= 12 and kills > 0


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torch", "accelerate"])
def test_two_ranks_take_the_same_steps_and_one_resumes_them(launcher: str, tmp_path: Path) -> None:
    """Killed on two ranks, resumed on two, and resumed on one by who has but one machine left."""
    if launcher == "accelerate" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: the extra examples")
    arguments = ["--accelerate"] if launcher == "accelerate" else []
    both = [result(ended) for ended in start(tmp_path / "run", *arguments, ranks=2)]
    assert both[0]["weights"] == both[1]["weights"] and both[0]["epsilon"] == both[1]["epsilon"]
    assert {one["rank"] for one in both} == {0, 1}
    assert require_claim(tmp_path / "run", both[0]) == 12
    again = result(start(tmp_path / "run")[0])
    assert again["weights"] == both[0]["weights"] and again["epsilon"] == both[0]["epsilon"]


@pytest.mark.full
def test_ranks_with_other_data_are_refused_on_all_of_them(tmp_path: Path) -> None:
    for code, output in start(tmp_path / "run", "--uneven", ranks=2):
        assert code == 1 and "ranks have another data set" in output
    assert not (tmp_path / "run").exists()
