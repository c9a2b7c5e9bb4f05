"""The privacy card as a type: `PrivacyCard`, whose JSON is the published format (docs/schemas/privacy_card.schema.json).

Headings and their order follow the reporting checklist of "How to DP-fy ML" (Ponomareva et al. 2023, arXiv 2303.00654). The JSON
holds facts, and each one that does not come from the ledger names its file; sentences that every card repeats stand on the pages
alone. A statement is one line of text in which backticks mark names of files; privacy/card/render.py makes pages of a card.

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
Scalar = str | bool | int | float | None


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


class DataSet(Part):
    """What the recipe says of the data; nothing computes or checks it."""

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


class Checkpoint(Part):
    """A checkpoint that the ledger records."""

    step: int = Field(description="Step after which it was written.")
    name: str | None = Field(description="Name of its folder.")
    manifest_sha256: str = Field(description="SHA-256 of its manifest, from the ledger.")
    manifest_matches: bool | None = Field(
        None, description="Whether the file there has it; null where none is."
    )


class Released(Part):
    """What leaves the trust boundary."""

    statement: str = Field(description="What the guarantee covers.")
    checkpoints_recorded: int = Field(description="Number of checkpoints in the ledger.")
    last_checkpoint: Checkpoint | None = Field(description="The newest of them.")


class UnitOfPrivacy(Part):
    """What is protected."""

    unit: str = Field(description="The record whose presence is hidden.")
    num_examples: int = Field(description="n, the public number of examples.")
    deduplication: Stated = Field(Stated(), description="How near-duplicates were removed.")
    data_set: DataSet = Field(DataSet(), description="What is declared of the data.")


class Release(Part):
    """A noised sum that the attempts release, by its name in the ledger."""

    name: str = Field(description="Its name.")
    count: int = Field(description="How often it was released.")
    smallest_noise_multiplier: float = Field(
        description="The least standard deviation / sensitivity of all times."
    )
    smallest_sensitivity: float = Field(
        description="The smallest L2 sensitivity of all times (of the gradient C)."
    )
    largest_sensitivity: float = Field(description="The largest of all times.")
    last_sensitivity: float = Field(description="That of the newest attempt.")


class Head(Part):
    """A private linear head (evaluation/private_head); the options of its method are further keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Scalar]

    method: str = Field(description="Name of the method.")
    num_classes: int = Field(description="Public number of classes.")
    covers: str | None = Field(
        None, description="Which examples the guarantee covers, and given what."
    )


class Mechanism(Part):
    """What is done to the data."""

    name: str = Field(description="The mechanism and its source.")
    head: Head | None = Field(description="The private head that was trained; null for DP-SGD.")
    noise_multiplier_accounted: float = Field(
        description="sigma / (1 + r), which the accountant is charged with."
    )
    settings: tuple[tuple[str, str], ...] = Field(
        (), description="[what, value] of each option of the plan."
    )
    releases: tuple[Release, ...] = Field(description="Everything that the attempts release.")
    drawn_noise: str = Field(description="Whether norms of noised sums refute the stated noise.")
    statement: str = Field(description="The mechanism in words.")


class Sampling(Part):
    """Which examples take part in a step."""

    scheme: str = Field(description="poisson, shuffle or full batch.")
    key_commitment_sha256: str = Field(description="Commitment to the secret sampling key.")
    data_hmac_sha256: str | None = Field(
        description="Identity of the data, as an HMAC under that key."
    )
    statement: str = Field(description="The scheme in words.")


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
    accountant_at_opening: str | None = Field(
        description="Package and version that the run was planned with."
    )
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
    max_examples_per_owner: int | None = Field(
        description="The most examples of one owner, as the recipe states."
    )
    epsilon_owner: Epsilon = Field(None, description="Epsilon of such an owner.")
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


class Tuning(Part):
    """How hyper-parameters were chosen."""

    stated: Stated = Field(Stated(), description="How they were chosen, in words.")
    shared_ledger: str | None = Field(
        None, description="SHA-256 of the owner's ledger's first line."
    )
    shared_summary: dict[str, JsonValue] | None = Field(
        None, description="Its budget and runs, where readable."
    )


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
    format: int = Field(description="Version of its format.")
    lines: int = Field(description="Number of its lines.")
    last_line_sha256: str = Field(
        description="SHA-256 of the last whole line, to be kept elsewhere."
    )
    mirrored_sessions: int = Field(description="Number of sessions that wrote a mirror of it.")


class Session(Part):
    """A start of the program; the command line stays out, since it may name private folders."""

    mirror: bool = Field(description="Whether it mirrored the ledger.")
    commit: str | None = Field(description="Commit of the code.")
    modified: bool | None = Field(description="Whether the code had uncommitted changes.")
    python: str | None = Field(description="Version of Python.")
    packages: dict[str, str | None] | None = Field(description="Versions of packages.")


class Provenance(Part):
    """Code, ledger and sessions."""

    commit: str | None = Field(description="Commit of the code that opened the ledger.")
    opened_utc: str = Field(description="When the program that opened the ledger was started.")
    closed: str | None = Field(description="Why the run ended; null while it may go on.")
    ledger: LedgerFile = Field(description="The ledger.")
    sessions: tuple[Session, ...] = Field(description="All starts of the program on this ledger.")


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

    card_format: Literal[3] = Field(3, description="Version of this format.")
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
    not_stated: tuple[str, ...] = Field(
        description="What whoever ran the training could have declared, and did not."
    )
    released: Released = Field(description="Section 2.")
    unit_of_privacy: UnitOfPrivacy = Field(description="Section 3.")
    adjacency: Literal["zero_out"] = Field(
        "zero_out", description="Neighbours: one zeroed-out record."
    )
    plan: dict[str, JsonValue] = Field(
        description="The plan of the ledger, without its target_epsilon."
    )
    mechanism: Mechanism = Field(description="Section 5.")
    sampling: Sampling = Field(description="Section 6.")
    accounting: Accounting = Field(description="Section 7: this run alone.")
    composition: Composition | None = Field(
        None, description="With private runs behind the weights."
    )
    tuning: Tuning = Field(description="Section 8.")
    public_data: PublicData = Field(PublicData(), description="Section 9.")
    provenance: Provenance = Field(description="Section 12.")
    audits: tuple[AuditResult, ...] = Field((), description="Section 13.")
    utility: Utility | None = Field(
        None, description="Section 14; null where no other file was read."
    )

    @model_validator(mode="after")
    def _claims_nothing_without_a_guarantee(self) -> Self:
        numbers = self.accounting
        claims = [value for name, value in numbers if "epsilon" in name or name == "attack"]
        claims = [
            self.epsilon,
            *numbers.epsilon_group.values(),
            *(v for v in claims if not isinstance(v, dict)),
        ]
        claims += [self.composition]
        if not self.formal_guarantee and any(value not in (None, ()) for value in claims):
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
