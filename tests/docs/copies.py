"""A copy of the project to try commands in."""

import shutil
from pathlib import Path

from tests.docs.pages import ROOT, project_files


def copy_project(folder: Path) -> None:
    """Without what runs left behind, and with the environment as it is."""
    for name in project_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
