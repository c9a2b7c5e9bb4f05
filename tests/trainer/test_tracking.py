"""What a tracker is given, and what an offline run of Weights & Biases holds: the public stream, no clock and no machine."""

import getpass
import importlib.util
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.files import write_durably
from privacy.boundary import Private, Public, Reason
from privacy.step.folder import try_lock
from tests.test_structure import ROOT
from trainer.errors import ConfigError
from trainer.loop.metrics import PrivateMetrics, PublicMetrics
from trainer.publish import FIXED_TIME
from trainer.tracking import Tracker, replay, write_wandb

SECRET = 424242.125


class Recorder:
    """A tracker of a test."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def scalars(self, step: int, values: Mapping[str, Public[float]]) -> None:
        self.said.append((step, {name: value.value for name, value in values.items()}))

    def text(self, step: int, name: str, markdown: Public[str]) -> None:
        self.said.append((step, name, markdown.value))

    def picture(self, step: int, name: str, image_HWC: Public[np.ndarray]) -> None:
        self.said.append((step, name, image_HWC.value.shape))

    def close(self) -> None:
        self.said.append(("closed",))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a public stream, and a secret number in every other place."""
    from PIL import Image

    root = tmp_path / "run"
    (root / "private").mkdir(parents=True)
    (root / "evaluation").mkdir()
    public = PublicMetrics(root)
    for step in (1, 2, 2, 3):  # the second step was repeated after a crash
        public.scalars(step, {"privacy/epsilon": Public(step / 2, Reason.CHARGED)})
        if step == 3:
            public.scalars(step, {"heldout/loss": Public(1.5, Reason.DECLARED)})
    public.close()
    private = PrivateMetrics(root / "private")
    private.scalars(1, {"train/loss": Private(SECRET)})
    private.close()
    Image.fromarray(np.full((6, 10, 3), 7, dtype=np.uint8)).save(root / "evaluation/samples-00000003.png")
    line = {"step": 3, "loss": 1.5, "captions": [["a </pre> cat", "the cat"]]}
    (root / "evaluation/heldout.jsonl").write_text(json.dumps(line) + "\n")
    (root / "evaluation/notes.jsonl").write_text(f"{SECRET}\n")
    write_durably(root / "config.toml", 'name = "tiny"\n[train]\nnum_steps = 3\n')
    write_durably(root / "ledger.jsonl", '{"seq": 0}\n')
    return root


