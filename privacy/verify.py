"""Rechecks a published run folder. It needs this file, numpy, dp-accounting and cryptography, and nothing of the trainer.

    python verify.py [FOLDER] [--fingerprint F] [--json]

FOLDER is by default the one that holds this file. A published folder is a run folder without `private/`. The start of a run puts
this file there; whoever does not trust the publisher takes it from the project instead, since it judges the folder that it is in.

chain        every line of ledger.jsonl is canonical JSON and repeats the SHA-256 of the line before
signature    the key in the first line has signed what it should have; with --fingerprint, it is the key that you were told
order        sessions, intents, attempts, `done`, checkpoints and repairs follow each other as they must
plan         the plan is consistent, every intent states its noise and sensitivity, and config.toml asks for no other plan
budget       no more attempts are charged than planned and reserved
epsilon      is recomputed from the ledger alone by privacy loss distributions (zero-out neighbours), the cap of the batches and
             every charged attempt included, and composed with the ledgers of private runs whose weights the run started from
card         report/privacy_card.json claims just these numbers
checkpoints  every manifest is the one that the ledger recorded, remembers a line of it, and its files have their hashes
metrics      metrics.jsonl shows no step and no charge that the ledger lacks

The documentation of the ledger's format is docs/running.md of the project. This is a second implementation of it.
Exit codes: 0 consistent, 5 violated, 6 inconclusive, 2 bad input. A folder from a stranger may hold anything: what is too large,
too deep, no plain file or of a wrong type ends in one line.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import json
import logging
import math
import os
import re
import signal
import stat
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

CONSISTENT, BAD_INPUT, VIOLATED, INCONCLUSIVE = 0, 2, 5, 6
LARGEST_LEDGER, LARGEST_LINE, LARGEST_FILE = 1 << 30, 1 << 20, 1 << 26
MINUTES = 20
MOST = 10**12
SIGNED = b"dp-trainer ledger head v1\n"
TORN = b" #torn"
HEADER = ("seq", "type", "time_utc", "previous")
TOLERANCE = 1e-6


OPEN = "open"
"""The state of a run that no `close` has ended."""


class BadInput(Exception):
    """Something that is no run folder, or that cannot be read."""


class Violated(Exception):
    """What a check found wrong."""


class Undecided(Exception):
    """What a check could not find out."""


# ---------------------------------------------------------------- Reading files that a stranger wrote


def open_plain(path: Path, largest: int) -> int:
    """A descriptor of a plain file of at most so many bytes; no link, pipe or device is followed or waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise BadInput(f"{shown(path)}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= largest:
        return descriptor
    os.close(descriptor)
    raise BadInput(f"{shown(path)}: is no plain file of at most {largest:,} bytes")


def read_file(path: Path, largest: int = LARGEST_FILE) -> bytes:
    with os.fdopen(open_plain(path, largest), "rb") as file:
        return file.read(largest)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file with their line ends; one that is too long is bad input."""
    with os.fdopen(open_plain(path, LARGEST_LEDGER), "rb") as file:
        number = 1
        while line := file.readline(LARGEST_LINE):
            if len(line) == LARGEST_LINE:
                raise BadInput(f"{shown(path)}: line {number} has {LARGEST_LINE:,} bytes or more")
            yield line
            number += 1


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def parsed(text: bytes) -> Any:
    """JSON whose numbers are finite and of sensible length, and whose keys differ; ValueError for anything else."""
    rules: dict[str, Any] = {"parse_constant": _refuse, "parse_int": _whole, "parse_float": _finite}
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, **rules)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError("it is nested too deeply, or no UTF-8") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object, so readers may see different values")
    return found


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _whole(text: str) -> int:
    return int(text) if len(text) <= 40 else _refuse("an integer of more than 40 digits")


def _finite(text: str) -> float:
    value = float(text)
    return value if len(text) <= 40 and math.isfinite(value) else _refuse("an infinite or overlong number")


def object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; Violated where it holds anything else."""
    try:
        value = parsed(read_file(path))
    except ValueError as error:
        raise Violated(f"{path.name} is no JSON: {shown(error)}") from error
    if not isinstance(value, dict):
        raise Violated(f"{path.name} holds no JSON object")
    return value


def shown(value: object) -> str:
    """Text from a file on one line of printable characters, cut to a length that can be read."""
    try:
        text = printable(str(value)[:300])
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:160]}..."


