"""The public stream of a run for experiment trackers.

A tracker never runs during the training. It is fed afterwards, from the files that may be published (`trainer/publish.py`), so
it can see neither `private/` nor a clock: a service that took values while a run goes on would learn how long every step took,
and the time that one example takes to decode is in that (contract 12).
"""

import hashlib
import html
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from privacy.boundary import Public, Reason
from privacy.files.public import open_public, parse_lines, read_public, survey, without_folders
from privacy.files.toml_text import parse_toml
from privacy.step.folder import try_lock
from trainer.errors import ConfigError
from trainer.publish import FIXED_TIME
from trainer.weights.new_folder import new_folder

PROJECT = "differentially-private-training"
"""The project's name at the service, unless `wandb sync --project` gives another."""


class Tracker(Protocol):
    """What takes the public stream; `PublicMetrics` is one. By type it can be handed nothing else."""

    def scalars(self, step: int, values: Mapping[str, Public[float]]) -> None:
        """Values of a step; names are like `privacy/epsilon`."""
        ...

    def text(self, step: int, name: str, markdown: Public[str]) -> None: ...

    def picture(self, step: int, name: str, image_HWC: Public[np.ndarray]) -> None: ...

    def close(self) -> None: ...


def replay(run_dir: Path, tracker: Tracker) -> int:
    """Hands the public stream of a run to `tracker`, step by step, and closes it; returns the number of steps.

    A step that was repeated after a crash counts as it was written last.

    Raises:
        ConfigError: there is no public stream, or the run is being trained.
    """
    lock = run_dir / "private/lock"
    if lock.is_file():  # a published folder has none
        held = try_lock(lock)
        if held is None:
            raise ConfigError(
                f"{run_dir} is being trained: how far it is tells how long its steps take; wait until it stands still"
            )
        os.close(held)
    names = survey(run_dir).public
    if "metrics.jsonl" not in names:
        raise ConfigError(f"{run_dir}: holds no metrics.jsonl, which is the public stream of a run; name a run folder")
    steps: dict[int, dict[str, float]] = {}
    for line in parse_lines(read_public(run_dir, "metrics.jsonl").decode()):
        steps.setdefault(line.pop("step"), {}).update(line)
    captions: dict[int, list[list[str]]] = {}
    if "evaluation/heldout.jsonl" in names:
        for line in parse_lines(read_public(run_dir, "evaluation/heldout.jsonl").decode()):
            captions[line["step"]] = line["captions"]
    for step, values in sorted(steps.items()):
        tracker.scalars(step, {name: Public(value, Reason.PUBLISHED) for name, value in values.items()})
        picture = f"evaluation/samples-{step:08d}.png"
        if picture in names:
            with open_public(run_dir, picture) as file:
                tracker.picture(step, "heldout/samples", Public(np.asarray(Image.open(file)), Reason.PUBLISHED))
        if captions.get(step):
            lines = "\n".join(f"* {generated!r} for {reference!r}" for generated, reference in captions[step])
            tracker.text(step, "heldout/samples_text", Public(lines, Reason.PUBLISHED))
    tracker.close()
    return len(steps)


class WandbRun:
    """An offline run of Weights & Biases in a folder of its own, which `wandb sync FOLDER` uploads.

    Everything that wandb gathers by itself is off: system metrics, the console, git and code, installed packages, the host, the
    user, error reports. Its clock shows the step's number; the run's start is the time at which this is written. Variables
    WANDB_* and settings files of the machine are not read.

    Args:
        folder: takes `run-ID.wandb` and `files/`; wandb's own logs, which say when and where, stay behind.
        identity: the run's id, so that another upload replaces the first.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, folder: Path, *, project: str, name: str, identity: str, config: Mapping[str, Any]) -> None:
        self._folder = folder
        self._work = Path(tempfile.mkdtemp(prefix="wandb-"))
        with _nothing_of_the_machine(self._work):
            try:
                import wandb
            except ImportError as error:
                shutil.rmtree(self._work)
                raise ConfigError("--wandb needs wandb: pip install '.[trackers]'") from error

            self._wandb: Any = wandb
            settings = wandb.Settings(
                mode="offline", console="off", disable_git=True, disable_code=True, save_code=False, silent=True,
                disable_job_creation=True, host="", username="", email="", program="", program_relpath="",
                x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
                root_dir=str(self._work),
            )  # fmt: skip
            self._run: Any = wandb.init(
                project=project, name=name, id=identity, config=dict(config), dir=str(self._work), settings=settings
            )

    def scalars(self, step: int, values: Mapping[str, Public[float]]) -> None:
        self._log(step, {name: value.value for name, value in values.items()})

    def text(self, step: int, name: str, markdown: Public[str]) -> None:
        self._log(step, {name: self._wandb.Html(f"<pre>{html.escape(markdown.value)}</pre>")})

    def picture(self, step: int, name: str, image_HWC: Public[np.ndarray]) -> None:
        self._log(step, {name: self._wandb.Image(image_HWC.value)})

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log({**values, "_timestamp": float(step)}, step=step)

    def close(self) -> None:
        with _nothing_of_the_machine(self._work):
            self._run.finish()
            self._wandb.teardown()
        (found,) = self._work.glob("wandb/offline-run-*")
        for path in sorted(found.rglob("*")):
            name = path.relative_to(found)
            if path.is_file() and (name.suffix == ".wandb" or name.parts[0] == "files"):
                copy = self._folder / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
        shutil.rmtree(self._work)


@contextmanager
def _nothing_of_the_machine(home: Path) -> Iterator[None]:
    """Hides WANDB_* variables and wandb's settings files, and turns its error reports off, for as long as it lasts."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("WANDB_"):
            del os.environ[name]
    os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_CONFIG_DIR": str(home), "WANDB_CACHE_DIR": str(home)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def write_wandb(run_dir: Path, target: Path) -> int:
    """Writes the public stream of a run as an offline run of Weights & Biases into the new folder `target`.

    Returns:
        The number of steps.

    Raises:
        ConfigError: `target` is not new, there is no such run, or wandb is not installed.
    """
    try:
        header = read_public(run_dir, "ledger.jsonl").split(b"\n")[0]
        config = parse_toml(without_folders(read_public(run_dir, "config.toml").decode()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir} is no run folder with ledger.jsonl and config.toml: {error}") from error
    identity, name = hashlib.sha256(header).hexdigest()[:16], str(config.get("name", "run"))
    with new_folder(target) as folder:
        count = replay(run_dir, WandbRun(folder, project=PROJECT, name=name, identity=identity, config=config))
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (FIXED_TIME, FIXED_TIME))
    return count
