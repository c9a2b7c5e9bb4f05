import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from data.errors import DataError
from data.index.build import build_index
from data.index.shards import find_shards
from data.index.tar_writer import write_shard
from launch_scripts import plan
from privacy.accounting.calibration import Calibrated
from privacy.errors import PrivacyConfigError
from tests.processes import run_python
from trainer.config.cli import run_command
from trainer.errors import ConfigError
from trainer.planner.tables import privacy_table

ROOT = Path(__file__).resolve().parents[2]
DPCAP = "--num_examples 233000000 --expected_batch_size 1310720 --num_steps 5708 --delta 4.2918e-9"
SMALL = "--num_examples 3000 --expected_batch_size 60 --num_steps 50"


def _plan(arguments, **environment):
    return run_python(
        ["launch_scripts/plan.py", *arguments.split()],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=120,
    )


def _timed(arguments):
    """As `_plan`, in a child of this process, whose user seconds the system tells."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "launch_scripts/plan.py", *arguments.split()],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert seconds > 0.1, "nobody was waited for"
    return done, seconds


@pytest.mark.full
@pytest.mark.parametrize("extras", [False, True])
def test_dpcap_point(extras):
    done = _plan(f"{DPCAP} --noise_multiplier 0.728 --json{'' if extras else ' --no_extras'}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert f"{result['epsilon_pld']:.3f}" == "7.360"
    assert f"{result['epsilon_rdp']:.2f}" == "8.07"
    assert result["epsilon_prv_lower"] < result["epsilon_pld"] < result["epsilon_prv_upper"]
    assert result["noise_multiplier"] == 0.728 and result["delta"] == 4.2918e-9
    assert result["sample_rate"] == pytest.approx(1310720 / 233e6)
    assert result["formal_guarantee"] is True
    assert result["tan"] == pytest.approx(2.4224, abs=1e-3)
    assert extras == (result["replace_one"] is not None)
    if extras:
        assert result["replace_one"] == pytest.approx(9.70, abs=0.01)
        assert result["group_2"] == pytest.approx(15.46, abs=0.01) and result["group_5"] == pytest.approx(
            44.96, abs=0.01
        )


@pytest.mark.full
def test_dpcap_target_epsilon():
    done, seconds = _timed(f"{DPCAP} --target_epsilon 8 --json")
    assert seconds < 15
    result = json.loads(done.stdout)
    assert 0.36 < result["attack_risk"]["advantage"] < 0.37
    assert 0 < result["noise_tail_delta"] < 1e-12
    assert f"{result['noise_multiplier']:.4f}" == "0.7078"
    assert 7.999 <= result["epsilon_pld"] <= 8


def test_human_output_with_cap_and_reserve_and_the_epsilon_of_an_owner(monkeypatch, capsys):
    arguments = "--recipe recipes/tiny.toml data.num_examples=3000 privacy.reserved_attempts=3 train.num_steps=20"
    out = _plan_here(f"{arguments} privacy.max_examples_per_owner=5", monkeypatch, capsys).out
    rows = {row[1].strip(): row[2].strip() for row in (line.split("│") for line in out.splitlines()) if len(row) > 3}
    assert rows["owner"] == rows["group of 5"]
    for text in ("attack advantage", "Privacy plan", "batches cut at", "with 3 reserved", "PRV bracket"):
        assert text in out


BANDS = "--num_examples 2000 --expected_batch_size 200 --num_steps 40 --delta 1e-5 --no_extras"


def _in_process(arguments):
    from launch_scripts import plan

    return plan.plan(plan.parse_args(arguments.split()))


def test_correlated_noise_at_equal_epsilon(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    result = _in_process(f"{BANDS} --target_epsilon 4 --bands auto")
    ratios = {row["bands"]: row["error_ratio"] for row in result["by_bands"]}
    assert list(ratios) == [1, 2, 4, 8] and ratios[1] == 1.0
    assert result["bands"] == min(ratios, key=ratios.get) > 1
    assert result["error_ratio"] == pytest.approx(ratios[result["bands"]], rel=1e-3) and result["error_ratio"] < 1
    assert result["noise_multiplier"] > result["independent_noise_multiplier"]
    assert 3.999 <= result["epsilon_pld"] <= 4 and result["epsilon_prv_lower"] <= result["epsilon_pld"]
    assert result["epochs"] == pytest.approx(4) and result["scaling_rule"] is None
    shown = capsys.readouterr()
    for text in ("error ratio", "the best", "which take turns", "past noise"):
        assert text in shown.out
    assert shown.err == ""
    # The noise that was found, given back: the same epsilon and the same ratio.
    sigma, bands = result["noise_multiplier"], result["bands"]
    again = _in_process(f"{BANDS} --noise_multiplier {sigma} --bands {bands} --json")
    assert again["epsilon_pld"] == result["epsilon_pld"] and json.loads(capsys.readouterr().out) == again
    assert again["error_ratio"] == pytest.approx(result["error_ratio"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--noise_multiplier 2 --bands some", "a number of bands or auto"),
        ("--noise_multiplier 2 --bands -2", "bands"),
        ("--noise_multiplier 2 --bands 99999999999999", "a number of bands or auto"),
        ("--noise_multiplier 2 --bands 0", "greater than or equal to 1"),
        ("--noise_multiplier 2 --bands 11", "take 10 bands or fewer"),
        ("--noise_multiplier 2 --bands auto", "give --target_epsilon"),
        ("--noise_multiplier 0 --bands 2", "makes no formal claim"),
    ],
)
def test_bands_that_cannot_be_planned_are_refused_in_one_line(arguments, words):
    with pytest.raises((PrivacyConfigError, ConfigError), match=words) as refused:
        _in_process(f"{BANDS} {arguments}")
    assert "\n" not in str(refused.value)


@pytest.mark.full
def test_bands_of_a_recipe_keep_its_epsilon_and_take_memory(capsys):
    """The recipe's own noise is that of independent noise; its workload and the past noise of a rank are planned too."""
    arguments = "--recipe recipes/tiny.toml --no_extras --json train.num_steps=40 data.num_examples=2000 "
    arguments += "privacy.expected_batch_size=200 --ds_config ds_configs/zero3.json --world_size 8"
    alone, four = (_in_process(f"{arguments}{more}") for more in ("", " --bands 4"))
    assert alone["noise_multiplier"] == pytest.approx(four["independent_noise_multiplier"], rel=5e-3)
    assert four["epsilon_with_reserve"] == pytest.approx(alone["epsilon_with_reserve"], rel=5e-3)
    assert four["optimised_error_ratio"] <= four["workload_error_ratio"] and four["error_ratio"] != 1.0
    assert len(four["optimised_coefficients"]) == 4 and alone["optimised_coefficients"] is None
    before, after = (result["resources"]["memory"] for result in (alone, four))
    owned = -(-four["resources"]["parameters"] // 8)
    assert before["noise_history"] == 0 and after["noise_history"] == pytest.approx(8 * 3 * owned, rel=0.05)
    assert after["peak"] - before["peak"] == after["noise_history"]


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
        PrivacyConfigError, match=r"or index its shards: python launch_scripts/prepare.py index '/.*/my shards'$"
    ):
        plan.plan(plan.parse_args(arguments))
    build_index(find_shards(str(folder), ROOT), folder / "index")
    plan.plan(plan.parse_args(arguments))
    assert json.loads(capsys.readouterr().out)["num_examples"] == 700
    write(1)
    with pytest.raises(DataError, match=r"other shards .*1\.tar.* prepare.py index"):
        plan.plan(plan.parse_args(arguments))


