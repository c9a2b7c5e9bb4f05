"""The Dockerfile, line by line, in a root file system that debootstrap makes; the Apptainer definition agrees with it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tools.test_delivery import ROOT, instructions

MIRROR = "http://deb.debian.org/debian"


def test_the_apptainer_definition_installs_what_the_image_has() -> None:
    runs = [re.sub(r"\s+", " ", rest) for word, rest in instructions() if word == "RUN"]
    text = re.sub(r"\s*\\?\n\s*", " ", (ROOT / "launch_scripts/cluster/apptainer.def").read_text())
    packages = re.search(r"--no-install-recommends (.*?) && rm", runs[0])
    assert packages is not None and f"--no-install-recommends {packages[1]} && rm" in text
    assert "make venv" in text and "make quickstart" in text


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("debootstrap") is None, reason="needs root and debootstrap"
)
def test_every_run_line_of_the_image_works_on_a_bare_system() -> None:
    """What is left out of the Dockerfile is its base image, which debootstrap stands in for. The image then trains."""
    with tempfile.TemporaryDirectory(
        dir="/var/tmp"
    ) as folder:  # the tests' own may lie in memory, without devices
        follow(Path(folder) / "root")


def follow(new: Path) -> None:
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", new, MIRROR],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        pytest.skip(f"debootstrap: {made.stdout[-300:]}")
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", new / "etc" / name)
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    # Where this machine has packages from, an image finds them, too.
    found = re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    variables = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found}
    bound = ["/proc", "/dev"]
    for path in {
        path
        for value in variables.values()
        for path in re.findall(r"(?:^|file://)(/[^\s']+)", value)
    }:
        if Path(path).is_file():
            shutil.copy(path, new / "srv")
            variables = {
                n: value.replace(path, f"/srv/{Path(path).name}") for n, value in variables.items()
            }
        elif Path(path).is_dir():
            # The files of an index of packages lie beside it.
            bound.append(str(Path(path).parent) if Path(path).name == "simple" else path)
    user, work, variables = (
        "0",
        "/",
        {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", **variables},
    )

    def run(command: str) -> None:
        """In the new root, whose mounts end with the command."""
        mounts = [f"mkdir -p {new}{path}; mount --rbind {path} {new}{path}" for path in bound]
        words = [
            f"--userspec={user}",
            str(new),
            "env",
            "-i",
            *(f"{n}={value}" for n, value in variables.items()),
        ]
        enter = shlex.join(["chroot", *words, "sh", "-c", f"cd {work} && {command}"])
        script = "; ".join(["set -e", *mounts, f"exec {enter}"])
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for word, rest in instructions():
        if word == "RUN":
            run(rest)
        elif word == "USER":
            user = rest
        elif word == "WORKDIR":
            work = rest
        elif word == "ENV":
            variables |= (
                {"PATH": f"/project/.venv/bin:{variables['PATH']}"} if "PATH" in rest else {}
            )
        elif word == "COPY":
            *names, _ = [name for name in rest.split() if not name.startswith("--")]
            for name in tracked.split("\0")[:-1] if names == ["."] else names:
                (new / "project" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, new / "project" / name)
            subprocess.run(["chown", "-R", "1000:1000", new / "project"], check=True)
        elif word == "CMD":
            assert json.loads(rest) == ["make", "quickstart"]
    run(
        "python launch_scripts/train.py --ds_config ds_configs/zero1.json --recipe recipes/tiny.toml --engine local"
    )
    run("python runs/tiny/verify.py runs/tiny")
