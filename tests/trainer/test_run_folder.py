"""Who may read a run folder, and who may train in it."""

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from privacy.step.run_folder import RunFolder
from tests.processes import Forked
from trainer.errors import ConfigError

HOLDER = """
import sys, time
from pathlib import Path
from privacy.step.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.create()
folder.lock()
print("locked", flush=True)
time.sleep(60)
"""


def test_private_is_private(tmp_path: Path) -> None:
    """Whatever the umask says, and again at every start."""
    folder = RunFolder(tmp_path / "runs" / "r")
    before = os.umask(0)
    try:
        folder.create()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    folder.private.chmod(0o755)
    folder.create()
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    assert folder.checkpoints.is_dir() and folder.evaluation.is_dir()


def test_one_trainer_at_a_time(
    start: Callable[..., Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused with exit code 2; SIGKILL of the first frees the folder."""
    monkeypatch.setattr("privacy.step.run_folder.LOCK_PATIENCE", 0.2)
    first, second = start(HOLDER, tmp_path / "run"), RunFolder(tmp_path / "run")
    first.wait_for_line("locked")
    second.create()
    with pytest.raises(ConfigError, match="in use by another trainer") as caught:
        second.lock()
    assert caught.value.exit_code == 2 and str(tmp_path) in str(caught.value)
    first.kill()
    first.wait()
    RunFolder(tmp_path / "run").lock()


def test_children_do_not_keep_the_lock(start: Callable[..., Forked], tmp_path: Path) -> None:
    """A worker process that outlives a killed trainer must not block the next start."""
    child_first = (
        "import subprocess; print(subprocess.Popen(['sleep', '30']).pid, flush=True)\nprint("
    )
    process = start(HOLDER.replace("print(", child_first), tmp_path / "run")
    process.wait_for_line("locked")
    child = int(process.stdout.read_text().split()[0])
    process.kill()
    process.wait()
    os.kill(child, 0)  # still there
    RunFolder(tmp_path / "run").lock()


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-hunter2")
    monkeypatch.setattr(sys, "argv", ["train.py", "--run_dir", "/home/hunter2-hunter2/run"])
    folder = RunFolder(tmp_path)
    folder.create()
    for name in ("first", "second"):
        folder.record_configuration(
            f'name = "{name}"\n', {"zero_optimization": {"stage": 3}}, {"free": 7}
        )
    assert (tmp_path / "config.toml").read_text() == 'name = "second"\n'
    assert json.loads((tmp_path / "ds_config.json").read_text()) == {
        "zero_optimization": {"stage": 3}
    }
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["python"].startswith("3.")
    assert isinstance(environment["modified"], bool)
    assert "free" not in environment and json.loads(
        (folder.private / "chosen.json").read_text()
    ) == {"free": 7}
    assert "hunter2" not in json.dumps(environment), (
        "environment variables and arguments hold secrets"
    )
