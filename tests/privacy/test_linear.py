"""What reads a ledger, a metrics file or a record of attempts does work in proportion to their lines; counted, not timed."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import privacy
from privacy import verify
from privacy.audit import folder as audits
from privacy.card.folder import build_card
from privacy.checkpoints.read import newest_whole, sealed
from privacy.ledger import durable
from privacy.ledger.members import MembersRecord
from privacy.ledger.records import read_ledger
from privacy.ledger.run_state import open_run_state
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import step_releases
from privacy.step.folder import RunFolder
from tests.privacy.published import config_of

HERE = str(Path(privacy.__file__).parent)
SIZES = (150, 300)
LARGEST_RATIO = 2.1


def operations(work: Callable[[], object]) -> int:
    """Lines of this project's library that `work` runs, and calls, which each turn of a generator is one of."""
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return local if frame.f_code.co_filename.startswith(HERE) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def plan_of(steps: int, noise: float = 4.0, **fields: Any) -> PrivacyPlan:
    request = PlanRequest(
        num_examples=1000, expected_batch_size=20, num_steps=steps, noise_multiplier=noise, target_delta=1e-5,
        reserved_attempts=4, sensitivity_slack=1e-3, **fields,
    )  # fmt: skip
    return make_plan(request)


def made_run(root: Path, steps: int, noise: float = 4.0) -> Path:
    """A run folder whose numbers of metrics, checkpoints and starts all grow with the steps."""
    folder, plan = RunFolder(root), plan_of(steps, noise)
    for path in (folder.checkpoints, folder.private):
        path.mkdir(parents=True)
    shutil.copy(verify.__file__, root / "verify.py")
    (root / "config.toml").write_text(config_of(plan))
    ledger, _ = open_run_state(folder.ledger, folder.key, plan, data_manifest=b"data", members=folder.members)
    with ledger, (root / "metrics.jsonl").open("w") as metrics, folder.members.open("a") as members:
        for step in range(1, steps + 1):
            if step % 10 == 1:
                nonce = ledger.start_session({"commit": "c0ffee"}).hex()
            members.write(MembersRecord(*ledger.position(), step, 0, nonce, 32, (20,), ("00" * 32,), ()).line())
            ledger.intent(step, 0, step_releases(noise, plan.max_grad_norm, None))
            ledger.done(step, 0)
            epsilon = {"privacy/epsilon": float(step)} if noise else {}
            metrics.write(json.dumps({"step": step, "privacy/charged_attempts": step, **epsilon}) + "\n")
            if step % 5 == 0:
                place, (seq, line_hash) = folder.checkpoints / f"step-{step:08d}", ledger.position()
                place.mkdir()
                manifest = {
                    "format": 1, "step": step, "parameters": {}, "files": {}, "formal_guarantee": plan.formal_guarantee,
                    "charged_attempts": step, "ledger": {"seq": seq, "hash": line_hash},
                }  # fmt: skip
                durable.write_new(place / "manifest.json", json.dumps(sealed(manifest)).encode(), 0o644)
                ledger.checkpoint(step, place.name, hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest())
                members.flush()
    (folder.checkpoints / "LATEST").write_text(f"step-{steps:08d}\n")
    return root


def sum_of(groups: Any, delta: float) -> float:
    """In place of an accountant, whose work is not in question here."""
    return float(sum(group.count for group in groups))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, float], Path]:
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "fsync", lambda descriptor: None)
        return {
            (steps, noise): made_run(root / f"{steps}-{noise}", steps, noise) for steps in SIZES for noise in (4.0, 0.0)
        }


def verified(run: Path) -> None:
    _, found = verify.verify(run, None)
    outcomes = {check["name"]: (check["outcome"], check["sentence"]) for check in found["checks"]}
    assert outcomes["metrics"][0] == outcomes["order"][0] == "ok" and outcomes["checkpoints"][0] != "violated", outcomes


def audited(run: Path) -> None:
    checks = {check.name: check for check in audits.ledger_audit(run).checks}
    assert not [name for name in ("attempts", "checkpoints", "metrics") if checks[name].outcome == "violated"], checks


def resumed(run: Path) -> None:
    """What the trainer and `PrivateLoop` read before they go on."""
    folder, state = RunFolder(run), read_ledger(run / "ledger.jsonl")
    ledger, _ = open_run_state(folder.ledger, folder.key, state.plan, data_manifest=b"data", members=folder.members)
    with ledger:
        newest_whole(folder.checkpoints, lambda at: ledger.require_not_shorter_than(at["seq"], at["hash"]))


@pytest.mark.parametrize(
    ("work", "noise"),
    [(verified, 4.0), (audited, 4.0), (audits.schedule_audit, 4.0), (build_card, 0.0), (resumed, 4.0)],
    ids=["verify", "audit ledger", "audit schedule", "report", "resume"],
)
def test_twice_the_steps_are_twice_the_work(
    runs: dict[tuple[int, float], Path], work: Callable[[Path], object], noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "fsync", lambda descriptor: None)
    monkeypatch.setattr(verify, "epsilon", sum_of)
    monkeypatch.setattr("privacy.ledger.records.epsilon", sum_of)
    small, large = (operations(lambda steps=steps: work(runs[steps, noise])) for steps in SIZES)  # type: ignore[misc]
    assert small > SIZES[0] and large / small < LARGEST_RATIO, (small, large)
