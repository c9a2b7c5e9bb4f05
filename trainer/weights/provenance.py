"""The start of a run's weights as manifests state it, and the proof that a ledger gives of them.

Reads the ledger and public files of run folders, and opens nothing under `private/`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.classifier import is_adapter
from privacy.accounting.rounding import rounded_up
from privacy.card.ledger_card import read_snapshot
from privacy.checkpoints.read import require_recorded
from privacy.errors import NotRecorded
from privacy.ledger.records import LedgerState

IMPORTED = "imported"


class Spending(BaseModel):
    """The epsilon and delta of one earlier run, by its own ledger alone."""

    model_config = ConfigDict(frozen=True)

    epsilon: float = Field(ge=0)
    delta: float = Field(ge=0)


class Initialisation(BaseModel):
    """The start of a run's weights, as the `initialisation` of a manifest states it.

    Attributes:
        kind: "random", "checkpoint" (of another run) or "imported"; any other word states nothing.
        training_data: provenance of the data behind a checkpoint.
        guarantee: epsilon and delta that a ledger proves of that run.
        at_random: parameters that began at random, not from the checkpoint.
        before_that: the start of that run.
        format, file, sha256, claim: the source of an import, and its authors' claim on its privacy.
    """

    model_config = ConfigDict(frozen=True)

    kind: str | None = None
    run: str | None = None
    step: int | None = None
    training_data: str | None = None
    guarantee: Spending | None = None
    at_random: tuple[str, ...] = ()
    before_that: "Initialisation | None" = None
    format: str | None = None
    file: str | None = None
    sha256: str | None = None
    claim: str | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "Initialisation":
        """Returns the start that a manifest states; without a kind if it is missing or invalid."""
        try:
            return cls.model_validate(manifest.get("initialisation"))
        except ValidationError:
            return cls()

    def chain(self) -> Iterator["Initialisation"]:
        """Yields this start and the earlier ones, the newest first."""
        start: Initialisation | None = self
        while start is not None:
            yield start
            start = start.before_that


def initialisation_statement(manifest: Mapping[str, Any]) -> str:
    """Returns the start of a manifest's weights in one or two sentences."""
    return _statement(Initialisation.of(manifest))


def _statement(start: Initialisation) -> str:
    if start.kind == "random":
        return "None: the model was initialised at random."
    if start.kind == IMPORTED:
        claim = f" Stated with the import: {start.claim!r}." if start.claim else ""
        return (
            f"Imported from the {start.format} file {start.file!r} (SHA-256 "
            f"{str(start.sha256)[:16]}...): what its authors claim of its privacy is not attested "
            f"by anything here.{claim}"
        )
    if start.kind != "checkpoint":
        return (
            "The model was not initialised at random: the data behind its initial weights is "
            "outside of the claim."
        )
    # Parameters that began at random: parts by their outermost module, and adapters, which are
    # inside of parts.
    parts = sorted({name.partition(".")[0] for name in start.at_random if not is_adapter(name)})
    random_parts = [f"those of {', '.join(parts)}"] if parts else []
    if any(is_adapter(name) for name in start.at_random):
        random_parts.append("the low-rank adapters")
    exception = f" (all but {' and '.join(random_parts)}, which began anew)" if random_parts else ""
    origin = f"The initial weights{exception} are those of step {start.step} of run {start.run!r}"
    parent = start.before_that
    if parent is not None and parent.kind == IMPORTED:
        declaration = f"their import declared the data behind them {start.training_data}"
        return f"{origin}: {declaration}. {_statement(parent)}"
    history = ""
    if parent is not None and parent.kind == "checkpoint":
        history = f" Before that: {_statement(parent)}"
    if start.training_data in ("public", "synthetic"):
        return f"{origin}, trained on data that its recipe declares {start.training_data}.{history}"
    if not start.guarantee:
        return (
            f"{origin}, trained on private data without a guarantee that a ledger proves.{history}"
        )
    return (
        f"{origin}, trained on private data with epsilon {rounded_up(start.guarantee.epsilon)} at "
        f"delta {start.guarantee.delta:g} of its own. The two compose: the card's first number "
        f"holds what both spent.{history}"
    )


class Proof(NamedTuple):
    """The whole ledger around a checkpoint, or None and the reason."""

    state: LedgerState | None
    reason: str = ""


def proof_of(checkpoint: Path, manifest: Mapping[str, Any]) -> Proof:
    """Refuses a ledger that contradicts the checkpoint; returns the ledger.

    Weights that are used as "not attested" next to a ledger that proves spending would hide that
    spending. Without a ledger nothing is attested.

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
    # The manifest names the last line of the ledger when the checkpoint was written.
    position = manifest.get("ledger") or {}
    seq = position.get("seq")
    line_hash = None
    if type(seq) is int and 0 <= seq < len(state.hashes):
        line_hash = state.hashes[seq]
    if line_hash is None or line_hash != position.get("hash"):
        raise NotRecorded(
            f"{checkpoint}: its manifest names no line of {ledger}, which is another run's, or was "
            f"rolled back{WAYS}"
        )
    if state.opened["plan"]["formal_guarantee"] != (manifest.get("formal_guarantee") is True):
        raise NotRecorded(
            f"{checkpoint}: its manifest and {ledger} contradict each other about the formal "
            f"guarantee{WAYS}"
        )
    return Proof(state)


WAYS = (
    ": restore the ledger from a copy, or copy the checkpoint to a folder without one, where it "
    "is used without a statement on its privacy"
)
