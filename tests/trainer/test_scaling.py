"""Studies: what a grid means, what a point trains, and that nothing without a guarantee ever shows an epsilon."""

import contextlib
import csv
import itertools
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privacy.files import durable
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from trainer.config.recipe import load_config, to_toml
from trainer.errors import ConfigError
from trainer.studies import executors, study_folder
from trainer.studies.grid import (
    Point,
    StudyConfig,
    load_study,
    plan_points,
    require_useful_starts,
    trained_keys,
)
from trainer.studies.study_folder import StudyFolder
from trainer.studies.study_report import Result, write_report

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "studies").glob("*.toml"))

STUDY = """
name = "tiny"
recipe = "recipes/tiny.toml"
seeds = [0, 1]
[base]
data.provenance = "public"
[axis.batch]
privacy.expected_batch_size = [8, 24]
train.num_steps = [6, 2]
[axis.start.small]
[axis.start.large]
model.overrides.encoder_depth = 2
"""


def study_of(tmp_path: Path, text: str) -> StudyConfig:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return load_study(path)


def planned_of(tmp_path: Path, text: str) -> list[Point]:
    return plan_points(study_of(tmp_path, text), "study", ROOT)


def test_axes_are_crossed_and_their_lists_go_together(tmp_path: Path) -> None:
    points = planned_of(tmp_path, STUDY)
    crossed = itertools.product((8, 24), ("small", "large"), (0, 1))
    assert [point.name for point in points] == [
        f"batch-{b}_start-{start}_seed-{seed}" for b, start, seed in crossed
    ]
    last = points[-1]
    assert last.labels == {"batch": 24, "start": "large"} and last.seed == 1
    # And what a point trains is what its overrides say.
    wanted = load_config(
        ROOT / "recipes/tiny.toml",
        [
            "name=batch-24_start-large_seed-1",
            "data.provenance=public",
            "privacy.expected_batch_size=24",
            "train.num_steps=2",
            "model.overrides.encoder_depth=2",
            "train.seed=1",
        ],
    )
    assert trained_keys(to_toml(last.config)) == trained_keys(to_toml(wanted))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds = [0, 1]", "seeds = [0, 0]"), "two points are both called"),
        (('name = "tiny"', 'name = "tiny"\ncolour = 1'), "unknown key colour"),
        (("[6, 2]", "[6]"), "expected_batch_size has 2, train.num_steps has 1"),
        (
            ("train.num_steps = [6", "training.num_steps = [6"),
            "axis.batch: training.num_steps is not a key of a recipe",
        ),
        (("train.num_steps = [6", "train.steps = [6"), "unknown key train.steps"),
        (("[base]", "[base]\ntrain.seed = 3"), "list it in seeds"),
        (
            (
                "[axis.start.large]\nmodel.overrides.encoder_depth",
                "[axis.start.large]\ntrain.num_steps",
            ),
            "and so does an axis",
        ),
        (("[base]", "[report]\ncolor = 'start '\n[base]"), "names no axis"),
        (
            ("[base]", "[tan]\nreference_batch_size = 24\n[base]"),
            "exactly one of reference_noise_multiplier",
        ),
        (
            ("[base]", "[tan]\nreference_batch_size = 24\nreference_epsilon = 8.0\n[base]"),
            "needs data.num_examples",
        ),
        (('data.provenance = "public"', ""), "name it in [base] privacy.shared_ledger"),
    ],
)
def test_a_bad_study_is_one_line(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in STUDY
    with pytest.raises(ConfigError) as caught:
        planned_of(tmp_path, STUDY.replace(*change, 1))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


FIRST = "batch-8_start-small_seed-0"
TAN = STUDY.replace(
    "[axis.batch]",
    "[tan]\nreference_batch_size = 24\nreference_noise_multiplier = 1.2\n[axis.batch]",
)


def test_tan_keeps_noise_over_batch_and_marks_all_but_the_reference(tmp_path: Path) -> None:
    """Sander et al. 2023, section 4: sigma in proportion to B; steps and rate as they are."""
    for one in planned_of(tmp_path, TAN):
        privacy = one.config.privacy
        assert math.isclose(privacy.noise_multiplier / privacy.expected_batch_size, 1.2 / 24)
        assert privacy.target_epsilon is None
        assert one.config.privacy.simulation == (privacy.expected_batch_size != 24)
        plan = make_plan(privacy.request(one.config.train.num_steps, 3000))
        assert plan.formal_guarantee != one.config.privacy.simulation
        if one.config.privacy.simulation:
            assert "TAN simulation" in plan.reasons[0]
            assert plan.epsilon_planned is None
            assert plan.epsilon_with_reserve is None
            assert plan.epsilon_table() is None
    # At B = 1 of a reference of 1,000 sigma is far below what a claim could have.
    text = TAN.replace("reference_batch_size = 24", "reference_batch_size = 1000").replace(
        "[8, 24]", "[1, 24]"
    )
    one = planned_of(tmp_path, text)[0]
    assert one.config.privacy.noise_multiplier == pytest.approx(0.0012)
    assert not make_plan(one.config.privacy.request(6, 3000)).formal_guarantee


@pytest.mark.full
def test_tan_is_calibrated_at_the_reference_batch(tmp_path: Path) -> None:
    text = TAN.replace("reference_noise_multiplier = 1.2", "reference_epsilon = 8.0").replace(
        "[6, 2]", "[2, 2]"
    )
    text = text.replace("[base]", "[base]\ndata.num_examples = 3000")
    planned = planned_of(tmp_path, text)
    reference = next(one for one in planned if not one.config.privacy.simulation)
    plan = make_plan(reference.config.privacy.request(2, 3000))
    assert plan.epsilon_with_reserve is not None
    assert 7.9 < plan.epsilon_with_reserve <= 8.0


@pytest.mark.parametrize("more", ["target_epsilon=8.0", "enabled=false"])
def test_a_simulation_aims_at_no_epsilon(more: str) -> None:
    recipe = ROOT / ("recipes/quickstart.toml" if "epsilon" in more else "recipes/tiny.toml")
    with pytest.raises(ConfigError, match="simulation"):
        load_config(recipe, ["privacy.simulation=true", f"privacy.{more}"])


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_shipped_studies_resolve(path: Path, tmp_path: Path) -> None:
    study = load_study(path)
    if (
        study.tan is not None and study.tan.reference_epsilon is not None
    ):  # calibration has its own test
        study = study.model_copy(
            update={
                "tan": study.tan.model_copy(
                    update={"reference_epsilon": None, "reference_noise_multiplier": 1.0}
                )
            }
        )
    planned = plan_points(study, "study", ROOT)
    assert len(planned) >= 4
    assert (
        f"launch_scripts/study.py run {path.relative_to(ROOT)}" in path.read_text().splitlines()[0]
    )
    assert study.name == path.stem


@pytest.mark.parametrize("named", ["run", "checkpoint"])
def test_a_start_that_knows_less_than_one_does_without_looking_is_refused(
    named: str, tmp_path: Path
) -> None:
    """By the last line of its public held-out losses; a start without any is taken as it is."""
    start = tmp_path / "start"
    checkpoint = start / "checkpoints" / "step-2"
    for folder in (checkpoint, start / "evaluation"):
        folder.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    where = start if named == "run" else checkpoint
    planned = planned_of(tmp_path, STUDY.replace("[base]", f'[base]\ninit.checkpoint = "{where}"'))
    require_useful_starts(planned, ROOT)
    losses = start / "evaluation" / "heldout.jsonl"
    losses.write_text(
        '{"step": 1, "loss": 9.0, "blind_loss": 1.5}\n{"step": 2, "loss": 1.25, "blind_loss": 1.5}\n'
    )
    require_useful_starts(planned, ROOT)
    losses.write_text(
        losses.read_text() + '{"step": 3, "lo\n{"step": 3, "loss": 1.75, "blind_loss": 1.5}\n'
    )
    with pytest.raises(
        ConfigError,
        match=f"start {start} has a held-out loss of 1.7500, and 1.5000 is the loss without",
    ):
        require_useful_starts(planned, ROOT)


def prepared(tmp_path: Path, text: str) -> tuple[StudyFolder, list[Point]]:
    folder = StudyFolder(tmp_path / "study")
    study = study_of(tmp_path, text)
    planned = plan_points(study, "study", ROOT)
    with folder.locked():
        folder.prepare(study, text, planned)
    return folder, planned


def test_a_study_folder_is_for_one_study_at_a_time_and_keeps_consoles_private(
    tmp_path: Path,
) -> None:
    """Contract 12: a console shows training loss."""
    folder, planned = prepared(tmp_path, STUDY)
    assert all(load_config(folder.recipe(one.name)) == one.config for one in planned)
    assert folder.private.stat().st_mode & 0o777 == 0o700
    folder.log(FIRST).write_text("loss 1.0\n")
    outside = {path.relative_to(folder.root).parts[0] for path in folder.root.rglob("*")} - {
        "private"
    }
    assert outside == {"lock", "recipes", "runs", "study.toml"}
    with (
        folder.locked(),
        pytest.raises(ConfigError, match="in use"),
        StudyFolder(folder.root).locked(),
    ):
        pass


def test_a_begun_point_cannot_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = prepared(tmp_path, STUDY)[1]
    begun = planned[0].name
    monkeypatch.setattr(
        StudyFolder, "progress", lambda self, name: "begun" if name == begun else "new"
    )
    prepared(tmp_path, STUDY)
    prepared(tmp_path, STUDY.replace("seeds = [0, 1]", "seeds = [0, 1, 2]"))
    with pytest.raises(ConfigError, match=f"{begun} .* began with another optimizer.peak_lr"):
        prepared(tmp_path, STUDY.replace("[base]", "[base]\noptimizer.peak_lr = 0.5"))


# Studies on private data


def on_private_data(root: Path) -> str:
    """The study, with an owner's ledger that charges its runs together."""
    path = root / "owner.jsonl"
    if not path.exists():
        SharedLedger.create(path, epsilon=50.0, delta=1e-4, informal_runs=True)
    named = f'privacy.shared_ledger = "{path}"\nprivacy.fixed_in_advance = true'
    return STUDY.replace('data.provenance = "public"', named)


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


def late_points(folder: StudyFolder, planned: list[Point]) -> list[str]:
    return [
        one.name
        for one in planned
        if not load_config(folder.recipe(one.name)).privacy.fixed_in_advance
    ]


def test_runs_know_their_siblings_and_those_without_a_guarantee_are_counted(tmp_path: Path) -> None:
    text = on_private_data(tmp_path)
    text = text.replace("[axis.start.large]", "[axis.start.large]\nprivacy.enabled = false")
    folder, planned = prepared(tmp_path, text)
    for one in planned:
        assert "one of 8 runs of study tiny; 4 claim a guarantee of their own, 4 have none" in str(
            one.config.privacy.tuning
        )
    large = next(one.name for one in planned if "large" in one.name)
    begin(folder, large)
    noted = SharedLedger(tmp_path / "owner.jsonl").summary()["informal_runs"]
    assert noted == [{"name": large, "reason": "privacy is disabled (privacy.enabled = false)"}]


def test_only_the_grid_before_all_outputs_is_fixed_in_advance(tmp_path: Path) -> None:
    text = on_private_data(tmp_path)
    assert (
        late_points(*prepared(tmp_path, text.replace("depth = 2", "depth = 3"))) == []
    )  # until a run begins
    folder, planned = prepared(tmp_path, text)
    begin(folder, FIRST)
    assert late_points(*prepared(tmp_path, text)) == []  # the rest of the grid, or a resume
    added = prepared(tmp_path, text.replace("seeds = [0, 1]", "seeds = [0, 1, 2]"))
    assert late_points(*added) == [one.name for one in added[1] if one.name.endswith("seed-2")]
    rest = [one.name for one in planned if one.name != FIRST]
    changed = prepared(tmp_path, text.replace("depth = 2", "depth = 3"))
    assert late_points(*changed) == rest  # leaving out what was planned is a choice, too
    assert late_points(*prepared(tmp_path, text)) == []
    shutil.rmtree(folder.run(FIRST))  # trained anew, it was chosen after its output
    assert late_points(*prepared(tmp_path, text)) == [FIRST]


def test_a_study_that_is_interrupted_at_any_write_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        text = on_private_data(root)
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(study_folder, "write_durably", count(study_folder.write_durably, last))
            patch.setattr(durable, "write", count(durable.write, last))
            with contextlib.suppress(KeyboardInterrupt):
                prepared(root, text)
        assert late_points(*prepared(root, text)) == []
        if len(written) < last:
            break
    assert last > 10
    begin(prepared(root, text)[0], FIRST)
    assert late_points(*prepared(root, text)) == []


# Running the points


@pytest.fixture
def codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str], list[str]], dict[str, int]]:
    """Runs points that end as their names say: exit-3 with code 3; sleep not at all by itself."""

    def stub(folder: StudyFolder, study: StudyConfig, name: str) -> list[str]:
        what = (
            "time.sleep(60)"
            if name == "sleep"
            else f"print('error: no'); sys.exit({name.removeprefix('exit-')})"
        )
        return [sys.executable, "-c", f"import sys, time; {what}"]

    monkeypatch.setattr(executors, "train_command", stub)
    study, folder = study_of(tmp_path, STUDY), StudyFolder(tmp_path)
    folder.logs.mkdir(parents=True)
    return lambda said, names: executors.run_local(folder, study, names, 2, said.append)


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["exit-0"], 0),
        (["exit-3", "exit-0"], 3),
        (["exit-3", "exit-7"], 7),
        (["exit-7", "exit-4", "exit-3"], 4),
    ],
)
def test_exit_codes_of_the_runs_become_the_study_s(names: list[str], code: int, codes: Any) -> None:
    said: list[str] = []
    found = codes(said, names)
    assert found == {name: int(name[-1]) for name in names}
    assert executors.exit_code(found) == code
    assert ("exit-4: failed with exit code 4: error: no" in "\n".join(said)) == ("exit-4" in names)


