"""The privacy ledger's records, and the one order of them that is legal; the form of the lines is privacy/ledger/chain.py's.

Legal order: `open` first and once; `session` starts a program; then `intent` [`done`] per step and `checkpoint`; `close` ends the
run. A torn line is followed by a `repair`
record, which is written by the next start. When the repair is torn as well, the torn lines follow each other and one `repair`
counts them all. This module only reads; privacy/ledger/ledger.py writes.
"""

import functools
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..accounting.accountants import ReleaseGroup, epsilon, joint_noise_multiplier
from ..errors import PrivacyConfigError, refusing
from ..plan.numbers import PrivacyPlan, with_constant_bound
from ..plan.releases import release_of_step
from ..sampling.keys import NONCE_BYTES
from .chain import (
    TORN_MARK,
    ChainState,
    Kind,
    LineRefused,
    is_count,
    is_hex,
    is_number,
    is_positive,
    read_chain,
    require,
    require_fields,
)

FORMAT_VERSION = 1
MIXED_EXAMPLES = "mixed_examples"
"""Why a run is closed whose examples were found not to stay apart: it claims nothing."""
WHY_MIXED = (
    "a check while the run trained found that losses or gradients of examples depended on other "
    "examples, so no step of this run has a guarantee"
)
CLOSE_REASONS = ("finished", "budget_spent", "stopped", MIXED_EXAMPLES)
RESTARTED = "restarted_from_step_0"
"""A `session` with this field begins the run again at step 0, by permission: the checkpoints that the ledger knows were gone."""
_close = functools.partial(math.isclose, rel_tol=1e-9)
_STEP: dict[str, Kind] = {"step": is_count, "attempt": is_count}


def _is_share(value: Any) -> bool:
    """The owner of coordinates with the smallest norm beside its noise, of several (privacy/noise/refutation.py)."""
    whole = isinstance(value, dict) and value.keys() == {"owners", "coordinates", "norm"}
    return (
        whole
        and is_positive(value["owners"])
        and is_positive(value["coordinates"])
        and is_number(value["norm"])
    )


_FIELDS: dict[str, dict[str, Kind]] = {
    "open": {
        "format": is_count,
        "plan": dict,
        "key_commitment": is_hex,
        "data_hmac?": str,
        "commit?": str,
        "accountant?": str,
        "unit?": str,
        "deduplication?": str,
        "tuning?": str,
        "disjoint_from_start?": bool,
        "shared_ledger?": (str, type(None)),
        "head?": dict,
        "behind?": list,
        "max_examples_per_owner?": lambda value: value is None or is_positive(value),
        "noised_coordinates?": lambda value: value is None or is_positive(value),
        "sum_exponent?": lambda value: value is None or type(value) is int,
        "sum_exponents?": dict,
    },
    "session": {
        "nonce": lambda value: is_hex(value, 2 * NONCE_BYTES),
        "mirror": bool,
        "environment": dict,
        f"{RESTARTED}?": bool,
        "shared_seq?": is_count,
        "shared_hash?": is_hex,
    },
    "intent": {**_STEP, "releases": list},
    "done": {
        **_STEP,
        "noised_norm?": is_number,
        "smallest_share?": _is_share,
    },
    "checkpoint": {"step": is_count, "path": str, "digest": is_hex},
    "repair": {"torn_lines": is_count, "charged": is_count},
    "close": {"reason": lambda value: value in CLOSE_REASONS, "num_charged": is_count},
}
_BEHIND: dict[str, Kind] = {"file": str, "run": str, "lines": is_count, "hash": is_hex}
"""How `open` names the ledger of a private run behind the initial weights."""
_HEAD: dict[str, Kind] = {
    "method": str,
    "num_classes": is_positive,
    "covers?": (str, type(None)),
}
"""What `open` says of a private head (evaluation/private_head/), beside the options of its method."""


@dataclass(frozen=True)
class Intent:
    """One charged attempt: its line from 0, and what with the session's nonce (hex) names its coins."""

    seq: int
    nonce: str
    step: int
    attempt: int


