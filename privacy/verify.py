"""Rechecks a published run folder. It needs this file, numpy and dp-accounting, and nothing of the trainer.

    python -I verify.py [FOLDER] [--head H] [--json]

FOLDER is by default the one that holds this file. A published folder is a run folder without `private/`. The start of a run puts
this file there; if you do not trust the publisher, take it from the project, since it judges the folder that it is in.

files        the folder holds no other code, no link, and no ledger that nothing names; otherwise nothing else is looked at
chain        every line of ledger.jsonl is canonical JSON, repeats the SHA-256 of the line before and has known fields
order        sessions, intents, `done`, checkpoints and repairs follow each other as they must, every intent states the planned
             noise and sensitivity, and no more are charged than planned and reserved; with --head, the ledger has that line
plan         the plan is consistent, and config.toml asks for it
behind       the ledgers of the private runs whose weights the run started from are here and whole, and are those that config.toml
             and manifests name
epsilon      is recomputed from the ledgers alone by privacy loss distributions (zero-out neighbours), the cap of the batches and
             every charged attempt included
card         claim, opening, plan and counts of report/privacy_card.json follow from the ledger, and no other of its fields is
             compared. An epsilon may be larger than the one that is computed here, never smaller
checkpoints  every manifest is the one that the ledger recorded, remembers a line of it where its step was reached, and its files
             have their hashes
metrics      metrics.jsonl and held-out results have no other names than a run publishes, no step, charge, norm or C that the
             ledger lacks, and no smaller epsilon
noise        no norm of a noised sum is too small for the noise that its intent states: that refutes, and never verifies

Claim and mechanism are printed: believe them and not the pages of the card, which nothing here reads, as the last line says. What
a browser shows of a page follows from styles and scripts, too, and no plain check can tell which number that is.
The documentation of the ledger's format is docs/run_folder.md of the project. This is a second implementation of it.
Exit codes: 0 consistent; 5 violated: something contradicts the ledger; 6 inconclusive: nothing does, but something is missing
that a check needs, as config.toml, a ledger in behind/, or a checkpoint's file; 2 bad input. A folder from a stranger may hold
anything: what is too large, too deep, no plain file or of a wrong type ends in one line.
"""

import os
import sys

if __name__ == "__main__":
    # Modules that lie next to this file are part of what is judged, so nothing is imported from there.
    _names = (os.path.abspath(__file__), os.path.realpath(__file__))
    _beside = {os.path.realpath(os.path.dirname(name)) for name in _names}
    sys.path[:] = [
        place for place in sys.path if os.path.realpath(place or os.curdir) not in _beside
    ]

# Hence no `from __future__`, which is a file too and would be looked for first; os is loaded before any script.
import argparse
import functools
import hashlib
import io
import json
import logging
import math
import re
import stat
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

CONSISTENT, BAD_INPUT, VIOLATED, INCONCLUSIVE = 0, 2, 5, 6
LARGEST_LEDGER, LARGEST_LINE, LARGEST_FILE = 1 << 30, 1 << 20, 1 << 26
MOST, MOST_COUNTS = 10**12, 20
USELESS, TORN = "; a delta of 1/n or more protects nobody", b" #torn"
UNREAD = "; no page was read: believe this line"
HAIR, FP32, PUBLISHED = 1e-9, 1e-7, 2.0**-23 + 6e-9
"""How much two machines' rounding of one computation may differ, that to fp32 above, and a number of the metrics from that of the
ledger: half a step of fp32 by rounding, half by its shortest decimal, and the ledger's nine digits."""
LEVEL, RAISED, EXACT_BELOW = 1e-9, 1 + 1e-6, 1000
"""How often true noise is refuted; by what norms are raised for rounding; below how many coordinates quantiles are exact."""
NORM = "optimizer/noised_grad_norm"
HELDOUT = {"loss", "accuracy", "shuffled_loss", "loss_of_average", "blind_loss", "blind_accuracy"}
HELDOUT |= {f"blind_{table}_loss" for table in ("unigram", "bigram", "whole_caption")}
METRICS = {
    NORM,
    "step",
    "attempt",
    "optimizer/lr",
    "privacy/epsilon",
    "privacy/charged_attempts",
}
METRICS |= {f"heldout/{name}" for name in HELDOUT}
NAMES = {
    "metrics.jsonl": METRICS,
    "evaluation/heldout.jsonl": {"step", "attempt", "captions", *HELDOUT},
}
"""All that a run publishes: of noised sums, the ledger, the schedule, and held-out data that somebody declared public."""
FINE, SMALLEST_DELTA, LARGE = 1e-4, 1e-12, 50.0
"""Privacy loss distributions have this grid, are not trusted below this delta, and have a coarser grid above this epsilon."""


class BadInput(Exception):
    """Something that is no run folder, or that cannot be read."""


class Violated(Exception):
    """What a check found wrong."""


class Undecided(Exception):
    """What a check could not find out."""


OF_ODD_FIELDS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What a field raises that is missing or of another type than a check takes it for."""


class Bound(float):
    """An upper bound, of epsilon or of what an attack can reach: a card may state more, and never less."""


def open_plain(path: Path, largest: int) -> int:
    """A descriptor of a plain file that is at most this long; no link, pipe or device is followed or waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{shown(path)}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
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
        while line := file.readline(LARGEST_LINE):
            if len(line) == LARGEST_LINE:
                raise BadInput(f"{shown(path)}: a line has {LARGEST_LINE:,} bytes or more")
            yield line


def parsed(text: bytes) -> Any:
    """Parses JSON and refuses repeated keys by ValueError. NaN and Infinity are numbers, as held-out losses may be."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice in an object, so readers may see different values")
        return dict(pairs)

    try:
        return json.loads(text.decode(), object_pairs_hook=unique)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError("it is nested too deeply, or no UTF-8") from error


def object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; Violated where it holds anything else."""
    try:
        value = parsed(read_file(path))
    except ValueError as error:
        raise Violated(f"{path.name} is no JSON: {shown(error)}") from error
    require(isinstance(value, dict), f"{path.name} holds no JSON object")
    return dict(value)


def shown(value: object) -> str:
    """Text from a file on one line of printable characters, cut to a length that can be read."""
    try:
        text = printable(str(value)[:300])
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:160]}..."


def shown_list(names: list[str]) -> str:
    text = ", ".join(map(shown, names[:60]))
    return text if len(names) <= 60 else f"{text} and {len(names) - 60} more"


def printable(text: str) -> str:
    """The text on one line; no name of a file can add a line of its own to what is printed."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def rounded_up(value: float) -> str:
    """An epsilon as text, never below its value."""
    return (
        "inf"
        if math.isinf(value)
        else f"{math.ceil(Fraction(repr(float(value))) * 1000) / 1000:.3f}"
    )


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise Violated(sentence)


def equal(one: object, other: object) -> bool:
    """Whether two JSON values are equal; true and 1 differ."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def is_hex(value: object, digits: int = 64) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def is_whole(value: object, least: int = 0, most: int = MOST) -> bool:
    return type(value) is int and least <= value <= most


def whole(record: dict[str, Any], name: str, least: int = 0, most: int = MOST) -> int:
    require(
        is_whole(record.get(name), least, most), f"{name} must be an integer from {least} to {most}"
    )
    return int(record[name])


def number(record: dict[str, Any], name: str, least: float, most: float) -> float:
    value: Any = record.get(name)
    fits = type(value) in (int, float) and least <= value <= most
    require(fits, f"{name} must be a number from {least:g} to {most:g}")
    return float(value)


# ---------------------------------------------------------------- The plan, frozen in the first line

SLACK = {"floating": 1e-3, "certified": 0.0, "head": 1e-6}
"""r of each arithmetic: how far rounding may carry a contribution above C, and the statistics of a private
head of version 0.1, which were not rounded to steps."""
CHOICES: dict[str, dict[str, str | None]] = {
    "adjacency": {"zero_out": None},
    "sampling": {"poisson": None, "shuffle": "sampling is 'shuffle', not Poisson"},
    "clipping_function": dict.fromkeys(
        ("flat", "automatic", "per_layer", "grouped")
    ),  # all keep the sum within C
    "arithmetic": dict.fromkeys(("floating", "certified")),
}
"""What a plan may choose, and the reason why nothing can be claimed then, if there is one."""
ANY = (1e-300, 1e300)
PLAN_FIELDS = {
    "num_examples",
    "expected_batch_size",
    "num_steps",
    "target_epsilon",
    "max_grad_norm",
    "clipping_function",
    "arithmetic",
    "lattice_exponent",
    "sensitivity_slack",
    "enabled",
    "sampling",
    "informal_reasons",
    "noise_multiplier",
    "target_delta",
    "reserved_attempts",
    "cap",
    "sample_rate",
    "sampling_threshold",
    "adjacency",
    "formal_guarantee",
}
ADAPTIVE = "adaptive_clipping"
"""A field of version 0.1, null where C was constant."""
NOISE_KIND = "noise_kind"
MIXED_EXAMPLES = "mixed_examples"
"""The reason of a `close` that takes the claim of the whole run back."""
WHY_MIXED = (
    "a check while the run trained found that losses or gradients of examples depended on other "
    "examples, so no step of this run has a guarantee"
)
"""A further field, "rounded": noise is whole steps of the sums, as the accountant's Gaussian rounded to them.
Ledgers of version 0.1 lack it: there noise was made of doubles, but for certified arithmetic."""