def test_sizes_are_shown_before_anything_is_calibrated(monkeypatch, capsys):
    """And what --no_extras leaves out has no row; without it a missing epsilon says why."""
    shown = []

    def calibrated(*_, **__):
        shown.append(capsys.readouterr().out)
        return Calibrated(4.0, 0.5, clamped=False)

    monkeypatch.setattr("privacy.plan.calibrate_noise_multiplier", calibrated)
    out = _plan_here(f"{SMALL} --target_epsilon 1 --no_extras", monkeypatch, capsys).out
    assert all(word in shown[0] for word in ("examples", "expected batch", "sample rate", "steps"))
    assert "epsilon (PLD)" in out and "replace-one" not in out and "none" not in out
    result = dict.fromkeys(("replace_one", "group_2", "group_5"))
    result |= json.loads(_plan_here(f"{SMALL} --noise_multiplier 4 --json", monkeypatch, capsys).out) | {
        "group_5": None
    }
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(privacy_table(result))
    assert re.search(r"group of 5 .* none .*no finite epsilon at this delta", console.export_text())


def test_no_noise_prints_no_epsilon():
    done = _plan(f"{SMALL} --noise_multiplier 0 --json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["formal_guarantee"] is False
    assert result["epsilon_pld"] is None and result["epsilon_rdp"] is None


def test_tiny_delta_uses_rdp():
    result = json.loads(_plan(f"{SMALL} --noise_multiplier 2 --delta 1e-14 --json").stdout)
    assert result["epsilon_pld"] is None and result["epsilon_rdp"] > 0
    assert result["epsilon_with_reserve"] == result["epsilon_rdp"]


def test_a_recipe_gives_what_training_claims():
    """The ledger of a run and this command agree: cap, reserve and slack included."""
    from privacy.plan import make_plan
    from trainer.config.recipe import load_config

    config = load_config(ROOT / "recipes/vip_base_data2m.toml")
    plan = make_plan(config.privacy.request(7, 2_000_000))
    arguments = "--recipe recipes/vip_base_data2m.toml --no_extras --json train.num_steps=7"
    said = json.loads(_plan(arguments).stdout)
    assert said["epsilon_pld"] == plan.epsilon_planned and said["epsilon_with_reserve"] == plan.epsilon_with_reserve
    assert (said["cap"], said["num_steps"]) == (plan.cap, 7)


QUICK = "--recipe recipes/quickstart.toml data.num_examples=10000 --no_extras --ds_config ds_configs"
CLUSTER = "--ds_config ds_configs/zero3_bf16.json --world_size 128 --gpu a100-80gb"
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_memory_and_time_of_every_recipe(recipe):
    """One JSON object, numbers that fit together, without the weights and without the data."""
    count = "" if "num_examples" in (ROOT / f"recipes/{recipe}.toml").read_text() else " data.num_examples=10000"
    done, seconds = _timed(f"--recipe recipes/{recipe}.toml {CLUSTER} --no_extras --json{count}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    found = result["resources"]
    assert found["memory"]["fits"] and found["memory"]["largest_micro_batch"] >= found["batch"]["micro_batch_size"]
    assert found["memory"]["peak"] < found["memory"]["device"] == 80 * 10**9
    assert found["time"]["gpu_hours"] == pytest.approx(128 * found["time"]["hours"])
    assert found["compute"]["flop_per_step"] > 3 * found["batch"]["expected_batch_size"] * found["parameters"]
    if recipe.startswith(("dpcap", "vip")):
        assert 0.9 < result["epsilon_with_reserve"] <= 8
    assert seconds < 60


def _plan_here(arguments, monkeypatch, capsys):
    from launch_scripts import plan

    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(ROOT)
    assert plan.main() == 0
    return capsys.readouterr()


@pytest.mark.full
def test_noise_to_signal_and_the_choice_for_fewer_examples_than_the_recipe_has_in_a_batch(monkeypatch, capsys):
    arguments = "--recipe recipes/quickstart.toml --choose --num_examples 1500 --target_epsilon 2 --no_extras"
    shown = _plan_here(f"{arguments} --json", monkeypatch, capsys)
    assert "2,000 is larger than the data: compared with 1,500 in 160 steps" in shown.err
    found = json.loads(shown.out)
    assert found["expected_batch_size"] == 1500 and found["noise_to_signal"]["kind"] == "captioner"
    chosen = found["choice"]
    assert chosen["expected_batch_size"] <= chosen["num_examples"] == 1500 and chosen["target_epsilon"] == 2
    assert chosen["epsilon_with_reserve"] <= 2 and chosen["reason"]
    assert chosen["expected_batch_size"] * chosen["num_steps"] == pytest.approx(240_000, rel=0.01)
    table = _plan_here(f"{arguments} train.num_steps=30", monkeypatch, capsys).out
    for text in ("noise-to-signal", "accumulated", "chosen batch", "chosen steps", "learned nothing"):
        assert text in table, text


def test_table_of_memory_and_time(monkeypatch, capsys):
    from launch_scripts import plan

    arguments = f"{QUICK}/zero1.json --engine local --gpu cpu --world_size 2 --bytes_per_example 30000"
    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(ROOT)
    assert plan.main() == 0
    shown = capsys.readouterr()
    for text in (
        "2 ranks, local, float32, cpu",
        "peak",
        "largest micro batch",
        "bookkeeping",
        "efficiency",
        "decoding cores per rank",
        "--bytes_per_example",
    ):
        assert text in shown.out, text
    assert "epsilon (PLD)" in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{SMALL} --noise_multiplier 4 --gpu a100-80gb", "give --ds_config and --recipe"),
        (f"{SMALL} --noise_multiplier 4 --ds_config ds_configs/zero3.json", "give --recipe"),
        (f"{QUICK}/zero3.json --efficiency 35", "--efficiency must be at most 1, got 35"),
        (f"{QUICK}/zero3.json --network_gbits 0", "--network_gbits must be above 0"),
        (f"{QUICK}/zero3.json --gpu tpu", "choose one of"),
        (f"{QUICK}/zero3_bf16.json --gpu v100-32gb", "no bf16"),
        (f"{QUICK}/zero3.json --world_size 0", "--world_size must be at least 1"),
        (f"{QUICK}/zero3.json --engine fairscale", "stage 3 is refused"),
        (f"{QUICK}/nowhere.json", "nowhere.json"),
        (f"{SMALL} --noise_multiplier 4 --choose", "--choose is for the choice .*: give --recipe too"),
        ("--recipe recipes/vip_nano.toml --num_examples 5000000", "change it by data.num_examples=5000000"),
        ("--recipe recipes/quickstart.toml --choose", "names no data.num_examples"),
        ("--recipe recipes/vip_nano.toml --choose --no_extras privacy.simulation=true", "a target epsilon"),
    ],
)
def test_bad_resources_are_refused(arguments, message, monkeypatch):
    from launch_scripts import plan

    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=message) as caught:
        plan.main()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num_examples 100 --expected_batch_size 200 --num_steps 5 --noise_multiplier 1", "larger than the data"),
        (f"{SMALL} --noise_multiplier 0 --target_epsilon 8", "exactly one of"),
        (SMALL, "exactly one of"),
        (f"{SMALL} --noise_multiplier 0.1", "below 0.3"),
        ("--recipe recipes/quickstart.toml", "names no data.num_examples"),
        ("--recipe recipes/quickstart.toml --gpu cpu", "give --ds_config"),
        ("--recipe recipes/vip_base.toml --num_steps 5", "business: change it by train.num_steps=5"),
        ("--recipe recipes/vip_nano.toml --num_examples 5", "change it by data.num_examples=5"),
        (f"{SMALL} --noise_multiplier 1 train.num_steps=5", "give --recipe"),
        (f"{SMALL} --noise_multiplier 1 --delta 2", "target_delta"),
        (f"{SMALL} --noise_multiplier x", "invalid float"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, message, monkeypatch, capsys):
    from launch_scripts import plan

    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments.split()])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        run_command(plan.main)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and message in said.err


def test_delta_above_one_over_n_is_warned():
    done = _plan(f"{SMALL} --noise_multiplier 4 --delta 0.01 --json")
    assert done.returncode == 0 and "above 1/n" in done.stderr
    assert json.loads(done.stdout)["warnings"]
