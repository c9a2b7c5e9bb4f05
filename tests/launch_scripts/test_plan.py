"""plan.py as a user runs it: published points, what training would claim, and what is printed for people."""

import io
import json
import os
import re
import resource
import subprocess
import sys

import pytest
from rich.console import Console

from data.errors import DataError
from data.index.build import build_index
from data.index.shards import find_shards
from data.index.tar_writer import write_shard
from launch_scripts import plan
from privacy.accounting.calibration import Calibration
from privacy.errors import PrivacyConfigError
from privacy.plan.numbers import make_plan
from tests.processes import ROOT
from trainer.config.recipe import load_config
from trainer.planner.tables import privacy_table

DPCAP = "--num_examples 233000000 --expected_batch_size 1310720 --num_steps 5708 --delta 4.2918e-9"
SMALL = "--num_examples 3000 --expected_batch_size 60 --num_steps 50"


@pytest.fixture
def planned(monkeypatch, capsys):
    """Runs plan.py in this process; returns its exit code and what it printed."""

    def run(arguments):
        monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.chdir(ROOT)
        assert plan.main() == 0
        return capsys.readouterr()

    return run


def _timed(arguments):
    """What a process of its own says, and its user seconds by the system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "launch_scripts/plan.py", *arguments.split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert seconds > 0.1, "nobody was waited for"
    return json.loads(done.stdout), seconds


@pytest.mark.full
def test_dpcap_point():
    result, _ = _timed(f"{DPCAP} --noise_multiplier 0.728 --json")
    assert f"{result['epsilon_pld']:.3f}" == "7.360"
    assert f"{result['epsilon_rdp']:.2f}" == "8.07"
    assert result["epsilon_prv_lower"] < result["epsilon_pld"] < result["epsilon_prv_upper"]
    assert result["noise_multiplier"] == 0.728 and result["delta"] == 4.2918e-9
    assert result["sample_rate"] == pytest.approx(1310720 / 233e6)
    assert result["formal_guarantee"] is True
    assert result["tan"] == pytest.approx(2.4224, abs=1e-3)
    found = [result[name] for name in ("replace_one", "group_2", "group_5")]
    assert found == pytest.approx([9.70, 15.46, 44.96], abs=0.01)


@pytest.mark.full
def test_dpcap_target_epsilon():
    result, seconds = _timed(f"{DPCAP} --target_epsilon 8 --json")
    assert seconds < 15
    assert 0.36 < result["attack_risk"]["advantage"] < 0.37
    assert f"{result['noise_multiplier']:.4f}" == "0.7078"
    assert 7.999 <= result["epsilon_pld"] <= 8


def test_human_output_with_cap_and_reserve_and_the_epsilon_of_an_owner(planned):
    arguments = "--recipe recipes/tiny.toml data.num_examples=3000 privacy.reserved_attempts=3 train.num_steps=20"
    out = planned(f"{arguments} privacy.max_examples_per_owner=5").out
    rows = {
        row[1].strip(): row[2].strip()
        for row in (line.split("│") for line in out.splitlines())
        if len(row) > 3
    }
    assert rows["owner"] == rows["group of 5"]
    for text in (
        "attack advantage",
        "Privacy plan",
        "larger batches are cut down",
        "with 3 reserved",
        "PRV bracket",
    ):
        assert text in out


def test_the_index_of_a_folder_of_shards_counts_its_examples(tmp_path, monkeypatch, capsys):
    """An un-indexed folder, and one with more shards than are indexed, end in one line that says what to do."""
    folder = tmp_path / "my shards"
    folder.mkdir()

    def write(number):
        parts = ((f"{number}-{n}", {"jpg": b"picture", "txt": b"words"}) for n in range(700))
        write_shard(folder / f"{number}.tar", parts)

    write(0)
    arguments = ["--recipe", "recipes/tiny.toml", f"data.shards={folder}", "--no_extras", "--json"]
    arguments += ["train.num_steps=4", "privacy.expected_batch_size=50"]
    monkeypatch.chdir(ROOT)
    with pytest.raises(
        PrivacyConfigError,
        match=r"or index its shards: python launch_scripts/prepare.py index '/.*/my shards'$",
    ):
        plan.plan(plan.parse_args(arguments))
    build_index(find_shards(str(folder), ROOT), folder / "index")
    plan.plan(plan.parse_args(arguments))
    assert json.loads(capsys.readouterr().out)["num_examples"] == 700
    write(1)
    with pytest.raises(DataError, match=r"other shards .*1\.tar.* prepare.py index"):
        plan.plan(plan.parse_args(arguments))


def test_sizes_are_shown_before_anything_is_calibrated(planned, monkeypatch, capsys):
    """And what --no_extras leaves out has no row; without it a missing epsilon says why."""
    shown = []

    def calibrated(*_, **__):
        shown.append(capsys.readouterr().out)
        return Calibration(4.0, 0.5, clamped=False)

    monkeypatch.setattr("privacy.plan.numbers.calibrate_noise_multiplier", calibrated)
    out = planned(f"{SMALL} --target_epsilon 1 --no_extras").out
    assert all(word in shown[0] for word in ("examples", "expected batch", "sample rate", "steps"))
    assert "epsilon (PLD)" in out and "replace-one" not in out and "none" not in out
    result = json.loads(planned(f"{SMALL} --noise_multiplier 4 --json").out) | {"group_5": None}
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(privacy_table(result))
    assert re.search(r"group of 5 .* none .*no finite epsilon at this delta", console.export_text())


def test_what_has_no_epsilon_by_pld_prints_none(planned):
    """No noise; and a delta too small for the claim's accountant, where RDP claims."""
    result = json.loads(planned(f"{SMALL} --noise_multiplier 0 --json").out)
    assert (
        result["formal_guarantee"] is False
        and result["epsilon_pld"] is None
        and result["epsilon_rdp"] is None
    )
    result = json.loads(planned(f"{SMALL} --noise_multiplier 2 --delta 1e-14 --json").out)
    assert (
        result["epsilon_pld"] is None
        and result["epsilon_with_reserve"] == result["epsilon_rdp"] > 0
    )


