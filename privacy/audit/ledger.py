"""Does the ledger hold together, and does everything that the run folder claims follow from it?

The chain and epsilon are computed here a second time, from the raw lines and dp-accounting alone; the ledger's own reader
(privacy/ledger/records.py) is asked as well, for the legal order of records.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import dp_accounting
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from dp_accounting.pld import PLDAccountant

from ..accounting.noise_tail import noise_tail_delta, noise_tail_of_cuts
from ..adaptive_clipping import RANGE
from ..card.text import rounded_up
from ..errors import PrivacyStateRefused
from ..ledger.records import LedgerState, read_state
from ..sampling.poisson import default_cap
from .members import LedgerMark, not_in_ledger, not_recorded
from .report import AuditReport, Check, fact, undecided

TORN = b" #torn"
TOLERANCE = 1e-3
"""Relative, between two epsilons of different discretisations. Claiming more than the truth is never a violation."""
FP32 = 1e-6
"""Relative: published numbers are rounded to fp32, and what follows from one of them is compared with another."""


@dataclass(frozen=True)
class EpsilonClaim:
    """`file` says that epsilon was `epsilon` (None: that there is none) after `charged` attempts."""

    file: str
    charged: int
    epsilon: float | None


@dataclass(frozen=True)
class CheckpointClaim:
    """A line of the ledger that a checkpoint's manifest remembers; `digest` is the SHA-256 of the manifest itself."""

    name: str
    step: int
    seq: int | None
    line_hash: str | None
    digest: str
    charged: int | None
    formal_guarantee: bool | None


@dataclass(frozen=True)
class BoundClaim:
    """`file` says that `step` clipped to `bound`, and that about `noised_fraction` of its examples stayed below it."""

    file: str
    step: int
    bound: float
    noised_fraction: float


@dataclass(frozen=True)
class RecordedAttempts:
    """The private record of attempts (privacy/audit/members.py), read before the ledger and again after it.

    A run in progress writes while it is audited: what was recorded before must be in the ledger, and what the ledger
    charges must be recorded afterwards.
    """

    before: Sequence[LedgerMark]
    after: Sequence[LedgerMark]


@dataclass(frozen=True)
class FolderClaims:
    """What the other files of a run folder say.

    Attributes:
        attempts: the private record; a sentence where it should be there and cannot be read; None in a folder without its
            private part.
        configured: why config.toml asks for another plan than the ledger states; None where it asks for the same.
        furthest_step: file -> the highest step that it shows; none may be beyond the ledger.
        mirror: the bytes of the ledger's mirror; None when there is none or it cannot be read.
        bounds: what was published of adaptive clipping, in the order of the file.
    """

    epsilons: Sequence[EpsilonClaim] = ()
    checkpoints: Sequence[CheckpointClaim] = ()
    furthest_step: Mapping[str, int] = field(default_factory=dict)
    mirror: bytes | None = None
    bounds: Sequence[BoundClaim] = ()
    attempts: RecordedAttempts | str | None = None
    configured: str | None = None


@dataclass(frozen=True)
class _Reading:
    """The raw lines, parsed without the ledger's reader; a torn line is None."""

    lines: list[bytes]
    tail: bytes
    records: list[dict[str, Any] | None]

    @classmethod
    def of(cls, data: bytes) -> Self:
        *lines, tail = data.split(b"\n")
        records: list[dict[str, Any] | None] = []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            records.append(record if isinstance(record, dict) else None)
        return cls(lines, tail, records)

    @cached_property
    def hashes(self) -> list[str]:
        return [hashlib.sha256(line).hexdigest() for line in self.lines]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record is not None and record.get("type") == kind]

    @property
    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = self.of_type("open")[0]["plan"]
        return plan


