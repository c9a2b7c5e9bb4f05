"""The privacy card as a type: `PrivacyCard`, whose JSON is the published format (docs/schemas/privacy_card.schema.json).

The card repeats records of the ledger as they are (`opened`, `plan`, releases, the last checkpoint) and adds claims,
counts, sentences and declarations, which have classes here. Each fact that does not come from the ledger names its file;
sentences that every card repeats stand on the pages alone. Sections of the pages follow the checklist of "How to DP-fy ML"
(Ponomareva et al. 2023, arXiv 2303.00654). A statement is one line of text in which backticks mark names of files.

python -m privacy.card.model > docs/schemas/privacy_card.schema.json
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from ..plan.limits import finite

STATEMENTS: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "templates/statements.toml").read_text()
)
"""The card's fixed sentences."""
Record = dict[str, JsonValue]
"""A record of the ledger, as it stands there."""
Epsilon = Annotated[float | None, BeforeValidator(finite)]
"""None where it is infinite, which JSON cannot hold, was not computed, or is not claimed."""


class Part(BaseModel):
    """A frozen part of the card; an unknown key and an infinite number are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )

    def updated(self, **changes: object) -> Self:
        """A copy with changed fields, which are checked as those of a new part are."""
        return type(self).model_validate(dict(self) | changes)


class Stated(Part):
    """Words of whoever ran the training, which nothing computes."""

    text: str | None = Field(None, description="The words; null where nothing is stated.")
    file: str | None = Field(None, description="The file that holds them.")
    attested: bool = Field(False, description="Whether that file is the ledger.")


class Declared(Part):
    """Words that nothing computes or checks: of the recipe, or of the ledger where it states them itself."""

    name: Stated = Field(Stated(), description="The name of the data set.")
    owner: Stated = Field(Stated(), description="Who answers for it.")
    purpose: Stated = Field(Stated(), description="What it was collected for, or may be used for.")
    licence: Stated = Field(
        Stated(), description="The licence or agreement under which it is used."
    )
    contact: Stated = Field(Stated(), description="Who answers questions about this card.")
    validity: Stated = Field(
        Stated(), description="Until when, or for which use, the claim may be relied on."
    )
    deduplication: Stated = Field(Stated(), description="How near-duplicates were removed.")
    tuning: Stated = Field(Stated(), description="How hyper-parameters were chosen.")


class Mechanism(Part):
    """What is done to the data."""

    name: str = Field(description="The mechanism and its source.")
    statement: str = Field(description="The mechanism in words.")
    settings: tuple[tuple[str, str], ...] = Field(
        (), description="[what, value] of each option of the plan."
    )
    noise_multiplier_accounted: float = Field(
        description="sigma / (1 + r), which the accountant is charged with."
    )
    releases: tuple[Record, ...] = Field(
        description="Every different release of the ledger's attempts, and its `count`."
    )
    drawn_noise: str = Field(description="Whether norms of noised sums refute the stated noise.")


class Attack(Part):
    """What any membership inference attack on one example can reach, whatever it knows."""

    advantage: float = Field(description="Upper bound of true-positive less false-positive rate.")
    true_positive: dict[str, float] = Field(
        description="False-positive rate -> upper bound of the true-positive rate."
    )
    curve: tuple[tuple[float, float], ...] = Field(
        description="[false-positive rate, bound on the other], for a plot."
    )


class Attempts(Part):
    """Attempts at steps, counted in the ledger."""

    charged: int = Field(
        description="Attempts that count against the budget, whether they ended or not."
    )
    allowed: int = Field(
        description="Attempts that the budget allows: planned steps and the reserve."
    )
    done: int = Field(description="Attempts whose update was applied.")
    repeats: int = Field(description="Attempts beyond the first at their step.")
    torn_lines: int = Field(description="Lines that a crash cut off.")
    torn_lines_charged: int = Field(description="Torn lines that may have been attempts.")


class Accounting(Part):
    """Everything about epsilon; every epsilon is null without a formal guarantee."""

    epsilon: Epsilon = Field(
        None, description="The claim, for everything charged; null where it is infinite."
    )
    delta: float = Field(description="delta of the claim.")
    accountant: str = Field(description="Package and version that computed this card.")
    accountant_python: str = Field(description="Version of Python that computed this card.")
    statement: str = Field(description="How the claim is computed.")
    value_interval: float | None = Field(
        None, description="Grid of the privacy loss distribution, where there is one."
    )
    noise_tail_delta: float | None = Field(
        None, description="What the bounded support of noise of version 0.1 costs."
    )
    epsilon_target: Epsilon = Field(None, description="What sigma was calibrated to.")
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
        None, description="Epsilon for replacing a record by any other one."
    )
    epsilon_group: dict[str, Epsilon] = Field(
        default_factory=dict, description="Number of copies -> epsilon."
    )
    epsilon_owner: Epsilon = Field(
        None, description="Epsilon of an owner of `max_examples_per_owner`, which `opened` states."
    )
    attack: Attack | None = Field(None, description="Bounds on membership inference.")
    attempts: Attempts = Field(description="What was charged.")


class CarriedRun(Part):
    """A private run that the released weights carry the charges of."""

    name: str = Field(description="Name of the run.")
    file: str = Field(description="Its ledger, relative to the run folder.")
    epsilon: Epsilon = Field(description="Epsilon of the run alone.")
    delta: float = Field(description="delta of that.")
    attempts_charged: int = Field(description="Attempts that its ledger charges.")
    disjoint_from_those_before: bool = Field(
        description="Whether its data are declared to hold no example of those."
    )


class Composition(Part):
    """What the released weights carry where they started from those of another private run."""

    epsilon: Epsilon = Field(description="Epsilon of all runs together: the claim of this card.")
    delta: float = Field(description="delta of that: the smallest one of the runs.")
    disjoint_by_declaration: bool = Field(
        description="Whether epsilon relies on data declared disjoint."
    )
    statement: str = Field(description="How the runs compose.")
    runs: tuple[CarriedRun, ...] = Field(description="All runs, this one first.")


class PublicData(Part):
    """What the model started from."""

    statement: str = Field(STATEMENTS["public_data"], description="The initial weights in words.")
    file: str | None = Field(None, description="The manifest that says so.")
    attested: bool | None = Field(None, description="Whether that file has the hash in the ledger.")
    facts: dict[str, JsonValue] = Field(
        default_factory=dict, description="What the manifest holds about them."
    )


class LedgerFile(Part):
    """The file that every number comes from."""

    file: Literal["ledger.jsonl"] = Field("ledger.jsonl", description="Its name.")
    lines: int = Field(description="Number of its lines.")
    last_line_sha256: str = Field(
        description="SHA-256 of the last whole line, to be kept elsewhere."
    )


class Session(Part):
    """A start of the program; the command line stays out, since it may name private folders."""

    mirror: bool = Field(description="Whether it mirrored the ledger.")
    commit: str | None = Field(description="Commit of the code.")
    modified: bool | None = Field(description="Whether the code had uncommitted changes.")
    python: str | None = Field(description="Version of Python.")
    packages: dict[str, str | None] | None = Field(description="Versions of packages.")


class AuditResult(Part):
    """What a file says about an audit of the run."""

    file: str = Field(description="The file, relative to the run folder.")
    attested: Literal[False] = Field(
        False, description="Nothing protects the file against changes."
    )
    kind: str = Field(description="Which audit.")
    verdict: str = Field(description="consistent, violated, inconclusive, or unreadable.")
    date_utc: str | None = Field(None, description="The day that it states.")
    of_this_ledger: bool = Field(False, description="Whether it looked at the ledger as it is now.")
    violated_checks: tuple[str, ...] = Field((), description="Names of the checks that failed.")


class HeldoutLoss(Part):
    """One point of a curve."""

    step: int = Field(description="Step after which it was measured.")
    loss: Epsilon = Field(description="Loss on held-out data; null where it is no number.")
    blind_loss: Epsilon = Field(None, description="What one gets on them without a model.")
    shuffled_loss: Epsilon = Field(
        None, description="The model's loss where each caption stands with another picture."
    )


class Utility(Part):
    """What the run's public files say about the model."""

    attested: Literal[False] = Field(
        False, description="Nothing protects these files against changes."
    )
    heldout_file: str | None = Field(description="The file that holds the losses.")
    heldout_loss: tuple[HeldoutLoss, ...] = Field(
        description="Losses on held-out data that are public."
    )