def test_delta_above_one_over_n_is_warned(planned):
    said = planned(f"{SMALL} --noise_multiplier 4 --delta 0.01 --no_extras --json")
    assert "above 1/n" in said.err and json.loads(said.out)["warnings"]


def test_a_recipe_gives_what_training_claims(planned):
    """The ledger of a run and this command agree: cap, reserve and slack included."""
    config = load_config(ROOT / "recipes/vip_base_data2m.toml")
    made = make_plan(config.privacy.request(7, 2_000_000))
    said = json.loads(
        planned("--recipe recipes/vip_base_data2m.toml --no_extras --json train.num_steps=7").out
    )
    assert (
        said["epsilon_pld"] == made.epsilon_planned
        and said["epsilon_with_reserve"] == made.epsilon_with_reserve
    )
    assert (said["cap"], said["num_steps"]) == (made.cap, 7)


@pytest.mark.full
def test_noise_to_signal_and_the_choice_for_fewer_examples_than_the_recipe_has_in_a_batch(planned):
    arguments = "--recipe recipes/quickstart.toml --choose --num_examples 1500 --target_epsilon 2 --no_extras"
    shown = planned(f"{arguments} --json")
    assert "2,000 is larger than the data: compared with 1,500 in 160 steps" in " ".join(
        shown.err.split()
    )
    found = json.loads(shown.out)
    assert found["expected_batch_size"] == 1500 and found["noise_to_signal"]["kind"] == "captioner"
    chosen = found["choice"]
    assert (
        chosen["expected_batch_size"] <= chosen["num_examples"] == 1500
        and chosen["target_epsilon"] == 2
    )
    assert chosen["epsilon_with_reserve"] <= 2 and chosen["reason"]
    assert chosen["expected_batch_size"] * chosen["num_steps"] == pytest.approx(240_000, rel=0.01)
    table = planned(f"{arguments} train.num_steps=30").out
    for text in (
        "noise-to-signal",
        "accumulated",
        "chosen batch",
        "chosen steps",
        "learned nothing",
    ):
        assert text in table, text


def test_table_of_memory_and_time(planned):
    arguments = "--recipe recipes/tiny.toml data.num_examples=10000 --no_extras --ds_config ds_configs/zero1.json"
    shown = planned(f"{arguments} --engine local --gpu cpu --world_size 2 --gpu_price 3").out
    assert shown.index("hours with failures") < shown.index("epsilon (PLD)"), (
        "what an allocation is asked for comes first"
    )
    for text in (
        *(
            "2 ranks, local, float32, cpu",
            "peak",
            "largest micro batch",
            "bookkeeping",
            "efficiency",
        ),
        *("best checkpoint every", "price", "repeated steps"),
        *("decoding cores per rank", "assumed: there is no index", "epsilon (PLD)"),
    ):
        assert text in shown, text