@dataclass
class LedgerState(ChainState):
    """What the lines of a run's ledger say.

    Attributes:
        shared_seen: the last line (seq, hash) of the shared ledger at the newest session.
        pending: the intent whose `done` has not come.
        checkpointed_step: of the newest checkpoint since the run began, or began again at step 0.
        reached: (line, step) of every `done`; also (line, 0) of a `session` that may write a checkpoint before its first step,
            and (line, None) of one that has a checkpoint to go on from.
        checkpoints: (step, SHA-256 of its manifest) of every `checkpoint`, and the last line that records it.
        torn_run: whether each of the torn lines that wait for their `repair` was charged.
        closed: the reason of the `close` record, which nothing can follow.
    """

    FIELDS = _FIELDS
    OPEN_TO_MORE = ("open",)
    nonces: list[str] = field(default_factory=list)
    shared_seen: tuple[int, str] | None = None
    session_active: bool = False
    intents: list[Intent] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    pending: Intent | None = None
    position_in_session: int | None = None
    last_done_step: int = 0
    checkpointed_step: int | None = None
    reached: list[tuple[int, int | None]] = field(default_factory=list)
    checkpoints: dict[tuple[int, str], int] = field(default_factory=dict)
    charged_torn: int = 0
    torn_run: list[bool] = field(default_factory=list)
    closed: str | None = None

    @property
    def may_take_intent(self) -> bool:
        """Whether an honest program could write an intent next, so that a torn line here is charged as one.

        The bytes of a torn line do not decide this: an intent whose first letters were edited looks like another record.
        """
        plan = self.plan
        has_steps = self.position_in_session is None or self.position_in_session < plan.num_steps
        has_budget = not plan.formal_guarantee or self.num_charged < plan.max_intents
        is_between_steps = self.session_active and self.pending is None and not self.torn_run
        return is_between_steps and has_steps and has_budget and self.closed is None

    @property
    def plan(self) -> PrivacyPlan:
        """Returns the plan frozen in the `open` record, without a guarantee where examples were mixed."""
        plan = PrivacyPlan.from_frozen(self.opened["plan"])
        if self.closed != MIXED_EXAMPLES:
            return plan
        return replace(plan, informal_reasons=(*plan.informal_reasons, WHY_MIXED))

    @property
    def num_charged(self) -> int:
        """Intents, done or not, and torn lines that may have been intents."""
        return len(self.intents) + self.charged_torn

    def may_lack_record(self, step: int, line: int) -> bool:
        """Whether a crash can have come between a checkpoint and its record.

        Then it is of the step that its session had reached when it was written, and the ledger knows of nothing that comes after
        it: a session begins with a record of the checkpoint that it goes on from, unless there is one.

        Args:
            line: the one that the checkpoint remembers, from 0; the ledger has it.
        """
        place = bisect_right(self.reached, line, key=itemgetter(0)) - 1
        if place < 0 or self.closed is not None:
            return False
        since, reached = self.reached[place]
        return step == reached and all(
            known < step for (known, _), at in self.checkpoints.items() if at > since
        )

    def charged_groups(self) -> list[ReleaseGroup]:
        """Everything charged, for the accountant, from the ledger alone: every intent has the planned noise."""
        return [self.plan.release_group(self.num_charged)] if self.num_charged else []

    def epsilon(self) -> float | None:
        """Epsilon of everything charged at the plan's delta; None when the plan makes no formal claim."""
        plan = self.plan
        return (
            epsilon(self.charged_groups(), plan.accounted_delta) if plan.formal_guarantee else None
        )

    def check_record(self, record: dict[str, Any] | None) -> None:
        require(self.closed is None, "a record after the end" if record else "bytes after the end")
        if record is None:
            return
        kind = record["type"]
        require(
            (kind == "repair") == bool(self.torn_run),
            "a `repair` follows torn lines, and nothing else does",
        )
        match kind:
            case "open":
                version = record["format"]
                require(
                    version == FORMAT_VERSION, f"ledger format {version} is not {FORMAT_VERSION}"
                )
                for place in record.get("behind", []):
                    require_fields({"type": "behind"} | place, _BEHIND)
                if "head" in record:
                    require_fields({"type": "head"} | record["head"], _HEAD, exact=False)
                try:
                    recorded = PrivacyPlan.from_frozen(record["plan"]).frozen_fields()
                except PrivacyConfigError as error:
                    raise LineRefused(f"the frozen plan is refused: {error}") from error
                read, written = (
                    json.dumps(plan, sort_keys=True)
                    for plan in (recorded, with_constant_bound(record["plan"]))
                )
                # As 1, 1.0 and true have.
                require(read == written, "a number of the frozen plan has another type")
            case "session":
                require(
                    record["nonce"] not in self.nonces,
                    "the session nonce was used before: coins would repeat",
                )
                named = ("shared_seq" in record) == ("shared_hash" in record)
                require(named, "a line of a shared ledger is named by its number and its SHA-256")
            case "intent":
                self._check_order(record["step"], record["attempt"])
                _check_releases(self.opened, record["releases"])
            case "done":
                finished, pending = (record["step"], record["attempt"]), self.pending
                is_pending = pending is not None and finished == (pending.step, pending.attempt)
                require(is_pending, "`done` without its intent just before")
                stated, plan = self.opened.get("noised_coordinates"), self.opened["plan"]
                told = stated is None or "noised_norm" in record or plan["noise_multiplier"] == 0
                require(told, "`done` does not state the norm of what it noised")
            case "checkpoint":
                require(self.session_active, "a checkpoint outside of a session")
                require(
                    record["step"] <= self.last_done_step, "a checkpoint of a step that is not done"
                )
            case "repair":
                repaired, expected = (
                    (record["torn_lines"], record["charged"]),
                    (len(self.torn_run), sum(self.torn_run)),
                )
                require(repaired == expected, "the repair does not match the torn lines before it")
            case "close":
                same = record["num_charged"] == self.num_charged
                require(same, "`close` states another number of charged intents")

    def _check_order(self, step: int, attempt: int) -> None:
        """An intent repeats the pending step or follows the last done one; a new session may go back, and none skips a step."""
        require(self.session_active, "an intent outside of a session")
        planned = self.opened["plan"]["num_steps"]
        require(1 <= step <= planned, f"step {step} is not one of the planned {planned}")
        if self.pending is not None:
            require(
                step == self.pending.step, f"step {step} while step {self.pending.step} is not done"
            )
        elif self.position_in_session is not None:
            require(
                step == self.position_in_session + 1,
                f"step {step} does not follow {self.position_in_session}",
            )
        else:
            require(
                step <= self.last_done_step + 1, f"step {step} skips step {self.last_done_step + 1}"
            )
        following = self.attempts[step]
        require(attempt == following, f"attempt {attempt} of step {step}: {following} is next")

    def take_record(self, record: dict[str, Any] | None, line: bytes) -> None:
        if record is None:
            charged = self.may_take_intent
            self.torn_run.append(charged)
            self.charged_torn += charged
            return
        match record["type"]:
            case "session":
                self.nonces.append(record["nonce"])
                self.mirrored = self.mirrored or record["mirror"]
                if "shared_hash" in record:
                    self.shared_seen = (record["shared_seq"], record["shared_hash"])
                if record.get(RESTARTED):
                    self.checkpointed_step = None
                self.reached.append((record["seq"], 0 if self.checkpointed_step is None else None))
                self.session_active = True
                self.pending = self.position_in_session = None
            case "intent":
                self.pending = Intent(
                    record["seq"], self.nonces[-1], record["step"], record["attempt"]
                )
                self.intents.append(self.pending)
                self.attempts[record["step"]] += 1
            case "done":
                self.pending, self.position_in_session = None, record["step"]
                self.reached.append((record["seq"], record["step"]))
                self.last_done_step = max(self.last_done_step, record["step"])
            case "checkpoint":
                self.checkpointed_step = record["step"]
                self.checkpoints[record["step"], record["digest"]] = record["seq"]
            case "repair":
                self.torn_run = []
                # The program that tore the line is dead: only a new session, with a new nonce, can go on.
                self.session_active = False
                self.pending = self.position_in_session = None
            case "close":
                self.closed = record["reason"]


