"""Where a start goes on: the newest whole checkpoint that the ledger recorded, or step 0 where somebody allows that."""

from torch import nn

from ..checkpoints.read import Checkpoint, newest_whole
from ..errors import PrivacyStateRefused
from .folder import RunFolder
from .run_ledger import RunLedger


def load_newest(folder: RunFolder, ledger: RunLedger, model: nn.Module | None) -> Checkpoint | None:
    """Finds the newest whole checkpoint and sets the model's weights. Collective.

    Args:
        model: None for a model that was built in shards: it takes its weights with the engine's state, piece by piece.

    Raises:
        PrivacyStateRefused: the checkpoint knows more of the ledger than the ledger itself, is of another run, or is not the
            one that the ledger recorded.
    """
    checkpoint = newest_whole(folder.checkpoints, ledger.require_not_shorter_than)
    if checkpoint is not None and not checkpoint.manifest.get("ledger"):
        raise PrivacyStateRefused(
            f"{checkpoint.path} remembers no line of this run's ledger, so it was not written by this run: take it away; "
            "weights from elsewhere are for [init]"
        )
    if checkpoint is not None:
        ledger.require_recorded(checkpoint.path)
    if checkpoint is not None and model is not None:
        checkpoint.load_weights(model)
    return checkpoint


def begins_again(folder: RunFolder, ledger: RunLedger, resumed: Checkpoint | None, *, may_restart: bool) -> bool:
    """Whether the run has lost all its checkpoints and begins again at step 0; prints one line about any other loss.

    A crash before the first checkpoint is no loss: the ledger records a checkpoint only when it is durable, and one that
    replaces another is durable before that is removed.

    Raises:
        PrivacyStateRefused: the ledger records a checkpoint, none is there, and nobody allowed to charge the steps again.
    """
    recorded = ledger.checkpointed_step
    if resumed is not None:
        if recorded is not None and resumed.step < recorded:
            print(
                f"the ledger records a checkpoint of step {recorded}, which is gone or set aside: the steps after "
                f"{resumed.step} are repeated and charged again",
                flush=True,
            )
        if may_restart:
            print(f"--restart_from_step_0 changes nothing: there is a checkpoint of step {resumed.step}", flush=True)
        return False
    if recorded is not None and not may_restart:
        raise PrivacyStateRefused(
            f"{folder.checkpoints}: the ledger records a checkpoint of step {recorded}, and none is there: put one back, or "
            "give --restart_from_step_0, which charges all steps again"
        )
    return recorded is not None
