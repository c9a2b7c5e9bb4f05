"""Studies on private data: a budget that nothing resets, a grid fixed before outputs, and a folder that tells nothing."""

import contextlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import PrivacyStateRefused
from privacy.ledger import durable
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.ledger.shared import SharedLedger
from privacy.plan import make_plan
from tests.trainer.test_refused_starts import image
from tests.trainer.test_scaling import BUDGET, STUDY, planned_of, prepared
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.studies import folder as study_folder
from trainer.studies.folder import StudyFolder
from trainer.studies.points import PlannedPoint

FIRST = "batch-8_start-small_seed-0"


def begin(folder: StudyFolder, name: str) -> None:
    """What train.py does until its first step."""
    config, run = load_config(folder.recipe(name)), folder.run(name)
    (run / "private").mkdir(parents=True)
    plan = make_plan(config.privacy.request(config.train.num_steps, 3000))
    assert config.privacy.shared_ledger is not None
    shared = SharedTerms(config.privacy.shared_ledger, name, config.privacy.fixed_in_advance)
    ledger, _ = open_run_state(
        run / "ledger.jsonl", run / "private/sampling.key", plan, data_manifest=b"", shared=shared
    )
    with ledger:
        ledger.start_session({})


def late_points(folder: StudyFolder, planned: list[PlannedPoint]) -> list[str]:
    return [one.name for one in planned if not load_config(folder.recipe(one.name)).privacy.fixed_in_advance]


def test_runs_on_private_data_share_a_ledger_and_know_their_siblings(tmp_path: Path) -> None:
    for one in planned_of(tmp_path, BUDGET):
        assert one.config.privacy.shared_ledger == str(tmp_path / "shared_ledger.jsonl")
        assert one.config.privacy.fixed_in_advance
        assert one.config.privacy.tuning is not None
        assert "one of 8 runs of study tiny; 8 claim a guarantee" in one.config.privacy.tuning


def test_runs_without_a_guarantee_need_leave_to_see_private_data(tmp_path: Path) -> None:
    text = BUDGET.replace("[axis.start.large]", "[axis.start.large]\nprivacy.enabled = false")
    with pytest.raises(ConfigError, match="informal_runs = true"):
        planned_of(tmp_path, text)
    planned = planned_of(tmp_path, text.replace("1e-4", "1e-4\ninformal_runs = true"))
    for one in planned:
        assert one.config.privacy.shared_ledger is not None  # where the run counts itself: privacy/ledger/shared.py
        assert one.config.privacy.fixed_in_advance == (one.point.labels["start"] == "small")
        assert "4 claim a guarantee of their own, 4 have none" in str(one.config.privacy.tuning)
    folder, planned = prepared(tmp_path, text.replace("1e-4", "1e-4\ninformal_runs = true"))
    large = next(one.name for one in planned if "large" in one.name)
    for attempts in (1, 2):
        begin(folder, large)
        noted = SharedLedger(folder.shared_ledger).summary()["informal_runs"]
        assert noted == [{"name": large, "reason": "privacy is disabled (privacy.enabled = false)"}] * attempts
        shutil.rmtree(folder.run(large))


def test_only_the_grid_before_all_outputs_is_fixed_in_advance(tmp_path: Path) -> None:
    assert late_points(*prepared(tmp_path, BUDGET.replace("depth = 2", "depth = 3"))) == []  # until a run begins
    folder, planned = prepared(tmp_path, BUDGET)
    begin(folder, FIRST)
    assert late_points(*prepared(tmp_path, BUDGET)) == []  # the rest of the grid, or a resume
    added = prepared(tmp_path, BUDGET.replace("seeds = [0, 1]", "seeds = [0, 1, 2]"))
    assert late_points(*added) == [one.name for one in added[1] if one.name.endswith("seed-2")]
    rest = [one.name for one in planned if one.name != FIRST]
    changed = prepared(tmp_path, BUDGET.replace("depth = 2", "depth = 3"))
    assert late_points(*changed) == rest  # leaving out what was planned is a choice, too
    replaced = prepared(tmp_path, BUDGET.replace("seeds = [0, 1]", "seeds = [5, 6]"))
    assert late_points(*replaced) == [one.name for one in replaced[1]]
    assert late_points(*prepared(tmp_path, BUDGET)) == []


def test_a_point_that_is_deleted_and_trained_anew_was_chosen_after_its_output(tmp_path: Path) -> None:
    folder, _ = prepared(tmp_path, BUDGET)
    begin(folder, FIRST)
    shutil.rmtree(folder.run(FIRST))
    assert late_points(*prepared(tmp_path, BUDGET)) == [FIRST]
    changed = prepared(tmp_path, BUDGET.replace("batch_size = [8", "batch_size = [9"))
    assert len(late_points(*changed)) == 8