def read_state(data: bytes, name: str) -> LedgerState:
    """Verifies all lines of a ledger; an unterminated last one is charged as its repair would charge it.

    PrivacyStateRefused names the line that breaks the chain.
    """
    state = LedgerState()
    if tail := read_chain(data, state, name):
        state.absorb(tail + TORN_MARK)
    return state


def read_ledger_and_bytes(path: Path | str) -> tuple[LedgerState, bytes]:
    """Verifies a ledger once, without writing to it."""
    with refusing(f"{path}: cannot read the ledger"):
        data = Path(path).read_bytes()
    return read_state(data, str(path)), data


def read_ledger(path: Path | str) -> LedgerState:
    return read_ledger_and_bytes(path)[0]


def noise_multiplier_of(releases: object) -> float:
    """Joint std / sensitivity of a step's releases; LineRefused when they are not well formed."""
    if not isinstance(releases, list) or not releases:
        raise LineRefused("an intent lists its releases")
    ratios = []
    for release in releases:
        if not isinstance(release, dict) or set(release) != {"name", "std", "sensitivity"}:
            raise LineRefused("a release has name, std and sensitivity")
        if not isinstance(release["name"], str):
            raise LineRefused("the name of a release is text")
        std, sensitivity = release["std"], release["sensitivity"]
        if not (is_number(std) and is_number(sensitivity) and std >= 0 and sensitivity > 0):
            raise LineRefused("std must be >= 0 and sensitivity > 0, both finite")
        ratios.append(std / sensitivity)
    return joint_noise_multiplier(ratios)


def _check_releases(opened: Mapping[str, Any], releases: Any) -> None:
    """A step releases what the plan says, to rounding: less noise breaks the claim, and more would lower epsilon unearned."""
    plan, sigma = opened["plan"], noise_multiplier_of(releases)
    if (
        "head" in opened
    ):  # statistics of other names and sensitivities; together they are worth the planned noise
        require(
            _close(sigma, plan["noise_multiplier"]),
            f"noise multiplier {sigma:g} is not the planned one",
        )
        return
    planned = release_of_step(plan["noise_multiplier"], plan["max_grad_norm"])
    names = [release["name"] for release in releases]
    require(names == [planned["name"]], f"a step of this plan releases {planned['name']}")
    (stated,) = releases
    require(
        _close(stated["std"], planned["std"])
        and _close(stated["sensitivity"], planned["sensitivity"]),
        f"{stated['name']} states noise of {stated['std']:g} for a sensitivity of {stated['sensitivity']:g}, where the "
        f"plan has {planned['std']:g} for {planned['sensitivity']:g}",
    )
