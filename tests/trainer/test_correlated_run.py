"""A whole run with correlated noise, through the trainer itself: what is released, whom it draws from, what it claims."""

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from privacy import verify
from privacy.audit.folder import ledger_audit, schedule_audit
from privacy.correlated.strategy import Strategy
from privacy.errors import PrivacyConfigError
from privacy.ledger.records import read_ledger
from privacy.noise import SystemNoise
from privacy.run.ledger import RunLedger
from privacy.step import step as loop
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.published import read_metrics
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.engines.local import LocalEngine
from trainer.planner import privacy as planned_privacy
from trainer.ranks.discovery import Ranks
from trainer.report import build_card
from trainer.run import start as training

ROOT = Path(__file__).resolve().parents[2]
BANDS, STEPS, DIES_AT = 3, 8, 6
pytestmark = pytest.mark.usefixtures("one_rank")


def changed(*changes: str) -> list[str]:
    fixed = [
        "data.shards=data/demo/train-00000.tar",
        "heldout.num_examples=2",
        "heldout.num_captions=0",
        "data.augment=false",
    ]
    return [*fixed, f"train.num_steps={STEPS}", f"privacy.bands={BANDS}", *changes]


class Killed(BaseException):
    """The program ends here, as by SIGKILL."""


class Watch(SystemNoise):
    """All that a run draws, the sums before their noise, and what the optimizer gets, session by session."""

    def __init__(self) -> None:
        self.drawn: list[list[np.ndarray]] = []
        self.sums: list[list[np.ndarray]] = []
        self.released: list[list[np.ndarray]] = []

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        draw = super().standard_normal(count, device)
        self.drawn[-1].append(draw.numpy().copy())
        return draw

    def start(self, folder: Path, *changes: str, dies_at: int | None = None) -> int | None:
        """One start of the program; None where it dies, after the update of a step and before its `done`."""
        config = load_config(ROOT / "recipes/tiny.toml", changed("name=run", *changes))
        machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
        reduce, step, done = loop.reduce_to_owners, LocalEngine.step, RunLedger.done
        for column in (self.drawn, self.sums, self.released):
            column.append([])

        def watched_reduce(*arguments: Any) -> Any:
            shards = reduce(*arguments)
            self.sums[-1].append(np.concatenate([s.values.numpy().copy() for s in shards]))
            return shards

        def watched_step(engine: Any, shards: Any, **rates: float) -> None:
            self.released[-1].append(np.concatenate([s.values.numpy().copy() for s in shards]))
            step(engine, shards, **rates)

        def dying(ledger: RunLedger, number: int, **stated: Any) -> None:
            if number == dies_at:
                raise Killed
            done(ledger, number, **stated)

        with (
            mock.patch.object(loop, "reduce_to_owners", watched_reduce),
            mock.patch.object(LocalEngine, "step", watched_step),
            mock.patch.object(RunLedger, "done", dying),
            mock.patch.object(fcntl, "flock"),  # held until the process ends
        ):
            try:
                return training.train(config, machine, "local", folder, ROOT, Ranks(), torch.device("cpu"), noise=self)
            except Killed:
                return None


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, one_rank: torch.device) -> tuple[Path, Watch]:
    """A run that dies in step 6, leaves a copy of its folder, and goes on itself."""
    folder, watch = tmp_path_factory.mktemp("runs") / "run", Watch()
    assert watch.start(folder, "train.checkpoint_every=2", dies_at=DIES_AT) is None
    shutil.copytree(folder, folder.with_name("copy"))
    assert watch.start(folder, "train.checkpoint_every=2") == 0
    return folder, watch


def test_contract_7_every_session_is_a_segment_of_its_own(watched: tuple[Path, Watch]) -> None:
    """In each session C W = Z from its first row on, by dense matrices; no draw comes twice."""
    folder, watch = watched
    assert [len(session) for session in watch.released[:2]] == [DIES_AT, STEPS - 4]
    check_noise(folder, watch)


@pytest.mark.full
def test_contract_7_a_copy_that_goes_on_too_shares_no_noise(watched: tuple[Path, Watch]) -> None:
    folder, watch = watched
    assert watch.start(folder.with_name("copy"), "train.checkpoint_every=2") == 0
    check_noise(folder, watch)
    check_account(folder.with_name("copy"))


