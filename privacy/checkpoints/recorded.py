"""Holds a checkpoint against the ledger of its run: anybody can seal a manifest anew, but the ledger's hash chain names one."""

from pathlib import Path

from ..errors import NotRecorded
from ..ledger.records import LedgerState
from .read import MANIFEST, checkpoint_name, file_digest, read_manifest


def require_recorded(checkpoint: Path, state: LedgerState) -> None:
    """Demands that the ledger recorded exactly this manifest, or that a crash can have come before its record.

    Raises:
        NotRecorded: the ledger recorded another one; it was rolled back, or is of another run, or its folder was renamed.
        ConfigError: the manifest cannot be read.
    """
    manifest = read_manifest(checkpoint)
    step, position = manifest["step"], manifest.get("ledger")
    is_numbered = checkpoint.parent.name == "checkpoints" and checkpoint.name.startswith("step-")
    # Names say which one is the newer.
    if is_numbered and isinstance(step, int) and checkpoint.name != checkpoint_name(step):
        raise NotRecorded(
            f"{checkpoint}: holds the checkpoint of step {step}, so it was renamed: call it {checkpoint_name(step)} again, "
            "or take it away"
        )
    if not state.plan.enabled or (step, file_digest(checkpoint / MANIFEST)) in state.checkpoints:
        return  # without privacy the ledger records no checkpoint
    position = position if isinstance(position, dict) else {}
    line = position.get("seq")
    is_known = isinstance(line, int) and 0 <= line < state.num_lines and state.hashes[line] == position.get("hash")
    if not (is_known and state.may_lack_record(step, position["seq"])):
        raise NotRecorded(
            f"{checkpoint}: its {MANIFEST} is not the one that the ledger recorded, so it was replaced or edited: restore it "
            "from a copy, or take it away, and the checkpoint before it is used"
        )
