"""A study's folder, and how far each of its runs is.

study_dir/  study.toml        the study as it was last run
            recipes/          one resolved recipe per point, written once
            runs/POINT/       an ordinary run folder each
            private/ (0700)   consoles show training loss (contract 12)
                logs/POINT.log    the console of its trainer
            report/           tables and plots

Where runs on private data share a ledger (`privacy.shared_ledger`), it holds the grid as it was before the first run began. Only
the points of that very grid, each once, are charged as fixed in advance. To leave one of them out is a choice as well, after
which what is left was chosen too.
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
from privacy.step.folder import RunFolder, try_lock
from trainer.config.recipe import to_toml
from trainer.errors import ConfigError
from trainer.studies.grid import Point, StudyConfig, trained_keys, with_privacy

Progress = Literal["new", "begun", "finished", "budget spent"]


class StudyFolder:
    """Paths and records of one study; nothing is written before `prepare`."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.definition = self.root / "study.toml"
        self.recipes = self.root / "recipes"
        self.runs = self.root / "runs"
        self.private = self.root / "private"
        self.logs = self.private / "logs"
        self.report = self.root / "report"

    def recipe(self, name: str) -> Path:
        return self.recipes / f"{name}.toml"

    def run(self, name: str) -> Path:
        return self.runs / name

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One study at a time works in the folder.

        Raises:
            ConfigError: another one does.
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
        """Writes the definition, the recipes of points that have not begun, and the grid into the shared ledger.

        Returns:
            the points that have not begun and, chosen after outputs of others could be seen, are charged by an RDP filter.

        Raises:
            ConfigError: the recipe of a point that began has changed (exit 2).
            PrivacyStateRefused: the shared ledger, or that of a run, is missing or broken (exit 4).
        """
        new = {one.name for one in planned if self.progress(one.name) == "new"}
        for one in planned:
            if one.name in new:
                continue
            recipe = self.recipe(one.name)
            try:
                then, now = trained_keys(recipe.read_text()), trained_keys(to_toml(one.config))
            except OSError as error:
                raise ConfigError(
                    f"{recipe}: {error.strerror}; its run is there, but not its recipe"
                ) from error
            if changed := sorted(
                key for key in then.keys() | now.keys() if then.get(key) != now.get(key)
            ):
                raise ConfigError(
                    f"point {one.name} of {self.root} began with another {changed[0]}; set it back, or choose another --study_dir"
                )
        sharing: dict[str, list[Point]] = {}
        for one in planned:
            if one.config.privacy.shared_ledger is not None:
                sharing.setdefault(one.config.privacy.shared_ledger, []).append(one)
        for path in sharing:
            SharedLedger(path).read()  # all of them, before a grid is written into one
        # Of the points whose owner says so, those of the grid that is frozen in their ledger once a run has begun.
        begun, fixed = len(new) < len(planned) or any(self.runs.glob("*/ledger.jsonl")), set[str]()
        for path, group in sharing.items():
            if not any(one.config.privacy.fixed_in_advance for one in group):
                continue
            keys = {
                one.name: json.dumps(trained_keys(to_toml(one.config)), sort_keys=True)
                for one in group
            }
            points = {
                name: hashlib.sha256(text.encode()).hexdigest() for name, text in keys.items()
            }
            shared = SharedLedger(path)
            frozen = shared.freeze_grid(study.name, points, has_runs=begun)
            if all(points.get(name) == digest for name, digest in frozen.items()):
                fixed |= frozen.keys() - (shared.read().names & new)
        for folder in (self.recipes, self.runs, self.logs):
            self._make(folder)
        self.private.chmod(0o700)
        late = []
        for one in planned:
            config = one.config
            if one.name not in new:
                continue
            if config.privacy.fixed_in_advance and one.name not in fixed:
                late.append(one.name)
                config = with_privacy(config, {"fixed_in_advance": False})
            write_durably(self.recipe(one.name), to_toml(config))
        write_durably(self.definition, definition)
        return late

    def progress(self, name: str) -> Progress:
        """How far a run is, from its own ledger; PrivacyStateRefused when that is broken."""
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
        """Whether a trainer has the run, e.g. one that outlived the study that started it."""
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
