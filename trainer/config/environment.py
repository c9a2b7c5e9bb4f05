"""Checks that a script runs where this project is installed; imports Python's own modules only."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def require_packages() -> None:
    """Ends a script (exit code 2) if its Python lacks the project's packages.

    Call it before the script imports one of them.
    """
    if importlib.util.find_spec("pydantic") is None:
        print(
            f"error: {sys.executable} has none of this project's packages: in {ROOT} "
            "run `make venv` once, then `source .venv/bin/activate`",
            file=sys.stderr,
        )
        sys.exit(2)