def test_sigterm_stops_the_runs_and_the_study_exits_with_7(codes: Any) -> None:
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    found = codes([], ["sleep", "exit-0", "exit-3"])
    assert executors.exit_code(found) == found["sleep"] == 7


def result(batch: int, seed: int, blind: float | None = 2.0, **plan: Any) -> Result:
    sizes = {
        "num_examples": 1000,
        "expected_batch_size": batch,
        "num_steps": 4,
        "target_delta": 1e-5,
    }
    made = make_plan(PlanRequest(**sizes, noise_multiplier=1.0, **plan))
    claim = (batch / 10, made.target_delta) if made.formal_guarantee else (None, None)
    losses = {0: 3.0, 2: 2.5 + seed / 10, 4: 2.0 - seed / 10 - batch / 1000}
    simulation = str(not made.formal_guarantee).lower()
    config = load_config(ROOT / "recipes/tiny.toml", [f"privacy.simulation={simulation}"])
    point = Point(f"batch-{batch}_seed-{seed}", {"batch": batch}, seed, config)
    return Result(point, "finished", made, 4, *claim, losses, blind, shuffled_loss=3.5)


def reported(
    tmp_path: Path, results: list[Result], missing: tuple[str, ...] = ()
) -> tuple[StudyFolder, str]:
    """The report of a study whose only axis is the batch, and its page."""
    text = STUDY.replace(
        "[axis.start.small]\n[axis.start.large]\nmodel.overrides.encoder_depth = 2", ""
    )
    folder = StudyFolder(tmp_path / "study")
    folder.root.mkdir(parents=True)
    return folder, write_report(folder, study_of(tmp_path, text), results, missing).read_text()