def printable(text: str) -> str:
    """The text on one line; no name of a file can add a line of its own to what is printed."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise Violated(sentence)


def whole(record: dict[str, Any], name: str, least: int, most: int = MOST) -> int:
    value: Any = record.get(name)
    if type(value) is not int or not least <= value <= most:
        raise Violated(f"{name} must be an integer from {least} to {most}")
    return value


def number(record: dict[str, Any], name: str, least: float, most: float) -> float:
    value: Any = record.get(name)
    if type(value) not in (int, float) or not least <= value <= most:
        raise Violated(f"{name} must be a number from {least:g} to {most:g}")
    return float(value)


# ---------------------------------------------------------------- The plan, frozen in the first line


@dataclass(frozen=True)
class Plan:
    """What an `open` record plans, checked.

    Attributes:
        rate: q, rounded up.
        accounted: the noise multiplier that the accountant is charged with, sigma / (1 + r); r is 0 where the arithmetic is
            certified to keep every contribution within C.
        reasons: why nothing is claimed; empty where something is.
    """

    fields: dict[str, Any]
    rate: float
    accounted: float
    reasons: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def most_charges(self) -> int:
        return int(self["num_steps"]) + int(self["reserved_attempts"])

    @property
    def shuffled(self) -> bool:
        return bool(self["sampling"] == "shuffle")

    def participations(self, last_step: int, replays: int) -> int:
        """The most releases that one example of shuffled data can be in: epochs, rounded up, and repeats."""
        per_epoch: int = -(-self["num_examples"] // self["expected_batch_size"])
        return -(-last_step // per_epoch) + replays

    def releases(self, count: int) -> Group:
        """`count` charges, as the accountant sees them; shuffled, the first ones are all different steps."""
        if self.shuffled:
            steps = min(count, self["num_steps"])
            return Group(1.0, self.accounted, self["num_examples"], None, self.participations(steps, count - steps))
        return Group(self.rate, self.accounted, self["num_examples"], self["cap"], count)

    def noise_tail(self) -> float:
        """What the bounded support of the noise costs in delta: Box-Muller from 63 bits ends at sqrt(128 ln 2) sigma.

        One coordinate moved by a / sigma passes the edge e with probability at most Q(e - a / sigma) - Q(e); over the at most
        2^36 coordinates of an example of norm 1 that is at most 2^18 g'(0) + g(1), in each step that the example is in.
        """
        if self.reasons or self.fields.get("arithmetic") == "certified":  # whose noise is exact, without an edge
            return 0.0
        edge, one = math.sqrt(128 * math.log(2)), self.releases(self.most_charges)
        inclusions, shift = one.rate * one.count, 1 / self.accounted
        if edge - shift <= 1:
            return min(1.0, inclusions)
        density = math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi)
        return inclusions * (density * shift * 2**18 + math.erfc((edge - shift) / math.sqrt(2)) / 2)


def read_plan(fields: Any, head: bool) -> Plan:
    """Checks every field of a plan that something here depends on, and that the derived ones follow from the others."""
    require(isinstance(fields, dict), "the frozen plan is no object")
    n = whole(fields, "num_examples", 1)
    batch = whole(fields, "expected_batch_size", 1, n)
    steps, reserve = whole(fields, "num_steps", 1), whole(fields, "reserved_attempts", 0)
    sigma, slack = number(fields, "noise_multiplier", 0, 1e4), number(fields, "sensitivity_slack", 0, 1e-3)
    number(fields, "target_delta", 1e-300, 1 - 1e-9)
    number(fields, "max_grad_norm", 1e-12, 1e12)
    for name in ("enabled", "shuffle_as_gaussian", "formal_guarantee"):
        require(type(fields.get(name)) is bool, f"{name} must be true or false")
    require(fields.get("sampling") in ("poisson", "shuffle"), "sampling must be poisson or shuffle")
    require(fields.get("adjacency") == "zero_out", "adjacency must be zero_out")
    require(fields.get("noise_source") in ("system", "aes_ctr"), "noise_source must be system or aes_ctr")
    certified = fields.get("arithmetic") == "certified"
    require(not certified or slack == 0, "certified arithmetic rounds nothing up, so sensitivity_slack must be 0")
    if fields.get("target_epsilon") is not None:
        number(fields, "target_epsilon", 1e-12, 1e12)
    cap = None if fields.get("cap") is None else whole(fields, "cap", 1)
    threshold = batch * 2**64 // n
    require(
        fields.get("sampling_threshold") == str(threshold), f"sampling_threshold is not floor(B 2^64 / n) = {threshold}"
    )
    exact = Fraction(threshold, 2**64)
    rate = float(exact) if Fraction(float(exact)) >= exact else math.nextafter(float(exact), 1.0)
    require(fields.get("sample_rate") == rate, f"sample_rate is not {rate!r}, which is B / n rounded up")
    usual = None if fields["sampling"] == "shuffle" else min(n, math.ceil(batch + 8 * math.sqrt(batch)))
    require(head or not fields["enabled"] or cap is None or cap <= n, f"cap {cap} is above the number of examples")
    adaptive = fields.get("adaptive_clipping")
    if adaptive is not None:
        require(isinstance(adaptive, dict), "adaptive_clipping must be an object")
        number(adaptive, "target_unclipped_quantile", 0, 1)
        number(adaptive, "clipbound_learning_rate", 1e-300, 1e300)
        count_std = number(adaptive, "unclipped_num_std", 1e-300, 1e300)
        require(2 * count_std > sigma, "unclipped_num_std leaves no noise to the gradient")
    informal = fields.get("informal_reasons")
    require(isinstance(informal, list) and all(isinstance(why, str) for why in informal), "informal_reasons are words")
    reasons = [] if fields["enabled"] else ["privacy is disabled"]
    reasons += ["the noise multiplier is 0"] if fields["enabled"] and sigma == 0 else []
    if fields["sampling"] == "shuffle" and not fields["shuffle_as_gaussian"]:
        reasons.append("shuffled data are not accounted for")
    reasons += informal or []
    require(fields["formal_guarantee"] == (not reasons), "formal_guarantee does not follow from the rest of the plan")
    accounted = sigma / (1 + slack)
    plan = Plan({**fields, "cap": cap, "usual_cap": usual}, rate, accounted, tuple(reasons))
    require(
        steps + reserve <= MOST and plan.noise_tail() < fields["target_delta"], "delta is below the tail of the noise"
    )
    return plan


def check_releases(plan: Plan, head: bool, releases: Any) -> float:
    """Every intent states the planned noise for the planned sensitivity; the first sensitivity is C."""
    require(isinstance(releases, list) and 1 <= len(releases) <= 1000, "an intent lists its releases")
    stated = []
    for release in releases:
        require(
            isinstance(release, dict) and set(release) == {"name", "std", "sensitivity"}, "a release has three fields"
        )
        stated.append(
            (release["name"], number(release, "std", 0, 1e300), number(release, "sensitivity", 1e-300, 1e300))
        )
    sigma, bound, adaptive = plan["noise_multiplier"], plan["max_grad_norm"], plan["adaptive_clipping"]
    if head:  # several Gaussian releases of one sample are one, with 1 / sigma^2 = sum of (sensitivity / std)^2
        joint = math.hypot(*(sensitivity / std if std else math.inf for _, std, sensitivity in stated))
        require(
            math.isclose(1 / joint if joint else math.inf, sigma, rel_tol=1e-9),
            f"the noise is not the planned {sigma:g}",
        )
        return float(stated[0][2])
    planned = [("gradient", sigma * bound, bound)]
    if (
        adaptive is not None
    ):  # C moves within a factor of 10^4; a noised count of unclipped examples shares sigma with the sum
        bound = stated[0][2]
        first, count_std = plan["max_grad_norm"], adaptive["unclipped_num_std"]
        require(first / 1e4 <= bound <= first * 1e4, f"C = {bound:g} is outside of its range")
        alone = sigma / math.sqrt(1 - (sigma / (2 * count_std)) ** 2)
        planned = [("gradient", alone * bound, bound), ("unclipped_count", count_std, 0.5)]
    require([name for name, _, _ in stated] == [name for name, _, _ in planned], "other releases than the plan has")
    for (name, *theirs), (_, *ours) in zip(stated, planned, strict=True):
        agree = all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(theirs, ours, strict=True))
        require(
            agree,
            f"{name} states std, sensitivity = {theirs[0]:g}, {theirs[1]:g}; the plan has {ours[0]:g}, {ours[1]:g}",
        )
    return float(bound)


# ---------------------------------------------------------------- The ledger, line by line


@dataclass
class Ledger:
    """What the lines of a ledger say; positions are numbers of lines from 0.

    Attributes:
        charges: the line of every charged attempt, done or not, and of torn lines that may have been one.
        intents, done: (line, step).
        checkpoints: (line, step, name, digest of the manifest).
        signed: how many lines the last signature covers.
    """

    name: str
    hashes: list[str] = field(default_factory=list)
    opened: dict[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan({}, 0.0, 0.0, ()))
    nonces: set[str] = field(default_factory=set)
    charges: list[int] = field(default_factory=list)
    intents: list[tuple[int, int]] = field(default_factory=list)
    done: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: list[tuple[int, int, str, str]] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    closed: str | None = None
    signatures: int = 0
    signed: int = 0
    mirrored: bool = False
    other_times: int = 0
    num_torn: int = 0
    unterminated: bool = False

    @property
    def head(self) -> bool:
        """A private linear head: one release of noised statistics instead of steps."""
        return "head" in self.opened

    @property
    def fingerprint(self) -> str | None:
        signer = self.opened.get("signer")
        return None if signer is None else hashlib.sha256(bytes.fromhex(signer)).hexdigest()

    def charged(self, num_lines: int | None = None) -> int:
        """The charges of the first lines, or of all."""
        return len(self.charges) if num_lines is None else bisect_right(self.charges, num_lines - 1)

    def last_done(self, num_lines: int | None = None) -> int:
        return max((step for line, step in self.done if num_lines is None or line < num_lines), default=0)

    def groups(self, num_lines: int | None = None) -> list[Group]:
        """Everything that the first lines charge, or all, for the accountant."""
        charged = self.charged(num_lines)
        if not charged or not self.plan.shuffled:
            return [self.plan.releases(charged)]
        steps = {step for line, step in self.intents if num_lines is None or line < num_lines}
        group = self.plan.releases(charged)
        count = self.plan.participations(max(steps, default=0), charged - len(steps))
        return [Group(group.rate, group.sigma, group.num_examples, None, count)]


def read_ledger(path: Path) -> Ledger:
    """Reads a ledger once, from top to bottom; Violated names the first line that is wrong."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    ledger, key = Ledger(path.name), None
    active = False  # a session may write steps
    pending: tuple[int, int] | None = None  # the intent whose `done` has not come
    position: int | None = None  # the last step that this session finished
    attempts: Counter[int] = Counter()
    furthest = 0
    ended = False  # nothing can follow `close` and its signature
    torn_run: list[bool] = []  # of the torn lines that wait for their `repair`: whether each was charged

    def take_torn() -> None:
        """An attempt may have been under way wherever one could stand; then the torn line is charged as one."""
        require(bool(ledger.hashes) and not ended, "a torn line where no line can be written")
        plan = ledger.plan
        room = not plan["formal_guarantee"] or ledger.charged() < plan.most_charges
        may_be = active and pending is None and not torn_run and (position or 0) < plan["num_steps"] and room
        if may_be:
            ledger.charges.append(len(ledger.hashes))
        torn_run.append(may_be)
        ledger.num_torn += 1

    try:
        for raw in lines_of(path):
            seq, line = len(ledger.hashes), raw.removesuffix(b"\n")
            if raw == line:  # a crash, or a write that is under way: the next start of the program marks it as torn
                take_torn()
                ledger.unterminated = True
                break
            previous = ledger.hashes[-1] if ledger.hashes else "0" * 64
            if line.endswith(TORN) or b"\0" in line:
                take_torn()
                ledger.hashes.append(hashlib.sha256(line).hexdigest())
                continue
            try:
                record = parsed(line)
                require(isinstance(record, dict) and list(record)[:4] == list(HEADER), "it is no ledger record")
                body = json.loads(
                    json.dumps({name: record[name] for name in record.keys() - set(HEADER)}, sort_keys=True)
                )
                header = {name: record[name] for name in HEADER}
                canonical = json.dumps({**header, **body}, separators=(",", ":"), ensure_ascii=True).encode()
            except (ValueError, RecursionError) as error:
                raise Violated(f"it is no ledger record: {shown(error)}") from error
            require(canonical == line, "it is not in canonical form")
            kind, time = record["type"], record["time_utc"]
            require(
                type(record["seq"]) is int and record["seq"] == seq, f"its number is {shown(record['seq'])}, not {seq}"
            )
            require(
                record["previous"] == previous, "the chain of hashes is broken: it does not continue the line before"
            )
            require(isinstance(kind, str) and isinstance(time, str), "type and time are words")
            require((kind == "open") == (seq == 0), "the first record, and no other, is `open`")
            require(not ledger.closed or kind in ("signature", "repair"), "a record after `close`")
            require(not ended, "a record after the end")
            require((kind == "repair") == bool(torn_run), "a `repair` follows torn lines, and nothing else does")
            ledger.other_times += seq > 0 and time != ledger.opened["time_utc"]
            if kind == "open":
                require(record.get("format") == 1, "the ledger's format is not 1")
                require(is_hex(record.get("key_commitment"), 64), "`open` needs the commitment of the sampling key")
                signer = record.get("signer")
                require(signer is None or is_hex(signer, 64), "signer must be an Ed25519 public key in hex")
                ledger.opened, ledger.plan = record, read_plan(record.get("plan"), "head" in record)
                key = None if signer is None else Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
            elif kind == "session":
                nonce = record.get("nonce")
                require(is_hex(nonce, 32), "a session has a nonce of 16 bytes in hex")
                require(nonce not in ledger.nonces, "the session nonce was used before: coins would repeat")
                require(type(record.get("mirror")) is bool, "a session says whether the ledger is mirrored")
                ledger.nonces.add(str(nonce))
                ledger.mirrored = ledger.mirrored or record["mirror"]
                ledger.sessions.append(record)
                active, pending, position = True, None, None
            elif kind == "intent":
                step, attempt = whole(record, "step", 1, ledger.plan["num_steps"]), whole(record, "attempt", 0)
                require(active, "an intent outside of a session")
                if pending is not None:
                    require(step == pending[0], f"step {step} begins while step {pending[0]} is not done")
                elif position is not None:
                    require(step == position + 1, f"step {step} does not follow step {position}")
                else:
                    require(step <= furthest + 1, f"step {step} skips step {furthest + 1}")
                require(attempt == attempts[step], f"attempt {attempt} of step {step}, where {attempts[step]} is next")
                bound = check_releases(ledger.plan, ledger.head, record.get("releases"))
                adapted = ledger.plan["adaptive_clipping"] is not None and not ledger.head
                require(
                    not (adapted and step == 1) or bound == ledger.plan["max_grad_norm"],
                    "C does not start at the plan's",
                )
                attempts[step] += 1
                pending = (step, attempt)
                ledger.charges.append(seq)
                ledger.intents.append((seq, step))
            elif kind == "done":
                finished = (whole(record, "step", 1), whole(record, "attempt", 0))
                require(finished == pending, "`done` without its intent just before")
                position, pending, furthest = finished[0], None, max(furthest, finished[0])
                ledger.done.append((seq, finished[0]))
            elif kind == "checkpoint":
                require(active, "a checkpoint outside of a session")
                step, digest, name = whole(record, "step", 0), record.get("digest"), record.get("path")
                require(step <= furthest, f"a checkpoint of step {step}, which is not done")
                require(
                    is_hex(digest, 64) and isinstance(name, str), "a checkpoint has a name and a SHA-256 digest in hex"
                )
                ledger.checkpoints.append((seq, step, str(name), str(digest)))
            elif kind == "signature":
                require(key is not None, "a signature, and no key in the first line")
                require(is_hex(record.get("signature"), 128), "a signature has 64 bytes in hex")
                try:
                    assert key is not None
                    key.verify(bytes.fromhex(record["signature"]), SIGNED + previous.encode())
                except InvalidSignature as error:
                    raise Violated(
                        "the signature is not that of the line before by the key in the first line"
                    ) from error
                ledger.signatures += 1
                ledger.signed = seq + 1
                ended = ledger.closed is not None
            elif kind == "repair":
                stated = (whole(record, "torn_lines", 1), whole(record, "charged", 0))
                require(stated == (len(torn_run), sum(torn_run)), "the repair does not match the torn lines before it")
                torn_run, active, pending, position = [], False, None, None
            elif kind == "close":
                require(record.get("reason") in ("finished", "budget_spent", "stopped"), "`close` needs a known reason")
                require(
                    whole(record, "num_charged", 0) == ledger.charged(),
                    f"`close` states other charges than {ledger.charged()}",
                )
                ledger.closed, active, ended = record["reason"], False, key is None
            else:
                raise Violated(f"unknown record type {shown(kind)}")
            ledger.hashes.append(hashlib.sha256(line).hexdigest())
        require(bool(ledger.hashes), "no whole record")
    except Violated as error:
        raise Violated(f"{path.name}: line {len(ledger.hashes) + 1}: {error}") from error
    return ledger


