"""Builds the privacy card: every number in it comes from the bytes of one ledger.jsonl and nothing else.

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
from ..ledger.claim import composed_epsilon, states_behind
from ..ledger.records import LedgerState, read_ledger_and_bytes
from ..noise.refutation import noise_seen
from ..plan.options import Clipping
from . import model
from .model import STATEMENTS, PrivacyCard, Stated

GROUP_SIZES = (2, 5)
CURVE_RATES = sorted({*np.geomspace(1e-5, 1, 101).tolist(), *FALSE_POSITIVE_RATES})
"""False-positive rates at which the curve of what an attack can reach is drawn."""


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
    state, data = read_ledger_and_bytes(path)
    *lines, tail = data.split(b"\n")
    whole = [line for line in lines if not is_torn(line)]
    num_torn = len(lines) - len(whole) + bool(tail)
    records = [json.loads(line) for line in whole]
    return LedgerSnapshot(
        state, records, hash_line(lines[-1]), num_torn, bool(tail), Path(path).parent
    )


def make_card(snapshot: LedgerSnapshot, name: str) -> PrivacyCard:
    """The card of a ledger; privacy/card/folder.py adds what other files say.

    Without a formal guarantee the card holds no epsilon at all, not even a planned or a targeted one.

    Args:
        name: path of the ledger, for errors.

    Raises:
        PrivacyStateRefused: a record of the ledger holds a value that its writer does not write.
    """
    state, plan, opened = snapshot.state, snapshot.state.plan, snapshot.state.opened
    covered = "released_head" if "head" in opened else "released"
    example = "one labelled example" if "head" in opened else "one image-text pair"
    checkpoints = snapshot.of_type("checkpoint")
    carried = _composition(snapshot.run_dir, state)
    numbers = _accounting(snapshot)
    # Without privacy the ledger records no steps, only that the run has finished.
    finished = plan.num_steps if state.closed == "finished" else None
    try:
        card = PrivacyCard(
            formal_guarantee=plan.formal_guarantee,
            reasons=plan.reasons,
            epsilon=numbers.epsilon if carried is None else carried.epsilon,
            delta=plan.target_delta if carried is None else carried.delta,
            steps_done=state.last_done_step if plan.enabled else finished,
            steps_planned=plan.num_steps,
            attempts_charged=state.num_charged,
            warnings=(),
            ledger=model.LedgerFile(lines=state.num_lines, last_line_sha256=snapshot.last_hash),
            opened=_without(opened, "plan"),
            plan=_without(opened["plan"], "target_epsilon"),
            sessions=tuple(_session(record) for record in snapshot.of_type("session")),
            closed=state.closed,
            checkpoints_recorded=len(checkpoints),
            last_checkpoint=checkpoints[-1] if checkpoints else None,
            released=STATEMENTS[covered if plan.formal_guarantee else "released_without_guarantee"],
            unit=opened.get("unit", example),
            declared=model.Declared(
                **{
                    name: Stated(text=opened[name], file="ledger.jsonl", attested=True)
                    for name in ("deduplication", "tuning")
                    if opened.get(name)
                }
            ),
            mechanism=_mechanism(snapshot),
            sampling=_sampling(snapshot),
            accounting=numbers,
            composition=carried,
        )
    except ValidationError as error:
        first, place = error.errors()[0], ".".join(map(str, error.errors()[0]["loc"]))
        raise PrivacyStateRefused(
            f"{name}: the ledger gives {first['input']!r:.80} for {place} of the privacy card: {first['msg']}"
        ) from error
    return card.updated(warnings=_warnings(card, snapshot))


def _without(record: dict[str, Any], left_out: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != left_out}


def _session(record: dict[str, Any]) -> model.Session:
    """Returns a start without its command line, which may name private folders."""
    stated = record["environment"]
    versions = {name: stated.get(name) for name in ("commit", "modified", "python", "packages")}
    return model.Session(mirror=record["mirror"], **versions)


def _mechanism(snapshot: LedgerSnapshot) -> model.Mechanism:
    """Says what is done to the data, by DP-SGD or by a private head (evaluation/private_head/)."""
    plan, head = snapshot.state.plan, snapshot.state.opened.get("head")
    releases = Counter(
        tuple(release.items())
        for intent in snapshot.of_type("intent")
        for release in intent["releases"]
    )
    if head is not None:
        name = f"{head['method']}: a linear head from noised statistics of features"
        statement = STATEMENTS["head"]
    elif plan.enabled:
        name = "DP-SGD: per-example clipping, Gaussian noise (Abadi et al. 2016); any optimizer is post-processing"
        clipping = plan.options["clipping_function"]
        assert isinstance(clipping, Clipping)
        sentences = [STATEMENTS["dp_sgd"].format(clipped=clipping.clipped)]
        sentences += [option.statement for option in plan.options.values()]
        statement = " ".join(filter(None, sentences))
    else:
        name = "No mechanism"
        statement = STATEMENTS["no_mechanism"]
    options = plan.options.values() if head is None else ()
    return model.Mechanism(
        name=name,
        statement=statement,
        settings=tuple(row for option in options for row in option.rows(plan)),
        noise_multiplier_accounted=plan.effective_noise_multiplier,
        releases=tuple({**dict(release), "count": count} for release, count in releases.items()),
        drawn_noise=noise_seen(snapshot.records)[0],
    )


def _sampling(snapshot: LedgerSnapshot) -> str:
    plan = snapshot.state.plan
    if "head" in snapshot.state.opened:
        return str(STATEMENTS["full_batch"])
    unsure = "The plan says this, unless a reason above says otherwise."
    sentences = [option.sampling_statement for option in reversed(plan.options.values())]
    return " ".join(filter(None, ["" if plan.formal_guarantee else unsure, *sentences]))


def _accounting(snapshot: LedgerSnapshot) -> model.Accounting:
    """Epsilons of everything charged; all of them None without a formal guarantee."""
    state, plan = snapshot.state, snapshot.state.plan
    delta, tail = plan.accounted_delta, plan.noise_tail_delta
    used = "by_rdp" if delta < accounting.PLD_SMALLEST_DELTA else "by_pld"
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
        statement=STATEMENTS[used if plan.formal_guarantee else "no_account"],
    )
    if not plan.formal_guarantee:
        return numbers
    groups = state.charged_groups()
    claim, interval = accounting.claimed_epsilon(groups, delta)
    planned, _ = accounting.claimed_epsilon([plan.release_group(plan.num_steps)], delta)
    reserve, _ = accounting.claimed_epsilon([plan.release_group(plan.max_intents)], delta)
    numbers = numbers.updated(
        epsilon=claim,
        value_interval=interval,
        noise_tail_delta=tail or None,
        epsilon_target=plan.target_epsilon,
        epsilon_planned=planned,
        epsilon_with_reserve=reserve,
        epsilon_rdp=accounting.epsilon_rdp(groups, delta),
    )
    if claim > accounting.LARGEST_DETAILED_EPSILON:
        return numbers
    if groups:
        risk = risk_of(
            accounting.loss_distribution(groups, accounting.COARSE_INTERVAL), tail, CURVE_RATES
        )
        curve = risk["true_positive_rates"]
        rates = {f"{rate:g}": bound for rate, bound in curve if rate in FALSE_POSITIVE_RATES}
        attack = model.Attack(advantage=risk["advantage"], true_positive=rates, curve=curve)
        numbers = numbers.updated(attack=attack)
    # Below that delta the claim is by RDP, and the others are not trusted.
    if delta < accounting.PLD_SMALLEST_DELTA:
        return numbers
    owner, bracket = state.opened.get("max_examples_per_owner"), None
    with contextlib.suppress(accounting.CrossCheckUnavailable):
        lower, _, upper = accounting.epsilon_prv(groups, delta)
        bracket = (lower, upper)
    # The grid of the guidance that surrounds the claim: still an upper bound, within 0.1 %, at a tenth of the time.
    guide = min(max(claim / 400, accounting.COARSE_INTERVAL), 2e-2)
    return numbers.updated(
        epsilon_owner=None if owner is None else epsilon_of_several(plan, groups, owner, guide),
        epsilon_replace_one=accounting.epsilon_replace_one(groups, delta, guide),
        epsilon_group={
            str(size): epsilon_of_several(plan, groups, size, guide) for size in GROUP_SIZES
        },
        epsilon_prv=bracket,
        prv_accountant=f"prv-accountant {version('prv-accountant')}",
    )


def _composition(run_dir: Path, state: LedgerState) -> model.Composition | None:
    """What the weights of a run carry; None where no private run is behind them, or nothing is claimed.

    Args:
        run_dir: holds the copies.
        state: of the run's own ledger.

    Raises:
        PrivacyStateRefused: a copy is missing, broken, or makes no claim.
    """
    behind = state.opened.get("behind", ())
    if not behind or not state.plan.formal_guarantee:
        return None
    states = [state, *states_behind(run_dir, state.opened)]
    names = [
        ("this run", "ledger.jsonl"),
        *((str(place["run"]), str(place["file"])) for place in behind),
    ]
    delta = min(before.plan.target_delta for before in states)
    disjoint = [before.opened.get("disjoint_from_start") is True for before in states]
    return model.Composition(
        epsilon=composed_epsilon(states, delta),
        delta=delta,
        disjoint_by_declaration=any(disjoint[:-1]),
        statement=STATEMENTS["composed"]
        + (f" {STATEMENTS['composed_disjoint']}" if any(disjoint[:-1]) else ""),
        runs=tuple(
            model.CarriedRun(
                name=name,
                file=file,
                delta=before.plan.target_delta,
                attempts_charged=before.num_charged,
                epsilon=accounting.claimed_epsilon(
                    before.charged_groups(), before.plan.accounted_delta
                )[0],
                disjoint_from_those_before=disjoint[number],
            )
            for number, ((name, file), before) in enumerate(zip(names, states, strict=True))
        ),
    )


def _warnings(card: PrivacyCard, snapshot: LedgerSnapshot) -> list[str]:
    """What an auditor should not overlook, one sentence each."""
    numbers, found = card.accounting, []
    if useless := useless_delta(card.delta, snapshot.state.plan.num_examples):
        found.append(f"The {useless}.")
    if refuted := noise_seen(snapshot.records)[1]:
        found.append(
            f"Less noise was drawn than stated, by the norm of {', '.join(refuted[:5])}: believe no epsilon."
        )
    if card.formal_guarantee and card.epsilon is None:
        found.append("The accountant finds no finite epsilon at this delta.")
    if (card.epsilon or 0.0) > accounting.LARGEST_DETAILED_EPSILON:
        found.append(
            "So large an epsilon protects nothing in practice; the card omits curves and other neighbours."
        )
    if numbers.epsilon is not None:
        # RDP >= claim >= PRV lower, with the slack of RDP's finite list of orders (a thousandth).
        rdp, lower = numbers.epsilon_rdp, numbers.epsilon_prv[0] if numbers.epsilon_prv else None
        above = rdp is not None and numbers.epsilon > rdp * (1 + 1e-3) + 1e-3
        if above or (lower is not None and lower > numbers.epsilon):
            found.append(
                "The claim is not between the PRV lower and the RDP upper bound, which both omit the cap."
            )
    if numbers.epsilon_replace_one is not None and numbers.epsilon_prv is None:
        found.append("The PRV accountant fails at these numbers: RDP alone cross-checks the claim.")
    if snapshot.unterminated:
        found.append(
            "The ledger ends inside a line (a crash, or a write under way), charged if it may be an attempt."
        )
    if not snapshot.state.mirrored:
        found.append(STATEMENTS["no_mirror"])
    modified = [
        str(number) for number, session in enumerate(card.sessions, start=1) if session.modified
    ]
    if modified:
        found.append(
            f"The code had uncommitted changes in session {', '.join(modified)}: no commit identifies it."
        )
    commits = {session.commit for session in card.sessions}
    if card.sessions and len(commits | {card.opened.get("commit")}) > 1:
        found.append(
            "The sessions ran different commits of the code, or not all commits are known."
        )
    planned_with = card.opened.get("accountant")
    if planned_with not in (None, numbers.accountant):
        found.append(
            f"The run was planned with {planned_with}; this card uses {numbers.accountant}."
        )
    return found
