"""The run folder: what lies where, who may read it, and one trainer at a time."""

import contextlib
import fcntl
import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import verify
from ..errors import ConfigError, PrivacyStateRefused, placed
from ..files.durable import make_directory, replace_file
from ..ledger.members import FILE

PACKAGES = (
    "torch",
    "deepspeed",
    "dp-accounting",
    "numpy",
    "cryptography",
    "tokenizers",
    "pillow",
    "pydantic",
)
VERIFIER = Path(verify.__file__)
"""Rechecks a published folder without the rest of the project, so every folder holds it."""
FILES = (
    *(
        "ledger.jsonl",
        "metrics.jsonl",
        "config.toml",
        "ds_config.json",
        "environment.json",
        VERIFIER.name,
        "STOP",
    ),
    *(
        "checkpoints/LATEST",
        "evaluation/*.*",
        "behind/*",
        "private/index/*",
        "private/heldout-index/*",
    ),
    *(
        f"private/{name}"
        for name in ("lock", "visible", "sampling.key", "sampling.key.staged", FILE)
    ),
    *(
        f"private/{name}"
        for name in ("metrics.jsonl", "status.*", "chosen.json", "heldout.jsonl", "*.png")
    ),
)
FOLDERS = (
    *(
        "checkpoints",
        "checkpoints/step-*",
        "checkpoints/.step-*",
        "evaluation",
        "tensorboard",
        "behind",
        "private",
    ),
    *("private/index", "private/heldout-index", "private/tensorboard", "private/profile"),
)
"""Names that a start, or a step, reads or writes: patterns in the run folder."""
LOCK_PATIENCE = 5.0
"""Seconds that a start waits for a trainer that is just ending."""


