"""Builds the privacy card of a ledger: every number comes from the bytes of one ledger.jsonl.

Nothing is written and no lock is taken, so a card can be made while the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from ..accounting import accountants as accounting
from ..accounting.accountants import FALSE_POSITIVE_RATES, risk_of
from ..accounting.group_privacy import epsilon_of_several
from ..accounting.rounding import useless_delta
from ..errors import PrivacyStateRefused
from ..ledger.chain import hash_line, is_torn
from ..ledger.claim import composed_epsilon, parent_states
from ..ledger.records import LedgerState, read_ledger_and_bytes
from ..noise.refutation import noise_seen
from ..plan.options import Clipping
from . import model
from .model import STATEMENTS, PrivacyCard, Stated

GROUP_SIZES = (2, 5)
CURVE_RATES = sorted({*np.geomspace(1e-5, 1, 101).tolist(), *FALSE_POSITIVE_RATES})
"""False-positive rates of the curve that bounds attacks."""


@dataclass(frozen=True)
class LedgerSnapshot:
    """A single reading of a ledger, so that all numbers of a card are of the same moment.

    Attributes:
        state: the verified state; an unterminated last line is charged as its repair would charge
            it.
        records: every whole record, in order.
        last_hash: SHA-256 of the last whole line.
        num_torn: number of torn lines, the unterminated one included.
        unterminated: whether the file ends inside a line: after a crash, or during a write.
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
    """Returns one verified reading of a ledger, without touching it.

    Raises:
        PrivacyStateRefused: the ledger is broken; the message names the place (exit 4).
    """
    state, content = read_ledger_and_bytes(path)
    *lines, tail = content.split(b"\n")
    whole_lines = [line for line in lines if not is_torn(line)]
    num_torn = len(lines) - len(whole_lines) + bool(tail)
    records = [json.loads(line) for line in whole_lines]
    last_hash = hash_line(lines[-1])
    return LedgerSnapshot(state, records, last_hash, num_torn, bool(tail), Path(path).parent)


def make_card(snapshot: LedgerSnapshot, name: str) -> PrivacyCard:
    """Returns the card of a ledger; privacy/card/run_card.py adds facts of other files.

    Without a formal guarantee the card has no epsilon at all, not even a planned or a targeted one.

    Args:
        name: path of the ledger, for errors.

    Raises:
        PrivacyStateRefused: a record of the ledger has a value that its writer does not write.
    """
    state = snapshot.state
    plan = state.plan
    opened = state.opened
    is_head = "head" in opened
    scope = "released_without_guarantee"
    if plan.formal_guarantee:
        scope = "released_head" if is_head else "released"
    example = "one labelled example" if is_head else "one image-text pair"
    checkpoints = snapshot.of_type("checkpoint")
    composition = _composition(snapshot.run_dir, state)
    numbers = _accounting(snapshot)
    # Without privacy the ledger records no steps, only that the run has finished.
    finished_steps = plan.num_steps if state.closed == "finished" else None
    try:
        declarations = {}
        for field in ("deduplication", "tuning"):
            text = opened.get(field)
            if text:
                declarations[field] = Stated(text=text, file="ledger.jsonl", attested=True)
        card = PrivacyCard(
            formal_guarantee=plan.formal_guarantee,
            reasons=plan.reasons,
            epsilon=numbers.epsilon if composition is None else composition.epsilon,
            delta=plan.target_delta if composition is None else composition.delta,
            steps_done=state.last_done_step if plan.enabled else finished_steps,
            steps_planned=plan.num_steps,
            attempts_charged=state.num_charged,
            warnings=(),
            ledger=model.LedgerFile(lines=state.num_lines, last_line_sha256=snapshot.last_hash),
            opened=_without(opened, "plan"),
            plan=_without(opened["plan"], "target_epsilon"),
            sessions=tuple(_session(record) for record in snapshot.of_type("session")),
            closed=state.closed,
            checkpoints_recorded=len(checkpoints),
            isolation_checks=_num_checks(snapshot),
            last_checkpoint=checkpoints[-1] if checkpoints else None,
            released=STATEMENTS[scope],
            unit=opened.get("unit", example),
            declared=model.Declared(**declarations),
            mechanism=_mechanism(snapshot),
            sampling=_sampling(snapshot),
            accounting=numbers,
            composition=composition,
        )
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise PrivacyStateRefused(
            f"{name}: the ledger gives {fault['input']!r:.80} for {place} of the privacy card: "
            f"{fault['msg']}"
        ) from error
    return card.updated(warnings=_warnings(card, snapshot))


