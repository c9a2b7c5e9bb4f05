"""The records of a run's ledger and their one legal order; chain.py has the form of the lines.

Legal order: `open` first and once; `session` starts a program; then `intent` [`done`] per step and
`checkpoint`; `close` ends the run. A torn line is followed by a `repair`, which the next start
writes. When the repair is torn too, the torn lines follow each other and one `repair` counts all of
them. This module only reads; privacy/ledger/ledger.py writes.
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
"""The reason of a `close` after a check found that examples mix: the run claims nothing."""
WHY_MIXED = (
    "a check while the run trained found that losses or gradients of examples depended on other "
    "examples, so no step of this run has a guarantee"
)
CLOSE_REASONS = ("finished", "budget_spent", "stopped", MIXED_EXAMPLES)
RESTARTED = "restarted_from_step_0"
"""A `session` with this field begins the run again at step 0, by permission: the checkpoints that
the ledger records were gone."""
_close = functools.partial(math.isclose, rel_tol=1e-9)
_STEP: dict[str, Kind] = {"step": is_count, "attempt": is_count}


def _is_share(value: Any) -> bool:
    """Returns whether `value` is a `smallest_share`, as privacy/noise/refutation.py reads it."""
    has_fields = isinstance(value, dict) and value.keys() == {"owners", "coordinates", "norm"}
    return (
        has_fields
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
    "checkpoint": {"step": is_count, "path": str, "digest": is_hex, "checks?": is_count},
    "repair": {"torn_lines": is_count, "charged": is_count},
    "close": {"reason": lambda value: value in CLOSE_REASONS, "num_charged": is_count},
}
_BEHIND: dict[str, Kind] = {"file": str, "run": str, "lines": is_count, "hash": is_hex}
"""The fields by which `open` names the ledger of a private run behind the initial weights."""
_HEAD: dict[str, Kind] = {
    "method": str,
    "num_classes": is_positive,
    "covers?": (str, type(None)),
}
"""Fields of `head`, which `open` has for a private head, beside the options of its method."""


@dataclass(frozen=True)
class Intent:
    """A charged attempt.

    Attributes:
        seq: number of its line, from 0.
        nonce: of its session, in hex; with step and attempt it names the attempt's coins.
    """

    seq: int
    nonce: str
    step: int
    attempt: int


@dataclass
class LedgerState(ChainState):
    """The content of a run's ledger.

    Attributes:
        shared_seen: the last line (seq, hash) of the shared ledger at the newest session.
        session_active: whether records of a program may follow: a session has begun, and no crash
            has torn a line since.
        pending: the intent whose `done` has not come.
        position_in_session: the last step that is done in the newest session.
        checkpointed_step: of the newest checkpoint since the run began, or began again at step 0.
        reached: (line, step) of every `done`; also (line, 0) of a `session` that may write a
            checkpoint before its first step, and (line, None) of one that has a checkpoint to go
            on from.
        checkpoints: (step, SHA-256 of its manifest) of every `checkpoint` -> the last line that
            records it.
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
        """Returns whether an honest program could write an intent next.

        A torn line at such a place is charged. The bytes of a torn line do not decide this: an
        intent whose first letters were edited looks like another record.
        """
        plan = self.plan
        has_steps = self.position_in_session is None or self.position_in_session < plan.num_steps
        has_budget = not plan.formal_guarantee or self.num_charged < plan.max_intents
        is_between_steps = self.session_active and self.pending is None and not self.torn_run
        return is_between_steps and has_steps and has_budget and self.closed is None

    @property
    def plan(self) -> PrivacyPlan:
        """Returns the frozen plan of the `open` record.

        It has no guarantee where the run was closed because of mixed examples.
        """
        plan = PrivacyPlan.from_frozen(self.opened["plan"])
        if self.closed != MIXED_EXAMPLES:
            return plan
        return replace(plan, informal_reasons=(*plan.informal_reasons, WHY_MIXED))

    @property
    def num_charged(self) -> int:
        """Counts intents, done or not, and torn lines that may have been intents."""
        return len(self.intents) + self.charged_torn

    def may_lack_record(self, step: int, line: int) -> bool:
        """Returns whether a crash can have come between a checkpoint and its record.

        Then the checkpoint is of the step that its session had reached when it was written, and the
        ledger records no checkpoint of that step or a later one since: a session begins with a
        record of the checkpoint that it goes on from, unless that record exists.

        Args:
            line: the line that the checkpoint remembers, from 0; the ledger has it.
        """
        place = bisect_right(self.reached, line, key=itemgetter(0)) - 1
        if place < 0 or self.closed is not None:
            return False
        start_line, reached_step = self.reached[place]
        if step != reached_step:
            return False
        return all(
            recorded_step < step
            for (recorded_step, _), record_line in self.checkpoints.items()
            if record_line > start_line
        )

    def charged_groups(self) -> list[ReleaseGroup]:
        """Returns every charge for the accountant; each intent has the planned noise."""
        return [self.plan.release_group(self.num_charged)] if self.num_charged else []

    def epsilon(self) -> float | None:
        """Returns the epsilon of all charges at the plan's delta; None without a formal claim."""
        plan = self.plan
        if not plan.formal_guarantee:
            return None
        return epsilon(self.charged_groups(), plan.accounted_delta)

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
                    frozen_plan = PrivacyPlan.from_frozen(record["plan"]).frozen_fields()
                except PrivacyConfigError as error:
                    raise LineRefused(f"the frozen plan is refused: {error}") from error
                # As text: 1, 1.0 and true are equal in Python, and not in a ledger.
                plan_text = json.dumps(frozen_plan, sort_keys=True)
                recorded_text = json.dumps(with_constant_bound(record["plan"]), sort_keys=True)
                require(plan_text == recorded_text, "a number of the frozen plan has another type")
            case "session":
                require(
                    record["nonce"] not in self.nonces,
                    "the session nonce was used before: coins would repeat",
                )
                require(
                    ("shared_seq" in record) == ("shared_hash" in record),
                    "a line of a shared ledger is named by its number and its SHA-256",
                )
            case "intent":
                self._check_order(record["step"], record["attempt"])
                _check_releases(self.opened, record["releases"])
            case "done":
                pending = self.pending
                attempt = (record["step"], record["attempt"])
                is_pending = pending is not None and attempt == (pending.step, pending.attempt)
                require(is_pending, "`done` without its intent just before")
                # Ledgers of version 0.1 do not count coordinates, and state no norms.
                states_norms = self.opened.get("noised_coordinates") is not None
                has_noise = self.opened["plan"]["noise_multiplier"] != 0
                require(
                    "noised_norm" in record or not states_norms or not has_noise,
                    "`done` does not state the norm of the noised gradient",
                )
            case "checkpoint":
                require(self.session_active, "a checkpoint outside of a session")
                require(
                    record["step"] <= self.last_done_step, "a checkpoint of a step that is not done"
                )
            case "repair":
                stated_counts = (record["torn_lines"], record["charged"])
                torn_counts = (len(self.torn_run), sum(self.torn_run))
                require(
                    stated_counts == torn_counts,
                    "the repair does not match the torn lines before it",
                )
            case "close":
                require(
                    record["num_charged"] == self.num_charged,
                    "`close` states another number of charged intents",
                )

    def _check_order(self, step: int, attempt: int) -> None:
        """Requires an intent to repeat the pending step or to follow the last one that is done.

        A new session may go back, since its checkpoint may be older; none skips a step.
        """
        require(self.session_active, "an intent outside of a session")
        num_steps = self.opened["plan"]["num_steps"]
        require(1 <= step <= num_steps, f"step {step} is not one of the planned {num_steps}")
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
        next_attempt = self.attempts[step]
        require(
            attempt == next_attempt, f"attempt {attempt} of step {step}: {next_attempt} is next"
        )

    def take_record(self, record: dict[str, Any] | None, line: bytes) -> None:
        if record is None:
            is_charged = self.may_take_intent
            self.torn_run.append(is_charged)
            self.charged_torn += is_charged
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
                self.pending = None
                self.position_in_session = None
            case "intent":
                nonce = self.nonces[-1]
                self.pending = Intent(record["seq"], nonce, record["step"], record["attempt"])
                self.intents.append(self.pending)
                self.attempts[record["step"]] += 1
            case "done":
                self.pending = None
                self.position_in_session = record["step"]
                self.reached.append((record["seq"], record["step"]))
                self.last_done_step = max(self.last_done_step, record["step"])
            case "checkpoint":
                self.checkpointed_step = record["step"]
                self.checkpoints[record["step"], record["digest"]] = record["seq"]
            case "repair":
                self.torn_run = []
                # The program that tore the line is dead: only a new session, with a new nonce, can
                # go on.
                self.session_active = False
                self.pending = None
                self.position_in_session = None
            case "close":
                self.closed = record["reason"]