class RunFolder:
    """Paths of one run. `create` makes them; only rank 0 calls it, and `lock` before anything else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private = root / "private"
        self.ledger = root / "ledger.jsonl"
        self.key = self.private / "sampling.key"
        self.members = self.private / FILE
        self.index = self.private / "index"
        self.checkpoints = root / "checkpoints"
        self.evaluation = root / "evaluation"
        self.stop = root / "STOP"
        self.status = self.private / "status.json"
        self._lock: int | None = None

    def create(self) -> None:
        """Makes the folders; `private` is for the owner alone."""
        try:
            for folder in (self.root, self.checkpoints, self.evaluation):
                make_directory(folder)
            make_directory(self.private, 0o700)
            self.private.chmod(0o700)
        except OSError as error:
            reason = "it is a file; name a folder" if self.root.is_file() else error.strerror
            raise ConfigError(f"run folder {self.root}: {reason}") from error

    def lock(self) -> None:
        """Takes the run folder for this process until it ends, however it ends.

        A killed process gives its lock back only after its memory, which takes the kernel some time, and a scheduler may
        start the run again within that time; so this waits a few seconds before it refuses.

        Raises:
            ConfigError: another trainer has it.
        """
        deadline = time.monotonic() + LOCK_PATIENCE
        while (lock := try_lock(self.private / "lock")) is None:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"run folder {self.root} is in use by another trainer; wait for it or take another run folder"
                )
            time.sleep(0.1)
        self._lock = lock

    def release(self) -> None:
        """Gives the lock back before the process ends."""
        if self._lock is not None:
            with contextlib.suppress(
                OSError
            ):  # somebody else has closed it, and the lock went with it
                os.close(self._lock)
            self._lock = None

    def take(self) -> None:
        """Enters and locks the folder, in which nothing else changes until `begin`.

        Raises:
            ConfigError, PrivacyStateRefused: as `enter`; ConfigError also where another trainer has it, or something of another
                kind has the name of a file or folder of a run.
        """
        self.require_kinds()
        self.enter()
        self.lock()

    def require_kinds(self) -> None:
        """Looks at what a run opens, before anything is opened: a pipe would block, and a folder would end the run in its middle.

        Raises:
            ConfigError: a file is no regular file, or a folder none; a link counts as what it leads to.
            PrivacyStateRefused: the same of ledger, sampling key or record of attempts.
        """
        for patterns, kind, fits in (
            (FILES, "file", Path.is_file),
            (FOLDERS, "folder", Path.is_dir),
        ):
            for pattern in patterns:
                for path in (
                    sorted(self.root.glob(pattern)) if "*" in pattern else [self.root / pattern]
                ):
                    if os.path.lexists(path) and not fits(path):
                        is_privacy_state = path in (self.ledger, self.key, self.members)
                        error = PrivacyStateRefused if is_privacy_state else ConfigError
                        raise error(
                            f"{path}: is no {kind}, and a run needs a {kind} of this name: move it away"
                        )
        for path in self.checkpoints.glob("step-*"):
            if not path.name.removeprefix("step-").isdigit():
                raise ConfigError(f"{path}: has no name of a checkpoint, step-NUMBER: move it away")

    def enter(self) -> None:
        """Makes a folder that is new.

        Raises:
            ConfigError: the folder cannot be made.
            PrivacyStateRefused: see `require_whole`.
        """
        self.require_whole()
        if (
            not self.ledger.exists()
        ):  # also after a crash in here, which may have left names that are not durable
            self.create()

    def require_whole(self) -> None:
        """Refuses a folder that has lost what nothing can make again.

        Raises:
            PrivacyStateRefused: the sampling key is gone, or a checkpoint stands without its ledger.
        """
        if self.ledger.exists() and not any(
            self.private.glob(f"{self.key.name}*")
        ):  # it may be staged
            lost = self.key if self.private.is_dir() else self.private
            raise PrivacyStateRefused(
                f"{self.ledger} has lost {lost}, without which its coins are unknown: restore it, or take another run folder"
            )
        if not self.ledger.exists() and any(self.checkpoints.glob("step-*")):
            raise PrivacyStateRefused(
                f"{self.ledger}: a checkpoint without its ledger; what it spent is unknown"
            )

    def begin(self) -> None:
        """What a start does to the folder once nothing refuses it: makes what is missing and removes an answered STOP."""
        self.create()
        if self._has_stopped_since():
            self.stop.unlink(missing_ok=True)

    def is_asked_to_stop(self) -> bool:
        """Whether the file STOP is there and no start has stopped since it was made."""
        return self.stop.exists() and not self._has_stopped_since()

    def _has_stopped_since(self) -> bool:
        """Whether the file STOP is there and a start has stopped since, which no torchrun has started again."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            return False
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            has_stopped = json.loads(self.status.read_text())["state"] == "stopped"
            return has_stopped and self.stop.stat().st_mtime_ns < self.status.stat().st_mtime_ns
        return False

    def record_configuration(
        self,
        config_toml: str,
        ds_config: Mapping[str, Any] | None,
        chosen: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes what this start resolved to. The files of earlier starts are overwritten; the ledger remembers them.

        Args:
            ds_config: the machine's settings, where a run has a file of them.
            chosen: what the program decided by itself, with its reasons. Private, since free memory is among them.
        """
        texts = {
            self.root / VERIFIER.name: VERIFIER.read_text(),
            self.root / "config.toml": config_toml,
            self.root / "environment.json": json.dumps(environment(), indent=1) + "\n",
            self.private / "chosen.json": json.dumps(dict(chosen or {}), indent=1) + "\n",
        }
        if ds_config is not None:
            texts[self.root / "ds_config.json"] = json.dumps(dict(ds_config), indent=1) + "\n"
        for path, text in texts.items():
            replace_file(path, text.encode())


def try_lock(path: Path) -> int | None:
    """Locks a file, which is made where there is none; None where another process has the lock.

    Returns:
        A descriptor: closing it, or the end of the process, gives the lock back.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with placed(path):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@functools.cache  # a process keeps the code that it has imported
def environment() -> Mapping[str, Any]:
    """Returns versions and the commit of the code. The file is public: arguments, paths and names of hosts and users stay out."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # the library needs less than the trainer
            packages[name] = version(name)
    return {
        "python": platform.python_version(),
        "packages": packages,
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str:
    """The output of a git command, which is empty outside of a checkout: a copied source tree is no error.

    The library may be installed inside of a checkout of something else, whose commit says nothing.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