def audit_ledger(data: bytes, claims: FolderClaims) -> AuditReport:
    """All checks of one ledger's bytes, and of the claims of the files around it."""
    reading = _Reading.of(data)
    chain = _chain(reading)
    try:
        state, tail = read_state(data, "ledger.jsonl")
    except PrivacyStateRefused as error:
        return AuditReport.of("ledger", [chain, fact("legal_order", False, str(error))])
    if tail:  # a write under way, or a crash: charged as its repair would be
        state.absorb(tail + TORN)
    plan = state.plan
    times = [record["time_utc"] for record in reading.records if record is not None]
    if others := sum(time != times[0] for time in times):
        clock = undecided("clock", f"{others} records state another time than the first, as this program writes none")
    else:
        clock = fact("clock", True, "all records repeat the time of the first")
    nonces = [session["nonce"] for session in reading.of_type("session")]
    repeated = len(nonces) - len(set(nonces))
    repeated_nonces = f"{repeated} of {len(nonces)} sessions repeat the nonce of an earlier one"
    charges = f"{state.num_charged} attempts are charged; steps plus reserve allow {plan.max_intents}"
    in_budget = state.num_charged <= plan.max_intents or not plan.formal_guarantee
    if not plan.enabled:
        nothing_uncharged = fact("nothing_uncharged", True, "trained without privacy: nothing is charged")
    else:
        last = state.last_done_step
        beyond = [f"{file} shows step {step}" for file, step in claims.furthest_step.items() if step > last]
        sentence = f"the ledger's last finished step is {last}; beyond it: {'; '.join(beyond) or 'nothing'}"
        nothing_uncharged = fact("nothing_uncharged", not beyond, sentence)
    if not state.mirrored:
        no_mirror = "the ledger has no mirror: a rollback of the whole run folder cannot be detected"
        mirror = fact("mirror", True, no_mirror)
    elif claims.mirror is None:
        mirror = undecided("mirror", "the ledger has a mirror, which could not be read")
    else:  # Ledger first, then mirror: between the two writes the mirror is a prefix, and never more.
        is_prefix = data.startswith(claims.mirror)
        relation = "a prefix of the ledger" if is_prefix else "longer or different: a rollback"
        mirror = fact("mirror", is_prefix, f"the mirror is {relation}")
    checks = [
        chain,
        fact("legal_order", True, f"{len(reading.lines)} lines are in legal order and canonical form"),
        clock,
        fact("session_nonces", repeated == 0, repeated_nonces, statistic=repeated, threshold=0),
        _releases(reading),
        _signatures(reading),
        fact("configuration", claims.configured is None, claims.configured or "config.toml asks for no other plan"),
        attempts_check(state, claims.attempts),
        *_bounds(reading, claims.bounds),
        fact("budget", in_budget, charges, statistic=state.num_charged, threshold=plan.max_intents),
        *_epsilons(reading, state, claims.epsilons),
        *_checkpoints(reading, state, claims.checkpoints),
        nothing_uncharged,
        mirror,
    ]
    facts = {"attempts_charged": state.num_charged, "formal_guarantee": plan.formal_guarantee}
    return AuditReport.of("ledger", checks, **facts)


def _chain(reading: _Reading) -> Check:
    """Every record names its place and the SHA-256 of the line before."""
    for index, (line, record) in enumerate(zip(reading.lines, reading.records, strict=True)):
        previous = reading.hashes[index - 1] if index else "0" * 64
        if line.endswith(TORN) or b"\0" in line:
            continue
        if record is None or record.get("seq") != index or record.get("previous") != previous:
            return fact("chain", False, f"line {index + 1} does not continue the chain of hashes", line=index + 1)
    torn = f"; the last {len(reading.tail)} bytes are an unfinished line" if reading.tail else ""
    return fact("chain", bool(reading.lines), f"{len(reading.lines)} lines are chained by their hashes{torn}")


def _signatures(reading: _Reading) -> Check:
    """Every signature is that of the key in `open`, for the line before it."""
    signer = reading.of_type("open")[0].get("signer")
    if signer is None:
        return fact("signatures", True, "the ledger names no signer: nothing in it is signed")
    key, last, seq = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer)), 0, 0
    try:
        for record in reading.of_type("signature"):
            seq = record["seq"]
            signed = b"dp-trainer ledger head v1\n" + reading.hashes[seq - 1].encode()
            key.verify(bytes.fromhex(record["signature"]), signed)
            last = seq
    except (InvalidSignature, ValueError):
        return fact("signatures", False, f"line {seq + 1}: the signature is not the signer's for the line before it")
    fingerprint = hashlib.sha256(bytes.fromhex(signer)).hexdigest()
    sentence = (
        f"{last} of {len(reading.lines)} lines are signed by the key with the fingerprint {fingerprint}; who that is knows only "
        "somebody who kept the fingerprint when the run began"
    )
    return fact("signatures", True, sentence, statistic=last, fingerprint=fingerprint)


def _releases(reading: _Reading) -> Check:
    """Every intent states the planned noise, for the sensitivity that is C; where C moves, `_bounds` looks at it."""
    plan, intents = reading.plan, reading.of_type("intent")
    planned, bound, is_head = (
        plan["noise_multiplier"],
        plan["max_grad_norm"],
        bool(reading.of_type("open")[0].get("head")),
    )
    sigmas, other = [], 0
    for intent in intents:
        releases = intent["releases"]
        # Several Gaussian releases of one sample act as one, of noise multiplier 1 / sqrt(sum (sensitivity / std)^2).
        squares = sum((r["sensitivity"] / r["std"]) ** 2 if r["std"] else math.inf for r in releases)
        sigmas.append(1 / math.sqrt(squares))
        if len(releases) == 1 and not is_head:
            other += not math.isclose(releases[0]["sensitivity"], bound)
    off = sum(not math.isclose(sigma, planned, rel_tol=1e-9) for sigma in sigmas)
    sentence = (
        f"{off} of {len(intents)} intents state another noise multiplier than the planned {planned:.6g}, and {other} "
        f"another sensitivity than C = {bound:g}"
    )
    furthest = max(sigmas, key=lambda sigma: abs(sigma - planned), default=planned)
    return fact("releases", not off and not other, sentence, statistic=furthest, threshold=planned)


