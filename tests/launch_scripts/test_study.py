"""study.py as a user runs it: killed, resumed, reported; and what it refuses."""

import csv
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from launch_scripts.study import main
from privacy.accounting.accountants import epsilon
from privacy.card.run_card import write_card
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import make_plan
from tests.distributed.ranks import ROOT
from tests.e2e.launch import alone, count, kill_group, ledger_lines
from tests.processes import Forked
from trainer.card_of_run import build_card
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.studies.study_folder import StudyFolder

STUDY = "launch_scripts/study.py"
TINY = """
name = "tiny"
recipe = "recipes/tiny.toml"
seeds = {seeds}
[base]
data.provenance = "public"
data.num_workers = 0
train.num_steps = 12
[axis.batch]
privacy.expected_batch_size = {batches}
[tan]
reference_batch_size = 24
reference_noise_multiplier = 1.2
"""
# A number behind "eps" or "epsilon"; norm_eps and the optimizer's eps are other things.
EPSILON = r"(?<![a-z_])eps(ilon)?(?! = 1e-08)\W{1,4}(is |of )?\W{0,3}\d"


def written(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(**values))
    return path


def kill_in_the_middle(study: Path, folder: StudyFolder, name: str) -> None:
    """SIGKILL of the study alone, while it trains point `name`: its trainer goes on."""
    log, until = folder.root.with_suffix(".log"), time.monotonic() + 120
    process = Forked([STUDY, "run", study, "--study_dir", folder.root], stdout=log)
    try:
        while count(folder.run(name), "done") < 1:
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        kill_group(process)