class PrivacyCard(Part):
    """What a run guarantees, and everything that this depends on."""

    card_format: Literal[4] = Field(4, description="Version of this format.")
    run_name: str | None = Field(
        None, description="Name of the run's folder; null for a card of a ledger alone."
    )
    formal_guarantee: bool = Field(description="Whether the run makes a formal claim.")
    reasons: tuple[str, ...] = Field(description="Why it makes none.")
    epsilon: Epsilon = Field(
        description="The claim, earlier private runs included; null where none is finite."
    )
    delta: float = Field(description="delta of the claim.")
    steps_done: int | None = Field(
        description="The highest step that is done; null where it is unknown."
    )
    steps_planned: int = Field(description="Planned steps.")
    attempts_charged: int = Field(description="Attempts that epsilon is computed from.")
    warnings: tuple[str, ...] = Field(description="What a reader should not overlook.")
    ledger: LedgerFile = Field(description="The ledger.")
    opened: Record = Field(description="Its `open` record, without the plan.")
    plan: Record = Field(description="The plan of that record, without its target_epsilon.")
    sessions: tuple[Session, ...] = Field(description="All starts of the program on the ledger.")
    closed: str | None = Field(description="Why the run ended; null while it may go on.")
    checkpoints_recorded: int = Field(description="Number of checkpoints in the ledger.")
    last_checkpoint: Record | None = Field(description="The newest `checkpoint` record.")
    manifest_matches: bool | None = Field(
        None, description="Whether the file there has the recorded SHA-256; null where none is."
    )
    released: str = Field(description="Section 2: what the guarantee covers, in words.")
    unit: str = Field(description="Section 3: the record whose presence is hidden.")
    declared: Declared = Field(description="Sections 3 and 8: what is declared; null if unstated.")
    mechanism: Mechanism = Field(description="Section 5.")
    sampling: str = Field(description="Section 6: who takes part in a step, in words.")
    accounting: Accounting = Field(description="Section 7: this run alone.")
    composition: Composition | None = Field(
        None, description="With private runs behind the weights."
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
    def _claims_nothing_without_a_guarantee(self) -> Self:
        numbers = self.accounting
        named = [*numbers, *self.plan.items(), *self.opened.items()]
        claims = [value for name, value in named if "epsilon" in name and name != "epsilon_group"]
        claims += [self.epsilon, self.composition, numbers.attack, *numbers.epsilon_group.values()]
        if not self.formal_guarantee and any(value is not None for value in claims):
            raise ValueError("a card without a formal guarantee holds no epsilon")
        return self

    def to_json(self, indent: int | None = None) -> str:
        """The published format, in ASCII."""
        return self.model_dump_json(indent=indent, ensure_ascii=True)


def schema_text() -> str:
    """The schema of the files `privacy_card.json`, in which every key is present."""
    schema = PrivacyCard.model_json_schema(mode="serialization")
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    print(schema_text(), end="")