def test_a_report_shows_epsilon_of_runs_that_claim_one_and_of_no_other(tmp_path: Path) -> None:
    results = [result(batch, seed) for batch in (10, 20) for seed in (0, 1)]
    results += [result(5, seed, informal_reasons=("a TAN simulation",)) for seed in (0, 1)]
    folder, page = reported(tmp_path, results, missing=("batch-40_seed-0",))
    groups = table_rows(page)
    said = {batch: row["epsilon"] for batch, row in groups.items()}
    assert said == {"10": "1.000", "20": "2.000", "5": "none (simulation, not private)"}
    assert [groups["10"][name] for name in ("held-out loss", "least", "largest")] == [
        "1.9400",
        "1.8900",
        "1.9900",
    ]
    assert "not done: batch-40_seed-0" in page
    with (folder.report / "points.csv").open() as file:
        rows = {row["point"]: row for row in csv.DictReader(file)}
    assert [rows[f"batch-{batch}_seed-1"]["epsilon"] for batch in (10, 20, 5)] == ["1.0", "2.0", ""]
    assert [rows[f"batch-{batch}_seed-1"]["delta"] for batch in (10, 5)] == ["1e-05", ""]
    for name in ("curves", "final"):
        assert (folder.report / f"{name}.png").stat().st_size > 5000, name