# ---------------------------------------------------------------- Epsilon


@dataclass(frozen=True)
class Group:
    """`count` releases of a Poisson-subsampled Gaussian; batches above `cap` are cut down uniformly."""

    rate: float
    sigma: float
    num_examples: int
    cap: int | None
    count: int


def epsilon(groups: list[Group], delta: float) -> float:
    """An upper bound of epsilon at `delta` of all groups together, as the project's report computes it.

    Without sampling all releases are one Gaussian, whose epsilon is exact. Below delta 1e-12 the bound is by Renyi DP, with the
    probability of any batch above its cap charged in delta. Else it is by privacy loss distributions, on a grid of 1e-4, or a
    coarser one where epsilon is above 50. Above 1000 nothing is computed.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting import dp_event as event
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
    from dp_accounting.rdp import RdpAccountant

    zero_out = NeighboringRelation.REPLACE_SPECIAL
    groups = [group for group in groups if group.count and group.rate]
    if not groups:
        return 0.0
    if any(group.sigma == 0 for group in groups) or delta <= 0:
        return math.inf
    if all(group.rate == 1 and group.cap is None for group in groups):
        mu = math.sqrt(math.fsum(group.count / group.sigma**2 for group in groups))
        if mu * mu > 1e6:
            raise Undecided("epsilon is so large that none is computed: it protects nobody")
        gaussian = GaussianPrivacyLoss(1 / mu)
        return smallest(lambda value: float(gaussian.get_delta_for_epsilon(value)) <= delta, 1e6)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Renyi orders that are left out keep the bound sound

    def renyi(left: float) -> float:
        accountant = RdpAccountant(neighboring_relation=zero_out)
        for group in groups:
            accountant.compose(event.PoissonSampledDpEvent(group.rate, event.GaussianDpEvent(group.sigma)), group.count)
        return float(accountant.get_epsilon(left))

    upper = renyi(delta)
    if upper > 1000:
        raise Undecided("epsilon is so large that none is computed: it protects nobody")
    if delta < 1e-12:
        from scipy.stats import binom  # comes with dp-accounting

        capped = [group for group in groups if group.cap is not None]
        tau = math.fsum(group.count * float(binom.sf(group.cap, group.num_examples, group.rate)) for group in capped)
        value = upper
        while (
            tau > 0
        ):  # the capped run is (value, delta)-DP if the uncapped one is (value, delta - tau (1 + e^value))-DP
            candidate = value * (1 + 1e-6)
            left = delta - tau * (1 + math.exp(min(candidate, 700.0)))
            following = renyi(left) if left > 0 else math.inf
            if following <= candidate or following == math.inf:
                return candidate if following <= candidate else math.inf
            value = following
        return value
    grid = 1e-4 if upper <= 50 else 1e-4 * 10 ** math.ceil(math.log10(upper / 50))
    value = composed(tuple(groups), grid, delta)
    return value if grid == 1e-4 or value > 50 else composed(tuple(groups), 1e-4, delta)


def smallest(holds: Callable[[float], bool], largest: float) -> float:
    """The smallest number from 0 to `largest` for which a monotone condition holds, from above, to 15 digits."""
    low, high = 0.0, largest
    if holds(low):
        return low
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def composed(groups: tuple[Group, ...], grid: float, delta: float) -> float:
    """Epsilon by the composition of the privacy loss distributions of all groups (Koskela et al. 2020)."""
    whole_loss: Any = None
    for group in groups:
        part = one_release(group.rate, group.sigma, group.num_examples, group.cap, grid).self_compose(group.count)
        whole_loss = part if whole_loss is None else whole_loss.compose(part)
    return float(whole_loss.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=8)
def one_release(rate: float, sigma: float, num_examples: int, cap: int | None, grid: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    zero_out = NeighboringRelation.REPLACE_SPECIAL
    if cap is None:
        return pld.from_gaussian_mechanism(
            sigma, value_discretization_interval=grid, sampling_prob=rate, neighboring_relation=zero_out
        )
    return pld.from_truncated_subsampled_gaussian_mechanism(
        num_examples, rate, cap, sigma, value_discretization_interval=grid, neighboring_relation=zero_out
    )


# ---------------------------------------------------------------- The checks, each of which ends in one sentence


@dataclass
class Folder:
    """A published folder under examination: what is read once, and what the checks find out."""

    path: Path
    ledger: Ledger
    fingerprint: str | None
    config: dict[str, Any] | None = None
    chain: list[Ledger] = field(default_factory=list)
    chain_is_whole: bool = False
    own_epsilon: float | None = None
    epsilon: float | None = None
    delta: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        """Whether there is anything of this name; a link in place of a folder is bad input."""
        path = self.path
        for name in names[:-1]:
            path = path / name
            if not path.exists() and not path.is_symlink():
                return False
            if not is_folder(path):
                raise BadInput(f"{shown(path)}: is no folder")
        return (path / names[-1]).exists() or (path / names[-1]).is_symlink()

    def within(self, what: str, compute: Callable[[], float]) -> float:
        """A number that takes memory; a folder that asks for too much is not judged."""
        try:
            return compute()
        except (MemoryError, OverflowError, ValueError, ArithmeticError) as error:
            raise Undecided(f"{what} cannot be computed here: {type(error).__name__}: {shown(error)}") from error


def check_signature(folder: Folder) -> str:
    ledger, told = folder.ledger, folder.fingerprint
    if told is not None:
        require(
            ledger.fingerprint == told,
            f"the ledger's key is {ledger.fingerprint or 'missing'}, and not the {told} you were told",
        )
    if ledger.fingerprint is None:
        raise Undecided(
            "the ledger names no key and nothing in it is signed: whoever has the file can have written it anew"
        )
    after = len(ledger.hashes) - ledger.signed
    if ledger.signatures == 0 or (ledger.closed and after):
        raise Undecided(f"{after} lines at the end are not signed: the run ended there, or the last line was cut off")
    who = (
        "which is the one you were told"
        if told
        else "which anybody can make: it attests nothing about who signed (--fingerprint)"
    )
    rest = f"; the last {after} lines are not signed yet" if after else ""
    return f"{ledger.signatures} signatures over {ledger.signed} lines by key {ledger.fingerprint}, {who}{rest}"


def check_order(folder: Folder) -> str:
    ledger = folder.ledger
    if ledger.other_times:
        raise Undecided(f"{ledger.other_times} records state another time than the first, as no trainer writes them")
    state = f"closed ({ledger.closed})" if ledger.closed else f"{OPEN}: the run may go on, or its end was cut off"
    return (
        f"{len(ledger.hashes)} lines, {len(ledger.sessions)} starts, {len(ledger.intents)} attempts, {len(ledger.done)} done, "
        f"{ledger.num_torn} torn lines; {state}"
    )


def check_plan(folder: Folder) -> str:
    """config.toml asks for this very plan; what it leaves open has its default."""
    ledger, plan = folder.ledger, folder.ledger.plan
    if ledger.head:
        return f"all {len(ledger.intents)} intents state the planned noise; a private head has no config.toml"
    if folder.config is None:
        raise Undecided("config.toml is missing: only the ledger itself says what was asked for")
    tables = {name: folder.config.get(name, {}) for name in ("privacy", "train", "data")}
    require(
        all(isinstance(table, dict) for table in tables.values()), "config.toml: privacy, train and data are tables"
    )
    asked, planned = tables["privacy"], {**plan.fields, **(plan["adaptive_clipping"] or {})}
    require(
        asked.get("enabled", True) == plan["enabled"],
        f"config.toml has privacy.enabled = {shown(asked.get('enabled'))}",
    )
    steps = tables["train"].get("num_steps", plan["num_steps"])
    require(
        steps == plan["num_steps"], f"config.toml has train.num_steps = {shown(steps)}, the plan {plan['num_steps']}"
    )
    if not plan["enabled"]:
        return "config.toml asks for a run without privacy, as the plan is"
    if plan["adaptive_clipping"] is not None:
        planned["clipping_function"] = "adaptive"
    n, batch = plan["num_examples"], plan["expected_batch_size"]
    defaults = {
        "reserved_attempts": max(2, -(-plan["num_steps"] // 100)),
        "target_delta": 1 / (2 * n),
        "sampling": "poisson",
    }
    wanted = {**defaults, **{name: value for name, value in asked.items() if name in planned}}
    wanted |= {"num_examples": tables["data"].get("num_examples", n), "cap": plan["usual_cap"]}
    for name, value in wanted.items():
        require(
            planned[name] == value,
            f"config.toml asks for {name} = {shown(value)}, and the plan has {shown(planned[name])}",
        )
    require(
        bool(asked.get("simulation", False)) <= bool(plan.reasons), "config.toml has a simulation, the plan a guarantee"
    )
    target, sigma = plan["target_epsilon"], plan["noise_multiplier"]
    require(("target_epsilon" in asked) == (target is not None), "one of config.toml and plan has a target_epsilon")
    if target is None:
        require("noise_multiplier" in asked, "config.toml states neither noise nor epsilon")
    elif not plan.reasons:
        delta, most = plan["target_delta"] - plan.noise_tail(), plan.releases(plan.most_charges)
        reached = folder.within("epsilon of the plan", lambda: epsilon([most], delta))
        require(
            reached <= target * 1.001,
            f"the plan spends epsilon {reached:.6g}, and config.toml asks for at most {target:g}",
        )
        less = Group(most.rate, 0.95 * most.sigma, n, None, most.count)
        enough = sigma > 0.3 and folder.within("epsilon of less noise", lambda: epsilon([less], delta)) <= target
        require(not enough, f"the plan states noise of {sigma:g}, more than epsilon {target:g} of config.toml takes")
    return (
        f"q = {plan.rate:.6g} ({batch} of {n}), sigma = {sigma:.6g}, C = {plan['max_grad_norm']:g}, as config.toml asks"
    )


def check_budget(folder: Folder) -> str:
    charged, most = folder.ledger.charged(), folder.ledger.plan.most_charges
    require(
        bool(folder.ledger.plan.reasons) or charged <= most, f"{charged} attempts are charged where {most} are allowed"
    )
    return f"{charged} attempts are charged; planned steps and reserve allow {most}"


def check_behind(folder: Folder) -> str:
    """The ledgers of private runs behind the initial weights are here, whole, and each names those behind itself."""
    listed = folder.ledger.opened.get("behind", [])
    require(isinstance(listed, list) and len(listed) <= 100, "`behind` lists ledgers")
    places = []
    for place in listed:
        require(
            isinstance(place, dict) and is_hex(place.get("hash"), 64), "`behind` names ledgers by file, lines and hash"
        )
        require(
            re.fullmatch(r"behind/ledger-[0-9]{1,3}\.jsonl", str(place.get("file"))) is not None,
            "`behind` names no ledger",
        )
        places.append((place.get("lines"), place["hash"]))
        if not folder.has(*place["file"].split("/")):
            raise Undecided(f"{place['file']} is missing: what the initial weights had spent cannot be recomputed")
        ledger = read_ledger(folder.path / place["file"])
        require(
            (len(ledger.hashes), ledger.hashes[-1]) == places[-1],
            f"{place['file']} is not the one that the ledger names",
        )
        require(not ledger.plan.reasons, f"{place['file']} is of a run without a guarantee")
        folder.chain.append(ledger)
    for position, ledger in enumerate(folder.chain):
        named = [
            (place.get("lines"), place.get("hash"))
            for place in ledger.opened.get("behind", [])
            if isinstance(place, dict)
        ]
        require(
            named == places[position + 1 :], f"{listed[position]['file']} names other ledgers behind it than there are"
        )
    folder.chain_is_whole = True
    if not listed:
        return "the ledger names no private run whose weights the run started from"
    return f"the run started from weights that {len(listed)} private runs had made; their ledgers are here and whole"


def alternatives(chain: list[Ledger]) -> list[list[Ledger]]:
    """Which runs of a chain, the newest first, one example can be in: all, but for those whose data are declared disjoint."""
    own, *before = chain
    if not before:
        return [[own]]
    if own.opened.get("disjoint_from_start") is True:
        return [[own], *alternatives(before)]
    return [[own, *runs] for runs in alternatives(before)]


def epsilon_of(folder: Folder, num_lines: int | None, delta: float, chain: list[Ledger] | None = None) -> float:
    """Epsilon of the ledger's first lines, or of all, with what `chain` spent before; the worst that any example bears."""
    values = []
    for runs in alternatives([folder.ledger, *(chain or [])]):
        groups = [group for run in runs for group in run.groups(num_lines if run is folder.ledger else None)]
        left = delta - math.fsum(run.plan.noise_tail() for run in runs)
        values.append(folder.within("epsilon", functools.partial(epsilon, groups, left)))
    return max(values)


