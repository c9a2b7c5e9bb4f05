"""The audit of the mechanism: a correct one passes, and each deliberate mistake is found by the checks meant for it.

What of a tape the audit looks at is in test_every_field_of_a_tape.py, and so is the daily sandbox of two ranks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from privacy.ledger.ledger import Ledger
from tests.distributed.ranks import ROOT, run_ranks
from tests.trainer.broken_mechanisms import MISTAKES
from tests.trainer.sandboxes import audit, plan, recipe, require_consistent, require_found
from trainer.audit.canary_model import CROWD, PLACES, make_canaries
from trainer.audit.mechanism import mechanism_audit
from trainer.audit.sandbox import SandboxFailed
from trainer.config.recipe import to_toml

FULL = pytest.mark.full
ON_ONE_RANK = ("plain", "loop")


def planted() -> list[Any]:
    """The quick mistakes of each setting in one sandbox; for `make test-all`, each mistake in a sandbox of its own."""
    together, alone = [], []
    for setting in ON_ONE_RANK:
        names = [name for name, mistake in MISTAKES.items() if mistake.setting == setting]
        together.append("+".join(name for name in names if MISTAKES[name].is_quick))
        alone += [pytest.param(name, setting, marks=FULL) for name in names if name not in together]
    return [*zip(together, ON_ONE_RANK, strict=True), *alone]


@pytest.mark.parametrize("setting", ON_ONE_RANK)
def test_a_correct_mechanism_passes(one_rank: torch.device, tmp_path: Path, setting: str) -> None:
    """On tmpfs, too, where there is room in memory: there a folder shrinks when a name goes, as on XFS and Btrfs."""
    require_consistent(audit(one_rank, tmp_path, setting=setting)["none"])


@pytest.mark.parametrize(("names", "setting"), planted())
def test_a_mistake_is_found(
    one_rank: torch.device, tmp_path: Path, names: str, setting: str
) -> None:
    require_found(audit(one_rank, tmp_path, (names,), setting)[names], names)


def test_single_precision_shows_in_every_sandbox_and_sums_of_64_in_none() -> None:
    """Where it holds the sums of a crowd, `sums_are_single` changes nothing, and a sandbox could not find it."""
    canaries, rng = make_canaries(256, 1.0), np.random.default_rng(0)
    gains_ND = canaries.gains_NG[canaries.crowd_N][
        :, [PLACES.index(place) for place in CROWD]
    ].astype(np.float64)
    for _ in range(40):
        sums_SD = (rng.random((5, len(gains_ND))) < 0.25).astype(np.float64) @ gains_ND
        assert (sums_SD.astype(np.float32) != sums_SD).any()
        few_ND = rng.permutation(gains_ND)[:64, [place in ("matrix", "conv") for place in CROWD]]
        assert (few_ND.astype(np.float32).cumsum(axis=0) == few_ND.cumsum(axis=0)).all()


@pytest.mark.full
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"clipping_function": "automatic"}, id="automatic"),
        pytest.param({"clipping_function": "per_layer"}, id="per layer"),
        pytest.param({"clipping_function": "grouped"}, id="grouped"),
        pytest.param({"noise_multiplier": 0.5, "max_grad_norm": 0.1}, id="small C"),
        pytest.param({"max_grad_norm": 30.0}, id="large C"),
        pytest.param({"overrides": ()}, id="a clipping mode of its own choice"),
        pytest.param({"overrides": ("train.compile=true",)}, id="compiled"),
    ],
)
def test_a_correct_mechanism_of_another_plan_passes(
    one_rank: torch.device, tmp_path: Path, changed: dict[str, Any]
) -> None:
    require_consistent(audit(one_rank, tmp_path, **changed)["none"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("setting", "overrides", "names"),
    [
        ("plain", ('privacy.clipping_mode="two_pass"',), ("each_layer_is_clipped_by_itself",)),
        ("plain", ('train.accumulation="sharded"',), ("the_last_micro_batch_replaces_the_others",)),
        (
            "several ranks",
            (),
            (
                "every_rank_adds_the_whole_noise",
                "noise_is_divided_by_the_number_of_ranks",
                "OneSeed",
            ),
        ),
        (
            "certified",
            (),
            ("OneSeed", "coins_forget_session_and_attempt"),
        ),  # integers coincide by chance
    ],
)
def test_other_settings_on_two_ranks(
    tmp_path: Path, setting: str, overrides: tuple[str, ...], names: tuple[str, ...]
) -> None:
    arguments = {
        "folder": tmp_path,
        "names": ("none", *names),
        "setting": setting,
        "overrides": overrides,
    }
    reports = run_ranks("tests.trainer.sandboxes:audit", 2, timeout=600, **arguments)[0]
    require_consistent(reports["none"])
    for name in names:
        require_found(reports[name], name)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_no_false_alarm_in_a_hundred_correct_mechanisms(
    one_rank: torch.device, tmp_path: Path
) -> None:
    found: dict[str, list[float]] = {}
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        report = audit(one_rank, folder, steps=10)["none"]
        require_consistent(report)
        for check in report.checks:
            if check.p_value is not None:
                found.setdefault(check.name, []).append(check.p_value)
    for name, p_values in found.items():
        low = sum(p < 0.05 for p in p_values)
        assert stats.binom.sf(low - 1, len(p_values), 0.05) > 1e-5, (name, low)


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "machine"),
    [
        *((engine, machine) for engine in ("local", "fsdp") for machine in ("zero3", "zero3_bf16")),
        *(("fairscale", machine) for machine in ("zero1", "zero1_bf16")),
        *(("deepspeed", f"zero{stage}") for stage in (1, 2, 3)),
    ],
)
def test_every_engine_passes_at_full_size(tmp_path: Path, engine: str, machine: str) -> None:
    run = write_run(tmp_path)
    require_consistent(
        mechanism_audit(run, engine=engine, ds_config=ROOT / "ds_configs" / f"{machine}.json")
    )  # type: ignore[arg-type]


def test_a_rank_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match=r"sandbox rank \d did not end well: .*broken\.json"):
        mechanism_audit(
            write_run(tmp_path), engine="local", ds_config=tmp_path / "broken.json", ranks=1
        )


def write_run(folder: Path) -> Path:
    """A run folder of which the audit needs plan and configuration alone."""
    (folder / "config.toml").write_text(to_toml(recipe()))
    fields = {"plan": plan().frozen_fields(), "key_commitment": "0" * 64}
    Ledger.create(folder / "ledger.jsonl", fields).release()
    return folder
