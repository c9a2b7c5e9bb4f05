"""The privacy card as a type: the JSON of `PrivacyCard` is the published format.

The card repeats records of the ledger as they are (`opened`, `plan`, releases, the last checkpoint)
and adds claims, counts, sentences and declarations, which have classes here. Sections of the pages
follow the checklist of "How to DP-fy ML" (Ponomareva et al. 2023, arXiv 2303.00654). A statement is
one line of text in which backticks mark names of files.

    python -m privacy.card.model > docs/schemas/privacy_card.schema.json
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from ..plan.limits import json_value

STATEMENTS: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "templates/statements.toml").read_text()
)
"""The card's fixed sentences."""
Record = dict[str, JsonValue]
"""An unchanged record of the ledger."""
Epsilon = Annotated[float | None, BeforeValidator(json_value)]
"""None where epsilon is infinite, which JSON cannot hold, was not computed, or is not claimed."""


class Part(BaseModel):
    """A frozen part of the card; it refuses unknown keys and infinite numbers."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )

    def updated(self, **changes: object) -> Self:
        """Returns a copy with changed fields, checked like those of a new part."""
        return type(self).model_validate(dict(self) | changes)


class Stated(Part):
    """A text of the run's operator, which nothing computes."""

    text: str | None = Field(None, description="The text; null where the operator stated none.")
    file: str | None = Field(None, description="The file that holds the text.")
    attested: bool = Field(False, description="Whether that file is the ledger.")


class Declared(Part):
    """Texts of the recipe or the ledger, which nothing computes or checks."""

    name: Stated = Field(Stated(), description="The name of the data set.")
    owner: Stated = Field(Stated(), description="The owner of the data.")
    purpose: Stated = Field(
        Stated(), description="The purpose of the collection, or the permitted use."
    )
    licence: Stated = Field(Stated(), description="The licence or agreement of that use.")
    contact: Stated = Field(Stated(), description="The contact for questions about this card.")
    validity: Stated = Field(Stated(), description="The time or the use for which the claim holds.")
    deduplication: Stated = Field(Stated(), description="How near-duplicates were removed.")
    tuning: Stated = Field(Stated(), description="How hyper-parameters were chosen.")


class Mechanism(Part):
    """The mechanism that is applied to the data."""

    name: str = Field(description="The mechanism and its source.")
    statement: str = Field(description="The mechanism in words.")
    settings: tuple[tuple[str, str], ...] = Field(
        (), description="[name, value] of each option of the plan."
    )
    noise_multiplier_accounted: float = Field(
        description="sigma / (1 + r), the noise multiplier of the accountant."
    )
    releases: tuple[Record, ...] = Field(
        description="Every different release of the ledger's attempts, and its `count`."
    )
    drawn_noise: str = Field(description="Whether norms of noised sums refute the stated noise.")


class Attack(Part):
    """Bounds on every membership inference attack on one example, whatever it knows."""

    advantage: float = Field(description="Upper bound of true-positive less false-positive rate.")
    true_positive: dict[str, float] = Field(
        description="False-positive rate -> upper bound of the true-positive rate."
    )
    curve: tuple[tuple[float, float], ...] = Field(
        description="[false-positive rate, bound on the other], for a plot."
    )


class Attempts(Part):
    """Attempts at steps, counted in the ledger."""

    charged: int = Field(description="Charged attempts, ended or not.")
    allowed: int = Field(description="Attempts of the budget: planned steps and reserve.")
    done: int = Field(description="Attempts whose update was applied.")
    repeats: int = Field(description="Attempts beyond the first at their step.")
    torn_lines: int = Field(description="Lines that a crash has cut.")
    torn_lines_charged: int = Field(description="Torn lines that may have been attempts.")


