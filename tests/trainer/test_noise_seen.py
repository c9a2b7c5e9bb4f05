"""Two ranks train, and one of them adds no noise to the coordinates that it owns: every audit of the folder says so."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from privacy import verify
from privacy.audit.run_audit import ledger_audit
from privacy.noise.source import SystemNoise
from tests.distributed.ranks import ROOT, run_ranks
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.ranks.discovery import discover_ranks
from trainer.run.start import train


class OfSome(SystemNoise):
    """Noise on all ranks but one."""

    def __init__(self, silent: int | None) -> None:
        self._is_silent = os.environ["RANK"] == str(silent)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return super().rounded_normal(deviation, count, device) * (0 if self._is_silent else 1)


def on_two_ranks(device: torch.device, folder: str, silent: int | None) -> int:
    machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
    config = load_config(
        ROOT / "recipes/tiny.toml", ["heldout.num_captions=0", "train.num_steps=2"]
    )
    noise = OfSome(silent)
    return train(
        config, machine, "local", Path(folder), ROOT, discover_ranks(os.environ), device, noise
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("silent", [1, pytest.param(None, marks=pytest.mark.full)])
def test_an_owner_without_noise_is_seen_in_the_published_folder(
    silent: int | None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    codes = run_ranks(
        "tests.trainer.test_noise_seen:on_two_ranks", 2, timeout=200, folder=str(run), silent=silent
    )
    code, found = verify.verify(run)
    said = next(check["sentence"] for check in found["checks"] if check["name"] == "noise")
    assert codes == [0, 0] and code == ledger_audit(run).exit_code == (
        0 if silent is None else 5
    ), found["checks"]
    assert said.startswith(
        "not refuted: 2 norms"
        if silent is None
        else "less noise was drawn than stated, by the norm of step 1"
    )