def check_noise(folder: Path, watch: Watch) -> None:
    """Dense matrices, session by session, and draws that are all different."""
    plan = read_ledger(folder / "ledger.jsonl").plan
    std, batch = plan.noise_multiplier * plan.max_grad_norm * (1 + plan.sensitivity_slack), plan.expected_batch_size
    for drawn, sums, released in zip(watch.drawn, watch.sums, watch.released, strict=True):
        rows, fresh = len(released), np.concatenate(drawn).reshape(len(released), -1)
        c = sum(
            (x * np.eye(rows, k=-k) for k, x in enumerate(plan.noise_strategy.coefficients)), np.zeros((rows, rows))
        )
        noise = np.stack(released) * batch - np.stack(sums)
        scale = float((c @ noise).std() / fresh.std())
        assert plan.noise_multiplier * plan.max_grad_norm <= scale * (1 + 1e-9) <= std * (1 + 1e-6)
        np.testing.assert_allclose(c @ noise, scale * fresh, atol=1e-9)
        assert np.abs(noise / scale - fresh)[1:].max() > 0.1, "the noise is not correlated"
    every = np.concatenate([np.concatenate(session) for session in watch.drawn])
    assert len(np.unique(every)) == len(every)


def test_contract_11_a_simulation_correlates_its_noise_and_claims_nothing(tmp_path: Path) -> None:
    """The noise of a larger batch, scaled down, in bands as well; ledger, card and verifier state no guarantee."""
    watch, folder = Watch(), tmp_path / "run"
    assert watch.start(folder, "privacy.simulation=true", "privacy.noise_multiplier=0.01") == 0
    check_noise(folder, watch)
    plan, card = read_ledger(folder / "ledger.jsonl").plan, build_card(folder)
    assert plan.bands == BANDS and not plan.formal_guarantee and "TAN simulation" in plan.reasons[0]
    assert card.epsilon is None and not card.formal_guarantee
    assert verify.read_ledger(folder / "ledger.jsonl").plan.reasons


def test_contract_10_the_groups_that_were_drawn_from_are_charged(watched: tuple[Path, Watch]) -> None:
    folder, _ = watched
    check_account(folder)


def check_account(run: Path) -> None:
    """Groups, epsilon by a script that reads lines alone, both audits, and what the metrics say."""
    state = read_ledger(run / "ledger.jsonl")
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_bytes().splitlines()]
    groups = [line["group"] for line in lines if line["type"] == "intent"]
    assert groups == [place % BANDS for place in range(DIES_AT + STEPS - 4)]
    charged, epsilon = recompute(run / "ledger.jsonl")
    assert charged == len(groups) and state.epsilon() == pytest.approx(epsilon, rel=1e-6)
    for report in (ledger_audit(run), schedule_audit(run)):
        assert report.verdict != "violated", report.to_text()
    last = read_metrics(run)[-1]
    assert last["privacy/epsilon"] == pytest.approx(epsilon, rel=1e-2) and last["privacy/epsilon"] >= epsilon * 0.9999


@pytest.mark.full
def test_optimised_coefficients_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the opening of the run; a resume, whatever its schedule would give, takes those of the ledger."""
    watch, folder, asked = Watch(), tmp_path / "run", Strategy((0.8, 0.5, 0.3))
    monkeypatch.setattr(planned_privacy, "optimised", lambda workload, number: asked)
    assert watch.start(folder, "privacy.strategy=optimised", dies_at=4) is None
    assert read_ledger(folder / "ledger.jsonl").plan.noise_strategy == asked
    monkeypatch.setattr(planned_privacy, "optimised", lambda *_: pytest.fail("computed again"))
    assert watch.start(folder, "privacy.strategy=optimised") == 0
    check_noise(folder, watch)
    assert verify.read_ledger(folder / "ledger.jsonl").plan["strategy"] == "optimised"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["privacy.bands=2"], "bands was 3 and is now 2"),
        (["privacy.bands=1"], "bands was 3 and is now 1"),
        (["privacy.strategy=optimised"], "strategy was 'square_root' and is now 'optimised'"),
        (["train.num_steps=9"], "num_steps was 8 and is now 9"),
    ],
)
def test_a_resume_with_other_noise_is_refused(watched: tuple[Path, Watch], changes: list[str], words: str) -> None:
    folder, _ = watched
    before = (folder / "ledger.jsonl").read_bytes()
    named = {change.partition("=")[0] for change in changes}
    kept = [
        change for change in changed("train.checkpoint_every=2", "name=run") if change.partition("=")[0] not in named
    ]
    config = load_config(ROOT / "recipes/tiny.toml", [*kept, *changes])
    machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
    with mock.patch.object(fcntl, "flock"), pytest.raises(PrivacyConfigError, match=words) as refused:
        training.train(config, machine, "local", folder, ROOT, Ranks(), torch.device("cpu"))
    assert "\n" not in str(refused.value) and (folder / "ledger.jsonl").read_bytes() == before