def read_state(data: bytes, name: str) -> LedgerState:
    """Returns the state of a ledger after all of its lines are verified.

    An unterminated last line is charged as its repair would charge it.

    Raises:
        PrivacyStateRefused: the chain breaks; the message names the line.
    """
    state = LedgerState()
    if tail := read_chain(data, state, name):
        state.absorb(tail + TORN_MARK)
    return state


def read_ledger_and_bytes(path: Path | str) -> tuple[LedgerState, bytes]:
    """Returns a ledger's verified state and the bytes that were verified; writes nothing."""
    with refusing(f"{path}: cannot read the ledger"):
        content = Path(path).read_bytes()
    return read_state(content, str(path)), content


def read_ledger(path: Path | str) -> LedgerState:
    """Returns the verified state of a ledger; writes nothing."""
    return read_ledger_and_bytes(path)[0]


def noise_multiplier_of(releases: object) -> float:
    """Returns the joint std / sensitivity of a step's releases; LineRefused for malformed ones."""
    if not isinstance(releases, list) or not releases:
        raise LineRefused("an intent lists its releases")
    noise_multipliers = []
    for release in releases:
        if not isinstance(release, dict) or set(release) != {"name", "std", "sensitivity"}:
            raise LineRefused("a release has name, std and sensitivity")
        if not isinstance(release["name"], str):
            raise LineRefused("the name of a release is text")
        std = release["std"]
        sensitivity = release["sensitivity"]
        if not (is_number(std) and is_number(sensitivity) and std >= 0 and sensitivity > 0):
            raise LineRefused("std must be >= 0 and sensitivity > 0, both finite")
        noise_multipliers.append(std / sensitivity)
    return joint_noise_multiplier(noise_multipliers)