def _num_checks(snapshot: LedgerSnapshot) -> int:
    """Returns the number of isolation checks that all sessions have recorded.

    Each checkpoint states how many its session had passed by then.
    """
    num_earlier = 0
    num_in_session = 0
    for record in snapshot.records:
        if record["type"] == "session":
            num_earlier += num_in_session
            num_in_session = 0
        elif record["type"] == "checkpoint":
            num_in_session = record.get("checks", 0)
    return num_earlier + num_in_session


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {field: content for field, content in record.items() if field != name}


def _session(record: dict[str, Any]) -> model.Session:
    """Returns a start without its command line, which may name private folders."""
    environment = record["environment"]
    names = ("commit", "modified", "python", "packages")
    versions = {name: environment.get(name) for name in names}
    return model.Session(mirror=record["mirror"], **versions)


def _mechanism(snapshot: LedgerSnapshot) -> model.Mechanism:
    """Returns the mechanism: DP-SGD, or that of a private head (evaluation/private_head/)."""
    plan = snapshot.state.plan
    head = snapshot.state.opened.get("head")
    counts = Counter[tuple[tuple[str, Any], ...]]()
    for intent in snapshot.of_type("intent"):
        for release in intent["releases"]:
            counts[tuple(release.items())] += 1
    releases = tuple({**dict(release), "count": count} for release, count in counts.items())
    if head is not None:
        name = f"{head['method']}: a linear head from noised statistics of features"
        statement = STATEMENTS["head"]
    elif plan.enabled:
        name = (
            "DP-SGD: per-example clipping, Gaussian noise (Abadi et al. 2016); any optimizer is "
            "post-processing"
        )
        clipping = plan.options["clipping_function"]
        assert isinstance(clipping, Clipping)
        sentences = [STATEMENTS["dp_sgd"].format(clipped=clipping.clipped)]
        sentences += [option.statement for option in plan.options.values()]
        statement = " ".join(filter(None, sentences))
    else:
        name = "No mechanism"
        statement = STATEMENTS["no_mechanism"]
    settings: list[tuple[str, str]] = []
    if head is None:
        for option in plan.options.values():
            settings += option.rows(plan)
    return model.Mechanism(
        name=name,
        statement=statement,
        settings=tuple(settings),
        noise_multiplier_accounted=plan.effective_noise_multiplier,
        releases=releases,
        drawn_noise=noise_seen(snapshot.records)[0],
    )


def _sampling(snapshot: LedgerSnapshot) -> str:
    plan = snapshot.state.plan
    if "head" in snapshot.state.opened:
        return str(STATEMENTS["full_batch"])
    sentences = [option.sampling_statement for option in reversed(plan.options.values())]
    if not plan.formal_guarantee:
        sentences.insert(0, "The plan says this, unless a reason above says otherwise.")
    return " ".join(filter(None, sentences))