class Accounting(Part):
    """The numbers of the accountants; every epsilon is null without a formal guarantee."""

    epsilon: Epsilon = Field(
        None, description="The claim for all charges; null where it is infinite."
    )
    delta: float = Field(description="delta of the claim.")
    accountant: str = Field(description="Package and version that computed this card.")
    accountant_python: str = Field(description="Version of Python that computed this card.")
    statement: str = Field(description="How the claim is computed.")
    value_interval: float | None = Field(
        None, description="Grid of the privacy loss distribution, where there is one."
    )
    noise_tail_delta: float | None = Field(
        None, description="Cost in delta of the bounded noise of version 0.1."
    )
    epsilon_target: Epsilon = Field(None, description="Target of the calibration of sigma.")
    epsilon_planned: Epsilon = Field(
        None, description="Epsilon of the planned steps without a crash."
    )
    epsilon_with_reserve: Epsilon = Field(None, description="Epsilon of all allowed attempts.")
    epsilon_rdp: Epsilon = Field(
        None, description="Cross-check by Renyi DP, an upper bound without the cap."
    )
    epsilon_prv: tuple[Epsilon, Epsilon] | None = Field(
        None, description="[lower, upper] by PRV, without the cap."
    )
    prv_accountant: str | None = Field(None, description="Package and version of that cross-check.")
    epsilon_replace_one: Epsilon = Field(
        None, description="Epsilon for replacing a record by any other record."
    )
    epsilon_group: dict[str, Epsilon] = Field(
        default_factory=dict, description="Number of copies -> epsilon."
    )
    epsilon_owner: Epsilon = Field(
        None, description="Epsilon of an owner of `max_examples_per_owner` of `opened`."
    )
    attack: Attack | None = Field(None, description="Bounds on membership inference.")
    attempts: Attempts = Field(description="The counts of attempts.")


class CarriedRun(Part):
    """A private run whose charges the released weights carry."""

    name: str = Field(description="Name of the run.")
    file: str = Field(description="Its ledger, relative to the run folder.")
    epsilon: Epsilon = Field(description="Epsilon of the run alone.")
    delta: float = Field(description="delta of that epsilon.")
    attempts_charged: int = Field(description="Attempts that its ledger charges.")
    disjoint_from_those_before: bool = Field(
        description="Whether its data are declared disjoint from those of earlier runs."
    )


class Composition(Part):
    """The claim of weights that started from those of other private runs."""

    epsilon: Epsilon = Field(description="Epsilon of all runs together: the claim of this card.")
    delta: float = Field(description="delta of that epsilon: the smallest delta of the runs.")
    disjoint_by_declaration: bool = Field(
        description="Whether epsilon relies on data declared disjoint."
    )
    statement: str = Field(description="How the runs compose.")
    runs: tuple[CarriedRun, ...] = Field(description="All runs, this one first.")


class PublicData(Part):
    """The initial weights of the model."""

    statement: str = Field(STATEMENTS["public_data"], description="The initial weights in words.")
    file: str | None = Field(None, description="The manifest that names them.")
    attested: bool | None = Field(
        None, description="Whether the manifest has the hash in the ledger."
    )
    facts: dict[str, JsonValue] = Field(
        default_factory=dict, description="The manifest's fields about them."
    )


class LedgerFile(Part):
    """The ledger, from which every number comes."""

    file: Literal["ledger.jsonl"] = Field("ledger.jsonl", description="Its name.")
    lines: int = Field(description="Number of its lines.")
    last_line_sha256: str = Field(
        description="SHA-256 of the last whole line, to be kept elsewhere."
    )


class Session(Part):
    """A start of the program; the command line stays out, since it may name private folders."""

    mirror: bool = Field(description="Whether the session mirrored the ledger.")
    commit: str | None = Field(description="Commit of the code.")
    modified: bool | None = Field(description="Whether the code had uncommitted changes.")
    python: str | None = Field(description="Version of Python.")
    packages: dict[str, str | None] | None = Field(description="Versions of packages.")


class AuditResult(Part):
    """An audit of the run, as a file reports it."""

    file: str = Field(description="The file, relative to the run folder.")
    attested: Literal[False] = Field(
        False, description="Nothing protects the file against changes."
    )
    kind: str = Field(description="Kind of the audit.")
    verdict: str = Field(description="consistent, violated, inconclusive, or unreadable.")
    date_utc: str | None = Field(None, description="Day of the audit.")
    of_this_ledger: bool = Field(False, description="Whether the audit is of the present ledger.")
    violated_checks: tuple[str, ...] = Field((), description="Names of the checks that failed.")


