"""The run folder: its files, who may read them, and one trainer at a time."""

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
from ..ledger.attempts import FILE

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
    "ledger.jsonl",
    "metrics.jsonl",
    "config.toml",
    "ds_config.json",
    "environment.json",
    VERIFIER.name,
    "STOP",
    "checkpoints/LATEST",
    "evaluation/*.*",
    "behind/*",
    "private/index/*",
    "private/heldout-index/*",
    "private/lock",
    "private/visible",
    "private/sampling.key",
    "private/sampling.key.staged",
    f"private/{FILE}",
    "private/metrics.jsonl",
    "private/status.*",
    "private/chosen.json",
    "private/heldout.jsonl",
    "private/*.png",
)
"""Files that a start, or a step, reads or writes: patterns in the run folder."""
FOLDERS = (
    "checkpoints",
    "checkpoints/step-*",
    "checkpoints/.step-*",
    "evaluation",
    "tensorboard",
    "behind",
    "private",
    "private/index",
    "private/heldout-index",
    "private/tensorboard",
    "private/profile",
)
"""Folders that a start, or a step, reads or writes: patterns in the run folder."""
LOCK_PATIENCE = 5.0
"""Seconds that a start waits for a trainer that is just ending."""


class RunFolder:
    """Holds the paths of one run.

    `create` makes them; only rank 0 calls it, and calls `lock` before anything else.
    """

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

        A killed process gives its lock back only after its memory, which takes the kernel some
        time, and a scheduler may start the run again within that time; so this waits a few seconds
        before it refuses.

        Raises:
            ConfigError: another trainer has it.
        """
        deadline = time.monotonic() + LOCK_PATIENCE
        path = self.private / "lock"
        lock = try_lock(path)
        while lock is None:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"run folder {self.root} is in use by another trainer; wait for it or take "
                    "another run folder"
                )
            time.sleep(0.1)
            lock = try_lock(path)
        self._lock = lock

    def release(self) -> None:
        """Gives the lock back before the process ends."""
        if self._lock is not None:
            # The lock is gone already if other code has closed the descriptor.
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None

    def take(self) -> None:
        """Enters the folder and locks it; the folder changes no further until `begin`.

        Raises:
            ConfigError: the folder cannot be made, another trainer has it, or a file or folder has
                a name that the run needs for the other kind.
            PrivacyStateRefused: see `require_kinds` and `require_whole`.
        """
        self.require_kinds()
        self.enter()
        self.lock()

    def require_kinds(self) -> None:
        """Refuses files where a run needs folders, and the reverse, before anything is opened.

        Opening a pipe would block, and a folder would end the run in its middle.

        Raises:
            ConfigError: a path is not a regular file, or not a folder; a link counts as its target.
            PrivacyStateRefused: the same of ledger, sampling key or record of attempts.
        """
        for patterns, kind, is_of_kind in (
            (FILES, "file", Path.is_file),
            (FOLDERS, "folder", Path.is_dir),
        ):
            for pattern in patterns:
                has_wildcard = "*" in pattern
                paths = sorted(self.root.glob(pattern)) if has_wildcard else [self.root / pattern]
                for path in paths:
                    if not os.path.lexists(path) or is_of_kind(path):
                        continue
                    is_privacy_state = path in (self.ledger, self.key, self.members)
                    error = PrivacyStateRefused if is_privacy_state else ConfigError
                    raise error(
                        f"{path}: is not a {kind}, and a run needs a {kind} of this name: move it "
                        "away"
                    )
        for path in self.checkpoints.glob("step-*"):
            if not path.name.removeprefix("step-").isdigit():
                raise ConfigError(
                    f"{path}: is not named as a checkpoint, step-NUMBER: move it away"
                )

    def enter(self) -> None:
        """Makes a folder that is new.

        Raises:
            ConfigError: the folder cannot be made.
            PrivacyStateRefused: see `require_whole`.
        """
        self.require_whole()
        # A crash in `create` may have left names that are not durable, so the ledger decides.
        if not self.ledger.exists():
            self.create()

    def require_whole(self) -> None:
        """Refuses a folder that has lost a file which the project cannot make again.

        Raises:
            PrivacyStateRefused: the sampling key is missing, or a checkpoint has no ledger.
        """
        # The pattern matches a staged key, too.
        has_key = any(self.private.glob(f"{self.key.name}*"))
        if self.ledger.exists() and not has_key:
            lost_path = self.key if self.private.is_dir() else self.private
            raise PrivacyStateRefused(
                f"{self.ledger} has lost {lost_path}, without which its coins are unknown: restore "
                "it, or take another run folder"
            )
        if not self.ledger.exists() and any(self.checkpoints.glob("step-*")):
            raise PrivacyStateRefused(
                f"{self.ledger}: a checkpoint without its ledger; what it spent is unknown"
            )

    def begin(self) -> None:
        """Makes missing folders and removes an answered STOP, once no check refuses the start."""
        self.create()
        if self._has_stopped_since():
            self.stop.unlink(missing_ok=True)

    def is_asked_to_stop(self) -> bool:
        """Returns whether the file STOP exists and no start has stopped since it was made."""
        return self.stop.exists() and not self._has_stopped_since()

    def _has_stopped_since(self) -> bool:
        """Returns whether a start has stopped since the file STOP was made.

        A restart by torchrun obeys the file again: torchrun starts ranks anew after any exit code.
        """
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
        """Writes the resolved settings of this start over those of earlier starts.

        The ledger remembers the earlier ones.

        Args:
            ds_config: the machine's settings, where a run has a file of them.
            chosen: the program's own decisions with their reasons. Private, since free memory is
                among them.
        """
        environment_json = json.dumps(environment(), indent=1) + "\n"
        chosen_json = json.dumps(dict(chosen or {}), indent=1) + "\n"
        texts = {
            self.root / VERIFIER.name: VERIFIER.read_text(),
            self.root / "config.toml": config_toml,
            self.root / "environment.json": environment_json,
            self.private / "chosen.json": chosen_json,
        }
        if ds_config is not None:
            texts[self.root / "ds_config.json"] = json.dumps(dict(ds_config), indent=1) + "\n"
        for path, text in texts.items():
            replace_file(path, text.encode())


def try_lock(path: Path) -> int | None:
    """Locks a file, which is made if it is missing; returns None if another process has the lock.

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


# A process keeps the code that it has imported, so one reading is enough.
@functools.cache
def environment() -> Mapping[str, Any]:
    """Returns versions and the commit of the code.

    The file is public: arguments, paths and names of hosts and users stay out.
    """
    packages = {}
    for name in PACKAGES:
        # The library needs fewer packages than the trainer.
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "python": platform.python_version(),
        "packages": packages,
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str:
    """Returns the output of a git command, or "" outside of a checkout, as in a copied source tree.

    The library may be installed inside of a checkout of another project, whose commit is of no use.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        process = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip()
