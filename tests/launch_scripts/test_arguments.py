"""Overrides may stand before, between and after the options of every command that takes them."""

import argparse
import itertools
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
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    code = end.code
heavy = {"torch", "scipy", "dp_accounting", "deepspeed", "transformers", "matplotlib", "datasets"} & set(sys.modules)
sys.exit(f"exit code {code}; imported: {heavy}")
"""


def _ends_without_heavy_imports(command: list[str], code: int) -> str:
    done = subprocess.run([sys.executable, "-c", RUN_AND_LIST, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"exit code {code}; imported: set()"
    return done.stdout + done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "launch_scripts").glob("*.py")))
def test_help_imports_nothing_that_takes_seconds(script: str) -> None:
    assert script in _ends_without_heavy_imports([f"launch_scripts/{script}", "--help"], 0)


def test_a_wrong_recipe_key_is_answered_before_anything_heavy_is_imported() -> None:
    train = ["launch_scripts/train.py", "--ds_config", "ds_configs/zero3.json", "train.num_stepz=4"]
    assert "did you mean num_steps?" in _ends_without_heavy_imports(train, 2)