def attempts_check(state: LedgerState, attempts: RecordedAttempts | str | None) -> Check:
    """Recorded attempts and charges are the same, but for the last of a session, which may have ended before its charge."""
    if attempts is None:
        sentence = "there is no private/ here, so charges are not compared with the record of attempts"
        return fact("attempts", True, sentence)
    if isinstance(attempts, str):
        return fact("attempts", False, attempts)
    wrong = not_in_ledger(attempts.before, state) or not_recorded(state, attempts.after)
    charged = f"{len(state.intents)} charges are those of the attempts in private/"
    return fact("attempts", wrong is None, wrong or charged)


def _bounds(reading: _Reading, claims: Sequence[BoundClaim]) -> list[Check]:
    """C moves only by what a charged release states: the first is the plan's, each next follows from the one before."""
    plan, intents = reading.plan, reading.of_type("intent")
    constants = plan["adaptive_clipping"]
    if constants is None:
        sentence = f"C is constant by the plan, and {len(claims)} lines publish a noised count that no intent released"
        return [fact("clipping_bound", False, sentence, statistic=len(claims), threshold=0)] if claims else []
    stated: dict[int, list[float]] = {}
    for intent in intents:
        stated.setdefault(intent["step"], []).append(intent["releases"][0]["sensitivity"])
    bad = [f"step 1 clips to {bound:g}" for bound in stated.get(1, []) if bound != plan["max_grad_norm"]]
    bad += [
        f"{claim.file}: step {claim.step} clipped to {claim.bound:g}, which no intent says"
        for claim in claims
        if not any(math.isclose(claim.bound, said, rel_tol=FP32) for said in stated.get(claim.step, []))
    ]
    rate, quantile = constants["clipbound_learning_rate"], constants["target_unclipped_quantile"]
    low, high = plan["max_grad_norm"] / RANGE, plan["max_grad_norm"] * RANGE
    for before, after in itertools.pairwise(claims):
        if after.step == before.step + 1:
            exponent = min(max(-rate * (before.noised_fraction - quantile), -50.0), 50.0)
            expected = min(max(before.bound * math.exp(exponent), low), high)
            if not math.isclose(after.bound, expected, rel_tol=FP32):
                bad.append(f"{after.file}: step {after.step} clips to {after.bound:g} where {expected:g} follows")
    sentence = f"{len(claims)} published values of C and of the noised count were compared; wrong: {'; '.join(bad[:3]) or 'none'}"
    return [fact("clipping_bound", not bad, sentence, statistic=len(bad), threshold=0)]


def _epsilons(reading: _Reading, state: LedgerState, claims: Sequence[EpsilonClaim]) -> list[Check]:
    """Epsilon comes out the same a second time, and no file claims less than it, or more charges than there are."""
    plan = state.plan
    if not plan.formal_guarantee:
        claimed = [claim.file for claim in claims if claim.epsilon is not None]
        reasons = "; ".join(plan.reasons)
        sentence = f"the run makes no formal claim ({reasons}); files that state an epsilon: {claimed or 'none'}"
        return [fact("no_claim", not claimed, sentence)]
    accounted = state.epsilon()
    assert accounted is not None
    recomputed: dict[int, float] = {}
    if plan.sampling == "poisson":
        # All at the planned noise: `_releases` and the legal order refuse an intent that states another.
        again = recompute_epsilon(reading.plan, len(reading.of_type("intent")) + state.charged_torn)
        recomputed[state.num_charged] = again
        close = math.isclose(accounted, again, rel_tol=TOLERANCE, abs_tol=1e-6)
        ours, theirs = rounded_up(again, 6), rounded_up(accounted, 6)
        sentence = f"epsilon {ours} by an independent PLD computation, {theirs} by the ledger's accountant"
        delta = plan.target_delta
        epsilon = fact("epsilon", close, sentence, statistic=accounted, threshold=again, epsilon=again, delta=delta)
    else:
        sentence = f"epsilon {rounded_up(accounted, 6)}; sampling by {plan.sampling!r} is not recomputed independently"
        epsilon = undecided("epsilon", sentence)
    if not claims:
        return [epsilon, undecided("claims", "no other file of the run folder states an epsilon")]
    bad = [f"{claim.file}: {claim.charged} attempts" for claim in claims if claim.charged > state.num_charged]
    for claim in claims:
        if plan.sampling != "poisson" or claim.charged > state.num_charged or claim.epsilon is None:
            continue
        if claim.charged not in recomputed:
            recomputed[claim.charged] = recompute_epsilon(reading.plan, claim.charged)
        true = recomputed[claim.charged]
        if claim.epsilon < true * (1 - TOLERANCE):
            bad.append(f"{claim.file}: {claim.epsilon:.6g} after {claim.charged}, where it is {rounded_up(true, 6)}")
    sentence = (
        f"{len(claims)} statements about epsilon were compared with the ledger; wrong: {'; '.join(bad) or 'none'}"
    )
    return [epsilon, fact("claims", not bad, sentence, statistic=len(bad), threshold=0)]