class Group(NamedTuple):
    """So many `releases` of a Poisson-subsampled Gaussian; batches above `cap` are cut down uniformly."""

    rate: float
    sigma: float
    num_examples: int
    cap: int | None
    releases: int


@dataclass(frozen=True)
class Plan:
    """What an `open` record plans, checked.

    Attributes:
        fields: those of the record, and what follows from them: the most charges, and the cap by default.
        rate: q, rounded up.
        accounted: the noise multiplier that the accountant is charged with, sigma / (1 + r).
        reasons: why nothing is claimed; empty where something is.
    """

    fields: dict[str, Any]
    rate: float
    accounted: float
    reasons: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def releases(self, count: int) -> Group:
        """`count` charges, as the accountant sees them."""
        return Group(self.rate, self.accounted, self["num_examples"], self["cap"], count)

    def noise_tail(self) -> float:
        """What noise of version 0.1 costs in delta, which is bounded: Box-Muller from 63 bits ends at sqrt(128 ln 2) sigma.

        One coordinate moved by a / sigma passes the edge e with probability at most g(a) = Q(e - a / sigma) - Q(e); over the at
        most 2^36 coordinates of a vector of norm j that is at most j 2^18 g'(0) + g(j). An example moves a step that it is in by
        a vector of norm 1. Rounded noise is exact and has no edge.
        """
        if (
            self.reasons
            or self.fields.get("arithmetic") == "certified"
            or NOISE_KIND in self.fields
        ):
            return 0.0
        edge, one = math.sqrt(128 * math.log(2)), self.releases(self["most_charges"])
        slope = math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi) * 2**18

        def passes(drawn: int) -> float:
            shift = drawn / self.accounted
            return (
                slope * shift + math.erfc((edge - shift) / math.sqrt(2)) / 2
                if edge - shift > 1
                else 1.0
            )

        cuts = 0.0
        if one.cap is not None:
            from scipy.stats import binom  # comes with dp-accounting

            # An example that pushes another one out of a batch that is cut moves its sum by up to 2.
            cuts = (
                one.rate
                * one.releases
                * float(binom.sf(one.cap - 1, one.num_examples - 1, one.rate))
                * passes(2)
            )
        return min(1.0, cuts + one.rate * one.releases * passes(1))


def read_plan(fields: dict[str, Any], head: bool) -> Plan:
    """Checks every field of a plan, and that the derived ones follow from the others: two that disagree would let a reader
    choose the one that he believes.

    Args:
        head: whether the ledger is that of a private head.
    """
    require(
        fields.get(ADAPTIVE) is None,
        "C moved, as in version 0.1: judge the run by the verify.py in its own folder",
    )
    odd = sorted(fields.keys() - {NOISE_KIND, ADAPTIVE} ^ PLAN_FIELDS)
    require(not odd, f"the frozen plan lacks {shown(odd[:1])}, or this verifier does not know it")
    rounded = NOISE_KIND in fields
    require(
        fields.get(NOISE_KIND, "rounded") == "rounded",
        "noise_kind must be rounded: no other is known",
    )
    n = whole(fields, "num_examples", 1)
    batch, steps = whole(fields, "expected_batch_size", 1, n), whole(fields, "num_steps", 1)
    reserve, sigma = whole(fields, "reserved_attempts"), number(fields, "noise_multiplier", 0, 1e4)
    bound, delta = (
        number(fields, "max_grad_norm", 1e-12, 1e12),
        number(fields, "target_delta", 1e-300, 1 - 1e-9),
    )
    cap = None if fields["cap"] is None else whole(fields, "cap", 1)
    if fields["target_epsilon"] is not None:
        number(fields, "target_epsilon", 1e-12, 1e12)
    for name in ("enabled", "formal_guarantee"):
        require(type(fields[name]) is bool, f"{name} must be true or false")
    for name, known in CHOICES.items():
        require(fields[name] in known, f"{name} must be {' or '.join(known)}: no other is known")

    certified, floating = fields["arithmetic"] == "certified", fields["arithmetic"] == "floating"
    slack = SLACK["head" if head and floating and not rounded else fields["arithmetic"]]
    stated = number(fields, "sensitivity_slack", 0, 1e-3)
    require(
        stated == slack or not sigma,
        f"sensitivity_slack must be {slack:g}: as much as rounding moves",
    )
    exponent = None
    if certified:  # sums and noise are multiples of 2^-f, the finest on which an entry has 32 bits and a sum 63
        exponent, deviation = 32 - math.frexp(bound)[1], Fraction(sigma) * Fraction(bound)
        largest = (min(n, cap or n) + 1) * Fraction(bound) + 64 * deviation
        while (
            largest * Fraction(2) ** exponent > 2**62 or deviation * Fraction(2) ** exponent > 2**49
        ):
            exponent -= 1
    require(
        equal(fields["lattice_exponent"], exponent),
        f"lattice_exponent is not {exponent}, as C, cap and noise are",
    )
    threshold = batch * 2**64 // n
    require(
        fields["sampling_threshold"] == str(threshold),
        f"sampling_threshold is not B 2^64 / n = {threshold}",
    )
    exact = Fraction(threshold, 2**64)
    rate = float(exact) if Fraction(float(exact)) >= exact else math.nextafter(float(exact), 1.0)
    require(
        fields["sample_rate"] == rate, f"sample_rate is not {rate!r}, which is B / n rounded up"
    )
    usual = (
        None if fields["sampling"] == "shuffle" else min(n, math.ceil(batch + 8 * math.sqrt(batch)))
    )
    require(
        head or not fields["enabled"] or cap is None or cap <= n,
        f"cap {cap} is above the number of examples",
    )
    full = batch == n and cap is None and fields["sampling"] == "poisson"
    require(
        full or not head, "a private head takes all examples in every step, and this plan does not"
    )

    informal = fields["informal_reasons"]
    require(
        isinstance(informal, list) and all(isinstance(why, str) for why in informal),
        "informal_reasons are words",
    )
    reasons = [] if fields["enabled"] else ["privacy is disabled (privacy.enabled = false)"]
    reasons += ["the noise multiplier is 0"] if fields["enabled"] and sigma == 0 else []
    reasons += [
        why for name, known in CHOICES.items() if (why := known[fields[name]]) is not None
    ] + informal
    require(
        fields["formal_guarantee"] == (not reasons),
        "formal_guarantee does not follow from the rest of the plan",
    )
    most = steps + reserve
    plan = Plan(
        {**fields, "usual_cap": usual, "most_charges": most},
        rate,
        sigma / (1 + stated),
        tuple(reasons),
    )
    require(most <= MOST and plan.noise_tail() < delta, "delta is below the tail of the noise")
    return plan


def check_step(opened: dict[str, Any], plan: Plan) -> None:
    """The step 2^-f of sums and noise is coarse enough to draw noise in it, and fine enough for what rounding may move."""
    sigma, bound = plan["noise_multiplier"], plan["max_grad_norm"]
    exponent, coordinates = opened.get("sum_exponent"), opened.get("noised_coordinates")
    if NOISE_KIND not in plan.fields:
        require(exponent is None, "sum_exponent is stated for noise that was not rounded")
        return
    if "head" in opened:
        return
    if exponent is None:
        return  # `seen` is then undecided
    require(sigma > 0, "sum_exponent is stated, and there is no noise")
    if plan["arithmetic"] == "certified":
        require(equal(exponent, plan["lattice_exponent"]), "sum_exponent is not lattice_exponent")
        return
    fine = (
        coordinates is None or coordinates * 4**13 <= Fraction(4) ** exponent * Fraction(bound) ** 2
    )
    require(
        fine,
        f"rounding to steps of 2^-{exponent} moves {coordinates} coordinates by more than 2^-13 C",
    )
    most = min(plan["num_examples"], plan["cap"] or plan["num_examples"])
    require_room(most, bound * (1 + SLACK["floating"]), exponent)
    require_drawn(sigma * bound, exponent)


def require_room(num_examples: int, bound: float, exponent: int) -> None:
    """A sum of so many examples, each at most `bound`, stays below 2^62 steps of 2^-exponent."""
    room = num_examples * Fraction(bound) * Fraction(2) ** exponent < 2**62
    require(room, f"in steps of 2^-{exponent} a sum of {num_examples} examples passes 2^62")


def require_drawn(std: float, exponent: int) -> None:
    """Noise of this deviation is drawn exactly in steps of 2^-exponent."""
    drawn = math.ldexp(std, exponent) <= 2**50 * (1 + HAIR)
    require(drawn, f"in steps of 2^-{exponent} the noise passes 2^50, which nothing draws exactly")


def check_steps_of_head(opened: dict[str, Any], plan: Plan, releases: list[Any]) -> None:
    """The statistics of a private head have steps of their own, in which sums and noise fit as those of a run do."""
    exponents = opened.get("sum_exponents")
    if exponents is None:
        return  # version 0.1
    known = all(is_whole(exponent, -200, 200) for exponent in exponents.values())
    same = exponents.keys() == {release["name"] for release in releases}
    require(known and same, "sum_exponents states no step for each release")
    for release in releases:
        exponent = exponents[release["name"]]
        require_room(plan["num_examples"], release["sensitivity"], exponent)
        require_drawn(release["std"], exponent)


