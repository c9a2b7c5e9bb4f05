"""What is known of the weights that a run started from, and what a ledger proves of a checkpoint.

Reads the ledger and public files of run folders; nothing under `private/` is opened.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.classifier import is_adapter
from privacy.accounting.rounding import rounded_up
from privacy.card.report import read_snapshot
from privacy.checkpoints.read import require_recorded
from privacy.errors import NotRecorded
from privacy.ledger.records import LedgerState

IMPORTED = "imported"


class Spent(BaseModel):
    """What the ledger of a run behind a start says of that run alone."""

    model_config = ConfigDict(frozen=True)

    epsilon: float = Field(ge=0)
    delta: float = Field(ge=0)


class Start(BaseModel):
    """What weights began from, as the `initialisation` of a manifest states it.

    Attributes:
        kind: "random", "checkpoint" (of another run) or "imported"; any other word says nothing.
        training_data: provenance of the data behind a checkpoint.
        guarantee: epsilon and delta that a ledger proves of that run.
        at_random: parameters that did not come from the start.
        before_that: what that run started from.
        format, file, sha256, claim: the source of an import, and what its authors claim of its privacy.
    """

    model_config = ConfigDict(frozen=True)

    kind: str | None = None
    run: str | None = None
    step: int | None = None
    training_data: str | None = None
    guarantee: Spent | None = None
    at_random: tuple[str, ...] = ()
    before_that: "Start | None" = None
    format: str | None = None
    file: str | None = None
    sha256: str | None = None
    claim: str | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "Start":
        """The start that a manifest states; one of no kind where it states nothing that can be read."""
        try:
            return cls.model_validate(manifest.get("initialisation"))
        except ValidationError:
            return cls()

    def chain(self) -> Iterator["Start"]:
        """This start and those behind it, the newest first."""
        start: Start | None = self
        while start is not None:
            yield start
            start = start.before_that


def initialisation_statement(manifest: Mapping[str, Any]) -> str:
    """What a manifest's weights started from, in one or two sentences."""
    return _statement(Start.of(manifest))


def _statement(start: Start) -> str:
    if start.kind == "random":
        return "None: the model was initialised at random."
    if start.kind == IMPORTED:
        claim = f" Stated with the import: {start.claim!r}." if start.claim else ""
        return (
            f"Imported from the {start.format} file {start.file!r} (SHA-256 {str(start.sha256)[:16]}...): what its authors "
            f"claim of its privacy is not attested by anything here.{claim}"
        )
    if start.kind != "checkpoint":
        return "The model was not initialised at random: the data behind its initial weights is outside of the claim."
    # What did not come from the start: parts by their outermost module, and adapters, which lie inside of parts.
    parts = sorted({name.partition(".")[0] for name in start.at_random if not is_adapter(name)})
    left_out = [f"those of {', '.join(parts)}"] if parts else []
    if any(is_adapter(name) for name in start.at_random):
        left_out.append("the low-rank adapters")
    but = f" (all but {' and '.join(left_out)}, which began anew)" if left_out else ""
    origin = f"The initial weights{but} are those of step {start.step} of run {start.run!r}"
    before = start.before_that
    if before is not None and before.kind == IMPORTED:
        who = f"whoever imported them declared the data behind them {start.training_data}"
        return f"{origin}: {who}. {_statement(before)}"
    behind = (
        f" Before that: {_statement(before)}"
        if before is not None and before.kind == "checkpoint"
        else ""
    )
    if start.training_data in ("public", "synthetic"):
        return f"{origin}, trained on data that its recipe declares {start.training_data}.{behind}"
    if not start.guarantee:
        return (
            f"{origin}, trained on private data without a guarantee that a ledger proves.{behind}"
        )
    return (
        f"{origin}, trained on private data with epsilon {rounded_up(start.guarantee.epsilon)} at delta "
        f"{start.guarantee.delta:g} of its own. The two compose: the card's first number holds what both spent.{behind}"
    )


class Proof(NamedTuple):
    """The whole ledger around a checkpoint that it knows, or None and why there is none."""

    state: LedgerState | None
    reason: str = ""


def proof_of(checkpoint: Path, manifest: Mapping[str, Any]) -> Proof:
    """Reads the ledger of the run folder around a checkpoint. One that lies there has to bear the checkpoint out: weights that
    are used under the words "not attested" next to a ledger that says otherwise would hide what was spent on them. Where there
    is no ledger, nothing is attested.

    Raises:
        PrivacyStateRefused, PrivacyConfigError: the ledger is broken.
        NotRecorded: it recorded another checkpoint, or manifest and ledger contradict each other.
    """
    checkpoint = checkpoint.resolve()
    ledger = checkpoint.parent.parent / "ledger.jsonl"
    if checkpoint.parent.name != "checkpoints" or not ledger.is_file():
        return Proof(None, "there is no ledger in its run folder")
    state = read_snapshot(ledger).state
    require_recorded(checkpoint, state)
    position = manifest.get("ledger") or {}
    seq = position.get("seq")
    if (
        type(seq) is not int
        or not 0 <= seq < len(state.hashes)
        or state.hashes[seq] != position.get("hash")
    ):
        raise NotRecorded(
            f"{checkpoint}: remembers no line of {ledger}, which is that of another run, or was rolled back{WAYS}"
        )
    if state.opened["plan"]["formal_guarantee"] != (manifest.get("formal_guarantee") is True):
        raise NotRecorded(
            f"{checkpoint}: its manifest and {ledger} contradict each other about the formal guarantee{WAYS}"
        )
    return Proof(state)


WAYS = (
    ": restore the ledger from a copy, or copy the checkpoint to a folder without one, where it is used without any statement on "
    "its privacy"
)