def check_epsilon(folder: Folder) -> str:
    plan = folder.ledger.plan
    folder.delta = plan["target_delta"]
    if plan.reasons:
        return f"nothing is claimed: {shown('; '.join(plan.reasons))}"
    folder.own_epsilon = epsilon_of(folder, None, plan["target_delta"])
    if not folder.chain_is_whole:
        raise Undecided(
            f"this run alone spent epsilon {folder.own_epsilon:.6f}; what its initial weights had spent is unknown"
        )
    folder.epsilon = folder.own_epsilon
    charged = folder.ledger.charged()
    sentence = f"epsilon {folder.own_epsilon:.6f} at delta {plan['target_delta']:g} for {charged} charged attempts"
    if folder.chain:
        folder.delta = min(plan["target_delta"], *(ledger.plan["target_delta"] for ledger in folder.chain))
        folder.epsilon = epsilon_of(folder, None, folder.delta, folder.chain)
        sentence += f"; with what the initial weights had spent, epsilon {folder.epsilon:.6f} at delta {folder.delta:g}"
    return sentence


def check_card(folder: Folder) -> str:
    """Every number that the card and a head's statement share with the ledger; a card may be older than the ledger."""
    ledger, plan, compared = folder.ledger, folder.ledger.plan, 0
    if folder.has("head.json"):
        head = object_in(folder.path / "head.json")
        require(head.get("delta") == plan["target_delta"], "head.json states another delta")
        same_number("head.json: epsilon", head.get("epsilon"), folder.own_epsilon, None)
        compared += 2
    if not folder.has("report", "privacy_card.json"):
        return f"there is no privacy card, and {compared} numbers of head.json were compared"
    if not plan.reasons and folder.epsilon is None:
        raise Undecided("its first number was not computed")
    card = object_in(folder.path / "report" / "privacy_card.json")

    def stated(place: str) -> Any:
        value: Any = card
        for name in place.split("."):
            require(isinstance(value, dict) and name in value, f"the card lacks {place}")
            value = value[name]
        return value

    last, lines = stated("provenance.ledger.last_line_sha256"), stated("provenance.ledger.lines")
    require(last in ledger.hashes, "the card is of a line that the ledger lacks: ledger or card were replaced")
    require(lines in (ledger.hashes.index(last) + 1, ledger.hashes.index(last) + 2), "the card counts other lines")
    versions = (stated("accounting.accountant"), accountant())
    other_version = (
        None
        if versions[0] == versions[1]
        else f"the card was computed with {shown(versions[0])}, this with {versions[1]}"
    )
    charged, own_delta, tail = ledger.charged(lines), plan["target_delta"], plan.noise_tail()
    numbers: dict[str, Any] = {
        "formal_guarantee": not plan.reasons, "delta": folder.delta, "attempts_charged": charged,
        "steps_planned": plan["num_steps"], "unit_of_privacy.num_examples": plan["num_examples"],
        "mechanism.noise_multiplier": plan["noise_multiplier"], "mechanism.sensitivity_slack": plan["sensitivity_slack"],
        "mechanism.noise_multiplier_accounted": plan.accounted, "mechanism.expected_batch_size": plan["expected_batch_size"],
        "sampling.sample_rate": plan.rate, "sampling.expected_batch_size": plan["expected_batch_size"],
        "sampling.cap": plan["cap"], "sampling.key_commitment_sha256": ledger.opened["key_commitment"],
        "accounting.delta": own_delta, "accounting.delta_times_n": own_delta * plan["num_examples"],
        "accounting.attempts.charged": charged, "accounting.attempts.allowed": plan.most_charges,
    }  # fmt: skip
    if plan["enabled"]:
        numbers["steps_done"] = ledger.last_done(lines)
    if not ledger.head:
        numbers["mechanism.max_grad_norm"] = plan["max_grad_norm"]
    if plan.reasons:
        numbers |= {"epsilon": None, "accounting.epsilon": None}
    else:
        left, current = own_delta - tail, charged == ledger.charged()
        numbers["accounting.noise_tail_delta"] = tail
        numbers["accounting.epsilon"] = folder.own_epsilon if current else epsilon_of(folder, lines, own_delta)
        numbers["epsilon"] = folder.epsilon if current else epsilon_of(folder, lines, folder.delta, folder.chain)
        for name, count in (("planned", plan["num_steps"]), ("with_reserve", plan.most_charges)):
            planned = [plan.releases(count)]
            numbers[f"accounting.epsilon_{name}"] = folder.within("epsilon", functools.partial(epsilon, planned, left))
    if folder.chain and not plan.reasons:
        numbers |= {"composition.epsilon": numbers["epsilon"], "composition.delta": folder.delta}
    else:
        require(card.get("composition") is None, "the card composes runs that the ledger does not name")
    for place, value in numbers.items():
        same_number(f"the card's {place}", stated(place), value, other_version)
    require(
        stated("provenance.closed") == (ledger.closed if lines >= len(ledger.hashes) - 1 else None),
        "the card's state of the run",
    )
    if charged != ledger.charged():
        raise Undecided(
            f"the card is of the first {lines} lines; {ledger.charged() - charged} attempts were charged since"
        )
    return f"{len(numbers) + compared} numbers agree with the ledger"


