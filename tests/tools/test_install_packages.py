"""What tests/install_packages.sh says where it cannot install, with stand-ins for apt-get and the user."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT


@pytest.mark.parametrize(
    ("user", "ends", "code", "said"),
    [
        (0, 100, 1, "could not be installed:"),  # as where another apt-get holds the lock
        (0, 0, 0, ""),
        (1000, 0, 0, "missing and installable by root with apt-get only:"),
    ],
)
def test_its_exit_code(tmp_path: Path, user: int, ends: int, code: int, said: str) -> None:
    for name, body in {"id": f"echo {user}", "apt-get": f"exit {ends}"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("rm", "chmod"):  # nothing else is in the PATH, so that everything is missing
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    if user == 0 and not os.access("/usr/sbin", os.W_OK):
        pytest.skip("the script keeps daemons from starting, which needs root")
    command = ["/bin/sh", str(ROOT / "tests/install_packages.sh"), "hosts"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == code and done.stderr.startswith(said), done.stderr
