"""export.py, run in this process."""

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
            assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
            return said.err
        return said.out

    return run
