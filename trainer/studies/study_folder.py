"""A study's folder, and the progress of each of its runs.

study_dir/  study.toml        the study as it was last run
            recipes/          one resolved recipe per point, written once
            runs/POINT/       an ordinary run folder each
            private/ (0700)   consoles show training loss (contract 12)
                logs/POINT.log    the console of its trainer
            report/           tables and plots

If runs on private data share a ledger (`privacy.shared_ledger`), that ledger holds the grid as it
was before the first run began. Only the points of that very grid, each once, are charged as fixed
in advance. To leave out a point is a choice as well: the remaining points are then charged as
chosen too.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from data.files import write_durably
from privacy.errors import PrivacyStateRefused
from privacy.ledger.records import MIXED_EXAMPLES, WHY_MIXED, read_ledger
from privacy.ledger.shared import SharedLedger
from privacy.step.run_folder import RunFolder, try_lock
from trainer.config.recipe import to_toml
from trainer.errors import ConfigError
from trainer.studies.grid import Point, StudyConfig, trained_keys, with_privacy

Progress = Literal["new", "begun", "finished", "budget spent"]


class StudyFolder:
    """Paths and records of one study; `prepare` is the first to write."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.definition = self.root / "study.toml"
        self.recipes = self.root / "recipes"
        self.runs = self.root / "runs"
        self.private = self.root / "private"
        self.logs = self.private / "logs"
        self.report = self.root / "report"

    def recipe(self, name: str) -> Path:
        """Returns the path of a point's recipe."""
        return self.recipes / f"{name}.toml"

    def run(self, name: str) -> Path:
        """Returns the path of a point's run folder."""
        return self.runs / name

    def log(self, name: str) -> Path:
        """Returns the path of a point's console log."""
        return self.logs / f"{name}.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock while the block runs: one study at a time works in it.

        Raises:
            ConfigError: another study holds the lock.
        """
        self._make(self.root)
        lock = try_lock(self.root / "lock")
        if lock is None:
            raise ConfigError(
                f"study folder {self.root} is in use by another study.py; wait for it"
            )
        try:
            yield
        finally:
            os.close(lock)

    def prepare(self, study: StudyConfig, definition: str, planned: Sequence[Point]) -> list[str]:
        """Writes the definition, the recipes of new points, and the grid into the shared ledger.

        Returns:
            The new points that were chosen after outputs of others could be seen, and are charged
            by an RDP filter.

        Raises:
            ConfigError: the recipe of a point that began has changed (exit 2).
            PrivacyStateRefused: the shared ledger, or that of a run, is missing or broken (exit 4).
        """
        new = {point.name for point in planned if self.progress(point.name) == "new"}
        for point in planned:
            if point.name in new:
                continue
            recipe = self.recipe(point.name)
            planned_keys = trained_keys(to_toml(point.config))
            try:
                first_keys = trained_keys(recipe.read_text())
            except OSError as error:
                raise ConfigError(
                    f"{recipe}: {error.strerror}; its run is there, but not its recipe"
                ) from error
            for key in sorted(first_keys.keys() | planned_keys.keys()):
                if first_keys.get(key) != planned_keys.get(key):
                    raise ConfigError(
                        f"point {point.name} of {self.root} began with another {key}; set it back, "
                        "or choose another --study_dir"
                    )
        sharing: dict[str, list[Point]] = {}
        for point in planned:
            ledger_path = point.config.privacy.shared_ledger
            if ledger_path is not None:
                sharing.setdefault(ledger_path, []).append(point)
        # All ledgers are read before a grid is written into one.
        for ledger_path in sharing:
            SharedLedger(ledger_path).read()
        # Points are fixed if their owner says so, and if they are in the grid that is frozen in
        # their ledger once a run has begun.
        begun_runs = any(self.runs.glob("*/ledger.jsonl"))
        has_begun = len(new) < len(planned) or begun_runs
        fixed: set[str] = set()
        for ledger_path, group in sharing.items():
            if not any(point.config.privacy.fixed_in_advance for point in group):
                continue
            digests = {}
            for point in group:
                keys = json.dumps(trained_keys(to_toml(point.config)), sort_keys=True)
                digests[point.name] = hashlib.sha256(keys.encode()).hexdigest()
            shared = SharedLedger(ledger_path)
            frozen = shared.freeze_grid(study.name, digests, has_runs=has_begun)
            if all(digests.get(name) == digest for name, digest in frozen.items()):
                fixed |= frozen.keys() - (shared.read().names & new)
        for folder in (self.recipes, self.runs, self.logs):
            self._make(folder)
        self.private.chmod(0o700)
        late = []
        for point in planned:
            config = point.config
            if point.name not in new:
                continue
            if config.privacy.fixed_in_advance and point.name not in fixed:
                late.append(point.name)
                config = with_privacy(config, {"fixed_in_advance": False})
            write_durably(self.recipe(point.name), to_toml(config))
        write_durably(self.definition, definition)
        return late

    def progress(self, name: str) -> Progress:
        """Returns the progress of a run, by its own ledger.

        Raises:
            PrivacyStateRefused: the ledger is broken.
        """
        ledger = self.run(name) / "ledger.jsonl"
        if not ledger.exists():
            return "new"
        state = read_ledger(ledger)
        if state.closed == MIXED_EXAMPLES:
            raise PrivacyStateRefused(f"{ledger}: {WHY_MIXED}")
        if state.closed is not None:
            return "finished"
        return "budget spent" if state.num_charged >= state.plan.max_intents else "begun"

    def in_use(self, name: str) -> bool:
        """Returns whether a trainer holds the run's lock, even one whose study was killed."""
        path = RunFolder(self.run(name)).private / "lock"
        if not path.exists():
            return False
        lock = try_lock(path)
        if lock is not None:
            os.close(lock)
        return lock is None

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"study folder {folder}: {error.strerror}") from error