def test_a_tracker_is_given_the_public_stream_alone(run: Path) -> None:
    tracker: Tracker = Recorder()
    assert isinstance(tracker, Recorder) and replay(run, tracker) == 3
    assert tracker.said == [
        (1, {"privacy/epsilon": 0.5}),
        (2, {"privacy/epsilon": 1.0}),
        (3, {"privacy/epsilon": 1.5, "heldout/loss": 1.5}),
        (3, "heldout/samples", (6, 10, 3)),
        (3, "heldout/samples_text", "* 'a </pre> cat' for 'the cat'"),
        ("closed",),
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluation/heldout.jsonl", "evaluation/samples-00000003.png"])
def test_no_link_leads_a_tracker_into_private(run: Path, name: str) -> None:
    (run / name).unlink()
    (run / name).symlink_to(run / "private/metrics.jsonl")
    tracker = Recorder()
    if name == "metrics.jsonl":
        with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
            replay(run, tracker)
    else:
        replay(run, tracker)
    assert str(SECRET) not in repr(tracker.said) and "train/loss" not in repr(tracker.said)


def test_a_run_that_is_being_trained_is_refused(run: Path) -> None:
    """Whoever follows a run learns how long its steps take."""
    held = try_lock(run / "private/lock")
    assert held is not None
    with pytest.raises(ConfigError, match="is being trained"):
        replay(run, Recorder())
    os.close(held)
    replay(run, Recorder())


def test_a_missing_package_is_one_line(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[trackers\]'"):
        write_wandb(run, tmp_path / "wandb")
    assert not (tmp_path / "wandb").exists() and not list(tmp_path.glob(".wandb*"))


class StandIn:
    """wandb as far as it is called: it notes what it is told, and its folder has logs too, which say when and where."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.begun: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.seen: dict[str, str] = {}

    def Settings(self, **given: Any) -> dict[str, Any]:
        return given

    def Html(self, text: str) -> str:
        return text

    def Image(self, image_HWC: np.ndarray) -> tuple[int, ...]:
        return image_HWC.shape

    def init(self, *, settings: dict[str, Any], **given: Any) -> "StandIn":
        self.settings, self.begun, self.seen = settings, given, dict(os.environ)
        own = Path(given["dir"]) / "wandb" / "offline-run-now-here"
        for name in ("run-it.wandb", "files/media/picture.png", "logs/debug.log", "files.txt"):
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_text(name)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None: ...

    def teardown(self) -> None: ...


def test_an_offline_run_is_told_the_public_stream_and_nothing_of_the_machine(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable of wandb reaches it, its clock is the step's number, its logs stay behind; another upload has the same id."""
    monkeypatch.setenv("WANDB_API_KEY", "telltale")
    before, made = dict(os.environ), []
    for target in (tmp_path / "offline", tmp_path / "again"):
        monkeypatch.setitem(sys.modules, "wandb", wandb := StandIn())
        assert write_wandb(run, target) == 3 and dict(os.environ) == before
        made.append(wandb)
    wandb = made[0]
    assert "telltale" not in wandb.seen.values() and wandb.seen["WANDB_ERROR_REPORTING"] == "false"
    off = {"mode": "offline", "console": "off", "disable_git": True, "host": "", "x_disable_machine_info": True}
    assert wandb.settings.items() >= off.items() and not wandb.settings["x_save_requirements"]
    assert wandb.logged == [
        (1, {"privacy/epsilon": 0.5, "_timestamp": 1.0}),
        (2, {"privacy/epsilon": 1.0, "_timestamp": 2.0}),
        (3, {"privacy/epsilon": 1.5, "heldout/loss": 1.5, "_timestamp": 3.0}),
        (3, {"heldout/samples": (6, 10, 3), "_timestamp": 3.0}),
        (3, {"heldout/samples_text": wandb.logged[-1][1]["heldout/samples_text"], "_timestamp": 3.0}),
    ]
    assert "a &lt;/pre&gt; cat" in wandb.logged[-1][1]["heldout/samples_text"]  # a caption is no markup
    target = tmp_path / "offline"
    kept = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert kept == {"run-it.wandb", "files/media/picture.png"} and not Path(wandb.begun["dir"]).exists()
    assert {int(path.stat().st_mtime) for path in target.rglob("*")} == {FIXED_TIME}
    assert wandb.begun["id"] == made[1].begun["id"] and wandb.begun["config"]["name"] == "tiny"


def records(path: Path) -> list[Any]:
    """The records of a .wandb file: a header of 7 bytes, then blocks of 32 KiB as LevelDB's log has them."""
    from wandb.proto import wandb_internal_pb2

    raw, place, part, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(raw):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", raw[place : place + 7])
        part += raw[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_an_offline_run_holds_the_public_stream_and_nothing_of_the_machine(run: Path, tmp_path: Path) -> None:
    """Written by a program with telling variables in its environment; read record by record."""
    settings = {"WANDB_NOTES": "telltale", "WANDB_TAGS": "telltale", "WANDB_MODE": "online", "WANDB_CONSOLE": "wrap"}
    settings |= {
        "WANDB_HOST": "telltale",
        "WANDB_USERNAME": "telltale",
        "WANDB_API_KEY": "t" * 40,
        "WANDB_DIR": "telltale",
    }
    target, began = tmp_path / "offline", time.time()
    script = "import sys; from pathlib import Path; from trainer.tracking import write_wandb\n"
    script += "print('telltale'); print(write_wandb(Path(sys.argv[1]), Path(sys.argv[2])))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(run), str(target)],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "telltale\n3\n", done.stderr
    files = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    (log,) = (name for name in files if name.endswith(".wandb"))
    assert {name.split("/")[0] for name in files} == {log, "files"}
    assert {name.split("/")[1] for name in files if name != log} <= {"media", "wandb-summary.json", "config.yaml"}
    whole = b"\n".join([*(name.encode() for name in files), *files.values()])
    machine = [socket.gethostname(), getpass.getuser(), sys.executable, str(ROOT), str(tmp_path), platform.release()]
    for word in ["telltale", "t" * 40, str(SECRET), "train/loss", *machine]:
        assert word.encode() not in whole, word
    found = records(target / log)
    history = [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item}
        for r in found
        if r.HasField("history")
    ]
    assert [(h["_step"], h["_timestamp"], h["privacy/epsilon"]) for h in history] == [
        (1, 1, 0.5),
        (2, 2, 1.0),
        (3, 3, 1.5),
    ]
    own = {"_step", "_timestamp", "_runtime"}
    assert {key for h in history for key in h if not key.startswith("heldout/samples")} - own == {
        "privacy/epsilon",
        "heldout/loss",
    }
    # When it was written, which is after the run; wandb's own clock cannot be set.
    (start,) = (r.run for r in found if r.HasField("run"))
    assert (
        start.start_time.seconds >= int(began)
        and not start.host
        and not start.HasField("git")
        and start.display_name == "tiny"
    )
    assert not any(r.HasField(kind) for r in found for kind in ("stats", "output", "output_raw", "environment"))