class HeldoutLoss(Part):
    """The held-out losses after one step."""

    step: int = Field(description="Number of the step.")
    loss: Epsilon = Field(description="Loss on held-out data; null where it is not finite.")
    blind_loss: Epsilon = Field(None, description="Loss on held-out data without a model.")
    shuffled_loss: Epsilon = Field(
        None, description="Loss of the model where each caption has another picture."
    )


class Utility(Part):
    """Facts of the run's public files about the model."""

    attested: Literal[False] = Field(
        False, description="Nothing protects these files against changes."
    )
    heldout_file: str | None = Field(description="The file that holds the losses.")
    heldout_loss: tuple[HeldoutLoss, ...] = Field(
        description="Losses on held-out data that are public."
    )


class PrivacyCard(Part):
    """The guarantee of a run, and every fact behind it."""

    card_format: Literal[4] = Field(4, description="Version of this format.")
    run_name: str | None = Field(
        None, description="Name of the run's folder; null for a card of a ledger alone."
    )
    formal_guarantee: bool = Field(description="Whether the run makes a formal claim.")
    reasons: tuple[str, ...] = Field(description="Reasons why the run makes no formal claim.")
    epsilon: Epsilon = Field(
        description="The claim, earlier private runs included; null where none is finite."
    )
    delta: float = Field(description="delta of the claim.")
    steps_done: int | None = Field(
        description="The highest step that is done; null where it is unknown."
    )
    steps_planned: int = Field(description="Planned steps.")
    attempts_charged: int = Field(description="Attempts that epsilon is computed from.")
    warnings: tuple[str, ...] = Field(description="Sentences that a reader should not overlook.")
    ledger: LedgerFile = Field(description="The ledger.")
    opened: Record = Field(description="The `open` record of the ledger, without the plan.")
    plan: Record = Field(description="The plan of that record, without its target_epsilon.")
    sessions: tuple[Session, ...] = Field(description="All starts of the program on the ledger.")
    closed: str | None = Field(description="Reason of the end; null while the run may go on.")
    checkpoints_recorded: int = Field(description="Number of checkpoints in the ledger.")
    isolation_checks: int = Field(
        description="Secret micro-batches whose examples were found to stay apart, as recorded."
    )
    last_checkpoint: Record | None = Field(description="The newest `checkpoint` record.")
    manifest_matches: bool | None = Field(
        None, description="Whether its manifest has the recorded SHA-256; null without a manifest."
    )
    released: str = Field(description="Section 2: the scope of the guarantee, in words.")
    unit: str = Field(description="Section 3: the record whose presence is hidden.")
    declared: Declared = Field(description="Sections 3 and 8: declared texts; null if unstated.")
    mechanism: Mechanism = Field(description="Section 5.")
    sampling: str = Field(description="Section 6: the examples of a step, in words.")
    accounting: Accounting = Field(description="Section 7: this run alone.")
    composition: Composition | None = Field(
        None, description="The claim with private runs behind the weights; null without such runs."
    )
    shared_ledger: dict[str, JsonValue] | None = Field(
        None, description="Section 8: budget and runs of the owner's ledger, where readable."
    )
    public_data: PublicData = Field(PublicData(), description="Section 9.")
    audits: tuple[AuditResult, ...] = Field((), description="Section 13.")
    utility: Utility | None = Field(
        None, description="Section 14; null where no other file was read."
    )

    @model_validator(mode="after")
    def _refuse_claims_without_a_guarantee(self) -> Self:
        numbers = self.accounting
        claims: list[object] = [self.epsilon, self.composition, numbers.attack]
        claims += numbers.epsilon_group.values()
        for name, number in (*numbers, *self.plan.items(), *self.opened.items()):
            if "epsilon" in name and name != "epsilon_group":
                claims.append(number)
        if not self.formal_guarantee and any(claim is not None for claim in claims):
            raise ValueError("a card without a formal guarantee holds no epsilon")
        return self

    def to_json(self, indent: int | None = None) -> str:
        """Returns the published format, in ASCII."""
        return self.model_dump_json(indent=indent, ensure_ascii=True)


def schema_text() -> str:
    """Returns the schema of the files `privacy_card.json`, in which every key is present."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PrivacyCard.model_json_schema(mode="serialization"),
    }
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
