"""A study's folder, and how far each of its runs is.

study_dir/  study.toml        the study as it was last run
            recipes/          one resolved recipe per point, written once
            runs/POINT/       an ordinary run folder each
            private/ (0700)   consoles show training loss (contract 12)
                logs/POINT.log    the console of its trainer
            shared_ledger.jsonl   what the runs may spend together, where the study has a budget; and the grid as it began
            report/           tables and plots

The shared ledger is the study's memory: it cannot be made anew where something relies on it, nor with another budget, and it
holds the grid as it was before the first run began. Only the points of that very grid, each once, are charged as fixed in
advance; to leave one of them out is a choice as well, after which what is left was chosen too.
"""

import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from data.files import write_durably
from privacy.errors import PrivacyStateRefused
from privacy.ledger.records import read_ledger
from privacy.ledger.shared import SharedLedger
from privacy.step.folder import RunFolder, try_lock
from trainer.config.recipe import to_toml
from trainer.errors import ConfigError
from trainer.studies.grid import StudyConfig
from trainer.studies.points import PlannedPoint, changed_keys, recipe_digest, with_privacy

LEDGER = "shared_ledger.jsonl"
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
        self.shared_ledger = self.root / LEDGER
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
            raise ConfigError(f"study folder {self.root} is in use by another study.py; wait for it")
        try:
            yield
        finally:
            os.close(lock)

    def prepare(self, study: StudyConfig, definition: str, planned: Sequence[PlannedPoint]) -> list[str]:
        """Writes the definition, the recipes of points that have not begun, and the shared ledger with the grid.

        Returns:
            the points that have not begun and, chosen after outputs of others could be seen, are charged by an RDP filter.

        Raises:
            ConfigError: the recipe of a point that began, or the budget, has changed (exit 2).
            PrivacyStateRefused: the shared ledger does not hold what the runs rely on (exit 4).
        """
        for one in planned:
            if self.progress(one.name) == "new":
                continue
            recipe = self.recipe(one.name)
            try:
                keys = changed_keys(recipe.read_text(), to_toml(one.config))
            except OSError as error:
                raise ConfigError(f"{recipe}: {error.strerror}; its run is there, but not its recipe") from error
            if keys:
                raise ConfigError(
                    f"point {one.name} of {self.root} began with another {keys[0]}; set it back, or choose another --study_dir"
                )
        prepare_budget(study, self.shared_ledger, self.recipes, self.runs)
        new = {one.name for one in planned if self.progress(one.name) == "new"}
        begun = len(new) < len(planned) or any(self.runs.glob("*/ledger.jsonl"))
        fixed = fixed_in_advance(study, self.shared_ledger, planned, new, begun=begun)
        for folder in (self.recipes, self.runs, self.private):
            self._make(folder)
        self.private.chmod(0o700)
        self._make(self.logs)
        late = []
        for one in planned:
            if one.name not in new:
                continue
            config = one.config
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


def prepare_budget(study: StudyConfig, path: Path, recipes: Path, runs: Path) -> None:
    """Makes the study's shared ledger, or verifies that it is the one that everything in the folder relies on.

    Raises:
        ConfigError: the file states another budget than the ledger, or none (exit 2).
        PrivacyStateRefused: the ledger is gone, is not the one of these runs, or was rolled back (exit 4).
    """
    if study.budget is None:
        if path.exists():
            raise ConfigError(
                f"study {study.name}: {path} holds the budget of its runs, but the file has none: put [budget] back, or choose "
                "another --study_dir"
            )
        return
    # The runs in the study's folder, whatever its file lists now.
    states = {run: read_ledger(run) for run in sorted(runs.glob("*/ledger.jsonl"))}
    charged = {run: state for run, state in states.items() if state.opened.get("shared_ledger") is not None}
    if not path.exists():
        trees = [tomllib.loads(recipe.read_text()) for recipe in recipes.glob("*.toml")]
        named = [tree.get("privacy", {}).get("shared_ledger") for tree in trees]
        if charged or any(name is not None and Path(name).name == LEDGER for name in named):
            raise PrivacyStateRefused(
                f"{path}: the shared ledger is gone, but recipes and runs in the folder rely on it: bring it back from a copy or "
                "its mirror; without it what was spent is unknown"
            )
        SharedLedger.create(
            path,
            epsilon=study.budget.target_epsilon,
            delta=study.budget.target_delta,
            informal_runs=study.budget.informal_runs,
            mirror=study.budget.mirror,
        )
    ledger = SharedLedger(path)
    shared = ledger.verified()
    opened = shared.opened
    mirror = None if study.budget.mirror is None else str(Path(study.budget.mirror).resolve())
    for key, stated, recorded in (
        ("target_epsilon", study.budget.target_epsilon, opened["epsilon"]),
        ("target_delta", study.budget.target_delta, opened["delta"]),
        ("informal_runs", study.budget.informal_runs, opened.get("informal_runs", False)),
        ("mirror", mirror, opened.get("mirror")),
    ):
        if stated != recorded:
            raise ConfigError(
                f"study {study.name}: [budget] {key} is {stated}, but {path} was made with {recorded}, which nothing changes "
                "later: set it back; another budget needs another --study_dir, and adds to what was spent in this one"
            )
    known: dict[str, Path] = {}
    for run, state in charged.items():
        if state.opened["shared_ledger"] != shared.identity:
            raise PrivacyStateRefused(f"{path}: not the shared ledger that the runs of this study began with")
        ledger.require_remembered(state, shared)
        if (first := known.setdefault(state.opened["key_commitment"], run)) != run:
            raise PrivacyStateRefused(f"{run}: is a copy of {first}; bring back the ledger that this run had")
        seq, line_hash = shared.positions.get(state.opened["key_commitment"], (0, state.hashes[0]))
        if seq >= state.num_lines or state.hashes[seq] != line_hash:
            raise PrivacyStateRefused(f"{run}: lacks line {seq + 1}, which {path} has seen: bring back its newest copy")


def fixed_in_advance(
    study: StudyConfig, study_ledger: Path, planned: Sequence[PlannedPoint], new: set[str], *, begun: bool
) -> set[str]:
    """The points that are charged as fixed in advance; the grid is frozen in their shared ledger until a run has begun.

    Args:
        study_ledger: where the study's ledger is; a data owner's may be shared with other studies.
        new: points without a ledger of their own.
        begun: whether any run of the study has a ledger.
    """
    groups: dict[str, list[PlannedPoint]] = {}
    for one in planned:
        if one.config.privacy.shared_ledger is not None:
            groups.setdefault(one.config.privacy.shared_ledger, []).append(one)
    fixed: set[str] = set()
    for path in groups:
        SharedLedger(path).verified()  # all of them, before a grid is written into one
    for path, group in groups.items():
        if not any(one.config.privacy.fixed_in_advance for one in group):
            continue
        points = {one.name: recipe_digest(one.config) for one in group}
        shared = SharedLedger(path)
        frozen = shared.freeze_grid("" if Path(path) == study_ledger else study.name, points, begun=begun)
        if all(points.get(name) == digest for name, digest in frozen.items()):
            fixed |= frozen.keys() - (shared.verified().names & new)
    return fixed