def _accounting(snapshot: LedgerSnapshot) -> model.Accounting:
    """Returns the epsilons of all charges; all of them None without a formal guarantee."""
    state = snapshot.state
    plan = state.plan
    delta = plan.accounted_delta
    tail_delta = plan.noise_tail_delta
    statement = STATEMENTS["no_account"]
    if plan.formal_guarantee:
        statement = STATEMENTS["by_rdp" if delta < accounting.PLD_SMALLEST_DELTA else "by_pld"]
    attempts = model.Attempts(
        charged=state.num_charged,
        allowed=plan.max_intents,
        done=len(snapshot.of_type("done")),
        torn_lines=snapshot.num_torn,
        repeats=sum(intent.attempt > 0 for intent in state.intents),
        torn_lines_charged=state.charged_torn,
    )
    numbers = model.Accounting(
        delta=plan.target_delta,
        attempts=attempts,
        accountant=accounting.accountant_version(),
        accountant_python=platform.python_version(),
        epsilon_group=dict.fromkeys(map(str, GROUP_SIZES)),
        statement=statement,
    )
    if not plan.formal_guarantee:
        return numbers
    groups = state.charged_groups()
    claim, value_interval = accounting.claimed_epsilon(groups, delta)
    planned_group = plan.release_group(plan.num_steps)
    largest_group = plan.release_group(plan.max_intents)
    epsilon_planned, _ = accounting.claimed_epsilon([planned_group], delta)
    epsilon_with_reserve, _ = accounting.claimed_epsilon([largest_group], delta)
    numbers = numbers.updated(
        epsilon=claim,
        value_interval=value_interval,
        noise_tail_delta=tail_delta or None,
        epsilon_target=plan.target_epsilon,
        epsilon_planned=epsilon_planned,
        epsilon_with_reserve=epsilon_with_reserve,
        epsilon_rdp=accounting.epsilon_rdp(groups, delta),
    )
    if claim > accounting.LARGEST_DETAILED_EPSILON:
        return numbers
    if groups:
        losses = accounting.loss_distribution(groups, accounting.COARSE_INTERVAL)
        risk = risk_of(losses, tail_delta, CURVE_RATES)
        curve = risk["true_positive_rates"]
        rates = {f"{rate:g}": bound for rate, bound in curve if rate in FALSE_POSITIVE_RATES}
        attack = model.Attack(advantage=risk["advantage"], true_positive=rates, curve=curve)
        numbers = numbers.updated(attack=attack)
    # Below that delta the claim is by RDP, and the other accountants are not trusted.
    if delta < accounting.PLD_SMALLEST_DELTA:
        return numbers
    prv_bounds: tuple[float, float] | None = None
    with contextlib.suppress(accounting.CrossCheckUnavailable):
        lower, _, upper = accounting.epsilon_prv(groups, delta)
        prv_bounds = (lower, upper)
    # The grid of the guidance that surrounds the claim: still an upper bound, within 0.1 %, at a
    # tenth of the time.
    interval = min(max(claim / 400, accounting.COARSE_INTERVAL), 2e-2)
    group_epsilons = {
        str(size): epsilon_of_several(plan, groups, size, interval) for size in GROUP_SIZES
    }
    owner_size = state.opened.get("max_examples_per_owner")
    owner_epsilon: float | None = None
    if owner_size is not None:
        owner_epsilon = epsilon_of_several(plan, groups, owner_size, interval)
    return numbers.updated(
        epsilon_owner=owner_epsilon,
        epsilon_replace_one=accounting.epsilon_replace_one(groups, delta, interval),
        epsilon_group=group_epsilons,
        epsilon_prv=prv_bounds,
        prv_accountant=f"prv-accountant {version('prv-accountant')}",
    )


