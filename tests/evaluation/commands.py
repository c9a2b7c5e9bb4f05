"""Runs evaluate.py in this process: parsing, command, record."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON object that it prints; an error comes as the exception that the script would print in one line."""
    monkeypatch.syspath_prepend(str(ROOT / "launch_scripts"))
    import evaluate as script

    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments, "--json"])
    assert script.main() == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return dict(json.loads(out))
