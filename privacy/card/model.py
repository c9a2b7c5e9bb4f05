"""The privacy card as a type: `PrivacyCard`, whose JSON is the published format (docs/schemas/privacy_card.schema.json).

Headings and their order follow the reporting checklist of "How to DP-fy ML" (Ponomareva et al. 2023, arXiv 2303.00654). Every
statement is one line of text in which backticks mark names of files; privacy/card/render.py makes pages of a card.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from .others import (
    STATEMENTS,
    AuditResult,
    Composition,
    DataSet,
    Epsilon,
    FileStatement,
    Part,
    PublicData,
    SharedSummary,
    Stated,
    Utility,
)

CARD_FORMAT: Literal[1] = 1
Scalar = str | bool | int | float | None


class Setting(Part):
    """Who is trusted with what."""

    model: str = Field("central differential privacy", description="The model of differential privacy.")
    statement: str = Field(STATEMENTS["setting"], description="The trust boundary and the adversary.")


class Checkpoint(Part):
    """A checkpoint that the ledger records."""

    step: int = Field(description="Step after which it was written.")
    name: str | None = Field(description="Name of its folder.")
    manifest_sha256: str = Field(description="SHA-256 of its manifest, from the ledger.")
    manifest_matches: bool | None = Field(None, description="Whether the file there has it; null where none is.")


class Released(Part):
    """What leaves the trust boundary."""

    statement: str = Field(description="What the guarantee covers.")
    checkpoints_recorded: int = Field(description="Number of checkpoints in the ledger.")
    last_checkpoint: Checkpoint | None = Field(description="The newest of them.")
    post_processing: tuple[FileStatement, ...] = Field((), description="What costs no budget.")


class UnitOfPrivacy(Part):
    """What is protected."""

    unit: str = Field(description="The record whose presence is hidden.")
    num_examples: int = Field(description="n, the public number of examples.")
    statement: str = Field(description="What holds for people and pictures that occur several times.")
    deduplication: Stated = Field(description="How near-duplicates were removed.")
    data_set: DataSet = Field(description="What is declared of the data.")


class Adjacency(Part):
    """Which data sets are neighbours."""

    relation: Literal["zero_out"] = Field("zero_out", description="Name of the relation.")
    statement: str = Field(STATEMENTS["adjacency"], description="The relation in words.")


class AdaptiveBound(Part):
    """Constants of adaptive clipping, and how far C has moved (privacy/adaptive_clipping.py)."""

    target_unclipped_quantile: float = Field(description="gamma, the fraction of examples to leave unclipped.")
    clipbound_learning_rate: float = Field(description="eta_C of the geometric update.")
    unclipped_num_std: float = Field(description="Standard deviation of the noise on the count of unclipped examples.")
    gradient_noise_multiplier: float = Field(description="Noise multiplier of the clipped sum alone.")
    smallest_bound: float | None = Field(description="The smallest C of all attempts; null before the first.")
    largest_bound: float | None = Field(description="The largest C of all attempts.")
    last_bound: float | None = Field(description="C of the newest attempt.")


class CorrelatedNoise(Part):
    """How the noise of a step depends on that of the steps before (docs/correlated_noise.md)."""

    bands: int = Field(description="b: noise depends on that of the b - 1 steps before in the same segment.")
    strategy: str = Field(description="Where the coefficients come from: square_root or optimised.")
    coefficients: tuple[float, ...] = Field(description="c_0, ..., c_(b-1); the sum of their squares is at most 1.")
    segments: int = Field(description="Starts of the program; each begins without past noise.")


class Groups(Part):
    """Groups of examples that take turns."""

    number: int = Field(description="b, the number of groups.")
    of_example: str = Field(description="Which group an example is in.")
    of_attempt: str = Field(description="Which group an attempt draws from.")
    largest: int = Field(description="Examples of the largest group.")
    turns_charged: int = Field(
        description="Charged attempts of the group with most of them: what epsilon is computed from."
    )


class Release(Part):
    """A noised sum that the attempts release, by its name in the ledger."""

    name: str = Field(description="Its name.")
    count: int = Field(description="How often it was released.")
    smallest_noise_multiplier: float = Field(description="The least standard deviation / sensitivity of all times.")
    largest_sensitivity: float = Field(description="The largest L2 sensitivity of all times.")


class Head(Part):
    """A private linear head (evaluation/private_head); the options of its method are further keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Scalar]

    method: str = Field(description="Name of the method.")
    num_classes: int = Field(description="Public number of classes.")
    covers: str | None = Field(None, description="Which examples the guarantee covers, and given what.")