def check_releases(plan: Plan, head: bool, releases: list[Any]) -> float:
    """Every intent states the planned noise for the planned sensitivity; returns the deviation of the gradient's."""
    require(1 <= len(releases) <= 1000, "an intent lists its releases")
    known = all(
        isinstance(one, dict) and one.keys() == {"name", "std", "sensitivity"} for one in releases
    )
    require(
        known and all(isinstance(one["name"], str) for one in releases),
        "a release has name, std and sensitivity",
    )
    stated = [
        (one["name"], number(one, "std", 0, 1e300), number(one, "sensitivity", *ANY))
        for one in releases
    ]
    sigma, bound = plan["noise_multiplier"], plan["max_grad_norm"]
    if head:  # several Gaussian releases of one sample are one, with 1 / sigma^2 = sum of (sensitivity / std)^2
        joint = math.hypot(
            *(sensitivity / std if std else math.inf for _, std, sensitivity in stated)
        )
        noise = 1 / joint if joint else math.inf
        require(math.isclose(noise, sigma, rel_tol=1e-9), f"the noise is not the planned {sigma:g}")
        return 0.0
    require([name for name, *_ in stated] == ["gradient"], "other releases than the plan has")
    (_, std, sensitivity), std_planned = stated[0], sigma * bound
    agree = math.isclose(std, std_planned, rel_tol=1e-9) and math.isclose(
        sensitivity, bound, rel_tol=1e-9
    )
    require(
        agree,
        f"gradient states std, sensitivity = {std:g}, {sensitivity:g}; the plan has {std_planned:g}, {bound:g}",
    )
    return std


# ---------------------------------------------------------------- The ledger, line by line

HEADER = ("seq", "type", "time_utc", "previous")
Kind = type | Callable[[Any], bool]


