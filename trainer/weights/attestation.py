"""What may be said of a checkpoint's privacy: what a whole ledger in its own run folder proves, and nothing else.

Reads the ledger and public files of the run folder; nothing under `private/` is opened.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from privacy.card.report import read_snapshot
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.records import LedgerState
from trainer.report import build_card


class Attestation(NamedTuple):
    """What a ledger proves of a checkpoint.

    Attributes:
        card: the privacy card of its run, or None where no ledger attests anything.
        reason: then why not.
    """

    card: dict[str, Any] | None
    reason: str = ""

    @property
    def formal_guarantee(self) -> bool:
        return self.card is not None and bool(self.card["formal_guarantee"])

    @property
    def epsilon(self) -> float | None:
        """Of the whole run as far as its ledger goes, so at least that of the checkpoint."""
        return self.card["epsilon"] if self.card is not None and self.formal_guarantee else None

    def facts(self) -> dict[str, Any]:
        """For config.json and the console; epsilon only with a guarantee."""
        said: dict[str, Any] = {"formal_guarantee": self.formal_guarantee, "attested": self.card is not None}
        if self.card is None:
            return said | {"not_attested_because": self.reason}
        if self.formal_guarantee:
            return said | {"epsilon": self.epsilon, "delta": self.card["delta"]}
        return said | {"reasons": self.card["reasons"]}


class Proof(NamedTuple):
    """The whole ledger around a checkpoint that knows it, or None and why there is none."""

    state: LedgerState | None
    reason: str = ""

    @property
    def formal_guarantee(self) -> bool:
        return self.state is not None and self.state.plan.formal_guarantee


def proof_of(checkpoint: Path, manifest: Mapping[str, Any]) -> Proof:
    """Reads the ledger of the run folder around a checkpoint; no accounting yet."""
    checkpoint = checkpoint.resolve()
    run = checkpoint.parent.parent
    if checkpoint.parent.name != "checkpoints" or not (run / "ledger.jsonl").is_file():
        return Proof(None, "there is no ledger beside it")
    try:
        state = read_snapshot(run / "ledger.jsonl").state
        guaranteed = state.plan.formal_guarantee
    except (PrivacyStateRefused, PrivacyConfigError):
        return Proof(None, "the ledger beside it is broken")
    position = manifest.get("ledger") or {}
    seq = position.get("seq")
    if type(seq) is not int or not 0 <= seq < len(state.hashes) or state.hashes[seq] != position.get("hash"):
        return Proof(None, "the ledger beside it is that of another run, or was rolled back")
    if guaranteed and not manifest.get("formal_guarantee"):
        return Proof(None, "its manifest claims no guarantee, although the ledger beside it does")
    return Proof(state)


def attest(checkpoint: Path, manifest: Mapping[str, Any]) -> Attestation:
    """The card of the run folder around a checkpoint, if its ledger is whole and knows this checkpoint's moment."""
    proof = proof_of(checkpoint, manifest)
    if proof.state is None:
        return Attestation(None, proof.reason)
    try:
        card = build_card(checkpoint.resolve().parent.parent)
    except (PrivacyStateRefused, PrivacyConfigError):
        return Attestation(None, "the ledger beside it is broken")
    return Attestation({**card, "run_dir": card["run_name"]})
