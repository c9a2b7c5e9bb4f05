"""Overrides may stand before, between and after the options of every command that takes them."""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch_scripts import plan, quickstart, train

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
        at = {place: [o for o, p in zip(OVERRIDES, places, strict=True) if p == place] for place in range(3)}
        more = ["--recipe", "r.toml"] if command != "quickstart" else ["--run_dir", "r"]
        arguments = [*at[0], *OPTIONS, *at[1], *more, *at[2]]
        found = COMMANDS[command](arguments)
        assert sorted(found.overrides) == sorted(OVERRIDES), arguments
        assert str(found.ds_config) == "machine.json"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_between_overrides_is_one_line(command: str) -> None:
    from trainer.errors import ConfigError

    with pytest.raises(ConfigError, match=r"unrecognized arguments: --nosuch"):
        COMMANDS[command]([OVERRIDES[0], *OPTIONS, "--nosuch", OVERRIDES[1]])


ROOT = Path(__file__).resolve().parents[2]
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
    return {name: (folder / str(n)).read_text().splitlines() for n, name in enumerate([*SCRIPTS, "wrong", *MISSING])}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_imports_nothing_that_takes_seconds(script: str, said: dict[str, list[str]]) -> None:
    *lines, ending = said[script]
    assert ending == "exit code 0; imported: set()" and script in "\n".join(lines)


def test_a_wrong_recipe_key_is_answered_before_anything_heavy_is_imported(said: dict[str, list[str]]) -> None:
    *lines, ending = said["wrong"]
    assert ending == "exit code 2; imported: set()" and "did you mean num_steps?" in "\n".join(lines)


@pytest.mark.parametrize("command", MISSING)
def test_a_command_looks_for_its_folder_first(command: str, said: dict[str, list[str]]) -> None:
    """One line, before it says what it does, and before anything heavy is imported."""
    line, ending = said[command]
    assert ending == "exit code 2; imported: set()" and line.startswith("error: ")
    assert ("docs" if " docs" in command and "nowhere" not in command else "runs/nowhere") in line
