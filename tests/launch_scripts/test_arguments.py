"""The command lines of all commands: overrides anywhere, help that is quick, and one line for everything that is refused."""

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from launch_scripts import plan, quickstart, train
from tests.processes import ROOT, run_python

OPTIONS = ["--ds_config", "machine.json"]
OVERRIDES = ["train.num_steps=1", "name=x"]
COMMANDS: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "train": train.parse_args,
    "plan": plan.parse_args,
    "quickstart": quickstart.parse_args,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_overrides_stand_anywhere(command: str) -> None:
    for places in itertools.product(range(3), repeat=len(OVERRIDES)):
        at = {
            place: [o for o, p in zip(OVERRIDES, places, strict=True) if p == place]
            for place in range(3)
        }
        arguments = [*at[0], *OPTIONS, *at[1], "--recipe", "r.toml", *at[2]]
        found = COMMANDS[command](arguments)
        assert sorted(found.overrides) == sorted(OVERRIDES), arguments
        assert str(found.ds_config) == "machine.json"


RUN_AND_LIST = """
import json, os, runpy, sys
import trainer.config.cli, trainer.config.recipe  # what nearly all of them import
for number, command in enumerate(json.loads(sys.argv[2])):
    if os.fork() == 0:
        os.dup2(os.open(f"{sys.argv[1]}/{number}", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        sys.argv = command
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
        heavy = {"torch", "scipy", "dp_accounting", "deepspeed", "transformers", "matplotlib", "datasets"} & set(sys.modules)
        sys.exit(f"exit code {code}; imported: {heavy}")
    os.wait()
"""
SCRIPTS = sorted(path.name for path in (ROOT / "launch_scripts").glob("*.py"))
WRONG_KEY = ["launch_scripts/train.py", "--ds_config", "ds_configs/zero3.json", "train.num_stepz=4"]

MISSING = [
    "report.py --run_dir runs/nowhere",
    "report.py --run_dir docs",
    *(f"audit.py {kind} --run_dir runs/nowhere" for kind in ("ledger", "schedule", "mechanism")),
    "audit.py run --run_dir runs/nowhere --canaries docs",
    "evaluate.py captions --checkpoint runs/nowhere --data shards:x",
    "evaluate.py linear-probe --checkpoint docs --train shards:x --test shards:x",
    "export.py --checkpoint runs/nowhere --format hf runs/out",
]
"""Commands on a folder that is not there, or holds no run."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that each script's --help says, and train.py (as "wrong") about a wrong key, each in a fork of one process."""
    folder = tmp_path_factory.mktemp("said")
    missing = [[f"launch_scripts/{words[0]}", *words[1:]] for words in map(str.split, MISSING)]
    commands = [*([f"launch_scripts/{name}", "--help"] for name in SCRIPTS), WRONG_KEY, *missing]
    command = [sys.executable, "-c", RUN_AND_LIST, str(folder), json.dumps(commands)]
    subprocess.run(command, cwd=ROOT, check=True)
    return {
        name: (folder / str(n)).read_text().splitlines()
        for n, name in enumerate([*SCRIPTS, "wrong", *MISSING])
    }


@pytest.mark.parametrize("script", [*SCRIPTS, "cluster/torchrun.py"])
def test_a_python_without_the_packages_says_how_to_get_them(script: str) -> None:
    command = [
        sys.executable,
        "-S",
        f"launch_scripts/{script}",
        "--help",
    ]  # -S: without site-packages
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("error: ")
        and done.stderr.count("\n") == 1
        and "make venv" in done.stderr
    )


@pytest.mark.parametrize("script", [*SCRIPTS, "wrong"])
def test_help_and_a_wrong_recipe_key_import_nothing_that_takes_seconds(
    script: str, said: dict[str, list[str]]
) -> None:
    *lines, ending = said[script]
    code, words = (2, "did you mean num_steps?") if script == "wrong" else (0, script)
    assert ending == f"exit code {code}; imported: set()" and words in "\n".join(lines)


@pytest.mark.parametrize("command", MISSING)
def test_a_command_looks_for_its_folder_first(command: str, said: dict[str, list[str]]) -> None:
    """One line, before it says what it does, and before anything heavy is imported."""
    line, ending = said[command]
    assert ending == "exit code 2; imported: set()" and line.startswith("error: ")
    assert ("docs" if " docs" in command and "nowhere" not in command else "runs/nowhere") in line


def test_all_keys_are_listed_with_their_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        train.parse_args(["--keys"])
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split(" ")[0] for line in lines if not line.startswith(" ")}
    used = {
        f"{section}.{key}"
        for recipe in ROOT.glob("recipes/*.toml")
        for section, keys in tomllib.loads(recipe.read_text()).items()
        for key in (keys if isinstance(keys, dict) else ())
    }
    assert used < listed and max(map(len, lines)) <= 80
    assert 'optimizer.name ("adamw" | "sgd")' in lines


