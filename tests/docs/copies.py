"""A copy of the project to try commands in."""

import shutil
from pathlib import Path

from tests.docs.pages import ROOT, tracked


def copy_project(folder: Path) -> None:
    """What is under version control, or could be, and the environment as it is."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
