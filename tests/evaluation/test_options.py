"""Commands as functions: each can be called from Python, prints and records nothing, and computes what the command line does."""

from pathlib import Path
from typing import Any

import pytest

from evaluation.command_options import COMMANDS, Command
from tests.evaluation.conftest import Evaluate
from tests.evaluation.support import save_pictures

Values = dict[str, Any]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


@pytest.fixture
def values(run_dir: Path, pictures: Path, tmp_path: Path) -> dict[str, Values]:
    """Options with which every command is short."""
    arrays, folder = save_pictures(tmp_path, 12), f"folder:{pictures}"
    probe = {"train": arrays, "test": arrays}
    short: dict[str, Values] = {
        "linear-probe": {**probe, "epochs": 2, "num_folds": 2},
        "few-shot": {**probe, "shots": (1,), "num_splits": 2},
        "private-head": {**probe, "method": "dp-ls", "target_epsilon": 1.0, "num_classes": 3},
        "dense": {
            "task": "segmentation",
            "train": "synthetic:1:2",
            "test": "synthetic:2:2",
            "epochs": 1,
        },
        "zero-shot": {"data": folder},
        "aro": {"synthetic": "shapes", "synthetic_tests": 1},
        "captions": {"data": folder, "max_tokens": 2},
    }
    return {name: {"checkpoint": run_dir, **given} for name, given in short.items()}


def words(given: Values) -> list[str]:
    """The same options on a command line."""
    return [
        word
        for name, value in given.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, tuple) else (value,)))
    ]


@each_command
def test_a_command_is_a_function(
    command: Command,
    values: dict[str, Values],
    tmp_path: Path,
    run: Evaluate,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = values[command.name]
    options = command.options(**given, output=tmp_path / "python")
    before = options.model_copy(deep=True)
    results = command.run(options)
    assert results is not None and results.name == command.name and options == before
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.rglob("evaluation")), "a record is the business of `publish`"
    record = run(command.name, *words(given), "--output", str(tmp_path / "shell"))
    if command.name == "private-head":  # its noise is drawn anew
        assert record["scalars"].keys() == results.scalars.keys()
    else:
        assert record["scalars"] == pytest.approx(dict(results.scalars), nan_ok=True)
    assert record["data_is_public"] == options.results_are_public == (command.name == "aro")
