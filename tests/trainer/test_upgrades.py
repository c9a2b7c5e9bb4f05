"""A run folder that version 0.1.0 left after two of four steps is verified and shown by this version (docs/upgrades.md).

The folder lies beside this file; every later version keeps it as it is. Its sampling key is no secret: the data are the demo's.
"""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy import verify
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.plan import numbers as plan_module
from privacy.plan.numbers import PrivacyPlan
from privacy.run.run_ledger import RunLedger
from privacy.step import run_folder
from tests.distributed.ranks import run_ranks
from tests.privacy.published import PLAN
from tests.processes import ROOT
from trainer.card_of_run import build_card
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.ranks.discovery import Ranks
from trainer.run.start import train
from trainer.weights.open_model import open_model

ARCHIVE = Path(__file__).with_name("run-0.1.0.tar.xz")
SHAPE = (
    "encoder_depth = 1, encoder_width = 16, decoder_depth = 1, decoder_width = 16, patch_size = 8"
)
HEADS = "encoder_num_heads = 2, decoder_num_heads = 2"
OPTIONS = (
    *(
        "name=run-0.1.0",
        "data.shards=data/demo/train-00000.tar",
        "heldout.num_examples=2",
        "heldout.num_captions=0",
    ),
    *(
        "model.kind=masked_autoencoder",
        "model.size=vip_base",
        f"model.overrides={{ {SHAPE}, {HEADS} }}",
    ),
    *(
        "data.image_size=16",
        "train.num_steps=4",
        "train.keep_checkpoints=1",
        "privacy.reserved_attempts=9",
    ),
    *("optimizer.name=sgd", "optimizer.momentum=0"),
)


def start(folder: Path, recipe: Path, *options: str) -> int:
    config, machine = (
        load_config(recipe, list(options)),
        load_machine_settings(ROOT / "ds_configs/zero1.json"),
    )
    return train(config, machine, "local", folder, ROOT, Ranks(), torch.device("cpu"))


@pytest.fixture
def folder(one_rank: torch.device, tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="tar")
    return tmp_path / "run-0.1.0"


def verified(verifier: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, verifier, folder], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_of_0_1_0_is_verified_and_shown_and_not_resumed(folder: Path) -> None:
    """Its own verifier and this one accept it; its noise was made of doubles, which no further step may draw.

    The way out is one line, nothing has changed, and what there is can be exported.
    """
    verified(folder / "verify.py", folder)
    code, found = verify.verify(folder, None)
    assert code == 0 and found["attested"]["noise"] == "doubles"
    plan = read_ledger(folder / "ledger.jsonl").plan
    assert plan.had_doubles and 0 < plan.noise_tail_delta < 1e-9 * plan.target_delta
    before = {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }
    card = build_card(folder)
    assert card.formal_guarantee and card.accounting.noise_tail_delta == plan.noise_tail_delta
    assert open_model(folder).manifest["step"] == 2
    with pytest.raises(
        PrivacyStateRefused, match="made of doubles, which is no longer drawn: export and verify"
    ) as no:
        start(folder, folder / "config.toml")
    assert no.value.exit_code == 4 and "\n" not in str(no.value)
    kept = {path: path.read_bytes() for path in before}
    assert kept == before
    verified(folder / "verify.py", folder)


def first_start(device: torch.device, folder: str, how: str) -> int:
    """Trains in a process of its own, whose locks end with it.

    Args:
        how: `stopped` after two steps; else as version 0.1 stated a run, whose ledger names no kind of noise and no
            step of sums, to its end (`closed`), or to a crash before the line that closes the ledger.
    """
    with pytest.MonkeyPatch.context() as patched:
        if how == "stopped":
            asked: list[int] = []
            patched.setattr(
                "trainer.loop.stopping.StopRequests.pending",
                lambda self: asked.append(1) or len(asked) > 2,
            )
        else:
            patched.setattr(plan_module, "ROUNDED", None)
            create = Ledger.create

            def create_as_before(path: Path, fields: dict[str, Any], *more: Any) -> Ledger:
                plan = fields["plan"] | {"adaptive_clipping": None}
                return create(path, fields | {"plan": plan, "sum_exponent": None}, *more)

            patched.setattr(Ledger, "create", create_as_before)
        if how == "crashed":
            patched.setattr(RunLedger, "close_run", lambda _: None)
        return start(Path(folder), ROOT / "recipes/tiny.toml", *OPTIONS)


@pytest.mark.parametrize("how", ["closed", pytest.param("crashed", marks=pytest.mark.full)])
def test_a_run_of_0_1_0_that_has_taken_its_steps_is_finished(
    one_rank: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The same command says that it is finished, and draws nothing; a new version may write the end of the ledger."""
    run = tmp_path / "run"
    assert run_ranks(f"{__name__}:first_start", 1, timeout=280, folder=str(run), how=how) == [0]
    lines = (run / "ledger.jsonl").read_text()
    assert '"noise_kind"' not in lines and ('"type":"close"' in lines) == (how == "closed")
    monkeypatch.setattr("privacy.step.step.add_noise", lambda *_: 1 / 0)
    assert start(run, run / "config.toml") == 0
    state = read_ledger(run / "ledger.jsonl")
    assert state.closed == "finished" and state.num_charged == 4
    assert build_card(run).formal_guarantee and verify.verify(run, None)[0] == 0


def test_a_run_is_resumed_by_another_version(
    one_rank: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch and the project may change on the way, and the ledger says so."""
    folder = tmp_path / "run"
    assert run_ranks(
        f"{__name__}:first_start", 1, timeout=280, folder=str(folder), how="stopped"
    ) == [7]
    before = (folder / "ledger.jsonl").read_bytes()
    there = run_folder.version
    monkeypatch.setattr(
        run_folder, "version", lambda package: "99.0" if package == "torch" else there(package)
    )
    run_folder.environment.cache_clear()
    assert start(folder, folder / "config.toml") == 0
    run_folder.environment.cache_clear()
    ledger = (folder / "ledger.jsonl").read_bytes()
    assert ledger.startswith(before)
    sessions = [line for line in map(json.loads, ledger.splitlines()) if line["type"] == "session"]
    assert [session["environment"]["packages"]["torch"] == "99.0" for session in sessions] == [
        False,
        True,
    ]
    verified(folder / "verify.py", folder)
    assert build_card(folder).formal_guarantee and open_model(folder).manifest["step"] == 4


def test_a_run_of_0_1_0_whose_bound_moved_is_left_to_its_own_verifier() -> None:
    constants = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "unclipped_num_std": 9.0,
    }
    frozen = PLAN.frozen_fields() | {"adaptive_clipping": constants}
    with pytest.raises(PrivacyConfigError, match=r"which version 0\.1 alone can do"):
        PrivacyPlan.from_frozen(frozen)
    with pytest.raises(verify.Violated, match=r"the verify\.py in its own folder"):
        verify.read_plan(frozen, head=False)
    null = PLAN.frozen_fields() | {"adaptive_clipping": None}
    assert PrivacyPlan.from_frozen(null) == PLAN
    verify.read_plan(null, head=False)