def same_number(what: str, claimed: Any, computed: Any, other_version: str | None) -> None:
    """Equal to TOLERANCE, absolute or relative; Undecided where another version of the accountant explains a small difference."""
    if type(claimed) not in (int, float) or type(computed) not in (int, float):
        infinite = computed == math.inf and claimed is None
        require(
            infinite or (type(claimed) is type(computed) and claimed == computed),
            f"{what} is {shown(claimed)}, not {shown(computed)}",
        )
        return
    if math.isclose(claimed, computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE if abs(computed) > 0.01 else 0.0):
        return
    if other_version is not None and math.isclose(claimed, computed, rel_tol=1e-3):
        raise Undecided(f"{what} is {claimed:.8g}, and {computed:.8g} here: {other_version}")
    raise Violated(f"{what} is {claimed:.8g}, and the ledger gives {computed:.8g}")


def accountant() -> str:
    from importlib.metadata import version

    return f"dp-accounting {version('dp-accounting')}"


def check_checkpoints(folder: Folder) -> str:
    """Manifests against the ledger, and files against manifests; checkpoints that were removed are nobody's loss."""
    ledger, plan = folder.ledger, folder.ledger.plan
    if not folder.has("checkpoints"):
        return "there is no checkpoint here"
    if not is_folder(folder.path / "checkpoints"):
        raise BadInput("checkpoints: is no folder")
    names = sorted(entry.name for entry in os.scandir(folder.path / "checkpoints") if entry.name.startswith("step-"))
    require(len(names) <= 10_000, "checkpoints/ holds more than 10,000 checkpoints")
    recorded = {(step, digest) for _, step, _, digest in ledger.checkpoints}
    unknown, hashed, starts = [], 0, []
    for name in names:
        place = folder.path / "checkpoints" / name
        if not is_folder(place):
            raise BadInput(f"{shown(place)}: is no folder")
        if not folder.has("checkpoints", name, "manifest.json"):
            raise Violated(f"{shown(name)} has no manifest.json")
        digest = hashlib.sha256(read_file(place / "manifest.json")).hexdigest()
        manifest = object_in(place / "manifest.json")
        step, position = whole(manifest, "step", 0), manifest.get("ledger")
        require(name == f"step-{step:08d}", f"{name} is of step {step}")
        require(isinstance(position, dict), f"{name} remembers no line of the ledger")
        assert isinstance(position, dict)
        line = whole(position, "seq", 0)
        known = line < len(ledger.hashes) and ledger.hashes[line] == position.get("hash")
        require(known, f"{name} remembers another line {line + 1}: the ledger was cut or replaced")
        require(
            manifest.get("formal_guarantee") == (not plan.reasons), f"{name} says something else about the guarantee"
        )
        charged = manifest.get("charged_attempts", ledger.charged(line + 1))
        require(
            charged == ledger.charged(line + 1),
            f"{name} states {shown(charged)} charges, the ledger {ledger.charged(line + 1)}",
        )
        if plan["enabled"]:
            require(
                step <= ledger.last_done(),
                f"{name} is of step {step}, and the ledger's last step is {ledger.last_done()}",
            )
            steps = {known_step for known_step, _ in recorded}
            require(
                (step, digest) in recorded or step not in steps,
                f"{name}: manifest.json is not the one that the ledger recorded",
            )
            unknown += [] if (step, digest) in recorded else [name]
        files = manifest.get("files", {})
        require(isinstance(files, dict) and len(files) <= 100_000, f"{name} lists its files")
        unlisted = {entry.name for entry in os.scandir(place)} - {"manifest.json", *files}
        require(
            not unlisted, f"{name} holds {', '.join(map(shown, sorted(unlisted)))}, which its manifest does not list"
        )
        for file, stated in files.items():
            require(
                re.fullmatch(r"[A-Za-z0-9._-]{1,200}", file) is not None and file not in (".", ".."),
                f"{name} lists no file names",
            )
            if not folder.has("checkpoints", name, file):
                raise Undecided(f"{name}: {file} is missing")
            with os.fdopen(open_plain(place / file, 1 << 50), "rb") as opened:
                require(
                    hashlib.file_digest(opened, "sha256").hexdigest() == stated,
                    f"{name}: {file} has another hash than its manifest says",
                )
            hashed += 1
        starts.append(manifest.get("initialisation"))
        data = manifest.get("training_data")
        folder.facts["training_data"] = shown(data.get("provenance")) if isinstance(data, dict) else None
    for start in starts:  # weights of a run with a guarantee bring its charges along, which `behind` must hold
        spent = 0
        while isinstance(start, dict) and spent <= 100:
            spent += bool(start.get("guarantee"))
            start = start.get("before_that")
        require(
            bool(plan.reasons) or spent <= len(folder.ledger.opened.get("behind", ())),
            "the weights started from private runs that the ledger does not name",
        )
    if unknown:
        raise Undecided(f"{', '.join(unknown[:3])}: the ledger has no record of it, as after a crash between the two")
    return f"{len(names)} manifests are those that the ledger recorded, and {hashed} files have their hashes"


