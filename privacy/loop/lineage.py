"""The private runs that trained a loop's first weights: in the weights their epsilons add up.

No program can tell these runs from weights: a cast to half precision and back, an average, a merged
adapter or a permuted layer resembles no earlier weights. So the caller always names them
(`PrivateLoop(starts_from=...)`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.read import has_checkpoints
from ..errors import PrivacyConfigError
from ..ledger.chain import TORN_MARK
from ..ledger.claim import (
    ParentLedger,
    keep_copies,
    ledgers_of_run,
    parent_states,
    read_copies,
    require_kept,
)
from ..ledger.records import read_state
from ..run.run_ledger import Recorded
from ..step.run_folder import RunFolder

StartsFrom = Literal["public"] | str | Path | Sequence[str | Path]
TRAINED: dict[Path, Mapping[str, Any]] = {}
"""Run folder -> number ("seq") and hash of the ledger's last line at this program's last step.

Filled on rank 0.
"""
ORIGIN_MISSING = (
    'PrivateLoop wants starts_from="public" if no private run has trained these weights, frozen '
    "ones and buffers too, or the folders of all runs that did: in the weights their epsilons add "
    "up"
)


def run_folders_of(starts_from: StartsFrom | None) -> list[Path]:
    """Returns the run folders that the caller names; none for public weights.

    Raises:
        PrivacyConfigError: the argument is missing, or names a path that is not a run folder.
    """
    if starts_from is None:
        raise PrivacyConfigError(ORIGIN_MISSING)
    if starts_from == "public":
        return []
    names = [starts_from] if isinstance(starts_from, str | Path) else starts_from
    if not isinstance(names, Sequence) or not all(isinstance(name, str | Path) for name in names):
        raise PrivacyConfigError(
            f'starts_from is "public" or a list of run folders, not {starts_from!r}'
        )
    folders = [Path(name) for name in names]
    faults = [str(folder) for folder in folders if not (folder / "ledger.jsonl").is_file()]
    if not folders:
        faults = ["an empty list"]
    if faults:
        raise PrivacyConfigError(
            f"starts_from: {faults[0]} is not a run folder; give all run folders that trained "
            'these weights, or "public"'
        )
    return folders


def origin_fields(
    folder: RunFolder, recorded: Recorded | None, parents: list[Path]
) -> dict[str, Any]:
    """Copies the ledgers behind a new run's weights, and returns the new ledger's fields on them.

    An existing ledger is checked against these runs instead. On rank 0.

    Args:
        recorded: of an existing ledger; None for a new one.
        parents: run folders that the caller names.

    Raises:
        PrivacyConfigError, PrivacyStateRefused: the runs behind the weights are not those of the
            ledger, or cannot be composed.
    """
    parent_ledgers: list[ParentLedger] = []
    for parent in parents:
        parent_ledgers += ledgers_of_run(parent)
    # A run behind several parents counts once, with all that it charged. It is moved to the end,
    # after the runs that started from it.
    ledger_of_run: dict[bytes, ParentLedger] = {}
    for ledger in parent_ledgers:
        run = _first_line(ledger.copy)
        longer = ledger_of_run.pop(run, ledger)
        shorter = ledger
        if len(shorter.copy) > len(longer.copy):
            longer, shorter = shorter, longer
        if not longer.copy.startswith(shorter.copy.removesuffix(TORN_MARK + b"\n")):
            raise PrivacyConfigError(
                f"starts_from: {shorter.run} and {longer.run} are copies of one run that were both "
                "trained further, and no ledger here has both their charges: start from one of them"
            )
        ledger_of_run[run] = longer
    for ledger in parent_ledgers if len(parents) > 1 else ():
        state = read_state(ledger.copy, ledger.run)
        if state.opened.get("disjoint_from_start"):
            # Of several runs nothing says that their data are disjoint from one another.
            raise PrivacyConfigError(
                "starts_from: one of several runs declares data that are disjoint from those "
                "before it, which is valid in a single chain of runs only: give one of them"
            )
    if recorded is None:
        if not ledger_of_run:
            return {}
        return {"behind": keep_copies(folder.root, [*ledger_of_run.values()])}
    recorded_runs = [_first_line(copy) for _, copy in read_copies(folder.root, recorded)]
    if set(recorded_runs) != set(ledger_of_run):
        raise PrivacyConfigError(
            f"{folder.ledger} was opened with {len(recorded_runs)} private runs behind its "
            "weights, and starts_from names others; they are part of the claim: name the same "
            "runs, or start another run folder"
        )
    if ledger_of_run and not has_checkpoints(folder.checkpoints):
        require_kept(folder.root, recorded, [ledger_of_run[run] for run in recorded_runs])
    parent_states(folder.root, recorded)
    return {}


def _first_line(copy: bytes) -> bytes:
    """Returns a ledger's first line, which names its run."""
    return copy.partition(b"\n")[0]
