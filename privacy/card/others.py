"""What other files than the ledger add to a privacy card. They are public files of the run; each part names its file."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

STATEMENTS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "templates/statements.toml").read_text())
"""The card's fixed sentences."""


def finite_or_none(value: object) -> object:
    """None for an infinite number or a NaN, which JSON cannot hold; any other value as it is."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Epsilon = Annotated[float | None, BeforeValidator(finite_or_none)]
"""None where it is infinite, was not computed, or is not claimed."""


class Part(BaseModel):
    """A frozen part of the card; an unknown key and an infinite number are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,
    )

    def updated(self, **changes: object) -> Self:
        """A copy with changed fields, which are checked as those of a new part are."""
        return type(self).model_validate(dict(self) | changes)


class FileStatement(Part):
    """A statement that another file than the ledger makes."""

    statement: str = Field(description="What follows from the file.")
    file: str = Field(description="The file, relative to the run folder.")
    attested: bool = Field(False, description="Whether the ledger proves it.")


class Stated(Part):
    """Words of whoever ran the training, which nothing computes."""

    text: str | None = Field(None, description="The words; null where nothing is stated.")
    file: str | None = Field(None, description="The file that holds them.")
    attested: bool = Field(False, description="Whether that file is the ledger.")


class DataSet(Part):
    """What the recipe says of the data; nothing computes or checks it."""

    name: Stated = Field(Stated(), description="The name of the data set.")
    owner: Stated = Field(Stated(), description="Who answers for it.")
    purpose: Stated = Field(Stated(), description="What it was collected for, or may be used for.")
    licence: Stated = Field(Stated(), description="The licence or agreement under which it is used.")


class SiblingRun(Part):
    """A reservation in the shared ledger of the data owner."""

    run: str = Field(description="Commitment to the run's sampling key, which names the run.")
    name: str = Field(description="Name of the run.")
    time_utc: str = Field(description="When it was reserved.")
    is_this_run: bool = Field(description="Whether it is the run of this card.")
    chosen_after_outputs: bool = Field(description="Whether it was chosen after outputs of other runs were seen.")
    epsilon: Epsilon = Field(description="Epsilon of its reservation alone.")
    sample_rate: float = Field(description="q of its steps.")
    noise_multiplier: float = Field(description="sigma / (1 + r) of its steps.")
    count: int = Field(description="Attempts that it reserves.")
    num_examples: int | None = Field(description="n, where its batches have a cap.")
    cap: int | None = Field(description="The largest batch.")


class InformalRun(Part):
    """A run on the same data without a guarantee, which no epsilon covers."""

    name: str = Field(description="Name of the run.")
    reason: str = Field(description="Why it has no guarantee.")


class SharedSummary(Part):
    """What the shared ledger of the data owner says."""

    identity: str = Field(description="SHA-256 of its first line.")
    epsilon: float = Field(description="The total for all runs.")
    delta: float = Field(description="delta of the total.")
    unit: str = Field(description="The owner's unit of privacy.")
    adjacency: str = Field(description="The owner's neighbouring relation.")
    rdp_order: float = Field(description="Order of the RDP filter.")
    accounting: str = Field(description="pld, or rdp_filter where a run was chosen after outputs of others.")
    epsilon_reserved: Epsilon = Field(description="Epsilon that all runs reserved together.")
    runs: tuple[SiblingRun, ...] = Field(description="All reservations.")
    informal_runs: tuple[InformalRun, ...] = Field(description="Runs without a guarantee.")


class CarriedRun(Part):
    """A private run that the released weights carry the charges of."""

    name: str = Field(description="Name of the run.")
    file: str = Field(description="Its ledger, relative to the run folder.")
    epsilon: Epsilon = Field(description="Epsilon of the run alone.")
    delta: float = Field(description="delta of that.")
    attempts_charged: int = Field(description="Attempts that its ledger charges.")
    disjoint_from_those_before: bool = Field(
        description="Whether its recipe declares that its data hold no example of the runs that it started from."
    )


class Composition(Part):
    """What the released weights carry where they started from those of another private run."""

    epsilon: Epsilon = Field(description="Epsilon of all runs together: the claim of this card.")
    delta: float = Field(description="delta of that: the smallest one of the runs.")
    disjoint_by_declaration: bool = Field(
        description="Whether somebody declared data disjoint, and epsilon relies on it."
    )
    statement: str = Field(description="How the runs compose.")
    runs: tuple[CarriedRun, ...] = Field(description="All runs, this one first.")


class PublicData(Part):
    """What the model started from."""

    statement: str = Field(STATEMENTS["public_data"], description="The initial weights in words.")
    file: str | None = Field(None, description="The manifest that says so.")
    attested: bool | None = Field(None, description="Whether that file has the hash in the ledger.")
    facts: dict[str, JsonValue] = Field(default_factory=dict, description="What the manifest holds about them.")


class AuditResult(Part):
    """What a file says about an audit of the run."""

    file: str = Field(description="The file, relative to the run folder.")
    attested: Literal[False] = Field(False, description="Nothing protects the file against changes.")
    kind: str = Field(description="Which audit.")
    verdict: str = Field(description="consistent, violated, inconclusive, or unreadable.")
    date_utc: str | None = Field(None, description="The day that it states.")
    of_this_ledger: bool = Field(False, description="Whether it looked at the ledger as it is now.")
    violated_checks: tuple[str, ...] = Field((), description="Names of the checks that failed.")


class HeldoutLoss(Part):
    """One point of a curve."""

    step: int = Field(description="Step after which it was measured.")
    loss: Epsilon = Field(description="Loss on held-out data; null where it is no number.")
    blind_loss: Epsilon = Field(
        None, description="What one gets on them without a model; null where nobody computed it."
    )
    shuffled_loss: Epsilon = Field(None, description="The model's loss where each caption stands with another picture.")


class Samples(Part):
    """A picture of what the model makes of public held-out examples."""

    file: str = Field(description="The file, relative to the run folder.")
    step: int = Field(description="Step after which it was drawn.")


class Utility(Part):
    """What the run's public files say about the model."""

    attested: Literal[False] = Field(False, description="Nothing protects these files against changes.")
    statement: str = Field(STATEMENTS["utility"], description="What that means.")
    heldout_file: str | None = Field(description="The file that holds the losses.")
    heldout_loss: tuple[HeldoutLoss, ...] = Field(description="Losses on held-out data that are public.")
    samples: Samples | None = Field(description="The newest picture.")


class OtherFiles(Part):
    """All that other files add; by default nothing. Where the ledger states something itself, its words count."""

    run_dir: str | None = None
    run_name: str | None = None
    manifest_matches: bool | None = Field(None, description="See `Checkpoint`.")
    post_processing: tuple[FileStatement, ...] = ()
    data_set: DataSet = DataSet()
    deduplication: Stated = Stated()
    tuning: Stated = Stated()
    shared_summary: SharedSummary | None = None
    public_data: PublicData = PublicData()
    audits: tuple[AuditResult, ...] = ()
    utility: Utility | None = None
    warnings: tuple[str, ...] = ()