def _composition(run_dir: Path, state: LedgerState) -> model.Composition | None:
    """Returns the claim of weights with private runs behind them.

    None without such runs, or without a guarantee.

    Args:
        run_dir: holds the copies.
        state: of the run's own ledger.

    Raises:
        PrivacyStateRefused: a copy is missing, broken, or makes no claim.
    """
    copies = state.opened.get("behind", ())
    if not copies or not state.plan.formal_guarantee:
        return None
    states = [state, *parent_states(run_dir, state.opened)]
    places = [("this run", "ledger.jsonl")]
    places += [(str(place["run"]), str(place["file"])) for place in copies]
    delta = min(run_state.plan.target_delta for run_state in states)
    declarations = [run_state.opened.get("disjoint_from_start") is True for run_state in states]
    statement = STATEMENTS["composed"]
    # The oldest run starts from no other.
    has_disjoint_runs = any(declarations[:-1])
    if has_disjoint_runs:
        statement += f" {STATEMENTS['composed_disjoint']}"
    runs = []
    for (name, file), run_state, is_disjoint in zip(places, states, declarations, strict=True):
        plan = run_state.plan
        epsilon, _ = accounting.claimed_epsilon(run_state.charged_groups(), plan.accounted_delta)
        runs.append(
            model.CarriedRun(
                name=name,
                file=file,
                delta=plan.target_delta,
                attempts_charged=run_state.num_charged,
                epsilon=epsilon,
                disjoint_from_those_before=is_disjoint,
            )
        )
    return model.Composition(
        epsilon=composed_epsilon(states, delta),
        delta=delta,
        disjoint_by_declaration=has_disjoint_runs,
        statement=statement,
        runs=tuple(runs),
    )


def _warnings(card: PrivacyCard, snapshot: LedgerSnapshot) -> list[str]:
    """Returns the sentences that an auditor should not overlook."""
    numbers = card.accounting
    warnings = []
    delta_warning = useless_delta(card.delta, snapshot.state.plan.num_examples)
    if delta_warning:
        warnings.append(f"The {delta_warning}.")
    refuted_norms = noise_seen(snapshot.records)[1]
    if refuted_norms:
        warnings.append(
            "Less noise was drawn than stated, by the norm of "
            f"{', '.join(refuted_norms[:5])}: believe no epsilon."
        )
    if card.formal_guarantee and card.epsilon is None:
        warnings.append("The accountant finds no finite epsilon at this delta.")
    if (card.epsilon or 0.0) > accounting.LARGEST_DETAILED_EPSILON:
        warnings.append(
            "So large an epsilon protects nothing in practice; the card omits curves and other "
            "neighbours."
        )
    if numbers.epsilon is not None:
        # RDP >= claim >= PRV lower, with the slack of RDP's finite list of orders (a thousandth).
        rdp = numbers.epsilon_rdp
        lower = numbers.epsilon_prv[0] if numbers.epsilon_prv else None
        is_above = rdp is not None and numbers.epsilon > rdp * (1 + 1e-3) + 1e-3
        is_below = lower is not None and lower > numbers.epsilon
        if is_above or is_below:
            warnings.append(
                "The claim is not between the PRV lower and the RDP upper bound, which both omit "
                "the cap."
            )
    if numbers.epsilon_replace_one is not None and numbers.epsilon_prv is None:
        warnings.append(
            "The PRV accountant fails at these numbers: RDP alone cross-checks the claim."
        )
    if snapshot.unterminated:
        warnings.append(
            "The ledger ends inside a line (a crash, or a write under way), charged if it may be "
            "an attempt."
        )
    if not snapshot.state.mirrored:
        warnings.append(STATEMENTS["no_mirror"])
    modified_sessions = []
    for number, session in enumerate(card.sessions, start=1):
        if session.modified:
            modified_sessions.append(str(number))
    if modified_sessions:
        warnings.append(
            f"The code had uncommitted changes in session {', '.join(modified_sessions)}: no "
            "commit identifies it."
        )
    session_commits = {session.commit for session in card.sessions}
    commits = session_commits | {card.opened.get("commit")}
    if card.sessions and len(commits) > 1:
        warnings.append(
            "The sessions ran different commits of the code, or not all commits are known."
        )
    planned_version = card.opened.get("accountant")
    if planned_version not in (None, numbers.accountant):
        warnings.append(
            f"The run was planned with {planned_version}; this card uses {numbers.accountant}."
        )
    return warnings