def _check_releases(opened: Mapping[str, Any], releases: Any) -> None:
    """Requires the releases of a step to be those of the plan, to rounding.

    Less noise breaks the claim, and more would lower epsilon unearned.
    """
    plan = opened["plan"]
    sigma = noise_multiplier_of(releases)
    # Statistics of a private head have other names and sensitivities; together they are worth the
    # planned noise.
    if "head" in opened:
        require(
            _close(sigma, plan["noise_multiplier"]),
            f"noise multiplier {sigma:g} is not the planned one",
        )
        return
    planned_release = release_of_step(plan["noise_multiplier"], plan["max_grad_norm"])
    names = [release["name"] for release in releases]
    require(
        names == [planned_release["name"]],
        f"a step of this plan releases {planned_release['name']}",
    )
    (release,) = releases
    std = release["std"]
    sensitivity = release["sensitivity"]
    has_planned_std = _close(std, planned_release["std"])
    has_planned_sensitivity = _close(sensitivity, planned_release["sensitivity"])
    stated_noise = f"{release['name']} states noise of {std:g} for a sensitivity of {sensitivity:g}"
    planned_noise = f"{planned_release['std']:g} for {planned_release['sensitivity']:g}"
    require(
        has_planned_std and has_planned_sensitivity,
        f"{stated_noise}, where the plan has {planned_noise}",
    )