def recompute_epsilon(plan: Mapping[str, Any], count: int) -> float:
    """Epsilon of `count` charges from the raw fields of an `open` record, by PLD.

    Zero-out adjacency, Poisson sampling with the recorded threshold and cap, sigma reduced by the slack (which is 0 in certified
    arithmetic), delta reduced by what the noise generator's finite tails cost.
    """
    if count == 0:
        return 0.0
    # Where groups of examples take turns, the group with most of them counts, and its size.
    bands = plan.get("correlated", {"bands": 1})["bands"]
    rate, sigma = int(plan["sampling_threshold"]) / 2**64, plan["noise_multiplier"] / (1 + plan["sensitivity_slack"])
    if plan["cap"] is None:
        one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    else:
        size = math.ceil(plan["num_examples"] / bands)
        one = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(size, rate, plan["cap"], sigma)
    turns = math.ceil((plan["num_steps"] + plan["reserved_attempts"]) / bands)
    # The sampler of certified arithmetic is exact: no tail is cut off.
    is_exact = plan["arithmetic"] == "certified"
    tail = 0.0 if is_exact else noise_tail_delta(sigma, rate * turns, rows=bands)
    cap = plan["cap"]
    if not is_exact and cap is not None and cap < default_cap(plan["expected_batch_size"]):
        tail += noise_tail_of_cuts(sigma, rate, turns, size, cap, rows=bands)
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_accounting.SelfComposedDpEvent(one, math.ceil(count / bands)))
    return float(accountant.get_epsilon(plan["target_delta"] - tail))


def _checkpoints(reading: _Reading, state: LedgerState, claims: Sequence[CheckpointClaim]) -> list[Check]:
    """Each manifest remembers a line of this very ledger, the charges up to it, and is known to the ledger."""
    if not claims:
        return [fact("checkpoints", True, "there is no checkpoint to compare with")]
    bad: list[str] = []
    unknown: list[str] = []
    charged, before = [], LedgerState()  # by line, in one pass for all checkpoints
    for line in reading.lines:
        before.absorb(line)
        charged.append(before.num_charged)
    for claim in claims:
        problem = _checkpoint_problem(reading, state, claim, charged)
        if problem:
            bad.append(f"{claim.name} {problem}")
        elif state.plan.enabled and not state.has_recorded(claim.step, claim.digest):
            honest = claim.seq is not None and state.may_lack_record(claim.step, claim.seq)
            (unknown if honest else bad).append(f"{claim.name} is not the one that the ledger recorded")
    sentence = f"{len(claims)} checkpoints were compared with the ledger; wrong: {'; '.join(bad) or 'none'}"
    if unknown and not bad:
        return [undecided("checkpoints", f"{sentence}; without a record: {'; '.join(unknown)}")]
    return [fact("checkpoints", not bad, sentence, statistic=len(bad), threshold=0)]


def _checkpoint_problem(
    reading: _Reading, state: LedgerState, claim: CheckpointClaim, charged: Sequence[int]
) -> str | None:
    if claim.formal_guarantee is not None and claim.formal_guarantee != state.plan.formal_guarantee:
        return "says something else about the formal guarantee"
    if claim.seq is None or claim.line_hash is None:
        return "remembers no line of the ledger"
    if claim.seq >= len(reading.hashes) or reading.hashes[claim.seq] != claim.line_hash:
        return f"remembers another line {claim.seq + 1}: the ledger was rolled back or replaced"
    if claim.charged is not None and claim.charged != charged[claim.seq]:
        return f"states {claim.charged} charged attempts where the ledger had {charged[claim.seq]}"
    if state.plan.enabled and claim.step > state.last_done_step:
        return f"is of step {claim.step}, which the ledger never finished"
    return None