def is_norm(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e150


def is_share(value: Any) -> bool:
    """Finds the owner of coordinates whose norm is the smallest beside its noise."""
    known = isinstance(value, dict) and value.keys() == {"owners", "coordinates", "norm"}
    return (
        known
        and is_whole(value["owners"], 2)
        and is_whole(value["coordinates"], 1)
        and is_norm(value["norm"])
    )


FIELDS: dict[str, dict[str, Kind]] = {
    "open": {
        "format": functools.partial(is_whole, least=1, most=1),
        "plan": dict,
        "key_commitment": is_hex,
        "data_hmac?": is_hex,
        "commit?": str,
        "accountant?": str,
        "unit?": str,
        "tuning?": str,
        "deduplication?": str,
        "head?": dict,
        "behind?": list,
        "shared_ledger?": lambda value: value is None or is_hex(value),
        "disjoint_from_start?": bool,
        "max_examples_per_owner?": lambda value: value is None or is_whole(value, 1),
        "noised_coordinates?": lambda value: value is None or is_whole(value, 1),
        "sum_exponent?": lambda value: value is None or is_whole(value, -200, 200),
        "sum_exponents?": dict,
    },
    "session": {
        "nonce": functools.partial(is_hex, digits=32),
        "mirror": bool,
        "environment": dict,
        "restarted_from_step_0?": bool,
        "shared_seq?": is_whole,
        "shared_hash?": is_hex,
    },
    "intent": {"step": is_whole, "attempt": is_whole, "releases": list},
    "done": {
        "step": is_whole,
        "attempt": is_whole,
        "noised_norm?": is_norm,
        "smallest_share?": is_share,
    },
    "checkpoint": {"step": is_whole, "path": str, "digest": is_hex},
    "repair": {"torn_lines": is_whole, "charged": is_whole},
    "close": {
        "reason": lambda value: value in ("finished", "budget_spent", "stopped", MIXED_EXAMPLES),
        "num_charged": is_whole,
    },
}
"""What a line states besides its header (`?`: may be missing); anything else would be believed, and checked by nothing."""
CHECKED = {"format", "plan", "key_commitment", "behind", "nonce", "step", "attempt"}
LOOSE = {
    name.rstrip("?") for kind in ("open", "session", "done") for name in FIELDS[kind]
} - CHECKED | {"reason"}
"""Those of them that nothing here can check; norms may be larger, and the number of coordinates smaller."""
BEHIND: dict[str, Kind] = {"file": str, "run": str, "lines": is_whole, "hash": is_hex}
"""How `open` names the ledger of a private run behind the initial weights."""


def check_fields(record: dict[str, Any], fields: dict[str, Kind], what: str) -> None:
    odd = sorted(record.keys() - {name.rstrip("?") for name in fields})
    require(not odd, f"{what} states {shown(odd)}, which this verifier does not know")
    for name, kind in fields.items():
        value = record.get(name.rstrip("?"), ...)
        fits = isinstance(value, kind) if isinstance(kind, type) else kind(value)
        if not fits and not (value is ... and name.endswith("?")):
            raise Violated(f"{name} of {what} cannot be {shown(value)}")


def record_in(line: bytes) -> dict[str, Any]:
    """The record of a line, which is written as every program writes it: other bytes would be other hashes of one content."""
    try:
        record = parsed(line)
        require(
            isinstance(record, dict) and list(record)[:4] == list(HEADER), "it is no ledger record"
        )
        header, rest = (
            {name: record[name] for name in record if (name in HEADER) == first}
            for first in (True, False)
        )
        ordered = json.loads(
            json.dumps(rest, sort_keys=True)
        )  # nested objects too, and the header stays in front
        canonical = json.dumps(
            {**header, **ordered}, separators=(",", ":"), allow_nan=False
        ).encode()
        if b"\\ud" in line:
            json.dumps(
                record, ensure_ascii=False
            ).encode()  # half of a character is an error, and no text
    except (ValueError, RecursionError) as error:
        raise Violated(f"it is no ledger record: {shown(error)}") from error
    require(canonical == line, "it is not in canonical form")
    words = all(isinstance(record[name], str) for name in HEADER[1:])
    require(
        words and type(record["seq"]) is int,
        "number, type, time and hash of the line before have other types",
    )
    return dict(record)


@dataclass
class Ledger:
    """What the lines of a ledger say so far; positions are numbers of lines from 0.

    Attributes:
        behind: how the ledgers of private runs that led to the initial weights are named, the newest first.
        charges: the line of every charged attempt, done or not, and of torn lines that may have been one.
        attempts: step -> number of its intents.
        done: (line, step).
        reached: (line, step) of every `done`; also (line, 0) of a `session` that may write a checkpoint before its first step,
            and (line, None) of one that has a checkpoint to go on from.
        checkpoints: (line, step, digest of the manifest).
        loose: fields of lines that are the word of the ledger's writer.
        active: whether a session may write steps.
        pending: (step, attempt) of the intent whose `done` has not come.
        position: the last step that this session finished.
        recorded: the step of the newest checkpoint since the run began, or began again at step 0.
        waiting: of the torn lines that wait for their `repair`: whether each was charged.
        released: (step, std of the gradient's noise, its `done` or nothing) of every intent.
    """

    hashes: list[str] = field(default_factory=list)
    opened: dict[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan({}, 0.0, 0.0, ()))
    behind: list[dict[str, Any]] = field(default_factory=list)
    nonces: set[str] = field(default_factory=set)
    charges: list[int] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    done: list[tuple[int, int]] = field(default_factory=list)
    reached: list[tuple[int, int | None]] = field(default_factory=list)
    checkpoints: list[tuple[int, int, str]] = field(default_factory=list)
    torn: int = 0
    closed: str | None = None
    loose: set[str] = field(default_factory=set)
    unterminated: bool = False
    furthest: int = 0
    active: bool = False
    pending: tuple[int, int] | None = None
    position: int | None = None
    recorded: int | None = None
    waiting: list[bool] = field(default_factory=list)
    released: list[tuple[int, float, dict[str, Any]]] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Returns why nothing is claimed; an empty list where there is a claim."""
        return [*self.plan.reasons, *([WHY_MIXED] if self.closed == MIXED_EXAMPLES else [])]

    def charged(self, num_lines: int | None = None) -> int:
        """The charges of the first lines, or of all."""
        return len(self.charges) if num_lines is None else bisect_right(self.charges, num_lines - 1)

    def reached_at(self, line: int) -> tuple[int, int | None]:
        """The entry of `reached` that a line belongs to."""
        place = bisect_right(self.reached, line, key=itemgetter(0)) - 1
        return self.reached[place] if place >= 0 else (0, None)

    def may_lack_record(self, step: int, line: int) -> bool:
        """Whether a crash can have come between a checkpoint, which remembers this line, and its record.

        Then it is of the step that its session had reached, and the ledger knows of nothing that comes after it: a session
        begins with a record of the checkpoint that it goes on from, unless there is one.
        """
        since, reached = self.reached_at(line)
        later = any(at > since and known >= step for at, known, *_ in self.checkpoints)
        return step == reached and not later and self.closed is None

    def take_torn(self) -> None:
        """An attempt may have been under way wherever one could stand; then the torn line is charged as one."""
        require(
            bool(self.hashes) and self.closed is None, "a torn line where no line can be written"
        )
        room = not self.plan["formal_guarantee"] or self.charged() < self.plan["most_charges"]
        between = self.active and self.pending is None and not self.waiting
        may_be = between and room and (self.position or 0) < self.plan["num_steps"]
        self.charges += [len(self.hashes)] if may_be else []
        self.waiting.append(may_be)
        self.torn += 1

    def take(self, record: dict[str, Any]) -> None:
        """The next record; Violated where it cannot stand here."""
        seq, kind = len(self.hashes), record["type"]
        require(record["seq"] == seq, f"its number is not {seq}")
        previous = self.hashes[-1] if seq else "0" * 64
        require(
            record["previous"] == previous,
            "the chain of hashes is broken: it does not continue the line before",
        )
        require(kind in FIELDS, f"unknown record type {kind[:40]}")
        body = {name: value for name, value in record.items() if name not in HEADER}
        check_fields(body, FIELDS[kind], f"`{kind}`")
        require((kind == "open") == (seq == 0), "the first record, and no other, is `open`")
        require(self.closed is None, "a record after `close`")
        require(
            (kind == "repair") == bool(self.waiting),
            "a `repair` follows torn lines, and nothing else does",
        )
        require(
            self.active or kind not in ("intent", "checkpoint"), f"`{kind}` outside of a session"
        )
        self.loose |= body.keys() & LOOSE
        time = self.opened.get("time_utc", record["time_utc"])
        require(
            record["time_utc"] == time,
            "its time is not that of the first line, which all lines repeat",
        )
        step, plan = record.get("step", 0), self.plan
        match kind:
            case "open":
                self.opened, self.plan = record, read_plan(record["plan"], "head" in record)
                check_step(record, self.plan)
                self.behind = record.get("behind", [])
                require(len(self.behind) <= 100, "`behind` lists more than 100 ledgers")
                for place in self.behind:
                    check_fields(place, BEHIND, "`behind`")
                    named = (
                        re.fullmatch(r"behind/ledger-[0-9]{1,3}\.jsonl", place["file"])
                        and place["lines"]
                    )
                    require(bool(named), "`behind` names no ledger")
            case "session":
                require(
                    record["nonce"] not in self.nonces,
                    "the session nonce was used before: coins would repeat",
                )
                require(
                    ("shared_seq" in record) == ("shared_hash" in record),
                    "half of a line of a shared ledger",
                )
                self.recorded = None if record.get("restarted_from_step_0") else self.recorded
                self.reached.append((seq, 0 if self.recorded is None else None))
                self.nonces.add(record["nonce"])
                self.active, self.pending, self.position = True, None, None
            case "intent":
                require(
                    1 <= step <= plan["num_steps"],
                    f"step must be an integer from 1 to {plan['num_steps']}",
                )
                if self.pending is not None:
                    require(
                        step == self.pending[0],
                        f"step {step} begins while step {self.pending[0]} is not done",
                    )
                elif self.position is not None:
                    require(
                        step == self.position + 1,
                        f"step {step} does not follow step {self.position}",
                    )
                else:
                    require(
                        step <= self.furthest + 1, f"step {step} skips step {self.furthest + 1}"
                    )
                attempt, after = record["attempt"], self.attempts[step]
                require(
                    attempt == after, f"attempt {attempt} of step {step}, where {after} is next"
                )
                std = check_releases(plan, "head" in self.opened, record["releases"])
                check_steps_of_head(self.opened, plan, record["releases"])
                self.released.append((step, std, {}))
                self.attempts[step] += 1
                self.pending = (step, attempt)
                self.charges.append(seq)
            case "done":
                require(
                    (step, record["attempt"]) == self.pending,
                    "`done` without its intent just before",
                )
                self.position, self.pending, self.furthest = step, None, max(self.furthest, step)
                self.done.append((seq, step))
                self.released[-1][-1].update(record)
                self.reached.append((seq, step))
            case "checkpoint":
                require(step <= self.furthest, f"a checkpoint of step {step}, which is not done")
                name = record["path"]
                require(
                    name == f"step-{step:08d}",
                    f"a checkpoint of step {step} has the name {shown(name)}",
                )
                self.checkpoints.append((seq, step, record["digest"]))
                self.recorded = step
            case "repair":
                same = (record["torn_lines"], record["charged"]) == (
                    len(self.waiting),
                    sum(self.waiting),
                )
                require(same, "the repair does not match the torn lines before it")
                self.waiting, self.active, self.pending, self.position = [], False, None, None
            case "close":
                ended = (
                    self.furthest == plan["num_steps"]
                    or not plan["enabled"]
                    or record["reason"] != "finished"
                )
                require(ended, f"the run finished after step {self.furthest}")
                same = record["num_charged"] == self.charged()
                require(same, f"`close` states other charges than {self.charged()}")
                self.closed = record["reason"]


def read_ledger(path: Path) -> Ledger:
    """Reads a ledger once from top to bottom; Violated names the first line that is wrong."""
    ledger = Ledger()
    try:
        for raw in lines_of(path):
            line = raw.removesuffix(b"\n")
            if (
                raw == line
            ):  # a crash, or a write that is under way: the next start of the program marks it as torn
                ledger.take_torn()
                ledger.unterminated = True
                break
            if line.endswith(TORN) or b"\0" in line:
                ledger.take_torn()
            else:
                ledger.take(record_in(line))
            ledger.hashes.append(hashlib.sha256(line).hexdigest())
        require(bool(ledger.hashes), "no whole record")
    except (Violated, *OF_ODD_FIELDS) as error:
        raise Violated(f"{path.name}: line {len(ledger.hashes) + 1}: {shown(error)}") from error
    return ledger


def epsilon(groups: list[Group], delta: float) -> float:
    """An upper bound of epsilon at `delta` of all groups together, as the project reports it.

    Without sampling all releases are one Gaussian, whose epsilon is exact. Else it is by privacy loss distributions, on a grid of
    1e-4, or a coarser one where epsilon is above 50. Above 1000, and below delta 1e-12, nothing is computed.
    """
    from dp_accounting import get_epsilon_gaussian

    groups = [group for group in groups if group.releases and group.rate]
    if not groups or delta <= 0 or any(group.sigma == 0 for group in groups):
        return math.inf if groups else 0.0
    try:
        if all(group.rate == 1 and group.cap is None for group in groups):
            mu = math.sqrt(math.fsum(group.releases / group.sigma**2 for group in groups))
            if mu <= 1000:
                return float(get_epsilon_gaussian(1 / mu, delta))
        elif (upper := renyi(tuple(groups), delta)) <= 1000 and delta >= SMALLEST_DELTA:
            grid = FINE if upper <= LARGE else FINE * 10 ** math.ceil(math.log10(upper / LARGE))
            value = float(composed(tuple(groups), grid).get_epsilon_for_delta(delta))
            fine = grid == FINE or value > LARGE
            return (
                value if fine else float(composed(tuple(groups), FINE).get_epsilon_for_delta(delta))
            )
    except (
        MemoryError,
        OverflowError,
        ValueError,
        ArithmeticError,
    ) as error:  # of numbers that no sensible plan has
        raise Undecided(
            f"epsilon cannot be computed here: {type(error).__name__}: {shown(error)}"
        ) from error
    raise Undecided(
        "epsilon is so large that none is computed: it protects nobody; or delta is below 1e-12"
    )


@functools.lru_cache(maxsize=64)
def renyi(groups: tuple[Group, ...], delta: float) -> float:
    """Epsilon by Renyi DP, without caps."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # Renyi orders that are left out keep the bound sound
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        gaussian = dp_event.GaussianDpEvent(group.sigma)
        accountant.compose(dp_event.PoissonSampledDpEvent(group.rate, gaussian), group.releases)
    return float(accountant.get_epsilon(delta)) if groups else 0.0


@functools.lru_cache(maxsize=8)
def one_release(rate: float, sigma: float, num_examples: int, cap: int | None, grid: float) -> Any:
    """The privacy loss distribution of one release."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    how = {
        "value_discretization_interval": grid,
        "neighboring_relation": NeighboringRelation.REPLACE_SPECIAL,
    }
    if cap is None:
        return pld.from_gaussian_mechanism(sigma, sampling_prob=rate, **how)
    return pld.from_truncated_subsampled_gaussian_mechanism(num_examples, rate, cap, sigma, **how)


@functools.lru_cache(maxsize=8)
def composed(groups: tuple[Group, ...], grid: float) -> Any:
    """The privacy loss distribution of all groups (Koskela et al. 2020)."""
    parts = (one_release(*one[:4], grid).self_compose(one.releases) for one in groups)
    return functools.reduce(lambda one, other: one.compose(other), parts)


# ---------------------------------------------------------------- The checks, each of which ends in one sentence


@dataclass
class Folder:
    """A published folder under examination: what is read once, and what the checks find out.

    Attributes:
        behind: the ledgers of private runs that led to the initial weights; None where one of them is missing.
        config: the content of config.toml, if there is one.
    """

    path: Path
    ledger: Ledger
    head: str | None = None
    behind: list[Ledger] | None = None
    config: dict[str, Any] | None = None
    epsilon: float | None = None
    delta: float = 0.0

    def has(self, place: str) -> bool:
        """Whether there is anything at this place; `check_files` has looked for links before."""
        return os.path.lexists(self.path / place)


def check_files(folder: Folder) -> str:
    """What has no place in a run folder: code that a start of this file could have run, links, ledgers that nothing names."""
    named = {place["file"] for place in folder.ledger.behind}
    for count, (root, folders, files) in enumerate(os.walk(folder.path)):
        if count > 10_000:
            raise Undecided("there are more than 10,000 folders")
        top = Path(root) == folder.path
        for entry in sorted([*folders, *files]):
            path = Path(root) / entry
            place, mode = str(path.relative_to(folder.path)), path.lstat().st_mode
            require(
                stat.S_ISREG(mode) or stat.S_ISDIR(mode),
                f"{shown(place)} is a link or a device: no run has any",
            )
            code = entry.endswith((".py", ".pyc", ".pyd", ".so")) and entry != "verify.py"
            code = top and (code or os.path.lexists(path / "__init__.py"))
            require(
                not code, f"{shown(place)} is code, which no run writes here: python may run it"
            )
            foreign = place.startswith("behind/") and place not in named
            require(not foreign, f"{shown(place)} is no ledger that ledger.jsonl names")
        folders[:] = sorted(
            name for name in folders if not (top and name == "private")
        )  # which is not published
    return "no other code, no link, and no ledger that ledger.jsonl does not name"


def check_order(folder: Folder) -> str:
    """What `read_ledger` leaves to say: the budget, and the line that somebody was told."""
    ledger, most = folder.ledger, folder.ledger.plan["most_charges"]
    spent = f"{ledger.charged()} attempts are charged where {most} are allowed"
    require(bool(ledger.plan.reasons) or ledger.charged() <= most, spent)
    require(
        folder.head in (None, *ledger.hashes),
        f"the ledger lacks the line {folder.head}: it was cut or replaced",
    )
    counts = (
        f"{len(ledger.hashes)} lines, {len(ledger.nonces)} starts, {len(ledger.done)} steps done"
    )
    state = (
        f"closed ({ledger.closed})"
        if ledger.closed
        else "open: the run may go on, or its end was cut off"
    )
    return f"{counts}, {ledger.torn} torn lines; {spent}; {state}"


def check_plan(folder: Folder) -> str:
    """config.toml asks for this very plan; what it leaves open has its default."""
    if "head" in folder.ledger.opened:
        require(not folder.has("config.toml"), "a private head has no config.toml, and one is here")
        return "all intents state the planned noise; a private head has no config.toml"
    if not folder.has("config.toml"):
        raise Undecided("config.toml is missing: only the ledger itself says what was asked for")
    try:
        text = read_file(folder.path / "config.toml", 1 << 18).decode()
        # Outside of strings, since a list of shards is long; tomllib takes memory by the square of the dots of a key.
        dots = max(re.sub(r'"[^"]*"|\'[^\']*\'', "", line).count(".") for line in text.split("\n"))
        if dots > 100:
            raise ValueError("a key of more than 100 parts")
        folder.config = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"config.toml is no TOML: {shown(error)}") from error
    return compare_plan(folder.ledger, folder.config)


def compare_plan(ledger: Ledger, config: dict[str, Any]) -> str:
    """What `check_plan` says of the content of config.toml."""
    plan, tables = (
        ledger.plan,
        {name: config.get(name, {}) for name in ("privacy", "train", "data", "init")},
    )
    require(
        all(isinstance(table, dict) for table in tables.values()),
        f"config.toml: {', '.join(tables)} are tables",
    )
    asked = tables["privacy"]
    n, batch, steps = plan["num_examples"], plan["expected_batch_size"], plan["num_steps"]
    disjoint = bool(ledger.behind) and tables["init"].get("disjoint_data", False)
    rows = [  # what config.toml asks for, and what the ledger states
        ("enabled", asked.get("enabled", True), plan["enabled"]),
        ("train.num_steps", tables["train"].get("num_steps"), steps),
        (
            "data.num_examples",
            tables["data"].get("num_examples", n if "model" in config else None),
            n,
        ),
        (
            "max_examples_per_owner",
            asked.get("max_examples_per_owner"),
            ledger.opened.get("max_examples_per_owner"),
        ),
        ("shared_ledger", "shared_ledger" in asked, ledger.opened.get("shared_ledger") is not None),
        ("init.disjoint_data", disjoint, ledger.opened.get("disjoint_from_start", False)),
    ]
    defaults = {
        "reserved_attempts": max(2, -(-steps // 100)),
        "target_delta": 1 / (2 * n),
        "sampling": "poisson",
        "max_grad_norm": 1.0,
        "clipping_function": "flat",
        "arithmetic": "floating",
        "expected_batch_size": None,
        "target_epsilon": None,
    }
    wanted = defaults | {name: value for name, value in asked.items() if name in plan.fields}
    if plan["enabled"]:
        rows += [(name, value, plan[name]) for name, value in wanted.items() if name in plan.fields]
        cap, usual = plan["cap"], plan["usual_cap"]  # whatever it is, it is charged
        known = (
            "cap" in asked
            or cap == usual
            or (cap is not None and usual is not None and batch <= cap < usual)
        )
        require(
            known,
            f"config.toml asks for cap at most {shown(usual)}, and the ledger has {shown(cap)}",
        )
    for name, value, known in rows:
        require(
            equal(value, known),
            f"config.toml asks for {name} = {shown(value)}, and the ledger has {shown(known)}",
        )
    surplus = Counter(starts_in(config) or ()) - Counter(place["run"] for place in ledger.behind)
    require(
        not surplus,
        f"config.toml starts from {shown_list(sorted(surplus))}, and `behind` of the ledger does not",
    )
    require(
        bool(plan.reasons) or not asked.get("simulation"),
        "config.toml has a simulation, the plan a guarantee",
    )
    if not plan["enabled"]:
        return "config.toml asks for a run without privacy, as the plan is"
    target, sigma = plan["target_epsilon"], plan["noise_multiplier"]
    require(
        "noise_multiplier" in asked or target is not None,
        "config.toml states neither noise nor epsilon",
    )
    if target is not None and not plan.reasons:
        delta, most = plan["target_delta"] - plan.noise_tail(), plan.releases(plan["most_charges"])
        reached, said = epsilon([most], delta), f"epsilon {target:g} of config.toml"
        require(
            reached <= target * 1.001, f"the plan spends epsilon {reached:.6g}, more than {said}"
        )
        less = most._replace(sigma=0.95 * most.sigma, num_examples=n, cap=None)
        needed = sigma <= 0.3 or epsilon([less], delta) > target
        require(needed, f"the plan states more noise than {said} takes: {sigma:g}")
    return f"q = {plan.rate:.6g} ({batch} of {n}), sigma = {sigma:.6g}, C = {plan['max_grad_norm']:g}, as asked"


def starts_in(config: dict[str, Any]) -> list[str] | None:
    """The private runs that the config.toml of a loop says the weights started from, none for public ones; None if it is silent.

    Two runs of one name are two entries.
    """
    value = config.get("init", {}).get("starts_from")
    names = [value] if isinstance(value, str) else value
    are_names = (
        isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)
    )
    require(
        value is None or are_names,
        'config.toml: init.starts_from is neither "public" nor names of runs',
    )
    return [] if value == "public" else names


def check_behind(folder: Folder) -> str:
    """The ledgers of private runs behind the initial weights are here, whole, and each names those behind itself."""
    listed, found = folder.ledger.behind, list[Ledger]()
    for place in listed:
        if not folder.has(place["file"]):
            raise Undecided(
                f"{place['file']} is missing: what the initial weights had spent cannot be recomputed"
            )
        ledger = read_ledger(folder.path / place["file"])
        same = (len(ledger.hashes), ledger.hashes[-1]) == (place["lines"], place["hash"])
        require(same, f"{place['file']} is not the one that the ledger names")
        require(not ledger.reasons, f"{place['file']} is of a run without a guarantee")
        newer = {other.hashes[0] for other in (folder.ledger, *found)}
        require(
            ledger.hashes[0] not in newer, f"{place['file']} is of a run that the chain has already"
        )
        found.append(ledger)
    parents = set[int]()  # that a ledger behind this one names
    for number, ledger in enumerate(
        found, start=1
    ):  # a run behind it may have gone on before this one started
        what, older = listed[number - 1]["file"], range(number, len(found))
        for place in ledger.behind:
            matches = {
                at
                for at in older
                if place["hash"] in found[at].hashes[place["lines"] - 1 : place["lines"]]
            }
            require(bool(matches), f"{what} names other ledgers behind it than there are")
            parents |= matches
        covers = not ledger.opened.get("disjoint_from_start") or len(ledger.behind) == len(older)
        require(covers, f"{what} declares data disjoint from those of runs that it does not name")
    names = None if folder.config is None else starts_in(folder.config)
    for number, place in enumerate(listed):
        agrees = names is None or number in parents or place["run"] in names
        require(agrees, f"the ledger starts from {shown(place['run'])}, and config.toml does not")
    folder.behind = found
    return (
        f"{len(listed)} private runs had made the initial weights; their ledgers are here and whole"
    )


def epsilon_of(chain: list[Ledger], delta: float, count: int | None = None) -> float:
    """Epsilon of a chain of runs, the newest first, or of `count` charges of the newest: the worst that any example bears.

    An example can be in all of them, but in one side alone where data are declared disjoint from those of the runs before.
    """
    *newer, oldest = chain
    alternatives = [[oldest]]
    for run in reversed(newer):
        disjoint = run.opened.get("disjoint_from_start") is True
        alternatives = (
            [[run], *alternatives] if disjoint else [[run, *runs] for runs in alternatives]
        )
    values = []
    for runs in alternatives:
        counts = [run.charged() if count is None or run is not chain[0] else count for run in runs]
        groups = [run.plan.releases(number) for run, number in zip(runs, counts, strict=True)]
        values.append(epsilon(groups, delta - math.fsum(run.plan.noise_tail() for run in runs)))
    return max(values)


def check_epsilon(folder: Folder) -> str:
    ledger, plan = folder.ledger, folder.ledger.plan
    folder.delta = plan["target_delta"]
    if ledger.reasons:
        return f"nothing is claimed: {shown('; '.join(ledger.reasons))}"
    alone = epsilon_of([ledger], plan["target_delta"])
    own = f"epsilon {rounded_up(alone)} at delta {plan['target_delta']:g} for {ledger.charged()} charged attempts"
    if folder.behind is None:
        raise Undecided(
            f"this run alone spent {own}; what its initial weights had spent is unknown"
        )
    chain = [ledger, *folder.behind]
    folder.delta = min(one.plan["target_delta"] for one in chain)
    folder.epsilon = epsilon_of(chain, folder.delta) if folder.behind else alone
    total = f"; with what the initial weights had spent, epsilon {rounded_up(folder.epsilon)} at delta {folder.delta:g}"
    return (
        own
        + (total if folder.behind else "")
        + (USELESS if folder.delta * plan["num_examples"] >= 1 else "")
    )


def card_fields(folder: Folder) -> dict[str, Any]:
    """The fields of a card that follow from the ledger, by their places."""
    at, plan, delta = folder.ledger, folder.ledger.plan, folder.ledger.plan["target_delta"]
    finished = plan["num_steps"] if at.closed == "finished" else None
    card: dict[str, Any] = {
        "formal_guarantee": not at.reasons,
        "reasons": list(at.reasons),
        "epsilon": None,
        "delta": folder.delta,
        "steps_done": at.furthest if plan["enabled"] else finished,
        "steps_planned": plan["num_steps"],
        "attempts_charged": at.charged(),
        "mechanism.noise_multiplier_accounted": plan.accounted,
        "accounting.epsilon": None,
        "accounting.delta": delta,
        "accounting.attempts.charged": at.charged(),
        "accounting.attempts.allowed": plan["most_charges"],
        "ledger.lines": len(at.hashes) + at.unterminated,
    }
    card |= {f"opened.{name}": value for name, value in at.opened.items() if name != "plan"}
    card |= {
        f"plan.{name}": value
        for name, value in at.opened["plan"].items()
        if name != "target_epsilon"
    }
    if not at.reasons:
        counts = {
            "": at.charged(),
            "_planned": plan["num_steps"],
            "_with_reserve": plan["most_charges"],
        }
        left, card["epsilon"] = delta - plan.noise_tail(), Bound(folder.epsilon or 0.0)
        card |= {
            f"accounting.epsilon{name}": Bound(epsilon([plan.releases(n)], left))
            for name, n in counts.items()
        }
        card |= {
            "accounting.noise_tail_delta": plan.noise_tail() or None,
            "accounting.epsilon_target": plan["target_epsilon"],
        }
    if at.reasons or not folder.behind:
        return card | {"composition": None}
    card |= {"composition.epsilon": card["epsilon"], "composition.delta": folder.delta}
    places = [{"run": "this run", "file": "ledger.jsonl"}, *at.behind]
    for number, (place, run) in enumerate(zip(places, [at, *folder.behind], strict=True)):
        own = run.plan["target_delta"]
        fields = {
            "name": place["run"],
            "file": place["file"],
            "attempts_charged": run.charged(),
            "delta": own,
            "epsilon": Bound(epsilon_of([run], own)),
            "disjoint_from_those_before": run.opened.get("disjoint_from_start") is True,
        }
        card |= {f"composition.runs.{number}.{name}": value for name, value in fields.items()}
    card[f"composition.runs.{len(places)}"] = ...
    return card


PLACES_OF_FORMAT_3 = {
    "adjacency": "plan.adjacency",
    "unit_of_privacy.num_examples": "plan.num_examples",
    "sampling.key_commitment_sha256": "opened.key_commitment",
    "provenance.ledger.lines": "ledger.lines",
}
"""Places in a card of version 0.1, and where later cards have the same facts."""


def fields_of_format_3(fields: dict[str, Any]) -> dict[str, Any]:
    """Moves the fields that follow from the ledger to their places in a card of version 0.1."""
    kept = {
        place: fields[place] for place in fields if not place.startswith(("opened.", "ledger."))
    }
    return kept | {old: fields[place] for old, place in PLACES_OF_FORMAT_3.items()}


def value_at(tree: Any, place: str) -> Any:
    """What stands there in a card, or `...`."""
    for name in place.split("."):
        entries = (
            {str(number): entry for number, entry in enumerate(tree)}
            if isinstance(tree, list)
            else tree
        )
        tree = entries.get(name, ...) if isinstance(entries, dict) else ...
    return tree


def compare(what: str, stated: Any, expected: Any, place: str) -> str:
    """What is wrong with a stated field; "" where it is the expected one but for rounding, or a bound that is larger."""
    if isinstance(expected, float) and type(stated) in (int, float):
        right = math.isclose(stated, expected, rel_tol=HAIR) or (
            isinstance(expected, Bound) and stated > expected
        )
    else:  # JSON has no infinity
        right = equal(stated, expected) or (
            isinstance(expected, Bound) and math.isinf(expected) and stated is None
        )
    given = "nothing" if expected is ... else shown(expected)
    return "" if right else f"{what}'s {place} is {shown(stated)}, and the ledger gives {given}"


def check_card(folder: Folder) -> str:
    """privacy_card.json where it follows from the ledger, and a head's statement."""
    ledger, agreed = folder.ledger, 0
    if not ledger.reasons and folder.epsilon is None:
        raise Undecided("the first number of card and head was not computed")
    if folder.has("head.json"):
        claim = None if folder.epsilon is None else Bound(folder.epsilon)
        expected = {
            "num_examples": ledger.plan["num_examples"],
            **ledger.opened.get("head", {}),
            "delta": folder.delta,
        }
        expected, head = expected | {"epsilon": claim}, object_in(folder.path / "head.json")
        require(head.keys() == expected.keys(), "head.json has other fields than a head")
        for name, value in expected.items():
            said = compare("head.json", head[name], value, name)
            require(not said, said)
        agreed = len(expected)
    if not folder.has("report/privacy_card.json"):
        return f"there is no privacy card, and {agreed} fields of head.json agree with the ledger"
    card = object_in(folder.path / "report/privacy_card.json")
    is_old, lines = equal(value_at(card, "card_format"), 3), ledger.hashes
    last = value_at(card, f"{'provenance.' if is_old else ''}ledger.last_line_sha256")
    require(
        last in lines, "the card is of a line that the ledger lacks: ledger or card were replaced"
    )
    if last != lines[-1]:
        raise Undecided(
            f"the card is of the first {lines.index(last) + 1} lines of {len(lines)}: make it again"
        )
    expected = fields_of_format_3(card_fields(folder)) if is_old else card_fields(folder)
    ours, theirs = (
        f"dp-accounting {metadata.version('dp-accounting')}",
        value_at(card, "accounting.accountant"),
    )
    wrong = []
    for place, value in expected.items():
        stated = value_at(card, place)
        if said := compare(
            "the card", stated, value, place
        ):  # two versions of the accountant round in their own ways
            near = ours != theirs and isinstance(value, Bound) and type(stated) is float
            require(near and math.isclose(stated, value, rel_tol=1e-3), said)
            wrong.append(place)
    if wrong:
        raise Undecided(
            f"by {shown(theirs)} were computed, and by {ours} differ: {shown_list(wrong)}"
        )
    return f"{len(expected) + agreed} fields agree with the ledger, and no other is compared"


def compare_start(folder: Folder, manifest: dict[str, Any], name: str) -> None:
    """What a manifest of the trainer says of the weights it started from: private runs bring their charges along.

    Their ledgers may say more than it does, since a run may go on between two looks at it, and never less.
    """
    start, config, links = (
        manifest.get("initialisation"),
        folder.config or {},
        list[dict[str, Any]](),
    )
    has_init = "checkpoint" in config.get("init", {})
    if (
        start is None and not has_init and "model" not in config
    ):  # of a loop, whose config.toml says it
        return
    kind = start["kind"] if isinstance(start, dict) else None
    require(kind is not None, f"{name} does not say what its weights started from")
    agrees = not has_init or kind == "checkpoint"
    require(agrees, f"config.toml starts from init.checkpoint, and {name} says {shown(kind)}")
    while isinstance(start, dict):
        links.append(start)
        start = start.get("before_that")
    chain = [link for link in links if link.get("guarantee")]
    gaps = [
        str(link.get("run"))
        for link in links
        if link.get("training_data") == "private" and link not in chain
    ]
    require(not gaps, f"{name} started from private data of {shown_list(gaps)} without a guarantee")
    ours, theirs = (
        [place["run"] for place in folder.ledger.behind],
        [str(link.get("run")) for link in chain],
    )
    made = f"{name} says private runs {shown_list(theirs) or 'none'} made its weights, the ledger {shown_list(ours) or 'none'}"
    require(ours == theirs, made)
    for link, ledger in zip(chain, folder.behind or [], strict=False):
        own, (spent, delta) = (
            ledger.plan["target_delta"],
            itemgetter("epsilon", "delta")(link["guarantee"]),
        )
        whole = equal(delta, own) and spent <= epsilon_of([ledger], own) * (1 + 1e-3)
        what = (
            f"{name} states of {shown(link['run'])} epsilon {shown(spent)} at delta {shown(delta)}"
        )
        require(whole, f"{what}, and its ledger in behind/ gives less")


def check_checkpoints(folder: Folder) -> str:
    """Manifests against the ledger, and files against manifests; a run may remove checkpoints."""
    ledger, plan = folder.ledger, folder.ledger.plan
    entries = os.listdir(folder.path / "checkpoints") if folder.has("checkpoints") else []
    names = sorted(name for name in entries if name.startswith("step-"))
    require(len(names) <= 10_000, "checkpoints/ holds more than 10,000 checkpoints")
    has_init = "checkpoint" in (folder.config or {}).get("init", {})
    if has_init and not names and not ledger.behind and not plan.reasons:
        raise Undecided(
            "config.toml starts from init.checkpoint, and no manifest says whether a private run made that"
        )
    recorded = {(step, digest) for _, step, digest in ledger.checkpoints}
    undecided, hashed = [], 0
    for name in names:
        place = folder.path / "checkpoints" / name
        require(
            folder.has(f"checkpoints/{name}/manifest.json"), f"{shown(name)} has no manifest.json"
        )
        digest = hashlib.sha256(read_file(place / "manifest.json")).hexdigest()
        manifest = object_in(place / "manifest.json")
        step, position, files = (
            whole(manifest, "step"),
            manifest["ledger"],
            manifest.get("files", {}),
        )
        require(name == f"step-{step:08d}", f"{shown(name)} is of step {step}")
        line = whole(position, "seq")
        known = line < len(ledger.hashes) and ledger.hashes[line] == position.get("hash")
        require(known, f"{name} remembers another line {line + 1}: the ledger was cut or replaced")
        guarantee, stated = (
            manifest.get("formal_guarantee"),
            manifest.get("charged_attempts", ledger.charged(line + 1)),
        )
        require(
            equal(guarantee, not plan.reasons), f"{name} says something else about the guarantee"
        )
        require(
            equal(stated, ledger.charged(line + 1)),
            f"{name} states {shown(stated)} charges, the ledger others",
        )
        if plan["enabled"] and (step, digest) not in recorded:
            may = ledger.may_lack_record(step, line)
            require(may, f"{name}: manifest.json is not the one that the ledger recorded")
            undecided.append(
                f"{name}: the ledger has no record of it, as after a crash between the two"
            )
        _, reached = ledger.reached_at(line)
        require(
            not plan["enabled"] or step == reached,
            f"{name} remembers line {line + 1}, which is of another step",
        )
        unlisted = sorted({*os.listdir(place)} - {"manifest.json", *files})
        require(
            not unlisted,
            f"{name} holds {shown_list(unlisted[:9])}, which its manifest does not list",
        )
        for file, listed in files.items():
            require(
                re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", file) is not None,
                f"{name} lists odd files",
            )
            if not folder.has(f"checkpoints/{name}/{file}"):
                undecided.append(f"{name}: {file} is missing")
                continue
            with os.fdopen(open_plain(place / file, 1 << 50), "rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            require(found == listed, f"{name}: {file} has another hash than its manifest says")
            hashed += 1
        if not plan.reasons:
            compare_start(folder, manifest, name)
    if undecided:
        raise Undecided("; ".join(undecided[:3]))
    return f"{len(names)} manifests are those that the ledger recorded, and {hashed} files have their hashes"


def check_metrics(folder: Folder) -> str:
    """What other files say of steps and charges: each pair is one that the ledger passed through, and no step is beyond it."""
    ledger, plan, torn, lines = folder.ledger, folder.ledger.plan, 0, 0
    passed = {(step, ledger.charged(line + 1)) for line, step in ledger.done}
    claims: dict[int, float] = {}  # charges -> epsilon
    stated: dict[int, list[float]] = {}  # step -> norms that its lines say
    for step, _, done in ledger.released:
        stated.setdefault(step, []).append(done.get("noised_norm", math.nan))
    for file in ("metrics.jsonl", "evaluation/heldout.jsonl"):
        here = lines_of(folder.path / file) if folder.has(file) else ()
        restarts = len(ledger.nonces) - 1 if plan["enabled"] else MOST
        for count, line in enumerate(here, start=1):
            where, lines = f"{file}: line {count}", lines + 1
            try:
                entry = parsed(line)
            except json.JSONDecodeError:  # a crash cut it off, and no reader takes a number from it
                torn, restarts, begin = torn + 1, restarts - line.endswith(b"\n"), b'{"step": '
                begun = line.startswith(begin) or begin.startswith(line.removesuffix(b"\n"))
                require(begun, f"{where} is neither an entry nor the beginning of one")
                require(restarts >= 0, f"{where} is torn, and no restart of the ledger explains it")
                continue
            except ValueError as error:  # what other readers would read, each in its own way
                raise Violated(f"{where}: {shown(error)}") from error
            require(
                isinstance(entry, dict) and type(entry.get("step")) is int, f"{where} has no step"
            )
            foreign = sorted(entry.keys() - NAMES[file])
            require(not foreign, f"{where} shows {shown_list(foreign[:9])}, which no run publishes")
            step, charged, claim = (
                entry["step"],
                entry.get("privacy/charged_attempts"),
                entry.get("privacy/epsilon"),
            )
            beyond = plan["enabled"] and not 0 <= step <= ledger.furthest
            require(
                not beyond, f"{where} shows step {shown(step)}, which the ledger never finished"
            )
            tries = (
                ledger.attempts[step] if step > 0 else len(ledger.nonces)
            )  # each start measures step 0, uncharged
            attempt, most = entry.get("attempt", 0), max(tries, 1)
            tried = type(attempt) is int and 0 <= attempt < most
            require(
                tried,
                f"{where} shows attempt {shown(attempt)} of step {step}, where the ledger has {most}, from 0 on",
            )
            if NORM in entry and not plan.reasons:
                norms = stated.get(step, [])
                require(
                    any(math.isclose(entry[NORM], norm, rel_tol=PUBLISHED) for norm in norms),
                    f"{where} shows {NORM} = {shown(entry[NORM])}, which no line of the step states",
                )
            if charged is not None or claim is not None:
                stood = type(charged) is int and (step, charged) in passed
                require(
                    stood,
                    f"{where} shows {shown(charged)} charges, as the ledger never stood after step {step}",
                )
            if charged is not None and claim is not None:
                require(not plan.reasons, f"{where} states an epsilon, and nothing is claimed")
                is_number = type(claim) in (int, float) and not math.isnan(
                    claim
                )  # NaN would hide a smaller one
                require(is_number, f"{where} states epsilon {shown(claim)}")
                claims[charged] = min(claim, claims.get(charged, claim))
    counts, true = sorted(claims), 0.0
    chosen = {
        *counts[:: -(-len(counts) // MOST_COUNTS) or 1],
        *counts[-1:],
    }  # of very many counts, some are recomputed
    for count in counts if folder.epsilon is not None else ():
        if count in chosen:
            true = epsilon_of([ledger, *(folder.behind or [])], folder.delta, count)
        enough = claims[count] >= true * (
            1 - FP32
        )  # at least that of the last count that was recomputed
        require(
            enough,
            f"epsilon {claims[count]:.8g} after {count}, where it is {rounded_up(true)} or more",
        )
    told = f"{lines} lines, {torn} of them torn, show nothing that the ledger lacks"
    return f"{told}; epsilon is recomputed for {len(chosen)} of {len(counts)} counts of charges"


def too_small(squared: float, coordinates: int, level: float) -> bool:
    """Whether at least `coordinates` squared standard normals add up to so little with a probability of at most `level`."""
    from scipy.special import gammainc  # comes with dp-accounting

    if coordinates < EXACT_BELOW:
        return bool(gammainc(coordinates / 2, squared / 2) < level)
    return squared < coordinates - 2 * math.sqrt(
        coordinates * math.log(1 / level)
    )  # Laurent and Massart 2000, lemma 1


def check_noise(folder: Folder) -> str:
    """The norm of every noised sum against the noise that its intent states.

    Given the past, the sum S of a step is fixed, whatever the data are, and its noise w is fresh: |S + w|^2 is stochastically at
    least |w|^2 = std^2 chi-square(P), and so are sums over steps. In steps of h, |S + w| is at most sqrt(P) h / 2 longer than
    round(S + w), which is seen. All comparisons together share LEVEL.
    """
    said = [seen(ledger) for ledger in (folder.ledger, *(folder.behind or []))]
    return f"not refuted: {said[0]}" + (
        f"; {len(said) - 1} ledgers behind it neither" if said[1:] else ""
    )


def seen(ledger: Ledger) -> str:
    """What `check_noise` says of one ledger; see there."""
    plan, coordinates = ledger.plan, ledger.opened.get("noised_coordinates")
    batch = plan["expected_batch_size"]
    if "head" in ledger.opened or not plan["noise_multiplier"] or not ledger.done:
        return "no step states noise that a norm could refute"
    if coordinates is None:
        raise Undecided(
            "the ledger does not state the number of noised coordinates, so nobody can see the noise"
        )
    exponent = ledger.opened.get("sum_exponent")
    if exponent is None and NOISE_KIND in plan.fields:
        raise Undecided(
            "the ledger does not state the step of its noise, so nobody can see the noise"
        )
    norms = list[tuple[str, float, int, int]]()
    total = 0.0
    half = 0.0 if exponent is None else math.ldexp(1.0, -exponent - 1)
    for step, std, done in ledger.released:
        if not done:
            continue
        require("noised_norm" in done, f"`done` of step {step} does not state what was noised")
        whole = {"owners": 1, "coordinates": coordinates, "norm": done["noised_norm"]}
        share = done.get("smallest_share", whole)
        norm, least_norm = (
            (one["norm"] * batch * RAISED + half * math.sqrt(one["coordinates"])) / std
            for one in (whole, share)
        )
        norms.append((f"step {step}", least_norm**2, share["coordinates"], share["owners"]))
        total += norm**2
    steps, least = len(norms), min(math.sqrt(squared / count) for _, squared, count, _ in norms)
    norms.append(("all steps together", total, steps * coordinates, 1))
    level = LEVEL / sum(comparisons for *_, comparisons in norms)
    small = [what for what, squared, count, _ in norms if too_small(squared, count, level)]
    require(not small, f"less noise was drawn than stated, by the norm of {shown_list(small[:9])}")
    return f"{steps} norms over {coordinates} coordinates are at least {least:.4g} of the stated noise's"


CHECKS = (
    check_files,
    check_order,
    check_plan,
    check_behind,
    check_epsilon,
    check_card,
    check_checkpoints,
    check_metrics,
    check_noise,
)


def declarations(folder: Folder) -> dict[str, str]:
    """What nothing here can check, and what is said of it."""
    opened, disjoint = (
        folder.ledger.opened,
        "that the data are disjoint from those behind the initial weights",
    )
    chained = {
        disjoint: "stated: one example bears one of them"
        if "disjoint_from_start" in opened
        else "NOT STATED"
    }
    fixed = "that no later schedule was chosen after looking at outputs of the earlier runs"
    chained[fixed] = (
        "the composed epsilon takes it for granted; a shared ledger's RDP filter does without it"
    )
    return {
        "that the program did what the ledger says": "see audit.py of the project",
        "time of the first start; all records repeat it, since clocks depend on the data": shown(
            opened["time_utc"]
        ),
        "commit of the code": shown(opened.get("commit") or "NOT STATED"),
        "what one example is": shown(opened.get("unit", "one example")),
        "in ledger.jsonl": shown_list(sorted(folder.ledger.loose)),
        **(chained if folder.ledger.behind else {}),
        "metrics.jsonl, heldout.jsonl": "learning rates and held-out results",
        "config.toml": "all but [privacy] as the plan holds it, numbers of steps and examples, disjoint_data and starts_from of "
        "[init]; whether init.checkpoint is of a private run is for manifests to say",
        "manifests of checkpoints": "all but step, charges, guarantee, line, hashes, and private runs that they started from",
        "verify.py": "judges nothing about itself: take it from the project, not from the folder",
        "privacy_card.html, privacy_card.md": "nothing here reads them, whatever they show",
        "tensorboard/, private/ and all other files": "nothing here looks at them, nor at an epsilon that they state",
        "privacy_card.json": "all but the claim, what it is composed of, the plan, the opening record, and numbers of steps, "
        "attempts and lines; not the epsilons of groups and other neighbours, nor the rates of attacks",
    }


def verify(path: Path, head: str | None = None) -> tuple[int, dict[str, Any]]:
    """All checks of a folder: the exit code, and what --json prints.

    Args:
        head: the hash of a line that the ledger has to have.

    Raises:
        BadInput: no such folder, or a file in it that cannot be judged.
    """
    if not path.is_dir():
        raise BadInput(f"{shown(path)}: is no folder")
    try:
        ledger = read_ledger(path / "ledger.jsonl")
    except Violated as error:
        broken = {"name": "ledger", "outcome": "violated", "sentence": printable(str(error))}
        line = f"violated: no epsilon was found{UNREAD}"
        return VIOLATED, {
            "verdict": "violated",
            "exit_code": VIOLATED,
            "line": line,
            "checks": [broken],
        }
    folder = Folder(path, ledger, head)
    checks = [
        ("chain", "ok", f"{len(ledger.hashes)} lines are canonical and chained by their hashes")
    ]
    for judge in CHECKS:
        name = judge.__name__.removeprefix("check_")
        try:
            checks.append((name, "ok", judge(folder)))
        except Violated as error:
            checks.append((name, "violated", str(error)))
        except Undecided as error:
            checks.append((name, "inconclusive", str(error)))
        except OF_ODD_FIELDS as error:
            checks.append(
                (name, "violated", f"a field is missing or of another type ({error!r:.200})")
            )
        if judge is check_files and checks[-1][1] != "ok":
            break  # behind a link are files of somebody else
    codes, plan = (
        {"violated": VIOLATED, "inconclusive": INCONCLUSIVE, "consistent": CONSISTENT},
        ledger.plan,
    )
    verdict = next(
        (word for word in codes if word in {outcome for _, outcome, _ in checks}), "consistent"
    )
    attested = {name: plan[name] for name in sorted(PLAN_FIELDS)}  # the mechanism
    exponent = ledger.opened.get("sum_exponent")
    attested |= {
        "noise": "rounded to steps of the sums"
        if NOISE_KIND in plan.fields or plan["arithmetic"] == "certified"
        else "doubles",
        **({} if exponent is None else {"step of sums and noise at the first C": f"2^{-exponent}"}),
        "noise multiplier as accounted": plan.accounted,
        "last step done": ledger.furthest,
        "charged attempts": ledger.charged(),
        "commitment of the sampling key": ledger.opened["key_commitment"],
        "last line": ledger.hashes[-1],
        "state of the run": ledger.closed or "open",
    }
    finite = folder.epsilon is not None and math.isfinite(folder.epsilon)
    claim = "no epsilon is claimed" if ledger.reasons else "no epsilon was found"
    if folder.epsilon is not None and finite:
        claim = f"epsilon {rounded_up(folder.epsilon)} at delta {folder.delta:g}"
        claim += USELESS if folder.delta * plan["num_examples"] >= 1 else ""
    return codes[verdict], {
        "verdict": verdict,
        "exit_code": codes[verdict],
        "line": f"{verdict}: {claim}{UNREAD}",
        "formal_guarantee": not ledger.reasons,
        "epsilon": folder.epsilon if finite else None,
        "delta": folder.delta or plan["target_delta"],
        "head_known": head is not None,
        "checks": [
            dict(zip(("name", "outcome", "sentence"), map(printable, check), strict=True))
            for check in checks
        ],
        "attested": attested,
        "declared": declarations(folder),
    }


def to_text(found: dict[str, Any]) -> str:
    """What a reader needs to know, in the order of its importance from the bottom upwards."""
    marks = {"ok": "ok          ", "violated": "VIOLATED    ", "inconclusive": "undecided   "}
    lines = [
        f"{marks[check['outcome']]}{check['name']}: {check['sentence']}"
        for check in found["checks"]
    ]
    if "attested" in found:
        lines += [
            "attested by the ledger's chain; believe this, and no page that says something else:"
        ]
        lines += [f"  {name}: {value}" for name, value in found["attested"].items()]
        lines += ["declared, and checked by nothing:"]
        lines += [f"  {what}: {words}" for what, words in found["declared"].items()]
        if not found["head_known"]:
            lines += [
                "without a hash from elsewhere (--head), a folder that was forged as a whole looks like a true one"
            ]
        if found["attested"]["state of the run"] == "open":
            lines += ["the ledger is open: the run may go on, or its last lines were cut off"]
    return "\n".join(map(printable, [*lines, f"verify: {found['line']}"]))


class Parser(argparse.ArgumentParser):
    """A bad argument ends in one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(shown(message))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a bad argument is bad input."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A run folder has a copy of this file; the library lies in none.
    own = Path(__file__).resolve().parent if __name__ == "__main__" else None
    parser.add_argument("folder", nargs="?", type=Path, default=own)
    parser.add_argument(
        "--head", help="hash of a line that the ledger had, as the end of the run printed it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Verifies one folder, prints, and returns the exit code; for anything that the folder may hold, errors are one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = parse_args(arguments)
        head = None if options.head is None else options.head.strip().lower()
        if head is not None and not is_hex(head):
            raise BadInput("--head is 64 hexadecimal digits")
        if options.folder is None:
            raise BadInput("give a run folder: auditable-dp verify RUN_DIR")
        if options.folder.is_dir() and not options.json:
            print(
                f"checking {shown(options.folder)}: ledger, epsilon, card and files (up to a minute)",
                file=sys.stderr,
                flush=True,
            )
        code, found = verify(options.folder, head)
    except ImportError as error:
        print(f"error: {error}: install numpy and dp-accounting", file=sys.stderr)
        return BAD_INPUT
    except (BadInput, OSError, RecursionError, MemoryError) as error:
        print(f"error: {shown(error) or type(error).__name__}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(found, allow_nan=False) if options.json else to_text(found))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
