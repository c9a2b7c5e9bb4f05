"""Where the weights of a loop of one's own come from: in them the epsilons of all private runs that trained them add up.

No program can tell that from weights: a cast to half precision and back, an average, a merged adapter or a permuted layer looks
like nothing before. So the caller says it, always (`PrivateLoop(starts_from=...)`).
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
from ..run.ledger import Recorded
from ..step.folder import RunFolder

StartsFrom = Literal["public"] | str | Path | Sequence[str | Path]
TRAINED: dict[Path, Mapping[str, Any]] = {}
"""Run folder -> number ("seq") and hash of the ledger's last line at the last step that this program took there, on rank 0."""
UNSAID = (
    'PrivateLoop wants starts_from="public" if no private run has trained these weights, frozen ones and buffers too, or the '
    "folders of all runs that did: in the weights their epsilons add up"
)


def stated(starts_from: StartsFrom | None) -> list[Path]:
    """Returns the run folders that the caller names; none for public weights.

    Raises:
        PrivacyConfigError: nothing was said, or something that is no run folder.
    """
    if starts_from is None:
        raise PrivacyConfigError(UNSAID)
    if starts_from == "public":
        return []
    listed = [starts_from] if isinstance(starts_from, str | Path) else starts_from
    if not isinstance(listed, Sequence) or not all(isinstance(x, str | Path) for x in listed):
        raise PrivacyConfigError(
            f'starts_from is "public" or a list of run folders, not {starts_from!r}'
        )
    folders = [*map(Path, listed)]
    wrong = [str(folder) for folder in folders if not (folder / "ledger.jsonl").is_file()]
    if not folders:
        wrong = ["an empty list"]
    if wrong:
        raise PrivacyConfigError(
            f'starts_from: {wrong[0]} is no run folder; give all run folders that trained these weights, or "public"'
        )
    return folders


def described(folder: RunFolder, recorded: Recorded | None, said: list[Path]) -> dict[str, Any]:
    """Fields of a new ledger, for which the copies are made; or a refusal of those that an existing one has. On rank 0.

    Raises:
        PrivacyConfigError, PrivacyStateRefused: the runs behind the weights are not those of the ledger, or cannot be composed.
    """
    behind = [one for parent in said for one in ledgers_of_run(parent)]
    found = dict[bytes, ParentLedger]()
    for one in (
        behind
    ):  # a run behind several of them counts once, with all that it charged, and stands behind them
        first = _first(one.copy)
        more, less = sorted(
            (found.pop(first, one), one), key=lambda ledger: len(ledger.copy), reverse=True
        )
        if not more.copy.startswith(less.copy.removesuffix(TORN_MARK + b"\n")):
            raise PrivacyConfigError(
                f"starts_from: {less.run} and {more.run} are copies of one run that were both trained further, and no ledger "
                "here holds what both spent: start from one of them"
            )
        found[first] = more
    declared = (read_state(one.copy, one.run).opened.get("disjoint_from_start") for one in behind)
    if len(said) > 1 and any(declared):
        raise PrivacyConfigError(
            "starts_from: one of several runs declares data that are disjoint from those before it, and that is known of a chain "
            "of runs alone: give one of them"
        )
    if recorded is None:
        return {"behind": keep_copies(folder.root, [*found.values()])} if found else {}
    kept = [_first(copy) for _, copy in read_copies(folder.root, recorded)]
    if set(kept) != set(found):
        raise PrivacyConfigError(
            f"{folder.ledger} was opened with {len(kept)} private runs behind its weights, and starts_from names others; they "
            "are part of the claim: name the same runs, or start another run folder"
        )
    if found and not has_checkpoints(folder.checkpoints):
        in_order = sorted(found.values(), key=lambda one: kept.index(_first(one.copy)))
        require_kept(folder.root, recorded, in_order)
    parent_states(folder.root, recorded)
    return {}


def _first(copy: bytes) -> bytes:
    """A ledger's first line, which names its run."""
    return copy.partition(b"\n")[0]
