"""What the runs of a study may spend together, and which of its points count as fixed before any output was seen.

The shared ledger is the study's memory: it cannot be made anew beside what relies on it, nor with another budget, and it holds
the grid as it was before the first run began. Only the points of that very grid, each once, are charged as fixed in advance;
leaving one of them out is a choice as well, after which what is left was chosen too.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from privacy.errors import PrivacyStateRefused
from privacy.ledger.records import LedgerState, read_ledger
from privacy.ledger.shared import SharedLedger
from trainer.errors import ConfigError
from trainer.studies.grid import BudgetSection, StudyConfig
from trainer.studies.points import PlannedPoint, recipe_digest

LEDGER = "shared_ledger.jsonl"


def run_ledgers(runs: Path) -> list[LedgerState]:
    """The ledgers of all runs in a study's folder, whatever its file lists now."""
    return [read_ledger(path) for path in sorted(runs.glob("*/ledger.jsonl"))]


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
    charged = [state for state in run_ledgers(runs) if state.opened.get("shared_ledger") is not None]
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
    _require_same_budget(study.name, study.budget, path, ledger.read().opened)
    identity = ledger.read().identity
    for state in charged:
        if state.opened["shared_ledger"] != identity:
            raise PrivacyStateRefused(f"{path}: not the shared ledger that the runs of this study began with")
        ledger.require_remembered(state)


def _require_same_budget(name: str, budget: BudgetSection, path: Path, opened: Mapping[str, object]) -> None:
    mirror = None if budget.mirror is None else str(Path(budget.mirror).resolve())
    for key, stated, recorded in (
        ("target_epsilon", budget.target_epsilon, opened["epsilon"]),
        ("target_delta", budget.target_delta, opened["delta"]),
        ("informal_runs", budget.informal_runs, opened.get("informal_runs", False)),
        ("mirror", mirror, opened.get("mirror")),
    ):
        if stated != recorded:
            raise ConfigError(
                f"study {name}: [budget] {key} is {stated}, but {path} was made with {recorded}, which nothing changes later: "
                "set it back; another budget needs another --study_dir, and adds to what was spent in this one"
            )


def fixed_in_advance(
    study: StudyConfig, own_ledger: Path, planned: Sequence[PlannedPoint], new: set[str], *, begun: bool
) -> set[str]:
    """The points that are charged as fixed in advance; the grid is frozen in their shared ledger until a run has begun.

    Args:
        own_ledger: where the study's own ledger is; an owner's may be shared with other studies.
        new: points without a ledger of their own.
        begun: whether any run of the study has a ledger.
    """
    groups: dict[str, list[PlannedPoint]] = {}
    for one in planned:
        if one.config.privacy.shared_ledger is not None:
            groups.setdefault(one.config.privacy.shared_ledger, []).append(one)
    fixed: set[str] = set()
    for path, group in groups.items():
        if not any(one.config.privacy.fixed_in_advance for one in group):
            continue
        points = {one.name: recipe_digest(one.config) for one in group}
        shared = SharedLedger(path)
        frozen = shared.freeze_grid("" if Path(path) == own_ledger else study.name, points, begun=begun)
        if all(points.get(name) == digest for name, digest in frozen.items()):
            fixed |= frozen.keys() - (shared.read().names & new)
    return fixed
