"""Builds the privacy card: every number in it comes from the bytes of one ledger.jsonl and nothing else.

Nothing is written and no lock is taken, so a card can be made while the run goes on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..accounting.rounding import useless_delta
from ..errors import PrivacyStateRefused
from ..ledger.chain import TORN_MARK, hash_line, is_torn
from ..ledger.records import LedgerState, noise_multiplier_of, read_state
from ..plan_request import GROUP_OF_ATTEMPT, GROUP_OF_EXAMPLE
from . import model
from .composition import composition
from .model import STATEMENTS, Head, PrivacyCard, Stated
from .numbers import LARGEST_DETAILED_EPSILON, accounting_numbers


@dataclass(frozen=True)
class LedgerSnapshot:
    """One reading of a ledger, so that all numbers of a card speak of the same moment.

    Attributes:
        state: the verified state; an unterminated last line is charged as its repair would charge it.
        records: every whole record, in order.
        last_hash: SHA-256 of the last whole line.
        num_torn: torn lines, the unterminated one included.
        unterminated: the file ends inside a line: a crash, or a write that is under way right now.
        run_dir: the folder of the ledger.
    """

    state: LedgerState
    records: list[dict[str, Any]]
    last_hash: str
    num_torn: int
    unterminated: bool
    run_dir: Path

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] == kind]


def read_snapshot(path: Path | str) -> LedgerSnapshot:
    """Reads and verifies a ledger once, without touching it; PrivacyStateRefused (exit 4) names what is broken."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PrivacyStateRefused(f"{path}: cannot read the ledger: {error.strerror or error}") from error
    state, tail = read_state(data, str(path))
    if tail:
        state.absorb(tail + TORN_MARK)
    lines = data.split(b"\n")[:-1]
    whole = [line for line in lines if not is_torn(line)]
    num_torn = len(lines) - len(whole) + bool(tail)
    return LedgerSnapshot(
        state, [json.loads(line) for line in whole], hash_line(lines[-1]), num_torn, bool(tail), Path(path).parent
    )


def privacy_card(path: Path | str) -> PrivacyCard:
    """The card of the run whose ledger is at `path`, from the ledger alone (a few seconds).

    Raises:
        PrivacyStateRefused: the ledger cannot be read or is broken.
    """
    return make_card(read_snapshot(path), str(path))


