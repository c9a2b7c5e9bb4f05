"""export.py, run in this process."""

import re
import sys
from collections.abc import Callable

import pytest

from launch_scripts import export as script
from trainer.config.cli import run_command

Run = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs export.py; returns what it printed, or the one line of its refusal."""

    def run(*arguments: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_command(script.main)
        said = capsys.readouterr()
        assert ended.value.code == code, said.err
        if code:
            line = re.sub(
                r"(?m)^reading and writing weights.*\n", "", said.err
            )  # said on a slow machine
            assert said.out == "" and line.startswith("error: ") and line.count("\n") == 1
            return line
        return said.out

    return run