def check_metrics(folder: Folder) -> str:
    ledger, plan, torn, lines = folder.ledger, folder.ledger.plan, 0, 0
    if not folder.has("metrics.jsonl"):
        return "there is no metrics.jsonl"
    last: dict[str, Any] = {}
    for lines, line in enumerate(lines_of(folder.path / "metrics.jsonl"), start=1):
        try:
            entry = parsed(line)
        except ValueError:
            torn += 1
            continue
        require(isinstance(entry, dict) and type(entry.get("step")) is int, f"line {lines} has no step")
        step, charged = entry["step"], entry.get("privacy/charged_attempts", 0)
        require(
            not plan["enabled"] or step <= ledger.last_done(),
            f"line {lines} shows step {shown(step)}, which the ledger never finished",
        )
        require(
            type(charged) in (int, float) and 0 <= charged <= ledger.charged(),
            f"line {lines} shows other charges than the ledger",
        )
        if entry.get("privacy/epsilon") is not None:
            require(not plan.reasons, f"line {lines} states an epsilon, and nothing is claimed")
            require("privacy/charged_attempts" in entry, f"line {lines} states an epsilon of no number of charges")
            last = entry
    if last and not plan.shuffled:
        count, claimed = int(last.get("privacy/charged_attempts", 0)), last["privacy/epsilon"]
        delta = plan["target_delta"] - plan.noise_tail()
        true = folder.within("epsilon", lambda: epsilon([plan.releases(count)], delta))
        require(
            type(claimed) in (int, float) and claimed >= true * (1 - 1e-3),
            f"epsilon {shown(claimed)} after {count}, where it is {true:.6g}",
        )
    return f"{lines} lines show nothing that the ledger lacks" + (f"; {torn} of them are torn" if torn else "")