def test_the_budget_of_a_study_cannot_be_reset(tmp_path: Path) -> None:
    folder, _ = prepared(tmp_path, BUDGET)
    for change in (("50.0", "0.5"), ("1e-4", "1e-5"), ("1e-4", "1e-4\ninformal_runs = true")):
        with pytest.raises(ConfigError, match=r"\[budget\] .* set it back; another budget needs another --study_dir"):
            prepared(tmp_path, BUDGET.replace(*change))
    with pytest.raises(ConfigError, match="holds the budget of its runs, but the file has none"):
        prepared(tmp_path, STUDY)
    begin(folder, FIRST)
    whole = folder.shared_ledger.read_bytes()
    folder.shared_ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))  # `open` and `grid`
    with pytest.raises(PrivacyStateRefused, match="rolled back") as refused:
        prepared(tmp_path, BUDGET)
    assert refused.value.exit_code == 4
    folder.shared_ledger.unlink()
    with pytest.raises(PrivacyStateRefused, match="the shared ledger is gone"):
        prepared(tmp_path, BUDGET)
    SharedLedger.create(folder.shared_ledger, epsilon=50.0, delta=1e-4)
    with pytest.raises(PrivacyStateRefused, match="not the shared ledger that the runs of this study began with"):
        prepared(tmp_path, BUDGET)
    shutil.rmtree(folder.runs)
    folder.shared_ledger.unlink()
    with pytest.raises(PrivacyStateRefused, match="the shared ledger is gone"):
        prepared(tmp_path, BUDGET)


def test_a_refused_study_leaves_its_folder_and_a_torn_shared_ledger_as_they_are(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror.jsonl"
    text = BUDGET.replace("1e-4", f"1e-4\nmirror = {str(mirror)!r}")
    folder, _ = prepared(tmp_path, text)
    begin(folder, FIRST)
    whole = folder.shared_ledger.read_bytes()
    folder.private.chmod(0o750)
    (folder.root / "private/logs").rmdir()
    cut = b"".join(whole.splitlines(keepends=True)[:2])
    for content, changed, refused in (
        (whole, text.replace("50.0", "0.5"), "set it back"),
        (whole, text.replace("num_steps = [6, 2]", "num_steps = [5, 2]"), "began with another"),
        (cut, text, "rolled back|differs"),
    ):
        folder.shared_ledger.write_bytes(content + b'{"seq":99,"type":"gr')
        mirror.write_bytes(content)
        before = image(tmp_path)
        with pytest.raises((ConfigError, PrivacyStateRefused), match=refused):
            prepared(tmp_path, changed)
        assert {**before, **image(tmp_path)} == before | {"study.toml": image(tmp_path)["study.toml"]}
    folder.shared_ledger.write_bytes(whole + b'{"seq":99,"type":"gr')
    mirror.write_bytes(whole)
    begin_again = image(tmp_path)["study/shared_ledger.jsonl"]
    prepared(tmp_path, text)  # writes no grid, so there is nothing to end the torn line for
    assert image(tmp_path)["study/shared_ledger.jsonl"] == begin_again


def test_a_run_whose_ledger_was_cut_or_exchanged_is_refused_by_the_study(tmp_path: Path) -> None:
    """Its trainer would refuse it as well, but a point that looks finished is never started again."""
    folder, planned = prepared(tmp_path, BUDGET)
    first, second = (folder.run(one.name) / "ledger.jsonl" for one in planned[:2])
    for one in planned[:2]:
        begin(folder, one.name)
    whole = first.read_bytes()
    for content, refused in (
        (b"".join(whole.splitlines(keepends=True)[:1]), "lacks line"),
        (second.read_bytes(), "is a copy of"),
        (whole.replace(b"1", b"2", 1), "the hash chain is broken"),
        (b"", "no whole record"),
    ):
        first.write_bytes(content)
        with pytest.raises(PrivacyStateRefused, match=refused):
            prepared(tmp_path, BUDGET)
    first.write_bytes(whole)
    assert late_points(*prepared(tmp_path, BUDGET)) == []


def test_a_study_that_is_interrupted_at_any_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All points stay fixed in advance, and none is charged otherwise once one of them has begun."""
    written: list[int] = []

    def count(real: Callable[..., None], last: int) -> Callable[..., None]:
        def write(*arguments: Any) -> None:
            written.append(1)
            if len(written) == last:
                raise KeyboardInterrupt
            real(*arguments)

        return write

    for last in itertools.count(1):
        root = tmp_path / str(last)
        root.mkdir()
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(study_folder, "write_durably", count(study_folder.write_durably, last))
            patch.setattr(durable, "write", count(durable.write, last))
            with contextlib.suppress(KeyboardInterrupt):
                prepared(root, BUDGET)
        assert late_points(*prepared(root, BUDGET)) == []
        if len(written) < last:
            break
    assert last > 10
    begin(prepared(root, BUDGET)[0], FIRST)
    assert late_points(*prepared(root, BUDGET)) == []


def test_contract_12_consoles_stay_private(tmp_path: Path) -> None:
    study = tmp_path / "study"
    folder, _ = prepared(tmp_path, BUDGET)
    assert folder.private.stat().st_mode & 0o777 == 0o700
    folder.log(FIRST).write_text("loss 1.0\n")
    outside = {path.relative_to(study).parts[0] for path in study.rglob("*")} - {"private"}
    assert outside == {"lock", "recipes", "runs", "shared_ledger.jsonl", "study.toml"}