class Mechanism(Part):
    """What is done to the data."""

    name: str = Field(description="The mechanism and its source.")
    head: Head | None = Field(description="The private head that was trained; null for DP-SGD.")
    clipping_function: str | None = Field(description="How an example's norm becomes a factor; null for a head.")
    max_grad_norm: float | None = Field(description="C, under adaptive clipping the first one; null for a head.")
    adaptive_clipping: AdaptiveBound | None = Field(description="null where C is constant.")
    arithmetic: str = Field(description="floating, whose rounding r pays for, or certified: whole numbers, with r = 0.")
    lattice_exponent: int | None = Field(
        description="f of certified arithmetic: sums are multiples of 2^-f; else null."
    )
    sensitivity_slack: float = Field(description="r: one example contributes at most C (1 + r).")
    noise_multiplier: float = Field(description="sigma, the standard deviation of the noise over the sensitivity.")
    noise_multiplier_accounted: float = Field(description="sigma / (1 + r), which the accountant is charged with.")
    correlated_noise: CorrelatedNoise | None = Field(None, description="null where the noise of steps is independent.")
    expected_batch_size: int = Field(description="B, the public divisor of the noised sum.")
    releases: tuple[Release, ...] = Field(description="Everything that the attempts release.")
    statement: str = Field(description="The mechanism in words.")


class Sampling(Part):
    """Which examples take part in a step."""

    scheme: str = Field(description="poisson, shuffle or full batch.")
    sample_rate: float = Field(description="q, the probability with which an example takes part.")
    expected_batch_size: int = Field(description="B = q n, or q n / b where b groups take turns.")
    groups: Groups | None = Field(None, description="null where all examples can be in every attempt.")
    cap: int | None = Field(description="The largest batch; null where there is none.")
    matches_accounting: bool = Field(description="Whether the accountant assumes this scheme.")
    key_commitment_sha256: str = Field(description="Commitment to the secret sampling key.")
    data_hmac_sha256: str | None = Field(description="Identity of the data, as an HMAC under that key.")
    statement: str = Field(description="The scheme in words.")


class Attack(Part):
    """What any membership inference attack on one example can reach, whatever it knows."""

    advantage: float = Field(description="Upper bound of true-positive less false-positive rate.")
    true_positive: dict[str, float] = Field(description="False-positive rate -> upper bound of the true-positive rate.")
    curve: tuple[tuple[float, float], ...] = Field(description="[false-positive rate, bound on the other].")


class Attempts(Part):
    """Attempts at steps, counted in the ledger."""

    charged: int = Field(description="Attempts that count against the budget, whether they ended or not.")
    allowed: int = Field(description="Attempts that the budget allows: planned steps and the reserve.")
    done: int = Field(description="Attempts whose update was applied.")
    repeats: int = Field(description="Attempts beyond the first at their step.")
    torn_lines: int = Field(description="Lines that a crash cut off.")
    torn_lines_charged: int = Field(description="Torn lines that may have been attempts.")


class Accounting(Part):
    """Everything about epsilon; every epsilon is null without a formal guarantee."""

    epsilon: Epsilon = Field(None, description="The claim, for everything charged; null where it is infinite.")
    delta: float = Field(description="delta of the claim.")
    delta_times_n: float = Field(description="delta n; above 1 the claim would allow publishing some examples.")
    accountant_at_opening: str | None = Field(description="Package and version that the run was planned with.")
    accountant: str = Field(description="Package and version that computed this card.")
    accountant_python: str = Field(description="Version of Python that computed this card.")
    statement: str = Field(description="How the claim is computed.")
    value_interval: float | None = Field(None, description="Grid of the privacy loss distribution, where there is one.")
    noise_tail_delta: float | None = Field(None, description="What the noise's bounded support costs.")
    epsilon_target: Epsilon = Field(None, description="What sigma was calibrated to.")
    epsilon_planned: Epsilon = Field(None, description="Epsilon of the planned steps without a crash.")
    epsilon_with_reserve: Epsilon = Field(None, description="Epsilon of all allowed attempts.")
    epsilon_rdp: Epsilon = Field(None, description="Cross-check by Renyi DP, an upper bound without the cap.")
    epsilon_prv: tuple[Epsilon, Epsilon] | None = Field(None, description="[lower, upper] by PRV, without the cap.")
    prv_accountant: str | None = Field(None, description="Package and version of that cross-check.")
    epsilon_replace_one: Epsilon = Field(None, description="Epsilon for replacing a record by any other one.")
    epsilon_group: dict[str, Epsilon] = Field(default_factory=dict, description="Number of copies -> epsilon.")
    max_examples_per_owner: int | None = Field(description="The most examples of one owner, as the recipe states.")
    epsilon_owner: Epsilon = Field(None, description="Epsilon of such an owner.")
    epsilon_by_delta: tuple[tuple[float, Epsilon], ...] = Field((), description="[delta, epsilon], by falling delta.")
    epsilon_by_attempts: tuple[tuple[int, Epsilon], ...] = Field((), description="[attempts, upper bound of epsilon].")
    delta_by_epsilon: tuple[tuple[float, float], ...] = Field((), description="[epsilon, delta] of the whole run.")
    attack: Attack | None = Field(None, description="Bounds on membership inference.")
    tan: Epsilon = Field(None, description="Total amount of noise (Sander et al. 2023).")
    attempts: Attempts = Field(description="What was charged.")