CHECKS = (
    check_signature, check_order, check_plan, check_budget, check_behind, check_epsilon, check_card, check_checkpoints,
    check_metrics,
)  # fmt: skip


# ---------------------------------------------------------------- What follows, and who says what cannot be checked


def declarations(folder: Folder) -> list[tuple[str, str | None, str]]:
    """(what, the words or None where nothing is stated, who says so): nothing here can check them."""
    config, ledger, operator = folder.config or {}, folder.ledger, "whoever ran the training, in config.toml"

    def said(section: str, key: str) -> str | None:
        table = config.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        return None if value in (None, "") else shown(value)

    signer = "the holder of the signing key" if ledger.fingerprint else "whoever wrote the ledger"
    words = [
        ("that the program did what the ledger says", "see audit.py of the project", signer),
        (
            "time of the first start; all records repeat it, since clocks depend on the data",
            shown(ledger.opened["time_utc"]),
            signer,
        ),
        ("commit of the code", shown(ledger.opened["commit"]) if ledger.opened.get("commit") else None, signer),
        ("what one example is", shown(ledger.opened.get("unit", "one example")), signer),
        ("the most examples of one owner", said("privacy", "max_examples_per_owner"), operator),
        ("provenance of the training data", said("data", "provenance") or folder.facts.get("training_data"), operator),
    ]
    for name in ("name", "owner", "purpose", "licence"):
        words.append((f"{name} of the training data", said("data", f"dataset_{name}"), operator))
    words += [
        ("how duplicates were removed", said("data", "deduplication"), operator),
        ("how hyper-parameters were chosen", said("privacy", "tuning"), operator),
        ("that the held-out data are public", said("heldout", "is_public"), operator),
    ]
    if ledger.opened.get("behind"):
        disjoint = "yes, so one example bears one of them" if ledger.opened.get("disjoint_from_start") is True else None
        words.append(("that the data are disjoint from those behind the initial weights", disjoint, operator))
    words.append(
        (
            "privacy_card.md and .html, audits, and what privacy_card.json says next to its claim, plan and schedule",
            "make them again from the ledger with report.py and audit.py of the project",
            "whoever publishes the folder",
        )
    )
    if folder.has("evaluation"):
        words.append(("utility: losses, captions and pictures", "evaluation/", "whoever publishes the folder"))
    return words