TINY = "--ds_config ds_configs/zero3.json --recipe recipes/tiny.toml"
SMALL = "--num_examples 3000 --expected_batch_size 60 --num_steps 50"
QUICK = (
    "--recipe recipes/quickstart.toml data.num_examples=10000 --no_extras --ds_config ds_configs"
)
BAD = {
    "train.py": [
        ("--recipe recipes/tiny.toml", "--ds_config"),
        (
            "--ds_config ds_configs/zero3.json --engine none",
            "argument --engine: invalid choice: 'none'",
        ),
        ("--ds_config ds_configs/zero3.json --recipe recipes/nothing.toml", "nothing.toml"),
        ("--ds_config ds_configs/nothing.json --recipe recipes/tiny.toml", "nothing.json"),
        (f"{TINY} train.num_steps=1 --nosuch name=x", "unrecognized arguments: --nosuch"),
        (f"{TINY} privacy.epsilonn=8", "tiny.toml: unknown key privacy.epsilonn"),
        (f"{TINY} train.num_steps=many", "train.num_steps: must be a whole number, not 'many'"),
        (
            f"{TINY} privacy.noise_multiplier=-1",
            "privacy.noise_multiplier: must be 0 or more, not -1",
        ),
        (f"{TINY} model.size=huge", "huge"),
        (f"{TINY} nonsense", "section.key=value"),
        (
            f"{TINY} data.shards=a-0.tar data.shards=a-1.tar",
            "once",
        ),  # what an unquoted {0..1} becomes in a shell
        (
            f"{TINY} privacy.noise_multiplier=0 privacy.target_epsilon=8.0",
            "gives no guarantee; remove one of them",
        ),
        (f"{TINY} privacy.expected_batch_size=3001", "3001 is larger than the data"),
        (f"{TINY} data.shards=nowhere/*.tar", "nowhere"),
        (f"{TINY} data.tokenizer=nowhere.json", "nowhere.json"),
    ],
    "plan.py": [
        (
            "--num_examples 100 --expected_batch_size 200 --num_steps 5 --noise_multiplier 1",
            "larger than the data",
        ),
        (f"{SMALL} --noise_multiplier 0 --target_epsilon 8", "exactly one of"),
        (SMALL, "exactly one of"),
        (f"{SMALL} --noise_multiplier 0.1", "below 0.3"),
        (f"{SMALL} --noise_multiplier 1 train.num_steps=5", "give --recipe"),
        (f"{SMALL} --noise_multiplier 1 --delta 2", "--delta must be below 1"),
        (f"{SMALL} --noise_multiplier x", "invalid float"),
        (
            f"{SMALL} --noise_multiplier 4 --gpu a100-80gb",
            "such as ds_configs/zero3.json, and --recipe",
        ),
        (f"{SMALL} --noise_multiplier 4 --ds_config ds_configs/zero3.json", "give --recipe"),
        (f"{SMALL} --noise_multiplier 4 --choose", "give --recipe too"),
        ("--recipe recipes/quickstart.toml", "names no data.num_examples"),
        (
            "--recipe recipes/vip_base.toml --num_steps 5",
            "states what --num_steps is: give train.num_steps=5",
        ),
        (
            "--recipe recipes/vip_nano.toml --choose --no_extras privacy.simulation=true",
            "a target epsilon",
        ),
        (f"{QUICK}/zero3.json --efficiency 35", "--efficiency must be 1 or less, not 35.0"),
        (f"{QUICK}/zero3.json --world_size 0", "--world_size must be 1 or more"),
        (f"{QUICK}/zero3.json privacy.target_epsilon=20 --gpu tpu", "choose one of"),
    ],
    "prepare.py": [
        ("index nothing.tar --output x", "missing or empty shards"),
        ("index 'data/demo/*.tar'", "--output is required unless SHARDS is a single folder"),
        ("index https://host/a.tar", "--output is required unless SHARDS is a single folder"),
        ("index README.md,LICENSE --output x", "not a tar archive"),
        ("verify data/demo --index nowhere", "there is no index in nowhere"),
        ("index --outputs x", "unrecognized arguments: --outputs"),
        ("import pairs.csv --output x", "required"),
        ("import --from csv missing.csv --output x", "there is no csv missing.csv"),
        ("import --from folder docs --output x --max_per_owner 2", "or neither"),
        ("import --from folder docs --output x --duplicate_distance 40", "must be 10 or less"),
        (
            "import --from folder docs --output x --heldout_share 0.51",
            "--heldout_share must be 0.5 or less",
        ),
        ("synthetic --output x --num_examples 0", "1 or more"),
        ("synthetic --output /proc/x --num_examples 1 --workers 1", "cannot write"),
        ("synthetic --preview x.png --image_size 5", "16 to 4096"),
    ],
    "shared_ledger.py": [("show nowhere.jsonl", "nowhere.jsonl: there is no such file")],
    "study.py": [
        (
            "run studies/none.toml",
            "study studies/none.toml: No such file or directory; give a file as in studies/",
        ),
        ("run recipes/quickstart.toml", "recipes/quickstart.toml is a recipe, not a study"),
        ("run studies/tan_dpcap.toml --workers 0", "--workers must be 1 or more, not 0"),
        ("run studies/tan_dpcap.toml --nodes 2", "--nodes is for --executor slurm-array"),
        ("run", "STUDY.toml"),
        ("report --study_dir runs/studies/none", "No such file"),
    ],
}
"""What each command refuses, and words of its answer."""


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [(script, *case) for script, cases in BAD.items() for case in cases],
)
def test_what_is_refused_is_one_line_and_exit_code_2(
    script: str, arguments: str, words: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    given = arguments.replace("--output x", f"--output {tmp_path / 'x'}")
    if TINY in given:
        given += f" --run_dir {run_dir}"
    done = run_python([f"launch_scripts/{script}", *shlex.split(given)])
    lines = [line for line in done.stderr.splitlines() if not line.startswith("computing epsilon")]
    assert done.returncode == 2 and len(lines) == 1, done.stdout + done.stderr
    assert lines[0].startswith("error: ") and words in lines[0]
    assert {*tmp_path.iterdir()} <= {run_dir} and not (run_dir / "ledger.jsonl").exists()
