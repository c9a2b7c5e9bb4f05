"""The ledgers of private runs behind a run's initial weights: gathered at its first start and copied into its folder.

What they charged is part of what the new weights carry (privacy/ledger/claim.py).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.files import fsync_path, write_durably
from data.index.tar_index import MANIFEST, ExampleTable
from privacy.checkpoints.read import Checkpoint
from privacy.errors import PrivacyConfigError
from privacy.ledger.chain import TORN_MARK, hash_line
from privacy.ledger.claim import FOLDER, copy_name, read_copies, record_of
from privacy.step.folder import RunFolder
from trainer.errors import ConfigError
from trainer.weights.provenance import Start, proof_of


class LedgerBehind(NamedTuple):
    """A private run behind weights.

    Attributes:
        needed: how many lines the charges of those weights take at least.
    """

    run: str
    copy: bytes
    needed: int


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
    run_dir, found = checkpoint.resolve().parent.parent, list[LedgerBehind]()
    state = proof_of(checkpoint, manifest).state
    if state is None:
        return found
    is_private = (manifest.get("training_data") or {}).get("provenance", "private") == "private"
    if is_private and state.plan.formal_guarantee:
        data = (run_dir / "ledger.jsonl").read_bytes()
        if not data.endswith(b"\n"):  # a write under way, or a crash: charged as its repair would charge it
            data += TORN_MARK + b"\n"
        found.append(LedgerBehind(str(manifest.get("run")), data, int(manifest["ledger"]["seq"]) + 1))
    return found + [LedgerBehind(run, data, data.count(b"\n")) for run, data in read_copies(run_dir, state.opened)]


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


def keep_copies(run_dir: Path, behind: Sequence[LedgerBehind]) -> list[dict[str, Any]]:
    """Writes the copies, durably, and returns what the `open` record says of them; a crash before that record changes nothing."""
    if not behind:
        return []
    (run_dir / FOLDER).mkdir(exist_ok=True)
    for number, ledger in enumerate(behind, start=1):
        write_durably(run_dir / copy_name(number), ledger.copy)
    fsync_path(run_dir)
    return [record_of(number, ledger.run, ledger.copy) for number, ledger in enumerate(behind, start=1)]


def require_kept(run_dir: Path, opened: dict[str, Any], behind: Sequence[LedgerBehind]) -> None:
    """A run that begins again at step 0 starts from weights whose charges its ledger names already.

    Raises:
        PrivacyConfigError: from other weights, or from the same run's after more attempts.
        PrivacyStateRefused: a copy is missing, or is not the one that the ledger names.
    """
    kept = read_copies(run_dir, opened)
    for number, ledger in enumerate(behind):
        lines = ledger.copy.split(b"\n")[: ledger.needed]
        known = kept[number][1].split(b"\n") if number < len(kept) else []
        if len(known) <= len(lines) or hash_line(known[len(lines) - 1]) != hash_line(lines[-1]):
            raise PrivacyConfigError(
                f"{run_dir}: its ledger was opened before init.checkpoint had spent what it has spent now; start another folder"
            )
