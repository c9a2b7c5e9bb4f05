"""Holds a checkpoint against the ledger of its run folder: what starts, goes on, is evaluated, exported or published."""

from pathlib import Path

from privacy.errors import NotRecorded
from privacy.ledger.recorded import not_recorded_because
from privacy.ledger.records import LedgerState
from trainer.checkpoints.read import MANIFEST, file_digest, read_manifest


def require_recorded(checkpoint: Path, state: LedgerState) -> None:
    """Demands that the ledger recorded exactly this manifest, or that a crash can have come before its record.

    Raises:
        NotRecorded: it is another one; the ledger was rolled back or is of another run.
        ConfigError: the manifest cannot be read.
    """
    manifest = read_manifest(checkpoint)
    step, position = manifest["step"], manifest.get("ledger")
    if not state.plan.enabled:
        return
    position = position if isinstance(position, dict) else {}
    line = position.get("seq")
    reason = "it remembers another ledger"
    known = isinstance(line, int) and 0 <= line < state.num_lines and state.hashes[line] == position.get("hash")
    if known and isinstance(line, int) and isinstance(step, int):
        found = not_recorded_because(state, step, file_digest(checkpoint / MANIFEST), line)
        if found is None:
            return
        reason = found
    raise NotRecorded(
        f"{checkpoint}: {reason}: it was replaced or edited; restore it from a copy, or take it away, and the checkpoint before "
        "it is used"
    )