def table_rows(page: str) -> dict[str, dict[str, str]]:
    """The groups' rows of a page by their first cell."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line[:1] == "|"
    ]
    return {
        row[0]: dict(zip(lines[0], row, strict=True))
        for row in lines[2:]
        if len(row) == len(lines[0])
    }


def test_every_group_is_compared_with_the_blind_line(tmp_path: Path) -> None:
    """Means are 1.94 at B = 10 and 1.85 at B = 100, with seeds 0.05 above and below."""
    results = [result(batch, seed, blind=1.93) for batch in (10, 100) for seed in (0, 1)]
    folder, page = reported(tmp_path, results)
    rows = table_rows(page)
    assert {row["blind line"] for row in rows.values()} == {"1.9300"}
    assert rows["10"]["below the blind line by"] == "**above it** by 0.0100"
    assert rows["100"]["below the blind line by"] == "0.0800"
    assert (
        "The blind line, 1.9300, is the loss on the same held-out data" in page
        and "pairs of words" in page
    )
    assert "**1 of 2 groups lie above it: batch 10.**" in page
    with (folder.report / "points.csv").open() as file:
        point = next(csv.DictReader(file))
    assert (point["blind_loss"], point["shuffled_loss"]) == ("1.93", "3.5")
    assert (point["max_grad_norm"], point["attempts_charged"]) == ("1.0", "4")
    seeds_end_at_199_and_189 = (
        1.95,
        "0.0100 (1 of 2 seeds above it)",
        "All 1 groups that are done lie below it",
    )
    for blind, below, words in (seeds_end_at_199_and_189, (None, "", "No blind line is known")):
        _, page = reported(
            tmp_path / str(blind), [result(10, seed, blind=blind) for seed in (0, 1)]
        )
        assert table_rows(page)["10"]["below the blind line by"] == below and words in page
