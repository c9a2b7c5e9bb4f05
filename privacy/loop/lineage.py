"""Where the weights of a loop of one's own come from: in them the epsilons of all private runs that trained them add up.

No program can tell that from weights: a cast to half precision and back, an average, a merged adapter or a permuted layer looks
like nothing before. So the caller says it (`PrivateLoop(starts_from=...)`), and has to once this program has seen a private
run's weights: trained by a loop here, or in a file of weights that Python opened, or a model of transformers was loaded from, in
a folder with a ledger. What other programs did, and what libraries open by themselves (safetensors), is not noticed.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..checkpoints.read import has_checkpoints
from ..errors import PrivacyConfigError
from ..ledger.chain import TORN_MARK
from ..ledger.claim import (
    LedgerBehind,
    keep_copies,
    ledgers_of_run,
    read_copies,
    require_kept,
    states_behind,
)
from ..ledger.records import read_state
from ..run.ledger import Recorded
from ..step.folder import RunFolder

StartsFrom = Literal["public"] | str | Path | Sequence[str | Path] | None
FILES = (".bin", ".ckpt", ".npy", ".npz", ".pt", ".pth", ".safetensors")
"""Endings of files of weights."""
TRAINED: dict[Path, Mapping[str, Any]] = {}
"""Run folder -> number ("seq") and hash of the ledger's last line at the last step that this program took there, on rank 0."""
_READ: set[Path] = set()


def _note_read(event: str, arguments: tuple[Any, ...]) -> None:
    """A file of weights was opened; Python calls this for every event that it audits."""
    if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(FILES):
        _READ.update(_run_folders(Path(arguments[0])))


sys.addaudithook(_note_read)


def _run_folders(file: Path) -> list[Path]:
    """The run folders around a file or folder; os.path never raises."""
    return [
        folder for folder in file.absolute().parents[:4] if os.path.exists(folder / "ledger.jsonl")
    ]


def stated(starts_from: StartsFrom) -> list[Path] | None:
    """Run folders, none of them for public weights; None where nothing was said.

    Raises:
        PrivacyConfigError: one of them is no run folder, or there is none.
    """
    if starts_from is None or starts_from == "public":
        return None if starts_from is None else []
    listed = [starts_from] if isinstance(starts_from, str | Path) else starts_from
    if not isinstance(listed, Sequence) or not all(isinstance(one, str | Path) for one in listed):
        raise PrivacyConfigError(
            f'starts_from is "public" or a list of run folders, not {starts_from!r}'
        )
    folders = [*map(Path, listed)]
    if (
        wrong := [str(one) for one in folders if not (one / "ledger.jsonl").is_file()]
        if folders
        else ["an empty list"]
    ):
        raise PrivacyConfigError(
            f'starts_from: {wrong[0]} is no run folder; give all run folders that trained these weights, or "public"'
        )
    return folders


def require_stated(model: nn.Module, folder: RunFolder, said: list[Path] | None) -> None:
    """A run whose weights are the caller's says where they come from, if this program has seen those of a private run.

    Raises:
        PrivacyConfigError: it does not.
    """
    own, names = (
        folder.root.resolve(),
        [getattr(module, "name_or_path", None) for module in model.modules()],
    )
    loaded = {
        one
        for name in names
        if isinstance(name, str) and name
        for one in _run_folders(Path(name) / "model")
    }
    if said is not None or has_checkpoints(
        folder.checkpoints
    ):  # a resume takes its checkpoint's weights
        return
    known = {one.resolve() for one in (*TRAINED, *_READ, *loaded)}
    if known - {own} or (known and not folder.ledger.exists()):
        raise PrivacyConfigError(
            f"this program has seen weights of the private run {min(map(str, known - {own} or known))}, and what several runs "
            'spend adds up in what they trained: give PrivateLoop starts_from="public" if these weights, frozen ones and buffers '
            "too, come from no private run, or the folders of all runs that they come from"
        )


def described(
    folder: RunFolder, recorded: Recorded | None, said: list[Path] | None
) -> dict[str, Any]:
    """Fields of a new ledger, for which the copies are made; or a refusal of those that an existing one has. On rank 0.

    Raises:
        PrivacyConfigError, PrivacyStateRefused: the runs behind the weights are not those of the ledger, or cannot be composed.
    """
    behind = [one for parent in said or () for one in ledgers_of_run(parent)]
    found = dict[bytes, LedgerBehind]()
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
    if len(said or ()) > 1 and any(declared):
        raise PrivacyConfigError(
            "starts_from: one of several runs declares data that are disjoint from those before it, and that is known of a chain "
            "of runs alone: give one of them"
        )
    if recorded is None:
        return {"behind": keep_copies(folder.root, [*found.values()])} if found else {}
    kept = [_first(copy) for _, copy in read_copies(folder.root, recorded)]
    if said is not None and set(kept) != set(found):
        raise PrivacyConfigError(
            f"{folder.ledger} was opened with {len(kept)} private runs behind its weights, and starts_from names others; they "
            "are part of the claim: name the same runs, or start another run folder"
        )
    if found and not has_checkpoints(folder.checkpoints):
        in_order = sorted(found.values(), key=lambda one: kept.index(_first(one.copy)))
        require_kept(folder.root, recorded, in_order)
    states_behind(folder.root, recorded)
    return {}


def _first(copy: bytes) -> bytes:
    """A ledger's first line, which names its run."""
    return copy.partition(b"\n")[0]