def check_report(folder: StudyFolder, names: list[str]) -> None:
    with (folder.report / "points.csv").open() as file:
        rows = {row["point"]: row for row in csv.DictReader(file)}
    assert sorted(rows) == names
    for name, row in rows.items():
        run, simulated = folder.run(name), "batch-24" not in name
        assert (row["epsilon"] == "") == (row["delta"] == "") == simulated
        assert row["formal_guarantee"] == str(not simulated)
        last = (run / "evaluation/heldout.jsonl").read_text().splitlines()[-1]
        assert float(row["final_heldout_loss"]) == json.loads(last)["loss"]
        if not simulated:
            continue
        # Neither card, metrics, manifest nor console of a simulation holds a number for epsilon.
        write_card(run, build_card(run))
        assert "formal_guarantee: false" in folder.log(name).read_text()
        manifests = list((run / "checkpoints").glob("*/manifest.json"))
        shown = [folder.log(name), run / "metrics.jsonl", run / "config.toml", *manifests]
        for text in (
            path.read_text() for path in (*shown, *(run / "report").glob("privacy_card.*"))
        ):
            assert not re.search(EPSILON, text), re.findall(r"eps.{0,30}", text)
        assert "TAN simulation" in (run / "report/privacy_card.md").read_text()
        assert manifests and not any(
            json.loads(path.read_text())["formal_guarantee"] for path in manifests
        )
    page = (folder.report / "study.md").read_text()
    assert "they are not private" in page
    assert (folder.report / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert sum("none (simulation, not private)" in line for line in lines) == 2


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_study_of_six_points_is_killed_twice_resumed_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch size 24 is the reference, the others are simulated; killed in the first point and in another."""
    seeds, batches = [0, 1], [24, 8, 12]
    study = written(tmp_path, seeds=seeds, batches=batches)
    folder = StudyFolder(tmp_path / "study")
    first = f"batch-{batches[0]}_seed-{seeds[0]}"
    kill_in_the_middle(study, folder, first)
    kill_in_the_middle(study, folder, f"batch-{batches[1]}_seed-{seeds[0]}")
    again = alone(["run", str(study), "--study_dir", str(folder.root)], script=STUDY)
    assert again.returncode == 0, again.stdout + again.stderr
    names = sorted(path.name for path in folder.runs.iterdir())
    assert len(names) == len(seeds) * len(batches)
    for name in names:
        assert folder.progress(name) == "finished"
        assert {
            line["step"] for line in ledger_lines(folder.run(name)) if line["type"] == "done"
        } == set(range(1, 13))
    assert first not in again.stdout
    sessions = {name: count(folder.run(name), "session") for name in names}
    assert set(sessions.values()) == {1}, "whoever comes later waits for a trainer that is at work"

    assert main(["run", str(study), "--study_dir", str(folder.root)]) == 0
    assert f"{len(names)} were done before" in capsys.readouterr().out
    assert {name: count(folder.run(name), "session") for name in names} == sessions

    assert main(["report", "--study_dir", str(folder.root)]) == 0
    check_report(folder, names)


def test_a_slurm_array_gets_each_point_that_is_not_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A queue stands still in place of Slurm's; tests/distributed/test_slurm.py has the real one."""
    queue, arguments, folder = tmp_path / "queue", tmp_path / "arguments", tmp_path / "study"
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def does(name: str, body: str) -> None:
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)

    def submitted() -> list[str]:
        """Words of all calls of sbatch since the last look."""
        words = arguments.read_text().splitlines()
        arguments.write_text("")
        return words

    arguments.touch()
    queue.touch()
    does("sbatch", f'printf "%s\\n" "$@" >> {arguments}\necho Submitted batch job 7')
    does("squeue", f'printf "%s\\n" "$@" >> {tmp_path}/asked\ncat {queue}')

    def submit(*more: str, batches: str = "[24, 8]") -> None:
        study = written(tmp_path, seeds=[0], batches=batches)
        study.write_text(study.read_text().replace("data.num_workers = 0", "data.num_workers = 3"))
        command = [
            "run",
            str(study),
            "--study_dir",
            str(folder),
            "--executor",
            "slurm-array",
            *more,
        ]
        assert main(command) == 0

    submit("--workers", "3")
    assert "Submitted batch job 7" in capsys.readouterr().out
    given = submitted()
    assert given[1:4] == [
        "--cpus-per-task=3",
        "--array=1,2%3",
        f"--output={folder}/private/logs/slurm-%A_%a.log",
    ]
    assert given[4:7] == [
        "launch_scripts/cluster/slurm_array.sbatch",
        str(folder / "points.txt"),
        str(folder / "runs"),
    ]
    assert given[0].startswith("--job-name=dp-study-study-")
    assert (
        f"--name={given[0].removeprefix('--job-name=')}"
        in (tmp_path / "asked").read_text().splitlines()
    )
    before, name = (folder / "points.txt").read_text(), "batch-8_seed-0"
    last = ["--recipe", f"{folder}/recipes/{name}.toml", "--run_dir", f"{folder}/runs/{name}"]
    assert before.splitlines()[1].split() == last

    queue.write_text("1\n2\n")
    submit()
    assert submitted() == []
    assert (
        "queued or running already: batch-24_seed-0, batch-8_seed-0\nnothing to submit"
        in capsys.readouterr().out
    )

    # A point in front of them: what waits keeps its number, and with it what it will train.
    queue.write_text("2\n")
    submit(
        *["--nodes", "2", "--ntasks_per_node", "4", "--gpus_per_node", "4", "--cpus_per_task", "6"],
        batches="[12, 24, 8]",
    )
    given = submitted()
    assert given[1:5] == [
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=6",
        "--gpus-per-node=4",
    ]
    assert "--array=3,1%1" in given
    lines = (folder / "points.txt").read_text()
    assert (
        lines.startswith(before)
        and "batch-12_seed-0" in lines.splitlines()[2]
        and len(lines.splitlines()) == 3
    )

    does("squeue", "echo no controller answers >&2; exit 1")
    with pytest.raises(
        ConfigError, match="squeue refused, so nothing is submitted: no controller answers"
    ):
        submit()
    assert submitted() == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_runs_on_private_data_stop_where_their_shared_budget_ends(tmp_path: Path) -> None:
    """Room for two of three runs: the third never touches the data, and the cards of the others name their sibling."""
    config = load_config(ROOT / "recipes/tiny.toml", ["train.num_steps=2"])
    group = (plan := make_plan(config.privacy.request(2, 3000))).release_group(plan.max_intents)
    two, three = (epsilon([group.times(runs * group.count)], 1e-4) for runs in (2, 3))
    study, folder, owner = (
        tmp_path / "private.toml",
        StudyFolder(tmp_path / "study"),
        tmp_path / "owner.jsonl",
    )
    SharedLedger.create(owner, epsilon=(two + three) / 2, delta=1e-4)
    study.write_text(
        f"""
name = "private"
recipe = "recipes/tiny.toml"
seeds = [0, 1, 2]
[base]
privacy.shared_ledger = "{owner}"
privacy.fixed_in_advance = true
data.num_workers = 0
train.num_steps = 2
"""
    )
    ended = alone(["run", str(study), "--study_dir", str(folder.root)], script=STUDY)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert [folder.progress(f"seed-{seed}") == "finished" for seed in range(3)] == [
        True,
        True,
        False,
    ]
    assert count(folder.run("seed-2"), "intent") == 0
    card = build_card(folder.run("seed-0"))
    assert "one of 3 runs of study private" in card.declared.tuning.text
    assert [run["name"] for run in card.shared_ledger["runs"]] == ["seed-0", "seed-1"]
    again = alone(["run", str(study), "--study_dir", str(folder.root)], script=STUDY)
    assert again.returncode == 3