def make_card(snapshot: LedgerSnapshot, name: str) -> PrivacyCard:
    """The card of a ledger; privacy/card/folder.py adds what other files say.

    Without a formal guarantee the card holds no epsilon at all, not even a planned or a targeted one.

    Args:
        name: path of the ledger, for errors.

    Raises:
        PrivacyStateRefused: a record of the ledger holds a value that its writer does not write.
    """
    state, plan, opened = snapshot.state, snapshot.state.plan, snapshot.state.opened
    try:
        head = Head.model_validate(opened["head"]) if "head" in opened else None
        words = "released" if head is None else "released_head"
        checkpoints = snapshot.of_type("checkpoint")
        last = checkpoints[-1] if checkpoints else None
        deduplication, tuning = (
            Stated(text=opened[key], file="ledger.jsonl", attested=True) if opened.get(key) else Stated()
            for key in ("deduplication", "tuning")
        )
        carried = composition(snapshot.run_dir, state)
        numbers = accounting_numbers(state, snapshot.num_torn, len(snapshot.of_type("done")))
        # Without privacy the ledger records no steps, only that the run has finished.
        finished = plan.num_steps if state.closed == "finished" else None
        card = PrivacyCard(
            formal_guarantee=plan.formal_guarantee,
            reasons=plan.reasons, epsilon=numbers.epsilon if carried is None else carried.epsilon,
            delta=plan.target_delta if carried is None else carried.delta, composition=carried,
            steps_done=state.last_done_step if plan.enabled else finished, steps_planned=plan.num_steps,
            attempts_charged=state.num_charged, warnings=(), not_stated=(),
            released=model.Released(
                statement=STATEMENTS[words if plan.formal_guarantee else "released_without_guarantee"],
                checkpoints_recorded=len(checkpoints),
                last_checkpoint=None if last is None else model.Checkpoint(
                    step=last["step"], name=last.get("path"), manifest_sha256=last["digest"]
                ),
            ),
            unit_of_privacy=model.UnitOfPrivacy(
                unit=opened.get("unit", "one image-text pair" if head is None else "one labelled example"),
                num_examples=plan.num_examples, deduplication=deduplication,
            ),
            mechanism=_mechanism(snapshot, head), sampling=_sampling(snapshot, head), accounting=numbers,
            tuning=model.Tuning(stated=tuning, shared_ledger=opened.get("shared_ledger")), provenance=_provenance(snapshot),
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PrivacyStateRefused(
            f"{name}: the ledger gives {first['input']!r:.80} for {place} of the privacy card: {first['msg']}"
        ) from error
    return with_files(card.updated(warnings=_warnings(card, snapshot)))


def with_files(card: PrivacyCard, **changes: object) -> PrivacyCard:
    """The card with what other files add, and the list of what nobody states in it."""
    card = card.updated(**changes)
    unit = card.unit_of_privacy
    stated = {f"{name} of the data set": words for name, words in unit.data_set}
    stated |= {"removal of near-duplicates": unit.deduplication, "choice of hyper-parameters": card.tuning.stated}
    return card.updated(not_stated=tuple(what for what, words in stated.items() if not words.text))


def _mechanism(snapshot: LedgerSnapshot, head: Head | None) -> model.Mechanism:
    """What is done to the data. Two mechanisms write ledgers: DP-SGD, and the private heads of evaluation/private_head/."""
    plan = snapshot.state.plan
    ratios: dict[str, list[float]] = {}
    sensitivities: dict[str, list[float]] = {}
    for release in (release for intent in snapshot.of_type("intent") for release in intent["releases"]):
        ratios.setdefault(release["name"], []).append(noise_multiplier_of([release]))
        sensitivities.setdefault(release["name"], []).append(release["sensitivity"])
    releases = (
        model.Release(
            name=name,
            count=len(found),
            smallest_noise_multiplier=min(found),
            largest_sensitivity=max(sensitivities[name]),
        )
        for name, found in ratios.items()
    )
    adaptive, constants = None, plan.adaptive_clipping
    if constants is not None:
        bounds = [intent["releases"][0]["sensitivity"] for intent in snapshot.of_type("intent")]
        adaptive = model.AdaptiveBound(
            **asdict(constants), gradient_noise_multiplier=constants.gradient_noise_multiplier(plan.noise_multiplier),
            smallest_bound=min(bounds, default=None), largest_bound=max(bounds, default=None),
            last_bound=bounds[-1] if bounds else None,
        )  # fmt: skip
    if head is not None:
        name, statement = f"{head.method}: a linear head from noised statistics of features", STATEMENTS["head"]
    elif plan.enabled:
        name = "DP-SGD: per-example clipping, Gaussian noise (Abadi et al. 2016); any optimizer is post-processing"
        statement = STATEMENTS["dp_sgd"].format(clipped=STATEMENTS["clipped"][plan.clipping_function])
        statement += f" {STATEMENTS['adaptive']}" if adaptive else ""
        statement += f" {STATEMENTS['correlated']}" if plan.bands > 1 else ""
        statement += f" {STATEMENTS[plan.arithmetic]}"
    else:
        name, statement = "No mechanism", STATEMENTS["no_mechanism"]
    return model.Mechanism(
        name=name, head=head, clipping_function=plan.clipping_function if head is None else None,
        max_grad_norm=plan.max_grad_norm if head is None else None, adaptive_clipping=adaptive,
        arithmetic=plan.arithmetic, lattice_exponent=None if plan.lattice is None else plan.lattice.exponent,
        sensitivity_slack=plan.sensitivity_slack, noise_multiplier=plan.noise_multiplier,
        noise_multiplier_accounted=plan.effective_noise_multiplier,
        releases=tuple(releases), statement=statement,
        correlated_noise=None if plan.bands == 1 else model.CorrelatedNoise(
            bands=plan.bands, strategy=plan.strategy, coefficients=plan.noise_strategy.coefficients,
            segments=len(snapshot.of_type("session")),
        ),
    )  # fmt: skip


def _sampling(snapshot: LedgerSnapshot, head: Head | None) -> model.Sampling:
    plan, opened, groups = snapshot.state.plan, snapshot.state.opened, None
    if plan.bands > 1:
        turns = plan.participations(snapshot.state.num_charged)
        groups = model.Groups(
            number=plan.bands, of_example=GROUP_OF_EXAMPLE, of_attempt=GROUP_OF_ATTEMPT, largest=plan.group_size,
            turns_charged=turns,
        )  # fmt: skip
    if head is not None:
        statement = STATEMENTS["full_batch"]
    elif plan.sampling == "poisson":
        unsure = "" if plan.formal_guarantee else "The plan says this, unless a reason above says otherwise. "
        who = "each example" if groups is None else "each example of the group whose turn it is"
        statement = unsure + STATEMENTS["poisson"].format(who=who) + (f" {STATEMENTS['cyclic']}" if groups else "")
    else:
        statement = f"The scheme is {plan.sampling}, not Poisson."
    return model.Sampling(
        scheme=plan.sampling if head is None else "full batch", sample_rate=plan.sample_rate,
        expected_batch_size=plan.expected_batch_size, groups=groups, cap=plan.cap,
        key_commitment_sha256=opened["key_commitment"], data_hmac_sha256=opened.get("data_hmac"), statement=statement,
    )  # fmt: skip


def _provenance(snapshot: LedgerSnapshot) -> model.Provenance:
    opened, sessions = snapshot.state.opened, []
    for record in snapshot.of_type("session"):
        environment = record.get("environment")
        environment = environment if isinstance(environment, dict) else {}
        known = {key: environment.get(key) for key in ("commit", "modified", "python", "packages")}
        sessions.append(model.Session(mirror=record["mirror"], **known))
    ledger = model.LedgerFile(
        format=opened["format"], lines=snapshot.state.num_lines, last_line_sha256=snapshot.last_hash,
        mirrored_sessions=sum(session.mirror for session in sessions),
    )  # fmt: skip
    return model.Provenance(
        commit=opened.get("commit"), opened_utc=opened["time_utc"], closed=snapshot.state.closed, ledger=ledger,
        sessions=tuple(sessions),
    )  # fmt: skip


def _warnings(card: PrivacyCard, snapshot: LedgerSnapshot) -> list[str]:
    """What an auditor should not overlook, one sentence each."""
    numbers, provenance, n = card.accounting, card.provenance, card.unit_of_privacy.num_examples
    found = []
    if useless := useless_delta(card.delta, n):
        found.append(f"The {useless}.")
    if card.formal_guarantee and card.epsilon is None:
        found.append("The accountant finds no finite epsilon at this delta.")
    if (card.epsilon or 0.0) > LARGEST_DETAILED_EPSILON:
        found.append("So large an epsilon protects nothing in practice; the card omits curves and other neighbours.")
    if numbers.epsilon is not None:
        # RDP >= claim >= PRV lower, with the slack of RDP's finite list of orders (a thousandth).
        rdp, lower = numbers.epsilon_rdp, numbers.epsilon_prv[0] if numbers.epsilon_prv else None
        if (rdp is not None and numbers.epsilon > rdp * (1 + 1e-3) + 1e-3) or (
            lower is not None and lower > numbers.epsilon
        ):
            found.append("The claim is not between the PRV lower and the RDP upper bound, which both omit the cap.")
    if numbers.epsilon_replace_one is not None and numbers.epsilon_prv is None:
        found.append("The PRV accountant fails at these numbers: RDP alone cross-checks the claim.")
    if snapshot.unterminated:
        found.append(
            "The ledger ends inside a line (a crash, or a write under way); the line is charged if it may be an attempt."
        )
    if not snapshot.state.mirrored:
        found.append(STATEMENTS["no_mirror"])
    modified = [str(number) for number, session in enumerate(provenance.sessions, start=1) if session.modified]
    if modified:
        found.append(
            f"The code had uncommitted changes in session {', '.join(modified)}: the commit does not identify the code."
        )
    if provenance.sessions and len({session.commit for session in provenance.sessions} | {provenance.commit}) > 1:
        found.append("The sessions ran different commits of the code, or not all commits are known.")
    if numbers.accountant_at_opening not in (None, numbers.accountant):
        found.append(f"The run was planned with {numbers.accountant_at_opening}; this card uses {numbers.accountant}.")
    return found
