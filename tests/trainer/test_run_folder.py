"""Who may read a run folder, and who may train in it."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import sys, time
from pathlib import Path
from trainer.run.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.create()
folder.lock()
print("locked", flush=True)
time.sleep(60)
"""


def hold(root: Path) -> "subprocess.Popen[str]":
    """Another process that has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


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


def test_secrets_lie_in_private(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.key.parent == folder.private and folder.index.parent == folder.private


def test_no_place_for_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run folder .*file"):
        RunFolder(tmp_path / "file").create()


def test_one_trainer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused with exit code 2; SIGKILL of the first frees the folder."""
    monkeypatch.setattr("trainer.run.folder.LOCK_PATIENCE", 0.2)
    first = hold(tmp_path)
    try:
        second = RunFolder(tmp_path)
        second.create()
        with pytest.raises(ConfigError, match="in use by another trainer") as caught:
            second.lock()
        assert caught.value.exit_code == 2 and str(tmp_path) in str(caught.value)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    RunFolder(tmp_path).lock()


def test_a_lock_that_is_about_to_be_free(tmp_path: Path) -> None:
    """A process that ends keeps its lock until its memory is freed; a start within that time waits."""
    first = hold(tmp_path)
    threading.Timer(0.5, first.kill).start()
    second = RunFolder(tmp_path)
    second.create()
    second.lock()
    assert first.wait() == -signal.SIGKILL


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker process that outlives a killed trainer must not block the next start."""
    code = HOLDER.replace(
        'print("locked", flush=True)',
        "import subprocess; child = subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL)\n"
        'print("locked", flush=True); print(child.pid, flush=True)',
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        os.kill(child, 0)  # still there
        RunFolder(tmp_path).lock()
    finally:
        os.kill(child, signal.SIGKILL)


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2-hunter2")
    folder = RunFolder(tmp_path)
    folder.create()
    for name in ("first", "second"):
        folder.record_configuration(f'name = "{name}"\n', {"zero_optimization": {"stage": 3}}, {"free": 7})
    assert (tmp_path / "config.toml").read_text() == 'name = "second"\n'
    assert json.loads((tmp_path / "ds_config.json").read_text()) == {"zero_optimization": {"stage": 3}}
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["python"].startswith("3.")
    assert isinstance(environment["modified"], bool)
    assert "free" not in environment and json.loads((folder.private / "chosen.json").read_text()) == {"free": 7}
    assert "hunter2" not in json.dumps(environment), "environment variables hold secrets"