class Shared(Part):
    """The shared ledger that the run belongs to."""

    identity: str | None = Field(description="SHA-256 of its first line; null where the run belongs to none.")
    summary: SharedSummary | None = Field(None, description="Its content, where that file can be read.")


class Tuning(Part):
    """How hyper-parameters were chosen."""

    included: Literal[False] = Field(False, description="Whether epsilon pays for it.")
    statement: str = Field(STATEMENTS["tuning"], description="What that means.")
    stated: Stated = Field(description="How they were chosen, in words.")
    shared_ledger: Shared = Field(description="Other runs on the same data.")


class LoggedWithoutNoise(Part):
    """Quantities that no noise protects."""

    where: str = Field("private/ (mode 0700)", description="Where they are.")
    quantities: tuple[str, ...] = Field(tuple(STATEMENTS["quantities"]), description="What they are.")
    statement: str = Field(STATEMENTS["logged_without_noise"], description="What that means.")


class NotCovered(Part):
    """What the guarantee leaves out."""

    points: tuple[str, ...] = Field(description="One sentence or more each.")


class LedgerFile(Part):
    """The file that every number comes from."""

    file: Literal["ledger.jsonl"] = Field("ledger.jsonl", description="Its name.")
    format: int = Field(description="Version of its format.")
    lines: int = Field(description="Number of its lines.")
    last_line_sha256: str = Field(description="SHA-256 of the last whole line, to be kept elsewhere.")
    mirrored_sessions: int = Field(description="Number of sessions that wrote a mirror of it.")
    signer_fingerprint: str | None = Field(
        None, description="SHA-256 of the public key that signs it; null where nobody signs. Whoever kept it when the run began "
        "knows the signer by it, and nobody else does."
    )  # fmt: skip
    signed_lines: int = Field(0, description="Number of its lines, from the first, that the newest signature covers.")


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


class PrivacyCard(Part):
    """What a run guarantees, and everything that this depends on."""

    card_format: Literal[1] = Field(CARD_FORMAT, description="Version of this format.")
    run_dir: str | None = Field(None, description="Folder of the run; null for a card of a ledger alone.")
    run_name: str | None = Field(None, description="Name of that folder.")
    formal_guarantee: bool = Field(description="Whether the run makes a formal claim.")
    reasons: tuple[str, ...] = Field(description="Why it makes none.")
    epsilon: Epsilon = Field(
        description="The claim for what is released, earlier private runs included; null without one, and where none is finite."
    )
    delta: float = Field(description="delta of the claim.")
    steps_done: int | None = Field(description="The highest step that is done; null where it is unknown.")
    steps_planned: int = Field(description="Planned steps.")
    attempts_charged: int = Field(description="Attempts that epsilon is computed from.")
    warnings: tuple[str, ...] = Field(description="What a reader should not overlook.")
    not_stated: tuple[str, ...] = Field(description="What whoever ran the training could have declared, and did not.")
    setting: Setting = Field(Setting(), description="Section 1.")
    released: Released = Field(description="Section 2.")
    unit_of_privacy: UnitOfPrivacy = Field(description="Section 3.")
    adjacency: Adjacency = Field(Adjacency(), description="Section 4.")
    mechanism: Mechanism = Field(description="Section 5.")
    sampling: Sampling = Field(description="Section 6.")
    accounting: Accounting = Field(description="Section 7: this run alone.")
    composition: Composition | None = Field(
        None,
        description="What the weights carry with the private runs that they started from; null where there is none.",
    )
    tuning: Tuning = Field(description="Section 8.")
    public_data: PublicData = Field(PublicData(), description="Section 9.")
    logged_without_noise: LoggedWithoutNoise = Field(LoggedWithoutNoise(), description="Section 10.")
    not_covered: NotCovered = Field(description="Section 11.")
    provenance: Provenance = Field(description="Section 12.")
    audits: tuple[AuditResult, ...] = Field((), description="Section 13.")
    utility: Utility | None = Field(None, description="Section 14; null where no other file was read.")

    @model_validator(mode="after")
    def _claims_nothing_without_a_guarantee(self) -> Self:
        numbers = self.accounting
        claims = [value for name, value in numbers if "epsilon" in name or name in ("attack", "tan")]
        claims = [self.epsilon, *numbers.epsilon_group.values(), *(v for v in claims if not isinstance(v, dict))]
        claims += [self.composition]
        if not self.formal_guarantee and any(value not in (None, ()) for value in claims):
            raise ValueError("a card without a formal guarantee holds no epsilon")
        return self

    def to_json(self, indent: int | None = None) -> str:
        """The published format, in ASCII."""
        return self.model_dump_json(indent=indent, ensure_ascii=True)
