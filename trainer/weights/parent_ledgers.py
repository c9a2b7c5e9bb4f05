"""The ledgers of private runs behind a run's initial weights: gathered at its first start and copied into its folder.

What they charged is part of what the new weights carry (privacy/ledger/claim.py).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.index.tar_index import MANIFEST, ExampleTable
from privacy.checkpoints.read import Checkpoint
from privacy.ledger.claim import LedgerBehind, ledgers_of_run, read_copies
from privacy.step.folder import RunFolder
from trainer.errors import ConfigError
from trainer.weights.provenance import Start, proof_of


def ledgers_behind(checkpoint: Checkpoint, start: Start, *, is_private: bool) -> list[LedgerBehind]:
    """The ledgers of all private runs that made a checkpoint's weights, the newest first; every attempt in them is charged.

    Args:
        start: the chain of starts that begins with this checkpoint.
        is_private: whether the run that starts makes a claim, which then needs all of them.

    Raises:
        ConfigError: a private run is behind the weights of a private one, and its ledger is not in the checkpoint's run folder.
        PrivacyStateRefused: a ledger is broken.
    """
    found = ledgers_of(checkpoint.path, checkpoint.manifest)
    private = [link.run for link in start.chain() if link.training_data == "private"]
    if is_private and len(found) < len(private):
        run_dir = checkpoint.path.resolve().parent.parent
        raise ConfigError(
            f"init.checkpoint {checkpoint.path}: run {private[len(found)]} behind its weights trained on private data, and its "
            f"ledger is not in {run_dir}: what it spent cannot be composed with this run; start from the checkpoint in its own "
            "run folder"
        )
    return found


def ledgers_of(checkpoint: Path, manifest: Mapping[str, Any]) -> list[LedgerBehind]:
    """The ledgers of the private runs that made a checkpoint's weights, as far as its run folder has them, the newest first.

    Raises:
        PrivacyStateRefused: a ledger is broken.
    """
    run_dir = checkpoint.resolve().parent.parent
    state = proof_of(checkpoint, manifest).state
    if state is None:
        return []
    is_private = (manifest.get("training_data") or {}).get("provenance", "private") == "private"
    if is_private and state.plan.formal_guarantee:
        return ledgers_of_run(run_dir, str(manifest.get("run")), int(manifest["ledger"]["seq"]) + 1)
    return [LedgerBehind(run, data, data.count(b"\n")) for run, data in read_copies(run_dir, state.opened)]


def require_disjoint(checkpoint: Checkpoint, table: ExampleTable) -> None:
    """Compares the shards and examples behind a declaration that data are disjoint, inside the trust boundary: nothing of it is
    published.

    Raises:
        ConfigError: a shard of this run, or some of its examples, are those of the run that the checkpoint is of.
    """
    path = RunFolder(checkpoint.path.resolve().parent.parent).index / MANIFEST
    if not path.is_file():
        print(
            f"init.disjoint_data is declared, and no shard was compared: {path} is not there. The declaration stands alone",
            flush=True,
        )
        return
    other = ExampleTable.open(path.parent, "", check_shards=False)
    theirs = {entry.sha256 for entry in other.entries}
    for entry in table.entries:
        if entry.sha256 in theirs:
            raise ConfigError(
                f"init.disjoint_data is declared, and shard {entry.name} is also one of the run behind {checkpoint.path}: remove "
                "the declaration, and the charges of both runs compose"
            )
    found, by_chance = table.found_in(other)
    if found > by_chance + 8 * math.sqrt(by_chance):
        raise ConfigError(
            f"init.disjoint_data is declared, and {found:,} examples or more are also, byte for byte, in the run behind "
            f"{checkpoint.path}, in other shards: remove the declaration, and the charges of both runs compose"
        )
    print(
        "init.disjoint_data is declared, and no shard and no example is in both runs byte for byte; that none is in another form "
        "is for the recipe to know",
        flush=True,
    )