def verify(path: Path, fingerprint: str | None) -> tuple[int, dict[str, Any]]:
    """All checks of a folder: the exit code, and what --json prints.

    Raises:
        BadInput: no such folder, or a file in it that cannot be judged.
    """
    if not path.is_dir():
        raise BadInput(f"{shown(path)}: is no folder")
    checks: list[tuple[str, str, str]] = []
    try:
        ledger = read_ledger(path / "ledger.jsonl")
    except Violated as error:
        checks = [("ledger", "violated", str(error))]
        return VIOLATED, {"verdict": "violated", "exit_code": VIOLATED, "checks": [_named(check) for check in checks]}
    folder = Folder(path, ledger, fingerprint)
    if folder.has("config.toml"):
        import tomllib

        try:
            folder.config = tomllib.loads(read_file(path / "config.toml", 1 << 18).decode())
        except (ValueError, RecursionError) as error:
            raise BadInput(f"config.toml is no TOML: {shown(error)}") from error
    checks.append(("chain", "ok", f"{len(ledger.hashes)} lines are canonical and chained by their hashes"))
    for judge in CHECKS:
        name = judge.__name__.removeprefix("check_")
        try:
            checks.append((name, "ok", judge(folder)))
        except Violated as error:
            checks.append((name, "violated", str(error)))
        except Undecided as error:
            checks.append((name, "inconclusive", str(error)))
    outcomes = {outcome for _, outcome, _ in checks}
    verdict = next((word for word in ("violated", "inconclusive") if word in outcomes), "consistent")
    code = {"consistent": CONSISTENT, "inconclusive": INCONCLUSIVE, "violated": VIOLATED}[verdict]
    plan, stated = ledger.plan, declarations(folder)
    attested = {
        "examples": plan["num_examples"], "expected batch": plan["expected_batch_size"], "sample rate": plan.rate,
        "cap": plan["cap"], "sampling": plan["sampling"], "noise multiplier": plan["noise_multiplier"],
        "noise multiplier as accounted": plan.accounted, "clipping bound": plan["max_grad_norm"],
        "planned steps": plan["num_steps"], "last step done": ledger.last_done(), "charged attempts": ledger.charged(),
        "state of the run": ledger.closed or OPEN,
        "commitment of the sampling key": ledger.opened["key_commitment"], "last line": ledger.hashes[-1],
    }  # fmt: skip
    finite = folder.epsilon is not None and math.isfinite(folder.epsilon)
    return code, {
        "verdict": verdict,
        "exit_code": code,
        "formal_guarantee": not plan.reasons,
        "epsilon": folder.epsilon if finite else None,
        "delta": folder.delta or plan["target_delta"],
        "epsilon_of_this_run_alone": folder.own_epsilon if finite else None,
        "fingerprint": ledger.fingerprint,
        "signer_known": fingerprint is not None and ledger.fingerprint == fingerprint,
        "checks": [_named(check) for check in checks],
        "attested": attested,
        "declared": [{"what": what, "words": words, "by": who} for what, words, who in stated if words is not None],
        "not_stated": [what for what, words, _ in stated if words is None],
    }


def _named(check: tuple[str, str, str]) -> dict[str, str]:
    return dict(zip(("name", "outcome", "sentence"), map(printable, check), strict=True))


def to_text(found: dict[str, Any]) -> str:
    """What a reader needs to know, in the order of its importance from the bottom upwards."""
    marks = {"ok": "ok          ", "violated": "VIOLATED    ", "inconclusive": "undecided   "}
    lines = [f"{marks[check['outcome']]}{check['name']}: {check['sentence']}" for check in found["checks"]]
    if "attested" in found:
        by = "chain and signature" if found["fingerprint"] else "chain alone"
        lines += [
            f"attested by the ledger's {by}:",
            *(f"  {name}: {value}" for name, value in found["attested"].items()),
        ]
        lines += ["declared, and checked by nothing:"]
        lines += [f"  {one['what']}: {one['words']} (says {one['by']})" for one in found["declared"]]
        lines += [f"  {what}: NOT STATED" for what in found["not_stated"]]
        if not found["signer_known"]:
            lines.append(
                "without the signer's fingerprint from elsewhere (--fingerprint), a folder that was forged as a whole, with "
                "another key, cannot be told from a true one"
            )
    if found.get("attested", {}).get("state of the run") == OPEN:
        lines.append(
            "the ledger is open: the run may go on, or lines after a signature were cut off; only the hash of its last line, "
            "kept elsewhere, can tell"
        )
    claim = ""
    if found.get("epsilon") is not None:
        claim = f": epsilon {math.ceil(found['epsilon'] * 1e4 - 1e-9) / 1e4:.4f} at delta {found['delta']:g}"
    return "\n".join([*lines, f"verify: {found['verdict']}{claim}"])


class Parser(argparse.ArgumentParser):
    """A bad argument ends in one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(shown(message))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a bad argument is bad input."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--fingerprint", help="SHA-256 of the signer's key in hex, as the start of the run printed it")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Verifies one folder, prints, and returns the exit code; whatever the folder holds, errors are one line."""

    def too_long(*_: object) -> NoReturn:
        raise BadInput(f"it takes more than {MINUTES} minutes to judge this folder")

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = parse_args(arguments)
        fingerprint = None if options.fingerprint is None else options.fingerprint.strip().lower()
        if fingerprint is not None and not is_hex(fingerprint, 64):
            raise BadInput("--fingerprint is 64 hexadecimal digits")
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, too_long)
            signal.alarm(60 * MINUTES)
        code, found = verify(options.folder, fingerprint)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:  # of what the folder holds
        print(
            f"error: a record lacks a field or has one of another type ({type(error).__name__}: {shown(error)})",
            file=sys.stderr,
        )
        return VIOLATED
    except ImportError as error:
        print(f"error: {error}: install numpy, dp-accounting and cryptography", file=sys.stderr)
        return BAD_INPUT
    except (BadInput, OSError, RecursionError, MemoryError) as error:
        print(f"error: {shown(error) or type(error).__name__}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(found, allow_nan=False) if options.json else to_text(found))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
